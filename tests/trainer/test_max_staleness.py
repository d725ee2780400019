"""--max_staleness 1: the next step is sampled while a step trains, and nothing depends on how long that takes."""

from __future__ import annotations

import pytest
import torch
from support import engines_ahead
from support.runs import fitted, trained_rows, whole_weights

from lightppo.plugin import ENGINES
from lightppo.table import Entry

pytestmark = pytest.mark.usefixtures("world")

AHEAD = {"max_staleness": 1, "n_samples_per_prompt": 2}
VARIANTS = {
    "plain": {},
    "short last step": {"rollout_batch_size": 5, "train_batch_size": 2},
    "no room ahead": {"gen_batch_size": 8},
    "two batches ahead": {
        "gen_batch_size": 2,
        "dynamic_sampling": True,
        "filter_range": (-0.5, 2.0),
    },
    "rejections": {"dynamic_sampling": True, "max_num_gen_batches": 2},
    "greedy baselines": {"advantage_estimator": "remax"},
    "best of four": {"generation_size": 4},
}


@pytest.fixture
def engines():
    for name in ("AtOnce", "InThread"):
        ENGINES.register(name.lower(), Entry(f"{engines_ahead.__file__}:{name}"))
    yield
    for name in ("AtOnce", "InThread"):
        del ENGINES[name.lower()]


@pytest.fixture
def run_of(make_config, tmp_path, engines):
    """``run_of(folder, engine, **options)``: the trainer after ``fit``."""

    def run(folder: str, engine: str, **options):
        paths = {"save_path": str(tmp_path / folder), "ckpt_path": str(tmp_path / f"{folder}_ckpt")}
        return fitted(make_config(**AHEAD | paths | {"rollout_engine": engine} | options))

    return run


def same(first, second) -> bool:
    weights = [whole_weights(run) for run in (first, second)]
    rows = [trained_rows(run.config) for run in (first, second)]
    assert rows[0] == rows[1]
    return all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_run_is_the_one_that_samples_each_step_before_it_trains_the_one_before(run_of, options):
    runs = [run_of(name, name, num_episodes=2, **options) for name in ("atonce", "inthread")]
    assert same(*runs)
    staleness = [row["rollout/staleness"] for row in trained_rows(runs[0].config)]
    assert staleness[0] == 0
    assert max(staleness) <= 1
    assert any(staleness)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_resumed_run_is_the_uninterrupted_run(run_of, options):
    options = {"num_episodes": 2, "save_steps": 1, "max_ckpt_num": 10, **options}
    straight = run_of("straight", "inthread", **options)
    for stop in (1, 2, 3, None):  # inside an episode, at its end, in the next one
        resumed = run_of("resumed", "inthread", benchmark_steps=stop, **options)
    assert same(straight, resumed)


def ranked(queries, prompts, labels, responses):
    """The place of each answer among those to its prompt."""
    answers = list(zip(prompts, responses, range(len(prompts))))
    return [
        float(sum(other[0] == answer[0] and other < answer for other in answers))
        for answer in answers
    ]


def test_a_function_may_compare_the_answers_to_a_prompt(run_of):
    options = VARIANTS["greedy baselines"] | VARIANTS["best of four"] | {"reward_fn": ranked}
    # A policy that stays samples the same in all three runs.
    options |= {"actor_learning_rate": 0.0, "total_training_steps": 2}
    one_after_the_other = run_of("after", "hf", max_staleness=0, **options)
    beside = run_of("beside", "hf", max_staleness=0, async_rewards=True, **options)
    ahead = run_of("ahead", "inthread", **options)
    rows = [
        trained_rows(run.config, ("rollout/reward", "reward/"))
        for run in (one_after_the_other, beside, ahead)
    ]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0][0]["rollout/reward_max"] > 0
