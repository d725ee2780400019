"""examples/cluster: the files' command lines parse, and the Slurm script stops, queues itself again and goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults.small_run import STEPS, flags, outcome, write_inputs
from support.ranks import ENVIRONMENT, LAUNCHER_VARIABLES, REPO, free_port, kill_marked, run_ranks

from lightppo.config import PPOConfig, parse_args

FOLDER = REPO / "examples" / "cluster"
SLURM = FOLDER / "slurm.sh"
# Stand-ins of Slurm's programs. srun starts the tasks as its children and signals nothing else, as slurmstepd does.
SRUN = """
import json, os, pathlib, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    del command[0]
count, on_node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = [
    subprocess.Popen(
        command,
        env=os.environ | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % on_node)},
    )
    for task in range(count)
]
folder = pathlib.Path(os.environ["STAND_INS"])
(folder / "new").write_text(json.dumps([task.pid for task in tasks]))
(folder / "new").rename(folder / "tasks")
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
import os, pathlib, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nnode-b")
elif sys.argv[1] == "requeue":
    with open(pathlib.Path(os.environ["STAND_INS"], "requeued"), "a") as file:
        print(sys.argv[2], file=file)
else:
    sys.exit(f"scontrol: {sys.argv[1:]}")
"""
# In place of lightppo, where only the script is looked at.
SAY = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
said = {name: os.environ.get(name) for name in names} | {"words": sys.argv[1:]}
pathlib.Path(os.environ["STAND_INS"], f"rank{os.environ['RANK']}").write_text(json.dumps(said))
sys.exit(int(os.environ["CODE"]) if os.environ["RANK"] == "1" else 0)
"""
LIGHTPPO = "import sys\nfrom lightppo.__main__ import main\nmain(sys.argv[1:])\n"


def commands(path: Path) -> list[str]:
    """The options of every ``lightppo ppo …`` of a file, as a shell would read them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        texts = [t for document in yaml.safe_load_all(text) for t in strings(document)]
    else:
        texts = [text]
    found = []
    for one in texts:
        found += re.findall(r"^[^#\n]*\blightppo ppo (.*)$", one.replace("\\\n", " "), re.MULTILINE)
    return found


def strings(value: Any) -> Iterator[str]:
    """All texts of a document of YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def options(path: Path) -> PPOConfig:
    """Of the one run that a file starts; /examples is where the image has them."""
    (command,) = commands(path)
    words = [word for word in shlex.split(command) if word != "$@"]
    return parse_args([word.replace("/examples/", "examples/") for word in words]).resolved()


def document(name: str, kind: str = "") -> dict[str, Any]:
    documents = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return next(one for one in documents if one.get("kind", "") == kind)


def directives() -> dict[str, str]:
    """What the Slurm script asks of sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SLURM.read_text(), re.MULTILINE))


class TestFiles:
    @pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
    def test_the_command_parses(self, path, monkeypatch):
        monkeypatch.chdir(REPO)
        monkeypatch.setenv("WORLD_SIZE", "2" if path.stem == "skypilot" else "16")
        config = options(path)
        assert config.flat()["pretrain"].startswith("Qwen/")
        assert config.flat()["rollout_engine"] == "vllm"

    def test_slurm_warns_ranks_in_time(self, monkeypatch):
        monkeypatch.chdir(REPO)
        monkeypatch.setenv("WORLD_SIZE", "16")
        # Slurm may be a minute early, never late. Without B: it signals the tasks, not this script.
        who, _, seconds = directives()["signal"].partition("@")
        assert who == "USR1"
        assert int(seconds) > options(SLURM).checkpoint.signal_grace
        assert subprocess.run(["bash", "-n", SLURM], capture_output=True).stderr == b""

    def test_kubernetes_waits_for_torchrun_and_that_for_the_ranks(self, monkeypatch):
        monkeypatch.chdir(REPO)
        monkeypatch.setenv("WORLD_SIZE", "16")
        pod = document("kubernetes.yaml", "Job")["spec"]["template"]["spec"]
        environment = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
        launcher = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        grace = options(FOLDER / "kubernetes.yaml").checkpoint.signal_grace
        assert pod["terminationGracePeriodSeconds"] > launcher > grace

    def test_pods_meet_at_a_name_that_exists(self):
        job, service = (document("kubernetes.yaml", kind) for kind in ("Job", "Service"))
        name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
        assert pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        assert service["spec"]["clusterIP"] == "None"
        command = pod["containers"][0]["args"][0]
        assert f"--master_addr={name}-0.{pod['subdomain']} " in command
        assert f"--nnodes={job['spec']['completions']} " in command
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["parallelism"] == job["spec"]["completions"]
        gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nproc_per_node={gpus} " in command
        claim = document("kubernetes.yaml", "PersistentVolumeClaim")["metadata"]["name"]
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim

    def test_runs_are_saved_where_the_next_machine_finds_them(self, monkeypatch):
        monkeypatch.chdir(REPO)
        monkeypatch.setenv("WORLD_SIZE", "2")
        (bucket,) = document("skypilot.yaml")["file_mounts"]
        sky = options(FOLDER / "skypilot.yaml").checkpoint
        assert Path(sky.save_path).is_relative_to(bucket)
        assert sky.save_seconds
        assert sky.max_ckpt_num > 1  # the last one may not be whole in the bucket
        monkeypatch.setenv("WORLD_SIZE", "16")
        pod = document("kubernetes.yaml", "Job")["spec"]["template"]["spec"]
        mounted = pod["containers"][0]["volumeMounts"][0]["mountPath"]
        kubernetes = options(FOLDER / "kubernetes.yaml").checkpoint
        assert Path(kubernetes.save_path).is_relative_to(mounted)


class Slurm:
    """A job of two nodes with a task each, which are processes of this machine."""

    def __init__(self, folder: Path, lightppo: str, **environment: str) -> None:
        self.folder, self.marker = folder, f"lightppo-test-{uuid.uuid4()}"
        for name, source in {"srun": SRUN, "scontrol": SCONTROL, "lightppo": lightppo}.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!{sys.executable}\n{source}")
            program.chmod(0o755)
        self.environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        self.environment |= ENVIRONMENT | environment
        self.environment |= {"LIGHTPPO_TEST_RUN": self.marker, "STAND_INS": str(folder)}
        self.environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{ENVIRONMENT['PATH']}"
        nodes = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[a-b]"}
        sizes = {"NTASKS": "2", "NTASKS_PER_NODE": "1", "CPUS_PER_TASK": "1"}
        self.environment |= nodes | {f"SLURM_{name}": size for name, size in sizes.items()}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        (self.folder / "tasks").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["bash", SLURM, *words],
                cwd=REPO,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal_tasks(self) -> None:
        """As slurmctld does before the time limit."""
        for task in json.loads((self.folder / "tasks").read_text()):
            os.kill(task, signal.SIGUSR1)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def requeued(self) -> list[str]:
        file = self.folder / "requeued"
        return file.read_text().split() if file.exists() else []


@pytest.mark.parametrize(
    ("code", "again"), [(0, []), (1, []), (2, []), (137, []), (143, []), (138, ["4711"])]
)
def test_slurm_queues_again_only_what_was_stopped(code, again, tmp_path):
    """Another rank's end must not hide it."""
    slurm = Slurm(tmp_path, SAY, CODE=str(code))
    assert slurm.start("--seed", "7").wait(timeout=60) == code
    assert slurm.requeued == again, slurm.log
    ranks = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "0")]
    shared = {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks}
    assert shared == {("2", "1")}
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {
        ("localhost", "24711")
    }
    assert ranks[0]["words"] == ranks[1]["words"]
    assert ranks[0]["words"][0] == "ppo"
    assert ranks[0]["words"][-2:] == ["--seed", "7"]


@pytest.mark.long
def test_a_job_of_slurm_goes_on_where_it_was_stopped(tmp_path):
    inputs = write_inputs(tmp_path)
    plain = {"rollout_engine": "hf", "zpg": 1, "zero_stage": 3, "input_key": "input"}
    plain |= dict.fromkeys(("no_bf16", "no_apply_chat_template", "no_gradient_checkpointing"), True)
    plain |= {"label_key": "label", "micro_rollout_batch_size": 2, "save_steps": 100}
    plain |= {"max_tokens_per_micro_batch": "None", "reward_source": "function"}
    words = {name: flags(inputs, tmp_path / name, **plain) for name in ("stopped", "undisturbed")}
    slurm = Slurm(tmp_path, LIGHTPPO, MASTER_PORT=str(free_port()))
    try:
        job = slurm.start(*words["stopped"])
        metrics = tmp_path / "stopped" / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert job.poll() is None, slurm.log
            time.sleep(0.02)
        slurm.signal_tasks()
        assert job.wait(timeout=200) == 138, slurm.log
        assert slurm.requeued == ["4711"]
        assert re.search(
            rf"stopped by SIGUSR1 after step [1-{STEPS - 1}] of {STEPS}; saved", slurm.log
        )
        assert slurm.start(*words["stopped"]).wait(timeout=200) == 0, slurm.log
        assert slurm.requeued == ["4711"]
    finally:
        kill_marked(slurm.marker)
    config = [*shlex.split(commands(SLURM)[0])[:-1], *words["undisturbed"]]
    run_ranks(REPO / "examples" / "train_ppo.py", *config)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "undisturbed")
