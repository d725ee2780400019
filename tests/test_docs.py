"""README and docs: links resolve, flags, metrics and paths exist, quoted messages are in the code, the site builds."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.ranks import REPO

from lightppo.algorithms.entries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
)
from lightppo.cli.audit_command import AuditConfig
from lightppo.cli.data import RowsConfig
from lightppo.config.options import all_options
from lightppo.config.removed_options import removal
from lightppo.config.supervised_options import COMMANDS as SUPERVISED
from lightppo.logging.step_metrics import METRICS
from lightppo.plugin import COMMANDS

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")])
NAMES = [page.name for page in PAGES]

# Flags of other programs that the pages name: launchers.
OTHER_FLAGS = {
    "num_gpus", "master_port", "nproc_per_node",  # deepspeed, torchrun
    "hostfile", "module", "nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id",
}  # fmt: skip
# of commands, examples, deepspeed, ruff
OWN_OTHER_FLAGS = {"fix", "write", "help", "version", "spo_power", "word_limit", "module", "once"}
OPENRLHF_FLAGS = {"async_train", "async_queue_size", "partial_rollout"}
NO_NEWS = {"NO_MKDOCS_2_WARNING": "1"}
# of lightppo serve-vllm, handed on
VLLM_FLAGS = {
    "dtype",
    "enable_sleep_mode",
    "no_enable_prefix_caching",
    "ssl_keyfile",
    "ssl_certfile",
}
# of the command that lightppo translate shows
TRL_FLAGS = {"model_name_or_path", "dataset_name", "reward_funcs", "num_generations", "fsdp"}
TRL_FLAGS |= {"gradient_accumulation_steps", "max_completion_length", "num_train_epochs"}


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request) -> Path:
    return request.param


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


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


def flags_added(script: Path) -> set[str]:
    """By its ``add_argument``."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    added = [call.args[0] for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    return {flag.value.removeprefix("--") for flag in added if isinstance(flag, ast.Constant)}


@cache
def known_flags() -> set[str]:
    names = {option.name for option in all_options()}
    names |= {option.name for kind in SUPERVISED.values() for option in kind.all_options()} | (
        RowsConfig.options() | AuditConfig.options()
    ).keys()
    files = {
        command.function.rpartition(":")[0].replace(".", "/") + ".py"
        for command in COMMANDS.values()
    }
    names |= {name for file in files for name in flags_added(REPO / file)}
    for file in ("run.py", "make_assets.py"):
        quickstart = ast.parse((REPO / "examples" / "quickstart" / file).read_text())
        main = next(
            node
            for node in quickstart.body
            if isinstance(node, ast.FunctionDef) and node.name == "main"
        )
        names |= {argument.arg for argument in main.args.args}
    return names | {f"no_{name}" for name in names}


def test_flags_exist(page):
    named = set(re.findall(r"(?<![\w-])--([a-z]\w*)", page.read_text(encoding="utf-8")))
    pages = (
        "README.md",
        "migrating.md",
        "troubleshooting.md",
        "rollouts.md",
        "multi-node.md",
        "checkpoints.md",
    )
    others = OTHER_FLAGS if page.name in pages else set()
    others |= VLLM_FLAGS if page.name == "rollouts.md" else set()
    others |= TRL_FLAGS if page.name == "commands.md" else set()
    others |= OPENRLHF_FLAGS if page.name == "asynchronous.md" else set()
    if page.name == "performance.md":
        others |= flags_added(REPO / "benchmarks" / "gpu_check.py")
    if page.name == "CHANGELOG.md":  # it names options that are gone
        others |= {name for name in named if removal(name.removeprefix("no_"))}
    assert named - known_flags() - OWN_OTHER_FLAGS - others == set()


def test_metrics_exist(page):
    text = page.read_text(encoding="utf-8").partition("\n## Names of other trainers")[0]
    named = set(re.findall(r"`((?:rollout|train|perf)/\w+)`", text))
    assert sorted(named - METRICS.keys()) == []


def test_every_algorithm_has_its_heading_or_line():
    """Of a table, in the first cell."""
    page = (REPO / "docs" / "algorithms.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.split("\n") if " | " in line]
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    named |= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert (
        sorted({*ADVANTAGE_ESTIMATORS, *POLICY_LOSSES, *KL_ESTIMATORS, *CORRECTIONS} - named) == []
    )


def test_paths_exist(page):
    """Files of the repository that are named by their path from its root."""
    named = re.findall(
        r"\b((?:examples|tests|docs|lightppo)/[\w/.]+\.(?:py|md|yaml))\b",
        page.read_text(encoding="utf-8"),
    )
    assert (
        sorted({name for name in named if "ROOM" not in name and not (REPO / name).exists()}) == []
    )


def is_written(body: list[ast.stmt], parts: list[str]) -> bool:
    """Whether a body of code defines a function or class, or a class in it another one."""
    for part in parts:
        found = [node for node in body if getattr(node, "name", "") == part]
        if not found:
            return False
        body = found[0].body
    return True


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or what it or a class of it has."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            file = REPO.joinpath(*parts[:end]).with_suffix(".py")
            if file.exists():  # it imports a package that is not installed here, as vLLM
                return is_written(ast.parse(file.read_text()).body, parts[end:])
            continue
        for part in parts[end:]:
            fields = getattr(found, "__annotations__", {})
            found = getattr(found, part, fields.get(part))
        return found is not None
    return False


def test_what_docstrings_refer_to_is_there():
    text = "".join(path.read_text() for path in sorted((REPO / "lightppo").rglob("*.py")))
    names = set(re.findall(r":(?:class|func|data|meth|attr):`~?(lightppo\.[\w.]+)`", text))
    assert len(names) > 50
    assert [name for name in sorted(names) if not is_there(name)] == []
    assert not is_there("lightppo.models.loading.NoSuchClass")
    assert not is_there("lightppo.rollout.vllm.worker.no_such_function")


def test_every_extra_is_in_the_readme():
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = re.findall(r"'\.\[([\w-]+)\]'", (REPO / "README.md").read_text(encoding="utf-8"))
    assert sorted(table) == sorted(project["optional-dependencies"])


# -- troubleshooting ---------------------------------------------------------------------------------------------------


@cache
def messages() -> list[str]:
    """All texts in the code, with … for what is put in."""
    found = []
    for path in (REPO / "lightppo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "…", node.value))
    return found


def test_quoted_messages_are_in_the_code():
    rows = [
        line
        for line in (REPO / "docs" / "troubleshooting.md").read_text().split("\n")
        if " | " in line
    ]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    pieces = [piece.strip() for text in quoted for piece in text.split("…")]
    pieces = [piece for piece in pieces if " " in piece]
    assert len(pieces) > 12
    assert [piece for piece in pieces if not any(piece in message for message in messages())] == []


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path):
    """Strict: a page that is in no menu, a link or an anchor that is not there."""
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'lightppo[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=300, env=os.environ | NO_NEWS
    )
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in tmp_path.glob("*.html")} - {
        "404",
        "index",
        "contributing",
        "agents",
        "changelog",
    }
    assert pages == {path.stem for path in (REPO / "docs").glob("*.md")}
    loaded = {
        m
        for path in tmp_path.glob("*.html")
        for m in re.findall(r'src="(https?:[^"]+)"', path.read_text())
    }
    assert not loaded  # nothing from elsewhere


_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"<!-- [^>]*? -->.*?<!-- end[^>]*-->", re.DOTALL)


def test_the_docs_stay_short():
    """Short docs are read. All words count, but for code and for what scripts write."""
    texts = {page.name: page.read_text() for page in (REPO / "docs").glob("*.md")}
    by_hand = {
        name: text
        for name, text in texts.items()
        if not text.split("\n")[2].startswith("<!-- Generated")
    }
    prose = {name: _CODE.sub("", _GENERATED.sub("", text)) for name, text in by_hand.items()}
    words = {name: len(text.split()) for name, text in prose.items()}
    assert {"flags.md", "metrics.md"}.isdisjoint(words)
    assert sum(words.values()) <= 35_000, sorted(words.items(), key=lambda item: -item[1])[:5]


def test_ruff_before_a_commit_is_the_pinned_one():
    """And comes from PyPI: no repository is cloned for it."""
    settings = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    pinned = re.search(r"^ruff==.+$", (REPO / "requirements.txt").read_text(), re.MULTILINE)[0]
    assert [repository["repo"] for repository in settings["repos"]] == ["local"]
    hooks = settings["repos"][0]["hooks"]
    assert [hook["entry"].partition(" --")[0] for hook in hooks] == ["ruff check", "ruff format"]
    assert [hook["additional_dependencies"] for hook in hooks] == [[pinned]] * 2
