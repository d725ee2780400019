"""Snippets of README and docs: Python runs, the tutorial runs from top to bottom, commands run up to their checks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from support.ranks import REPO, run_ranks
from support.tiny import save_causal_lm, sums, write_jsonl

from lightppo.__main__ import COMMANDS
from lightppo.__main__ import main as lightppo
from lightppo.config import parse_args

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")])


def fenced(text: str, language: str) -> Iterator[tuple[str, str]]:
    """(line before the block, block) of the fenced blocks in a language."""
    for match in re.finditer(r"(?:^|\n)([^\n]*)\n```(\w*)\n(.*?)\n```", text, re.DOTALL):
        if match[2] == language:
            yield match[1], match[3]


# -- commands ----------------------------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of all command lines, a line each; those of transcripts begin with a dollar sign."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [block for _, block in fenced(text, "bash")]
        blocks += [
            "\n".join(re.findall(r"^\$ (.+)", block, re.MULTILINE)) for _, block in fenced(text, "")
        ]
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            if words := shlex.split(line.rstrip("\\"), comments=True):
                yield page.name, words


LINES = [
    pytest.param(page, words, id=f"{page}: {' '.join(words)[:60]}")
    for page, words in command_lines()
]
SHELL = {"cd", "cat", "ls", "head", "tail", "source", "ruff", "mypy", "pre-commit"}
# of lightppo serve-vllm, which hands on what it does not know
VLLM_FLAGS = {"--dtype", "--max_model_len"}


@cache
def flags_of(command: str) -> set[str]:
    told = StringIO()
    for more in ([], ["all"]):
        with redirect_stdout(told), suppress(SystemExit):
            lightppo([command, "--help", *more])
    return set(re.findall(r"--[a-z]\w*", told.getvalue()))


@pytest.mark.parametrize(("page", "words"), LINES)
def test_command_lines_name_what_there_is(page, words):
    """Programs, targets, extras, commands and their flags."""
    while words and re.match(r"\w+=", words[0]):
        words = [] if "$(" in words[0] else words[1:]
    if not words:
        return
    program, *rest = words
    if program == "make":
        makefile = (REPO / "Makefile").read_text()
        rules = re.findall(r"^([\w-]+(?: [\w-]+)*):", makefile, re.MULTILINE)
        targets = {name for names in rules for name in names.split()}
        assert {word for word in rest if "=" not in word} <= targets
    elif "lightppo" in words or any(word.startswith("examples/train_") for word in words):
        at = next(
            i
            for i, word in enumerate(words)
            if word == "lightppo" or word.startswith("examples/train_")
        )
        name = (
            words[at + 1]
            if words[at] == "lightppo"
            else Path(words[at]).stem.removeprefix("train_")
        )
        check_flags(name, words[at + 1 :])
    elif program.startswith("--"):
        check_flags("ppo", words)
    elif program in ("python", "python3"):
        assert rest[0] == "-c" or (REPO / rest[0]).is_file() or page == "tutorial.md"
    elif program == "pip":
        assert rest[0] in ("install", "freeze", "download", "wheel")
    elif program == "pytest":
        assert all((REPO / word).exists() for word in rest if word.startswith("tests/"))
    else:
        assert program in SHELL


def check_flags(name: str, words: list[str]) -> None:
    if name.startswith("--"):  # lightppo --version
        return
    assert name in COMMANDS
    named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    known = flags_of(name) | (VLLM_FLAGS if name == "serve-vllm" else set())
    known |= flags_of("ppo") if name == "memory" else set()
    assert named - known - {flag.replace("--", "--no_") for flag in known} == set()
    whole = not {"…", "..."} & set(words)
    if whole and name == "ppo" and {"--prompt_data", "--pretrain"} <= named:
        start = next(i for i, word in enumerate(words) if word.startswith("--"))
        parse_args(words[start:])


def test_whole_commands_have_no_contradictions():
    """Commands under the marker are parsed with all their flags."""
    marked = [
        b
        for page in PAGES
        for before, b in fenced(page.read_text(), "bash")
        if "flags are checked" in before
    ]
    assert len(marked) == 1
    (command,) = marked
    with_critic = next(
        b
        for _, b in fenced((REPO / "README.md").read_text(), "bash")
        if b.lstrip().startswith("--adv")
    )
    lines = command.split("\n")
    in_place = [with_critic if "grpo" in line else line for line in lines]
    assert in_place != lines
    for text, estimator in ((command, "grpo"), ("\n".join(in_place), "gae")):
        words = shlex.split(text.replace("\\\n", " "))
        config = parse_args(words[words.index("examples/train_ppo.py") + 1 :])
        assert config.algorithm.advantage_estimator == estimator


# -- examples that run -------------------------------------------------------------------------------------------------


def python_blocks(alone: bool) -> dict[str, str]:
    """Of all pages but the tutorial; ``alone``: those that say that they run as they are, else those that do not."""
    return {
        f"{page.stem}-{i}": block
        for page in PAGES
        if page.stem != "tutorial"
        for i, (before, block) in enumerate(fenced(page.read_text(encoding="utf-8"), "python"))
        if (before == "<!-- runs -->") == alone
    }


EXAMPLES, FRAGMENTS = python_blocks(alone=True), python_blocks(alone=False)

REWARD = """
def reward_func(queries, prompts, labels, **extra):
    return [float(label in query) for query, label in zip(queries, labels)]
"""


def test_there_are_examples():
    assert sorted(EXAMPLES) == [
        "README-0",
        "README-1",
        "environments-0",
        "environments-1",
        "extending-12",
        "rewards-2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, tmp_path):
    """In a folder with a tiny model, prompts and a reward function, under the names that the pages use."""
    save_causal_lm(tmp_path / "model")
    write_jsonl(tmp_path / "prompts.jsonl", sums(8))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "example.py").write_text(
        "import os\nos.chdir(os.path.dirname(__file__))\n" + EXAMPLES[name]
    )
    run_ranks(tmp_path / "example.py", world_size=1)
    made = {"README-0": "ckpt/model.safetensors", "README-1": "trained/model.safetensors"}
    if name in made:
        assert (tmp_path / made[name]).is_file()


RUN_FRAGMENTS = '''
"""Each fragment in the names of those before, or in the file that it says it is in."""
import importlib, json, os, re, sys

os.chdir(os.path.dirname(__file__))
sys.path.insert(0, os.getcwd())
from lightppo import Actor, get_strategy, get_tokenizer
from lightppo.algorithms import advantages
from argparse import Namespace

strategy = get_strategy(Namespace(train_batch_size=1, micro_train_batch_size=1))
strategy.setup_distributed()
advantages.group_range = lambda groups, **_: groups.advantage  # another example of the page
names = {"Actor": Actor, "strategy": strategy, "tokenizer": get_tokenizer("MODEL"), "judge": len}
flags = "--pretrain MODEL --prompt_data train.jsonl --reward_fn reward.py --policy_loss spo --spo_power 1.5"
sys.argv = ["train.py", *flags.split()]

for name, text in json.load(open("fragments.json")).items():
    print("fragment", name, flush=True)
    space, first = names, text.split("\\n")[0]
    if found := re.match(r"# (lightppo/\\S+)[.]py", first):
        space = vars(importlib.import_module(found[1].replace("/", ".")))
    elif re.match(r"# \\w+[.]py$", first):
        open(first[2:], "w").write(text)
    if text.split("\\n")[1].startswith(\'"\'):  # entries of a table
        for entry in eval("{" + text + "}", space).values():
            assert callable(entry.fn)
    else:
        exec(text, space)

assert names["config"].loss.policy_loss == "spo" and names["prompts"].report and names["reference"]
assert names["reward_func"](["1+1=2"], ["1+1="], ["2"], response_ids=[[5]])["rewards"] == [1]
'''


def test_fragments_run(tmp_path):
    """What a page shows in part runs where it belongs."""
    save_causal_lm(tmp_path / "MODEL")
    rows = [{"question": row["input"], "answer": row["label"]} for row in sums(8)]
    for folder in (tmp_path, tmp_path / "owner" / "name"):
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "train.jsonl", rows)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "examples").symlink_to(REPO / "examples")
    (tmp_path / "fragments.json").write_text(json.dumps(FRAGMENTS))
    (tmp_path / "run_fragments.py").write_text(RUN_FRAGMENTS)
    done = run_ranks(tmp_path / "run_fragments.py", world_size=1)
    assert done.output.count("fragment ") == len(FRAGMENTS) > 10


# -- what docs/extending.md attaches to runs ---------------------------------------------------------------------------


RUN_CALLBACKS = """
import json, os, sys
os.chdir(os.path.dirname(__file__))
from lightppo import PPOConfig, PPOTrainer

answers = []  # (temperature, prompts) of each step


class Spy(__import__("lightppo").Callback):
    def on_rollouts(self, run, step, collected):
        lengths = [len(rollout.prompt.token_ids) for rollout in collected.rollouts]
        temperature = run.sampler.sampler.sampling.temperature
        answers.append((temperature, run.actor.temperature, run.initial_model.temperature, lengths))


options = dict(pretrain="model", prompt_data="prompts.jsonl", reward_fn="reward.py", rollout_batch_size=4)
options |= dict(train_batch_size=4, prompt_max_len=16, generate_max_len=8, init_kl_coef=0.01)
options |= dict(save_path="trained", save_steps=1)
callbacks = ["stop_at.py:StopAt", "log_spread.py:LogSpread", "cool.py:Cool"]
callbacks += ["short_first.py:ShortFirst", "best_reward.py:BestReward"]
config = PPOConfig.from_flat(**options, callback=callbacks)
for limit in (1, 2):
    PPOTrainer.from_config(config.with_options(benchmark_steps=limit), callbacks=[Spy()]).fit()
json.dump({"answers": answers}, open("seen.json", "w"))
"""


def write_named_blocks(folder: Path) -> None:
    """The Python files of docs/extending.md that say their name; ``continued`` is added to the file."""
    for _, block in fenced((REPO / "docs" / "extending.md").read_text(encoding="utf-8"), "python"):
        if name := re.match(r"# (\w+[.]py)(, continued)?\n", block):
            with (folder / name[1]).open("a" if name[2] else "w") as file:
                file.write(f"{block}\n\n")


@pytest.mark.slow
def test_the_callbacks_of_the_page(tmp_path):
    """Two runs of a step each; the second one goes on from the first."""
    save_causal_lm(tmp_path / "model")
    write_jsonl(
        tmp_path / "prompts.jsonl",
        [{"input": "1+" * n + "1=", "label": "2"} for n in (4, 1, 3, 1, 2, 2, 3, 4)],
    )
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [0.95 + len(p) / 1e3 for p in prompts]\n"
    )
    write_named_blocks(tmp_path)
    (tmp_path / "run.py").write_text(RUN_CALLBACKS)
    run_ranks(tmp_path / "run.py", world_size=1)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [sampled for *sampled, _ in seen["answers"]] == [[1.2] * 3, [pytest.approx(1.1)] * 3]
    (*_, first), (*_, second) = seen["answers"]
    assert max(first) <= min(second)
    logged = [
        json.loads(line)
        for line in (tmp_path / "trained" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in logged if "rollout/reward" in row]
    assert all(
        row["rollout/reward_spread"] == row["rollout/reward_max"] - row["rollout/reward_min"]
        for row in steps
    )
    assert [row["rollout/best_reward"] for row in steps] == [
        max(row["rollout/reward"] for row in steps[: i + 1]) for i in range(len(steps))
    ]


@pytest.mark.slow
def test_the_plugin_of_the_page(tmp_path, monkeypatch):
    """Installed as pip would install it: its modules, and its entry point."""
    save_causal_lm(tmp_path / "model")
    write_jsonl(tmp_path / "prompts.jsonl", sums(8))
    write_named_blocks(tmp_path)
    ((_, project),) = fenced((REPO / "docs" / "extending.md").read_text(encoding="utf-8"), "toml")
    declared = tomllib.loads(project)["project"]
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n"
    )
    ((group, points),) = declared["entry-points"].items()
    (info / "entry_points.txt").write_text(
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    (tmp_path / "run.py").write_text("from lightppo.__main__ import main\n\nmain()\n")
    monkeypatch.chdir(tmp_path)

    def told(*words: str, code: int = 0) -> str:
        done = run_ranks(
            tmp_path / "run.py", *words, bare=True, world_size=1, check=False, env=environment
        )
        assert done.returncode == code, done.output[-6000:]
        return done.output

    assert "lightppo hello greets you" in told("hello", "you")
    run = "--pretrain model --prompt_data prompts.jsonl --reward_source shortness --save_path out "
    run += "--advantage_estimator signed --policy_loss plain --rollout_engine told "
    run += "--rollout_batch_size 8 --train_batch_size 16 --prompt_max_len 16 --generate_max_len 8 --n_samples_per_prompt"
    assert "--word_limit 50 is never reached" in told("ppo", *run.split(), "4", code=2)
    assert "Most words of a response" in told("ppo", "--help", "all")
    run = f"--word_limit 2 {run}"
    assert "my estimator compares samples" in told("ppo", *run.split(), "2", code=2)
    said = told("ppo", *run.split(), "4")
    assert "4 samples per prompt" in said
    assert "the engine is made" in said
    (row,) = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["rollout/words"] > 0


# -- the tutorial ------------------------------------------------------------------------------------------------------


def run_block(block: str, environment: dict[str, str]) -> None:
    """In bash; commands of lightppo in a fork, which has the imports done."""
    for command in block.replace("\\\n", " ").splitlines():
        if command.startswith("lightppo "):
            run_ranks(
                REPO / "lightppo" / "__main__.py",
                *shlex.split(command)[1:],
                world_size=1,
                timeout=500,
            )
            continue
        command = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


@pytest.mark.slow
def test_the_tutorial(tmp_path, monkeypatch):
    """Every block in the order of the page: Python goes into the file that its first line names, bash is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task").mkdir()
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
    assert languages == [
        "python",
        "bash",
        "python",
        "python",
        "bash",
        "bash",
        "bash",
        "python",
        "bash",
        "bash",
    ]
    assert (tmp_path / "my_task" / "trained" / "model.safetensors").is_file()
