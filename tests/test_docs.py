"""README and docs: links resolve, flags, metrics, imports exist, quoted messages are in the code, examples run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.ranks import REPO, run_ranks
from support.tiny import save_causal_lm, sums, write_jsonl

from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from lightppo.commands.sft import SFTConfig
from lightppo.config import parse_args
from lightppo.config.options import all_options
from lightppo.trainer.metrics import METRICS

PAGES = sorted([REPO / "README.md", *(REPO / "docs").glob("*.md")])
NAMES = [page.name for page in PAGES]

# Flags of other programs that the pages name: launchers.
OTHER_FLAGS = {
    "num_gpus", "master_port", "nproc_per_node",  # deepspeed, torchrun
    "hostfile", "module", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
    "nodes", "ntasks", "gres",  # sbatch
    "signal",  # Slurm
}  # fmt: skip
OWN_OTHER_FLAGS = {"write", "help", "version", "spo_power", "module"}  # of commands, an example; deepspeed --module
VLLM_FLAGS = {"dtype", "enable_sleep_mode", "ssl_keyfile", "ssl_certfile"}  # of lightppo serve-vllm, handed on


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request) -> Path:
    return request.param


def fenced(text: str, language: str) -> Iterator[tuple[str, str]]:
    """(line before the block, block) of the fenced blocks in a language."""
    for match in re.finditer(r"(?:^|\n)([^\n]*)\n```(\w*)\n(.*?)\n```", text, re.DOTALL):
        if match[2] == language:
            yield match[1], match[3]


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_relative_links_resolve(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@cache
def known_flags() -> set[str]:
    names = {option.name for option in all_options()}
    names |= SFTConfig.options().keys()
    files = [f"commands/{name}.py" for name in ("serve_reward", "serve_vllm", "replay", "diff")] + ["trainer/report.py"]
    servers = [ast.parse((REPO / "lightppo" / file).read_text()) for file in files]
    calls = [node for server in servers for node in ast.walk(server) if isinstance(node, ast.Call)]
    added = [call.args[0].value for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    names |= {flag.removeprefix("--") for flag in added}
    for file in ("run.py", "make_assets.py"):
        quickstart = ast.parse((REPO / "examples" / "quickstart" / file).read_text())
        main = next(node for node in quickstart.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        names |= {argument.arg for argument in main.args.args}
    return names | {f"no_{name}" for name in names}


def test_flags_exist(page):
    named = set(re.findall(r"(?<![\w-])--([a-z]\w*)", page.read_text(encoding="utf-8")))
    pages = ("README.md", "migrating.md", "troubleshooting.md", "rollouts.md", "multi-node.md", "dataflow.md")
    others = OTHER_FLAGS if page.name in pages else set()
    others |= VLLM_FLAGS if page.name == "rollouts.md" else set()
    assert named - known_flags() - OWN_OTHER_FLAGS - others == set()


def test_metrics_exist(page):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:rollout|train|perf)/\w+)`", text))
    assert sorted(named - METRICS.keys()) == []


def test_every_algorithm_has_its_heading_or_line():
    """Of a table, in the first cell."""
    page = (REPO / "docs" / "algorithms.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.split("\n") if " | " in line]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    named |= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert sorted({*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES, *KL_ESTIMATORS, *CORRECTIONS} - named) == []


def test_imports_resolve(page):
    blocks = [block for _, block in fenced(page.read_text(encoding="utf-8"), "python")]
    written = {Path(block.split("\n")[0]).stem for block in blocks}  # files of the tutorial
    for block in blocks:
        try:
            tree = ast.parse(block)
        except SyntaxError:  # lines out of a table or a call, shown alone
            assert "import" not in block
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module not in written:
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == [], f"from {node.module}"
            elif isinstance(node, ast.Import):
                assert all(importlib.util.find_spec(alias.name) for alias in node.names)


def test_paths_exist(page):
    """Files of the repository that are named by their path from its root."""
    named = re.findall(
        r"\b((?:examples|tests|docs|lightppo)/[\w/.]+\.(?:py|md|yaml))\b", page.read_text(encoding="utf-8")
    )
    assert sorted({name for name in named if not (REPO / name).exists()}) == []


def test_whole_commands_have_no_contradictions():
    """Commands under the marker are parsed with all their flags."""
    marked = [b for page in PAGES for before, b in fenced(page.read_text(), "bash") if "flags are checked" in before]
    assert len(marked) == 1
    (command,) = marked
    with_critic = next(b for _, b in fenced((REPO / "README.md").read_text(), "bash") if b.lstrip().startswith("--adv"))
    lines = command.split("\n")
    in_place = [with_critic if "grpo" in line else line for line in lines]
    assert in_place != lines
    for text, estimator in ((command, "grpo"), ("\n".join(in_place), "gae")):
        words = shlex.split(text.replace("\\\n", " "))
        config = parse_args(words[words.index("examples/train_ppo.py") + 1 :])
        assert config.algorithm.advantage_estimator == estimator


def test_every_extra_is_in_the_readme():
    calls = [node for node in ast.walk(ast.parse((REPO / "setup.py").read_text())) if isinstance(node, ast.Call)]
    given = {word.arg: word.value for call in calls for word in call.keywords}
    table = re.findall(r"'\.\[([\w-]+)\]'", (REPO / "README.md").read_text(encoding="utf-8"))
    assert sorted(table) == sorted(ast.literal_eval(given["extras_require"]))


# -- troubleshooting ---------------------------------------------------------------------------------------------------


@cache
def messages() -> list[str]:
    """All texts in the code, with … for what is put in."""
    found = []
    for path in (REPO / "lightppo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "…", node.value))
    return found


def test_quoted_messages_are_in_the_code():
    rows = [line for line in (REPO / "docs" / "troubleshooting.md").read_text().split("\n") if " | " in line]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    pieces = [piece.strip() for text in quoted for piece in text.split("…")]
    pieces = [piece for piece in pieces if " " in piece]
    assert len(pieces) > 12
    assert [piece for piece in pieces if not any(piece in message for message in messages())] == []


# -- examples that run -------------------------------------------------------------------------------------------------

EXAMPLES = {
    f"{page.stem}-{i}": block
    for page in PAGES
    for i, (before, block) in enumerate(fenced(page.read_text(encoding="utf-8"), "python"))
    if before == "<!-- runs -->"
}

REWARD = """
def reward_func(queries, prompts, labels, **extra):
    return [float(label in query) for query, label in zip(queries, labels)]
"""


def test_there_are_examples():
    assert sorted(EXAMPLES) == ["README-0", "README-1", "extending-0", "extending-6", "rewards-2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    """In a folder with a tiny model, prompts and a reward function, under the names that the pages use."""
    save_causal_lm(tmp_path / "model")
    write_jsonl(tmp_path / "prompts.jsonl", sums(8))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "example.py").write_text("import os\nos.chdir(os.path.dirname(__file__))\n" + EXAMPLES[name])
    run_ranks(tmp_path / "example.py", world_size=1)
    made = {"README-0": "ckpt/model.safetensors", "README-1": "trained/model.safetensors"}
    made["extending-6"] = "trained/model.safetensors"
    if name in made:
        assert (tmp_path / made[name]).is_file()


# -- the tutorial ------------------------------------------------------------------------------------------------------


def run_block(block: str, environment: dict[str, str]) -> None:
    """In bash; what begins with ``python examples/`` in a fork, which has the imports done."""
    for command in block.replace("\\\n", " ").splitlines():
        if command.startswith("python examples/"):
            _, script, *words = shlex.split(command)
            run_ranks(REPO / script, *words, world_size=1, timeout=500)
            continue
        command = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


@pytest.mark.slow
def test_the_tutorial(tmp_path, monkeypatch):
    """Every block in the order of the page: Python goes into the file that its first line names, bash is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task").mkdir()
    (tmp_path / "examples").symlink_to(REPO / "examples")
    page = (REPO / "docs" / "tutorial.md").read_text(encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    languages = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)\n```", page, re.DOTALL | re.MULTILINE):
        languages.append(language)
        if language == "python":
            (tmp_path / block.split("\n")[0].removeprefix("# ")).write_text(block + "\n")
        else:
            run_block(block, environment)
    assert languages == ["python", "bash", "python", "python", "bash", "bash", "python", "bash", "bash"]
    assert (tmp_path / "my_task" / "trained" / "model.safetensors").is_file()
