"""Training on episodes: masks, log probs, gradients, rewards of turns, resume, ranks."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from support.ranks import run_ranks
from support.runs import fitted, forget_checkpoints, logged, trained_rows, whole_weights

from lightppo import PPOTrainer, Step
from lightppo.algorithms.advantages import gae
from lightppo.algorithms.entries import LOSS_AGG_MODES
from lightppo.algorithms.masking import LossNormalizer
from lightppo.data.records import Prompt, Rollout
from lightppo.episodes.episode_engine import _Stage
from lightppo.episodes.episode_metrics import NAMES
from lightppo.episodes.rewards import EnvironmentReward
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience
from lightppo.models.actor import Actor
from lightppo.trainer.training_losses import actor_loss
from lightppo.trainer.update import build_policy_loss

GROUPED = {"advantage_estimator": "grpo", "n_samples_per_prompt": 2, "init_kl_coef": 0}
COUNTING = Path(__file__).with_name("counting.py")
WORKER = Path(__file__).parent / "ranks" / "episodes.py"


class Seen(PPOTrainer):
    """Keeps the rollouts of every step."""

    def fit(self) -> None:
        self.seen, self.seen_by_step = [], []
        collect = self.sampler.collect

        def noting(prompts, step):
            collected = collect(prompts, step)
            self.seen += collected.rollouts
            self.seen_by_step.append(collected.rollouts)
            return collected

        self.sampler.collect = noting
        super().fit()


@pytest.fixture
def trained(world, make_episodes):
    trainer = fitted(make_episodes(**GROUPED, benchmark_steps=1, actor_learning_rate=0.0), Seen)
    return trainer


def test_log_probs_of_trained_tokens_are_those_of_a_forward_pass(trained):
    assert len({len(one.turns) for one in trained.seen}) > 1
    model = trained.rollout_engine.engine.model
    for one in trained.seen:
        ids = torch.tensor([one.prompt.token_ids + one.response_ids])
        start = len(one.prompt.token_ids)
        with torch.no_grad():
            scores = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(one.response_ids)[:, None])[:, 0]
        mask = torch.tensor(one.trained)
        assert 0 < mask.sum() <= len(mask)
        got = torch.tensor(one.log_probs)
        torch.testing.assert_close(got[mask], expected[mask], atol=1e-4, rtol=0)
        assert not got[~mask].any()


def test_what_is_logged(trained):
    (row,) = trained_rows(trained.config, ("rollout/", "train/", "reward/"))
    turns = [len(one.turns) for one in trained.seen]
    assert row["reward/turns"] == pytest.approx(sum(turns) / len(turns))
    lengths = [sum(one.trained) for one in trained.seen]
    assert row["rollout/response_length"] == pytest.approx(sum(lengths) / len(lengths))
    rewards = [sum(turn["reward"] for turn in one.turns) for one in trained.seen]
    assert row["rollout/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert all(reward >= 0.5 for reward in rewards)  # that of the end


def test_recorded_samples_have_their_turns(trained):
    """For reports: messages, turns, and which tokens were sampled."""
    (file,) = (Path(trained.config.checkpoint.save_path) / "rollouts").glob("step*.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    seen = {(one.prompt.index, one.sample_index): one for one in trained.seen}
    assert rows
    for row in rows:
        one = seen[row["index"], row["sample_index"]]
        assert (row["messages"], row["turns"]) == (one.messages, one.turns)
        assert "conversation" not in row["extras"]
        trained_tokens = row["tokens"].get("trained", [1] * len(one.trained))
        assert [bool(yes) for yes in trained_tokens] == one.trained
    assert any("trained" in row["tokens"] for row in rows)


def test_metrics_of_episodes(world, make_episodes, tmp_path):
    """Of all that were played in a step, those that failed included; and of evaluations."""
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    rows[2]["fails"] = "yes"
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_episodes(
        **GROUPED,
        num_episodes=1,
        env_retries=1,
        eval_data=str(tmp_path / "episodes.jsonl"),
        eval_steps=1,
        env_failure_limit=1.0,
    )
    trainer = fitted(config, Seen)
    trained = trained_rows(config, ("episode/", "rollout/", "perf/"))
    logs = {name.removeprefix("episode/") for row in trained for name in row if "episode/" in name}
    kinds = {name for name in NAMES if name.startswith("failures_")}
    assert logs == {*NAMES} - kinds | {"failures_failure"}
    failed = [row for row in trained if row["episode/failed"]]
    assert len(failed) == 1  # the row with fails
    assert failed[0]["episode/failures_failure"] == 4  # two samples, twice each
    assert not any("episode/failures_failure" in row for row in trained if row not in failed)
    count = 2 * config.rollout.rollout_batch_size
    assert failed[0]["episode/failed"] == pytest.approx(2 / count)
    for row, rollouts in zip(trained, trainer.seen_by_step, strict=True):
        turns = [len(one.turns) for one in rollouts]
        assert row["episode/turns"] == pytest.approx(sum(turns) / len(turns))
        reasons = [one.texts["stop_reason"] for one in rollouts]
        for reason in ("done", "length"):
            share = reasons.count(reason) / len(reasons)
            assert row[f"episode/stop_{reason}"] == pytest.approx(share)
        assert 0 < row["perf/environment_share"] < 1
        assert 0 <= row["perf/waiting_share"] <= 1
    evaluated = [row for row in logged(config) if "eval/reward" in row]
    assert evaluated
    for row in evaluated:
        assert row["eval/episode/failures_failure"] == 2
        assert row["eval/episode/failed"] == pytest.approx(1 / 12)
        assert row["eval/episode/turns"] == pytest.approx(row["eval/turns"])


def rollout(ids, trained, reward=1.0, turns=((0, 0.0),), index=0) -> Rollout:
    prompt = Prompt("x", [5, 6, 7], index=index)
    return Rollout(
        prompt,
        0,
        list(ids),
        "",
        "stop",
        [-0.5 if yes else 0.0 for yes in trained],
        reward=reward,
        trained=list(trained),
        turns=[{"end": end, "reward": reward} for end, reward in turns],
    )


def test_holes_are_not_trained():
    """The mask has them; lengths count what was sampled, totals what the model reads."""
    mask = [True, True, False, False, True]
    batch = Experience.from_rollouts(
        [rollout(range(10, 15), mask), rollout([10, 11], [True, True])]
    )
    assert batch.action_mask.tolist() == [mask, [True, True, False, False, False]]
    assert batch.attention_mask.sum(1).tolist() == [8, 5]
    assert batch.info["response_length"].tolist() == [3.0, 2.0]
    assert batch.info["total_length"].tolist() == [8.0, 5.0]


@pytest.mark.parametrize("trained", [[True], [False, False]])
def test_masks_that_do_not_fit_are_refused(trained):
    with pytest.raises(
        ValueError, match=r"prompt 0, sample 0: trained names .* the response has 2"
    ):
        Experience.from_rollouts([rollout([10, 11], trained) if len(trained) == 2 else bad()])


def bad() -> Rollout:
    one = rollout([10, 11], [True, True])
    one.trained = [True]
    return one


@pytest.mark.parametrize("packing", [False, True])
def test_targets_of_observations_leave_the_gradient_as_it_is(tiny_model, make_episodes, packing):
    """An observation at the end, so that it is a target alone; with a broken mask, it would be learnt."""
    actor = Actor(tiny_model, packing_samples=packing)
    config = make_episodes(**GROUPED).resolved()

    def gradient(observation: list[int], mask: list[bool]) -> list[torch.Tensor]:
        ids = [10, 11, 12, *observation]
        batch = Experience.from_rollouts([rollout(ids, mask), rollout(ids, mask)])
        batch.advantages = torch.tensor([[1.0], [-0.5]]) * batch.action_mask
        actor.zero_grad()
        loss, *_ = actor_loss(
            actor,
            batch,
            LossNormalizer.from_masks([batch.action_mask]),
            loss_fn=build_policy_loss(config),
            options=config.loss,
            aggregate=LOSS_AGG_MODES.find(config.loss.loss_agg_mode).fn,
        )
        loss.backward()
        return [p.grad.clone() for p in actor.parameters() if p.grad is not None]

    def same(mask: list[bool]) -> bool:
        before, after = gradient([20, 21], mask), gradient([30, 31], mask)
        assert any(grad.any() for grad in before)
        return all(torch.equal(left, right) for left, right in zip(before, after, strict=True))

    assert same([True, True, True, False, False])
    assert not same([True] * 5)


class TestRewardsOfTurns:
    def test_they_stand_on_the_last_sampled_tokens(self):
        mask = [True, True, False, True, False, False, True]
        one = rollout(range(7), mask, turns=((1, 0.5), (3, -1.0), (6, 2.0)))
        output = EnvironmentReward(of_turns=True).score([one])
        assert output.scores == [1.5]
        assert output.token_scores == [[0.0, 0.5, 0.0, -1.0, 0.0, 0.0, 2.0]]

    def test_gae_over_two_holes_by_hand(self):
        """γ = 0.9, λ = 0.5, values 0: A_t = r_t + 0.45 A_next, where next is the next trained token."""
        mask = torch.tensor([[True, True, False, True, False, False, True]])
        rewards = torch.tensor([[0.0, 0.5, 0.0, -1.0, 0.0, 0.0, 2.0]])
        values = torch.zeros(1, 7)
        advantages, _ = gae(
            token_rewards=rewards, action_mask=mask, values=values, gamma=0.9, lambd=0.5
        )
        last = 2.0
        third = -1.0 + 0.45 * last
        second = 0.5 + 0.45 * third
        first = 0.45 * second
        expected = torch.tensor([first, second, third, last])
        torch.testing.assert_close(advantages[mask], expected)

    def test_a_run_with_a_critic(self, world, make_episodes):
        config = make_episodes(
            advantage_estimator="gae",
            env_reward="turns",
            use_dense_reward=True,
            benchmark_steps=2,
        )
        trainer = fitted(config, Seen)
        for one in trainer.seen:
            for turn in one.turns:
                assert one.trained[turn["end"]]
            assert one.reward == pytest.approx(sum(turn["reward"] for turn in one.turns))
        assert all(math.isfinite(row["train/critic_loss"]) for row in trained_rows(config))


def test_it_depends_on_neither_micro_batches_nor_packing(world, make_episodes, tmp_path):
    options = GROUPED | {"benchmark_steps": 2}
    runs = {
        "padded": {"packing_samples": False, "micro_train_batch_size": 4},
        "ones": {"packing_samples": False, "micro_train_batch_size": 1},
        "packed": {"packing_samples": True, "share_prompts": False},
        "shared": {"packing_samples": True, "share_prompts": True},
        "slots": {"packing_samples": True, "micro_rollout_batch_size": 1},
    }
    weights = {}
    for name, more in runs.items():
        folder = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / f"{name}_ckpt")}
        weights[name] = whole_weights(fitted(make_episodes(**options | more | folder)))
    for name, found in weights.items():
        for key, expected in weights["padded"].items():
            torch.testing.assert_close(
                found[key],
                expected,
                atol=2e-4,
                rtol=0,
                msg=lambda m, at=f"{name} {key}": f"{at}: {m}",
            )


def test_a_resumed_run_is_the_uninterrupted_run(world, make_episodes, tmp_path):
    def options(name: str) -> dict:
        paths = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / f"{name}_ckpt")}
        return GROUPED | paths | {"save_steps": 1}

    straight = fitted(make_episodes(**options("straight"), benchmark_steps=3))
    fitted(make_episodes(**options("again"), benchmark_steps=3))
    forget_checkpoints(tmp_path / "again_ckpt", after=1)
    resumed = fitted(make_episodes(**options("again"), benchmark_steps=3))
    expected, found = whole_weights(straight), whole_weights(resumed)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def one_turn_at_a_time(stage, wait, take=_Stage.take):
    """As if each reply of an environment came after the one before had been sampled from."""
    held = vars(stage).setdefault("held", [])
    if not held:
        came = take(stage, wait)
        if came is None:
            return None
        held += came
    return [held.pop(0)] if held else []


def test_weights_do_not_depend_on_when_replies_come(world, make_episodes, tmp_path, monkeypatch):
    """With two optimizer steps per rollout: the log probs before them are of a pass, not of the sampled turns."""
    found = []
    for name in ("together", "apart"):
        if name == "apart":
            monkeypatch.setattr(_Stage, "take", one_turn_at_a_time)
        folder = {"save_path": str(tmp_path / name), "ckpt_path": str(tmp_path / f"{name}_ckpt")}
        config = make_episodes(**GROUPED | folder, benchmark_steps=2, max_epochs=2)
        trainer = fitted(config, Seen)
        log_probs = [one.log_probs for one in trainer.seen]
        ids = [one.response_ids for one in trainer.seen]
        found.append((ids, log_probs, whole_weights(trainer)))
    (ids, log_probs, weights), (other_ids, other_log_probs, other_weights) = found
    assert ids == other_ids
    assert log_probs != other_log_probs  # rounding: other turns went through the model together
    assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


class Shouts:
    """Its own environment, given from Python."""

    def __init__(self, reward: float = 0.25) -> None:
        self.reward = reward

    def reset(self, **row: object) -> None: ...

    def step(self, text: str) -> Step:
        return Step(None, reward=self.reward, done=True)


def louder() -> Shouts:
    return Shouts(0.7)  # no sum of Counting


def test_environments_given_as_objects(world, make_episodes, tmp_path):
    """A class, a function that makes one beside a path, and the same again on resume."""
    config = make_episodes(**GROUPED, env=Shouts, benchmark_steps=1, save_steps=1)
    assert config.episodes.env == (Shouts,)
    trainer = fitted(config, Seen)
    assert {one.reward for one in trainer.seen} == {0.25}
    resumed = fitted(make_episodes(**GROUPED, env=[Shouts], benchmark_steps=2, save_steps=1), Seen)
    assert resumed.state.global_step == 2
    assert len(resumed.seen) == len(trainer.seen)

    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    names = ("louder", "Counting")
    routed = [row | {"environment": names[i % 2]} for i, row in enumerate(rows)]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in routed))
    paths = {"save_path": str(tmp_path / "two"), "ckpt_path": str(tmp_path / "two_ckpt")}
    both = [louder, f"{COUNTING}:Counting"]
    trainer = fitted(make_episodes(**GROUPED, **paths, env=both, benchmark_steps=1), Seen)
    scores = {one.prompt.extra["environment"]: one.reward for one in trainer.seen}
    assert scores["louder"] == 0.7
    assert scores["Counting"] != 0.7
    written = yaml.safe_load((tmp_path / "two" / "run_config.yaml").read_text())["env"]
    assert written == [f"<louder of {__name__}>", f"{COUNTING}:Counting"]


def test_what_is_neither_a_path_nor_an_object_is_refused(make_episodes):
    with pytest.raises(ConfigError, match=r"--env must be a list of texts.* or in Python"):
        make_episodes(env=[Shouts, 3]).resolved()


def test_another_reward_sees_the_last_turn_and_no_failed_episode(world, make_episodes, tmp_path):
    (tmp_path / "scores.py").write_text(
        "def reward_func(queries, prompts, labels, *, responses):\n"
        "    assert all(responses)\n"
        "    return [float(len(response)) for response in responses]\n"
    )
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    rows[2]["fails"] = "yes"
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_episodes(
        **GROUPED,
        reward_fn=str(tmp_path / "scores.py"),
        reward_source=["function"],
        env_reward="none",
        env_retries=0,
        num_episodes=1,
    )
    trainer = fitted(config, Seen)
    assert len(trainer.seen) == 22
    assert all(one.reward == len(one.response_text) for one in trainer.seen)
    counts = [row.get("rollout/unscored", 0) for row in logged(config)]
    assert sum(counts) == 2
    assert sum(row.get("reward/failures", 0) for row in logged(config)) == 2


def test_two_ranks_under_zero_3(tiny_model, tmp_path):
    """Ranks with 1 and with 8 turns, a rank without prompts, a rank whose episodes all fail: nobody waits for ever."""
    run_ranks(WORKER, tiny_model, tmp_path, timeout=400)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0]["turns"] == [1, 1]
    assert results[1]["turns"] == [8, 8]
    assert [len(result["nothing"]) for result in results] == [2, 0]
    assert results[0]["failed"] == [[], []]
    assert all(results[1]["failed"])
    for result in results:
        assert "of 2 of 4 episodes failed (--env_failure_limit 0.4)" in result["too many"]
