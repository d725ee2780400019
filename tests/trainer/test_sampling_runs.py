"""Whole runs with selection: resumed to the bit, each prompt once per episode, files, FIRE, empty steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import fitted, numbers, whole_weights
from support.sampled import sample
from support.tiny import read_jsonl, sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.config.rules import logp_diff_tolerance
from lightppo.errors import ConfigError, RewardError, TrainingError
from lightppo.logging.step_metrics import METRICS
from lightppo.trainer.build import eval_sampling_params, sampling_params
from lightppo.trainer.prompts import EpisodePrompts, PromptFilter

pytestmark = pytest.mark.usefixtures("world")

# Of the 12 prompts 0+…, 1+…, … every third may have answers of different scores; those of the others are all 1.
REWARD = """
import hashlib

def reward_func(queries, prompts, labels):
    draws = [hashlib.sha256(query.encode()).digest()[0] % 2 for query in queries]
    fixed = [int(prompt.split("+")[0]) % 3 > 0 for prompt in prompts]
    scores = [1.0 if same else float(draw) for same, draw in zip(fixed, draws)]
    return {"rewards": scores, "extra_logs": {"acc": scores}}
"""


def episode_of(trainer):
    """The prompts of its first episode."""
    return EpisodePrompts(trainer.prompts_dataloader, 0, 0, list)


@pytest.fixture
def config_of(make_config, tmp_path):
    """``config_of(folder, **options)``: GRPO on 12 prompts, groups of 3."""
    (tmp_path / "mixed.py").write_text(REWARD)

    def make(folder: str = "run", **options: Any) -> PPOConfig:
        own = {
            "advantage_estimator": "grpo",
            "init_kl_coef": 0.0,
            "n_samples_per_prompt": 3,
            "rollout_batch_size": 2,
            "train_batch_size": 6,
            "reward_fn": str(tmp_path / "mixed.py"),
            "save_path": str(tmp_path / folder / "run"),
            "ckpt_path": str(tmp_path / folder / "ckpt"),
            "rollout_data_dir": str(tmp_path / folder / "data"),
        }
        return make_config(**own | options)

    return make


def samples_of(config: PPOConfig) -> list[list[dict[str, Any]]]:
    """The samples of each step."""
    files = sorted(
        Path(config.sampling.rollout_data_dir).iterdir(), key=lambda path: int(path.stem[4:])
    )
    return [read_jsonl(path) for path in files]


SELECTION = {
    "dynamic_sampling": True,
    "filter_metric": "acc",
    "gen_batch_size": 5,
    "max_num_gen_batches": 0,
}


OF_SELECTION = {
    f"rollout/{name}"
    for name in (
        *(
            "not_best",
            "num_gen_batches",
            "trained_groups",
            "reused_groups",
            "stale_groups",
            "staleness",
        ),
        *(
            "surplus_groups",
            "kept_share",
            "rejected_equal",
            "rejected_low",
            "rejected_high",
            "rejected_unmeasured",
        ),
        "left_out_prompts",
    )
}


@pytest.mark.parametrize(
    "options",
    [
        # the last one has more to keep than these
        pytest.param(SELECTION, marks=pytest.mark.long, id="dynamic"),
        pytest.param({"gen_batch_size": 6}, marks=pytest.mark.long, id="oversampled"),
        pytest.param(
            {"gen_batch_size": 7, "generation_size": 5}, marks=pytest.mark.long, id="best of n"
        ),
        pytest.param(
            SELECTION | {"dataset_filter_threshold": 0.9, "dataset_max_filter_percentage": 0.3},
            id="dynamic and epoch filter",
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(config_of, options):
    options = options | {"num_episodes": 2, "save_steps": 1}
    straight = fitted(config_of("straight", **options))
    steps = straight.state.global_step
    assert steps >= 3
    waited = []
    for stop in range(1, steps + 1):  # stopped after every step
        torch.rand(5)
        resumed = fitted(config_of("resumed", benchmark_steps=stop, **options))
        assert resumed.state.global_step == stop
        waited.append(len(resumed.sampler.surplus))
    assert max(waited) > 0  # some stops have a surplus
    assert str(numbers(resumed.config)) == str(numbers(straight.config))  # as text: NaN is NaN
    assert samples_of(resumed.config) == samples_of(straight.config)
    assert resumed.state == straight.state
    ours, theirs = whole_weights(resumed), whole_weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ("dataset_filter_threshold" in options) == bool(
        numbers(straight.config)[-1].get("rollout/left_out_prompts")
    )


def test_each_accepted_prompt_is_trained_on_once_per_episode(config_of):
    config = config_of(**SELECTION, num_episodes=2)
    trainer = fitted(config)
    assert trainer.state.episode == 2
    rows, steps = numbers(config), samples_of(config)
    for row, samples in zip(rows, steps, strict=True):
        groups = {
            s["index"]: [t["score"] for t in samples if t["index"] == s["index"]] for s in samples
        }
        assert all(len(scores) == 3 and len(set(scores)) == 2 for scores in groups.values())
        assert (row["rollout/samples"], row["rollout/trained_groups"]) == (
            3 * len(groups),
            len(groups),
        )
        assert len(groups) <= 2
    # each prompt is sampled once in each episode: 12 prompts, 3 samples, 2 episodes
    assert sum(row["rollout/generated_samples"] for row in rows) == 2 * 12 * 3
    trained = sum(row["rollout/trained_groups"] for row in rows)
    rejected = sum(row["rollout/rejected_equal"] for row in rows)
    assert trained + rejected == 24
    assert trained > 2
    assert rejected >= 16
    assert rows[-1]["rollout/surplus_groups"] == 0
    # 5, 5 and 2 prompts to a batch
    assert sum(row["rollout/num_gen_batches"] for row in rows) == 6


def test_what_is_logged_is_documented_and_only_of_selection_where_there_is_any(config_of):
    everything = SELECTION | {
        "generation_size": 4,
        "dataset_filter_threshold": 0.99,
        "total_training_steps": 1,
    }
    with_selection = set(numbers(fitted(config_of("with", **everything)).config)[0])
    without = set(numbers(fitted(config_of("without", total_training_steps=1)).config)[0])
    assert with_selection - without == OF_SELECTION
    assert without <= {*METRICS, "step"}


def test_steps_without_a_group_train_nothing_and_the_run_goes_on_to_its_error(config_of, tmp_path):
    (tmp_path / "same.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
    )
    config = config_of(
        dynamic_sampling=True, max_num_gen_batches=2, reward_fn=str(tmp_path / "same.py")
    )
    trainer = PPOTrainer.from_config(config)
    before = whole_weights(trainer)
    with pytest.raises(
        TrainingError, match=r"no optimizer step was taken in 3 steps.*--filter_range"
    ):
        trainer.fit()
    rows = numbers(config)
    assert [row["step"] for row in rows] == [1, 2, 3]  # two batches of two prompts each
    assert {
        (row["rollout/samples"], row["train/optimizer_steps"], row["rollout/kept_share"])
        for row in rows
    } == {(0, 0, 0)}
    after = whole_weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(RewardError, match=r"0 of 2 groups.*--on_exhausted"):
        fitted(config.with_options(on_exhausted="raise", ckpt_path=str(tmp_path / "other")))


def test_reused_groups_have_the_advantages_of_their_own_group(config_of):
    options = {
        "dynamic_sampling": True,
        "max_num_gen_batches": 1,
        "gen_batch_size": 10,
        "rollout_batch_size": 30,
    }
    found = {}
    for policy in ("train_short", "reuse"):
        trainer = PPOTrainer.from_config(
            config_of(policy, on_exhausted=policy, train_batch_size=90, **options)
        )
        whole = len(sample(trainer, episode_of(trainer)).rollouts)
        found[policy] = trainer.replay_buffer.items
    short, reused = found["train_short"], found["reuse"]
    assert len(short) == whole < len(reused) == 90
    for i, item in enumerate(reused):
        assert torch.equal(item.advantages, short[i % whole].advantages)
        assert torch.equal(item.sequences, short[i % whole].sequences)


def test_groups_are_judged_by_the_metric_and_the_range(config_of):
    # Shaped, the fixed scores are 1 · 3 clipped to 2; the mean of those by chance is 0, 2/3, 4/3 or 2.
    shaping = {"reward_scaling": 3.0, "reward_clip_range": (-2.0, 2.0), "gen_batch_size": 12}
    for limits in ((0.5, 1.0), (1.0, 1.5), (1.9, 2.1)):
        config = config_of(f"{limits}", dynamic_sampling=True, filter_metric="seq_final_reward", filter_range=limits,
                           total_training_steps=1, rollout_batch_size=12, train_batch_size=36, **shaping)  # fmt: skip
        trainer = PPOTrainer.from_config(config)
        collected = sample(trainer, episode_of(trainer))
        sums_ = {}
        for rollout in collected.rollouts:
            sums_[rollout.prompt.index] = sums_.get(rollout.prompt.index, 0) + rollout.reward
        assert all(limits[0] < 2 / 3 * total < limits[1] for total in sums_.values())
        assert collected.counts["rejected_low"] + collected.counts["rejected_high"] == 12 - len(
            sums_
        )
        assert (collected.counts["rejected_high"] > 0) == (limits[1] < 2)


def test_best_of_n_trains_on_the_best(config_of):
    options = {
        "generation_size": 6,
        "n_samples_per_prompt": 2,
        "train_batch_size": 4,
        "total_training_steps": 1,
    }
    config = config_of(best_of_n_tie="longer", stop_token_ids=tuple(range(10, 25)), **options)
    trainer = fitted(config)
    (row,), (samples,) = numbers(config), samples_of(config)
    assert (row["rollout/generated_samples"], row["rollout/not_best"], row["rollout/samples"]) == (
        12,
        8,
        4,
    )
    assert trainer.sampler.sampler.sampling.n == 6
    assert eval_sampling_params(trainer.config).n == 1
    assert {s["score"] for s in samples} == {1.0}  # among six there are two
    other = config.with_options(best_of_n_tie="shorter", save_path=f"{config.checkpoint.save_path}2",
                                ckpt_path=f"{config.checkpoint.ckpt_path}2",
                                rollout_data_dir=f"{config.sampling.rollout_data_dir}2")  # fmt: skip
    fitted(other)
    (shorter,) = samples_of(other)
    lengths = [sum(s["response_length"] for s in found) for found in (shorter, samples)]
    assert lengths[0] < lengths[1]


def test_a_replayed_run_is_the_run(config_of, tmp_path, monkeypatch):
    options = SELECTION | {"skip_rollout": str(tmp_path / "saved")}
    first = fitted(config_of("first", **options))
    # nothing is sampled now
    monkeypatch.setattr("lightppo.rollout.hf.HFRolloutEngine.generate", None)
    again = fitted(config_of("again", **options))
    assert str(numbers(again.config)) == str(numbers(first.config))
    ours, theirs = whole_weights(again), whole_weights(first)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match="--skip_rollout"):
        fitted(config_of("other", seed=7, **options))


def test_the_first_token_is_hot_and_its_log_prob_is_the_policys(config_of):
    plain = config_of("plain", total_training_steps=1)
    hot = config_of("hot", total_training_steps=1, fire_sampling=True)
    trainer = PPOTrainer.from_config(hot)
    assert sampling_params(trainer.config).first_token_temperature == 10
    assert sampling_params(PPOTrainer.from_config(plain).config).first_token_temperature is None
    assert eval_sampling_params(trainer.config).first_token_temperature is None
    trainer.fit()
    row = numbers(hot)[0]
    # what the engine records is what the trainer computes at --temperature, for the first token as for the others
    assert row["rollout/logp_diff_max"] < 1e-4


def test_an_engine_that_cannot_heat_the_first_token_is_refused(trainer_with):
    with pytest.raises(ConfigError, match="--fire_sampling: FakeEngine"):
        trainer_with(fire_sampling=True)


def filter_of(trainer) -> PromptFilter:
    return next(callback for callback in trainer.callbacks if isinstance(callback, PromptFilter))


def test_easy_prompts_leave_the_further_episodes(config_of, tmp_path):
    config = config_of(
        dataset_filter_threshold=0.99, dataset_max_filter_percentage=0.4, num_episodes=2
    )
    trainer = fitted(config)
    rows, steps = numbers(config), samples_of(config)
    # 40% of 12, of 8
    assert [row["rollout/left_out_prompts"] for row in rows] == [0] * 5 + [4] * 4 + [4 + 3]
    seen = {s["index"]: s for samples in steps[6:] for s in samples}
    first = filter_of(trainer).left_out[:4]
    assert not set(first) & seen.keys()
    assert len(seen) == 8
    labels = {s["index"]: int(s["ground_truth"]) for samples in steps for s in samples}
    means = {
        i: [s["score"] for samples in steps[:6] for s in samples if s["index"] == i] for i in labels
    }
    assert all(min(means[i]) == 1.0 for i in first)


def test_prompts_of_dropped_rows_are_found(config_of, tmp_path):
    rows = [{"input": ""}, *sums(5)]  # row 0 is bad: positions are not row numbers
    path = write_jsonl(tmp_path / "some.jsonl", [{"label": "0", **row} for row in rows])
    config = config_of(prompt_data=path, on_bad_row="skip", dataset_filter_threshold=0.99, num_episodes=2,
                       dataset_max_filter_percentage=0.5)  # fmt: skip
    trainer = fitted(config)
    left_out = set(filter_of(trainer).left_out)
    assert left_out
    assert 0 not in left_out
    dataset = trainer.prompts_dataloader.dataset
    order = trainer.prompts_dataloader.batch_sampler.order()
    assert {dataset[position].index for position in order} == set(range(1, 6)) - left_out


def test_groups_that_were_left_over_have_log_probs_of_the_policy_that_trains(make_config, caplog):
    """With ``--gen_batch_size`` alone: of 6 prompts a step trains on 4, the other 2 wait while the policy moves on."""
    options = {
        "gen_batch_size": 6,
        "num_episodes": 1,
        "total_training_steps": 2,
        "lr_warmup_steps": 0,
    }
    trainer = PPOTrainer.from_config(make_config(**options))
    make, compared = trainer.experience_maker.make_experience_list, []

    def checked(rollouts):
        experiences = make(rollouts)
        for e in experiences:
            with torch.no_grad():
                now = trainer.actor(e.sequences, e.num_actions, e.attention_mask)
            compared.append(((e.action_log_probs - now) * e.action_mask).abs().max().item())
        return experiences

    trainer.experience_maker.make_experience_list = checked
    trainer.fit()
    lines = Path(trainer.config.checkpoint.save_path, "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in lines)
    assert last["rollout/stale_groups"] == 2
    assert max(compared) < 1e-5
    # That an older policy sampled some is no error of the engine.
    assert last["rollout/logp_diff_mean"] > logp_diff_tolerance(
        trainer.config, trainer.strategy.device.type
    )
    assert last["rollout/logp_diff_on_policy"] < 1e-5
    assert "rollout/logp_diff_on_policy" not in first
    assert "drift" not in caplog.text
