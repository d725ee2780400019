"""examples/recipes: each is short, says something, names its paper, resolves to what it says, and trains."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.ranks import REPO
from support.tiny import read_jsonl, sums, write_jsonl

from lightppo.config import PPOConfig, parse_args
from lightppo.config.options import all_options
from lightppo.config.rules import needs_critic
from lightppo.preflight.advice import advice

FOLDER = REPO / "examples" / "recipes"
PAGE = REPO / "docs" / "choosing.md"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
NEEDED = {"pretrain": "model", "prompt_data": "prompts.jsonl", "reward_fn": "reward.py"}
# A recipe says these also where they are the defaults: what it is, how many optimizer steps a rollout has, the KL.
ALWAYS_SAID = {"advantage_estimator", "rollout_batch_size", "train_batch_size", "use_kl_loss"}
SAMPLES = 16  # of a rollout here

REWARD = """
def reward_func(queries, prompts, labels):
    return [sum(map(ord, query)) % 97 / 97 for query in queries]
"""

# What takes two steps in `make test`: a critic, filtered groups, other losses. trainer/test_algorithms_act.py has them all.
IN_SUITE = ("cispo", "dapo", "gspo", "ppo")


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Path:
    return RECIPES[request.param]


def said(recipe: Path) -> dict[str, Any]:
    return yaml.safe_load(recipe.read_text(encoding="utf-8"))


def parsed(recipe: Path, options: dict[str, Any]) -> PPOConfig:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return parse_args(["--config", str(recipe), *words]).resolved()


def test_the_algorithms_that_people_ask_for_are_there():
    expected = {"ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"}
    assert set(RECIPES) >= expected | {"remax", "dapo", "gspo", "cispo"}


def test_each_is_short_and_names_its_paper(recipe):
    lines = recipe.read_text(encoding="utf-8").split("\n")
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    head = [line for line in lines if line.startswith("#")]
    assert lines[: len(head)] == head  # before the options
    assert re.search(r"arXiv:\d{4}\.\d{5}", " ".join(head))


def test_each_option_says_something_new(recipe):
    """Without it the run would be another one."""
    options = said(recipe)
    whole = PPOConfig.from_flat(NEEDED | options).resolved()
    without = {
        name: {k: v for k, v in options.items() if k != name}
        for name in options.keys() - ALWAYS_SAID
    }
    assert [
        name
        for name, rest in without.items()
        if PPOConfig.from_flat(NEEDED | rest).resolved() == whole
    ] == []


def test_no_machine_and_no_path(recipe):
    of_the_user = {"model", "data", "strategy", "checkpoint", "evaluation", "logging"}
    homes = {option.name: option.owner for option in all_options()}
    assert [name for name in said(recipe) if homes[name] in of_the_user] == []


def test_resolves_to_what_it_says(recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # the ranks share the batches out evenly
    config = parsed(recipe, NEEDED)
    assert config.flat().items() >= said(recipe).items()
    assert advice(config) == []


def test_each_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(../examples/recipes/(\w+)\.yaml\)", page)) == sorted(RECIPES)


def test_the_numbers_of_the_page():
    rows = re.findall(
        r"^\[(\w+)\]\(../examples/recipes/(.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == len(RECIPES)
    for name, rest in rows:
        _, critic, samples, kl, steps, papers = rest.split(" | ")
        options = said(RECIPES[name])
        config = PPOConfig.from_flat(NEEDED | options).resolved()
        a, r, t = config.algorithm, config.rollout, config.training
        assert critic == ("yes" if needs_critic(config) else "no")
        assert int(re.match(r"\d+", samples)[0]) == r.n_samples_per_prompt
        where = f"loss ({a.kl_estimator})" if a.use_kl_loss else "reward"
        assert (kl == "none") == (a.init_kl_coef == 0)
        assert kl in ("none", f"{where}, {kl.split(', ')[-1]}")
        assert kl == "none" or float(kl.split(", ")[-1]) == a.init_kl_coef
        assert int(steps) * t.train_batch_size == r.rollout_batch_size * r.n_samples_per_prompt
        in_file = re.findall(r"arXiv:(\d{4}\.\d{5})", RECIPES[name].read_text(encoding="utf-8"))
        assert set(re.findall(r"abs/(\d{4}\.\d{5})", papers)) <= set(in_file)


def test_the_command_of_the_page(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.chdir(REPO)
    (command,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    config = parse_args(words[words.index("examples/train_ppo.py") + 1 :])
    assert config.flat().items() >= said(RECIPES["gspo"]).items()


# -- two steps of each -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("recipes")
    (root / "reward.py").write_text(REWARD)
    prompts = write_jsonl(root / "prompts.jsonl", sums(2 * SAMPLES))
    return {"pretrain": tiny_model, "prompt_data": prompts, "reward_fn": str(root / "reward.py")}


def scaled_down(recipe: Path) -> dict[str, Any]:
    """Batch sizes and lengths of a tiny run with as many optimizer steps per rollout as the recipe's."""
    whole = parsed(recipe, NEEDED)
    steps = (
        whole.rollout.rollout_batch_size
        * whole.rollout.n_samples_per_prompt
        // whole.training.train_batch_size
    )
    n = 2 if whole.rollout.n_samples_per_prompt > 1 else 1
    small = {
        "n_samples_per_prompt": n,
        "rollout_batch_size": SAMPLES // n,
        "train_batch_size": SAMPLES // steps,
    }
    small |= {"prompt_max_len": 12, "generate_max_len": 6, "micro_rollout_batch_size": SAMPLES}
    return small | ({"overlong_buffer_len": 4} if whole.reward.overlong_buffer_len else {})


@pytest.mark.parametrize(
    "recipe",
    [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.long) for name in RECIPES],
    indirect=True,
)
def test_two_steps(recipe, world, inputs, tmp_path):
    from lightppo import PPOTrainer

    small = scaled_down(recipe)
    run = {
        "save_path": tmp_path / "run",
        "ckpt_path": tmp_path / "ckpt",
        "benchmark_steps": 2,
        "num_examine": 0,
    }
    trainer = PPOTrainer.from_config(parsed(recipe, inputs | small | run))
    trainer.keeps = False
    flat = trainer.config.flat()
    assert {name: flat[name] for name in said(recipe).keys() - small.keys()}.items() <= said(
        recipe
    ).items()

    before = [p.detach().clone() for p in trainer.actor.parameters()]
    trainer.fit()
    changed = sum((now != old).sum().item() for now, old in zip(trainer.actor.parameters(), before))
    assert changed > 0.2 * sum(p.numel() for p in before)

    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    undefined = {
        name
        for row in rows
        for name, value in row.items()
        if value is None or not math.isfinite(value)
    }
    assert undefined == set()
    for row in rows:
        assert row["rollout/samples"] == SAMPLES
        assert row["train/optimizer_steps"] == SAMPLES / small["train_batch_size"]
        assert row["train/actor_grad_norm"] > 0
        assert row["train/actor_skipped"] == row["train/actor_stopped"] == 0
        assert ("train/critic_loss" in row) == needs_critic(trainer.config)
        assert ("train/kl_loss" in row) == trainer.config.algorithm.use_kl_loss
        assert ("rollout/kl" in row) == (trainer.config.algorithm.init_kl_coef > 0)
