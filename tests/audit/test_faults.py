"""Faults of public reports, rebuilt as dumps out of the formulas that the reports state: the audit names each.

Each test first writes the right dump, which raises no alarm, then the one of the report. Where a report is a change of
the code, its message is the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

# Two micro batches with different numbers of tokens: rows 0 and 1, rows 2 and 3. Prompts: rows 0 and 1, rows 2 and 3.
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).bool()
FIRST = torch.tensor([1, 1, 0, 0]).bool()
GENERATOR = torch.Generator().manual_seed(3)
LOSSES = torch.rand(4, 4, generator=GENERATOR) * MASK
OLD = -torch.rand(4, 4, generator=GENERATOR) * MASK
REFERENCE = -torch.rand(4, 4, generator=GENERATOR) * MASK
VALUES = torch.randn(4, 4, generator=GENERATOR) * MASK
SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0])


def token_mean(values: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
    return values[rows][MASK[rows]].mean()


def at_the_end(scores: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask, positions, -1).amax(1, keepdim=True)
    return scores[:, None] * (positions == last)


@pytest.fixture
def judged(tmp_path, departures):
    """``judged(dump, flags)``: what departs in a file of torch."""

    def of(dump: Any, flags: str = "") -> dict[str, Any]:
        torch.save(dump, tmp_path / "dump.pt")
        return departures(tmp_path / "dump.pt", flags)

    return of


def place(found: dict[str, Any], quantity: str) -> tuple[str, str, int | None]:
    """The first column, row and position that depart; this quantity is the first that does."""
    assert next(iter(found)) == quantity
    first = found[quantity]["first"]
    return first["column"], first["row"], first["position"]


def test_openrlhf_1249_each_micro_batch_has_its_own_mean(judged):
    """The loss of a step was the mean of the micro batches' token means; they have 6 and 4 tokens."""

    def dump(loss: Tensor) -> list[dict[str, Any]]:
        rows = [
            {"action_mask": MASK[part], "policy_losses": LOSSES[part]} for part in (FIRST, ~FIRST)
        ]
        return [{**row, "policy_loss": loss} for row in rows]

    assert not judged(dump(token_mean(LOSSES)))
    wrong = (token_mean(LOSSES, FIRST) + token_mean(LOSSES, ~FIRST)) / 2
    found = judged(dump(wrong))
    assert place(found, "policy loss") == ("policy_loss", "", None)
    assert found["policy loss"]["first"]["expected"] == pytest.approx(token_mean(LOSSES).item())
    assert found["policy loss"]["hints"] == ["the mean over micro batches of their own losses"]


def test_verl_6957_the_critics_micro_batches_add_up(judged):
    """The value loss was summed over micro batches of which each had its own mean: K times too large."""
    new_values = VALUES + 0.3
    returns = VALUES + torch.linspace(0, 1, 16).reshape(4, 4)
    error = 0.5 * (new_values - returns).square()  # all within the clip of 0.5
    batch = {"response_mask": MASK, "values": VALUES, "new_values": new_values, "returns": returns,
             "micro_batches": (~FIRST).long()}  # fmt: skip
    assert not judged({**batch, "value_loss": token_mean(error)})
    wrong = token_mean(error, FIRST) + token_mean(error, ~FIRST)
    found = judged({**batch, "value_loss": wrong})
    assert place(found, "value loss") == ("value_loss", "", None)
    assert found["value loss"]["hints"] == ["the sum over micro batches of their own losses"]


def test_verl_7225_distillation_with_one_row_per_micro_batch(judged):
    """Issue 7200: a sum of per-sequence token means instead of the global token mean."""
    batch = {"response_mask": MASK, "distill_losses": LOSSES, "micro_batches": torch.arange(4)}
    assert not judged({**batch, "distill_loss": token_mean(LOSSES)})
    wrong = torch.stack([token_mean(LOSSES, slice(n, n + 1)) for n in range(4)]).sum()
    found = judged({**batch, "distill_loss": wrong})
    assert place(found, "distillation loss") == ("distill_loss", "", None)
    assert "the sum over micro batches of their own losses" in found["distillation loss"]["hints"]


def test_verl_7300_returns_end_at_an_observation(judged):
    """Issue 7278: [action, action, observation, observation, action, action] and a reward of 1 at the end."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1.0]])
    rewards = torch.zeros(2, 6)
    rewards[:, -1] = 1.0

    def returns(carries: bool) -> Tensor:
        result, running = torch.zeros(2, 6), torch.zeros(2)
        for t in reversed(range(6)):
            new = rewards[:, t] + running
            result[:, t] = new
            kept = running if carries else torch.zeros(2)
            running = torch.where(mask[:, t] > 0, new, kept)
        return result

    batch = {"response_mask": mask, "token_level_rewards": rewards}
    flags = "--advantage_estimator reinforce++ --no_adv_norm"
    right = returns(carries=True) * mask
    assert not judged({**batch, "returns": right, "advantages": right}, flags)
    wrong = returns(carries=False) * mask
    found = judged({**batch, "returns": wrong, "advantages": wrong}, flags)
    assert place(found, "returns") == ("returns", "row 1", 0)
    assert (found["returns"]["departing"], found["returns"]["largest"]) == (2, 1.0)


def slime_dump(advantages: Tensor, mask: Tensor = MASK, **columns: Tensor) -> dict[str, Any]:
    lengths = [int(n) for n in mask.sum(1)]
    tensors = {"advantages": advantages, "loss_masks": mask.int(), **columns}
    samples = [
        {name: value[row, :n] for name, value in tensors.items()}
        | {"response_lengths": n, "rollout_position": row, "sample_index": row}
        for row, n in enumerate(lengths)
    ]
    return {"format_version": 2, "samples": samples, "dp_shards": [], "raw_reward": SCORES.tolist()}


def test_slime_2235_each_context_parallel_rank_whitens_its_slice(judged):
    """With two ranks of context parallelism, the two halves of a sequence got other means and deviations."""
    mask = torch.ones(4, 4, dtype=torch.bool)
    values = torch.stack([VALUES[n] + SCORES[n] for n in range(4)])
    rewards = {"log_probs": OLD * 0 - 1.0, "values": values * 0}

    def whitened(tokens: Tensor) -> Tensor:
        return (tokens - tokens.mean()) * (tokens.var() + 1e-8).rsqrt()

    returns = SCORES[:, None] * 0.9 ** torch.arange(3, -1, -1)  # γ = 0.9
    flags = "--advantage_estimator reinforce++ --adv_norm --gamma 0.9"
    assert not judged(slime_dump(whitened(returns), mask, **rewards), flags)
    halves = torch.cat([whitened(returns[:, :2]), whitened(returns[:, 2:])], dim=1)
    found = judged(slime_dump(halves, mask, **rewards), flags)
    assert place(found, "advantages") == ("advantages", "samples[0]", 0)
    assert found["advantages"]["hints"] == []


def test_slime_2247_the_dual_clip_is_not_forwarded(judged):
    """With eps_clip_c 1.5, ratios 2, 2, 0.5 and A = 2, -2, 2 the losses are -2.4, 3, -1; without it 4 for the second."""
    ratios = torch.tensor([[2.0, 2.0, 0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.full((1, 3), -2.0)
    columns = {"log_probs": old, "new_log_probs": old + ratios.log()}
    advantages = torch.tensor([[2.0, -2.0, 2.0]])

    def dump(losses: list[float]) -> dict[str, Any]:
        made = slime_dump(advantages, mask, **columns, policy_losses=torch.tensor([losses]))
        return {key: value for key, value in made.items() if key != "raw_reward"}

    flags = "--dual_clip 1.5"
    assert not judged(
        dump([-2.4, 3.0, -1.0]), f"{flags} --logged policy_loss=-0.1333 dual_clip_ratio=0.3333"
    )
    wrong = dump([-2.4, 4.0, -1.0])
    found = judged(wrong, f"{flags} --logged policy_loss=0.2 dual_clip_ratio=0")
    assert place(found, "policy loss of tokens") == ("policy_losses", "samples[0]", 1)
    assert found["policy loss of tokens"]["hints"] == ["no --dual_clip"]
    assert list(found) == ["policy loss of tokens", "policy loss", "dual clip ratio"]


def test_slime_1414_unequal_groups_are_compared_over_the_batch(judged):
    """Issues 1414 and 2230: with groups of 4, 3 and 4, a prompt with three scores of 5 gets -1.09 instead of 0."""
    sizes = [4, 3, 4]
    scores = torch.tensor([5.0, 6.0, 7.0, 8.0, 5.0, 5.0, 5.0, 5.0, 6.0, 7.0, 8.0])
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))

    def dump(rewards: Tensor) -> dict[str, Any]:
        samples = [
            {"rewards": reward, "advantages": torch.tensor([reward]), "loss_masks": torch.ones(1),
             "group_index": group}
            for reward, group in zip(rewards.tolist(), groups.tolist())
        ]  # fmt: skip
        return {"format_version": 2, "samples": samples, "raw_reward": scores.tolist()}

    means = torch.tensor([scores[groups == group].mean() for group in groups])
    flags = "--no_group_std_norm"
    assert not judged(dump(scores - means), flags)
    found = judged(dump(scores - scores.mean()), flags)
    assert place(found, "scores in their groups") == ("rewards", "samples[0]", None)
    assert found["scores in their groups"]["compared"] == 11
    assert "advantages" in found


def test_trl_3991_scale_rewards_batch_divides_by_the_groups_deviation(tmp_path, departures):
    def dump(std: Tensor) -> Path:
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (std + 1e-4)
        columns = {"step": [1] * 4, "prompt": ["a", "a", "b", "b"], "completion": ["x"] * 4,
                   "accuracy": SCORES.tolist(), "advantage": advantages.flatten().tolist()}  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / "completions_00001.parquet")
        return tmp_path / "completions_00001.parquet"

    rewards = SCORES.view(2, 2)
    flags = "--grpo_std_scope batch"
    assert not departures(dump(rewards.std()), flags)
    found = departures(dump(rewards.std(dim=1, keepdim=True)), flags)
    assert place(found, "advantages") == ("advantage", "row 0", None)
    assert found["advantages"]["hints"] == ["--grpo_std_scope group"]


def test_roll_447_a_masked_value_goes_on_as_the_next_one(judged):
    """alibaba/ROLL 447, with its numbers: mask 1 1 0, rewards 0 1 0, values 0 0 100, γ 1, λ 0.95."""
    batch = {"response_mask": torch.tensor([[1.0, 1.0, 0.0]]), "values": torch.tensor([[0.0, 0.0, 100.0]]),
             "token_level_rewards": torch.tensor([[0.0, 1.0, 0.0]])}  # fmt: skip
    flags = "--lambd 0.95 --no_adv_norm"
    right = torch.tensor([[0.95, 1.0, 0.0]])
    assert not judged({**batch, "advantages": right, "returns": right}, flags)
    last = 1.0 + 100.0
    wrong = torch.tensor([[0.95 * last, last, 0.0]])
    found = judged({**batch, "advantages": wrong, "returns": wrong}, flags)
    assert place(found, "returns") == ("returns", "row 0", 0)
    assert found["advantages"]["first"]["expected"] == pytest.approx(0.95)


def test_verl_6452_a_rejected_response_moves_the_baseline_of_its_group(judged):
    """Its response_mask is all 0, its reward still counts in the mean and deviation of the others."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).float()
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 8.0]])
    batch = {"response_mask": mask, "token_level_rewards": rewards, "uid": ["a"] * 3}
    flags = "--advantage_estimator grpo --masked_rows leave_out"

    def advantages(scores: Tensor) -> Tensor:
        shaped = (rewards.sum(1) - scores.mean()) / (scores.std() + 1e-6)
        return shaped[:, None] * mask

    assert not judged({**batch, "advantages": advantages(torch.tensor([1.0, 0.0]))}, flags)
    wrong = {**batch, "advantages": advantages(torch.tensor([1.0, 0.0, 8.0]))}
    found = judged(wrong, flags)
    assert place(found, "advantages") == ("advantages", "row 0", 0)
    assert found["advantages"]["hints"] == ["--masked_rows count"]
    assert not judged(wrong, "--advantage_estimator grpo")  # verl's own rule


def test_areal_408_all_kl_estimators_fall_through_to_k3(judged):
    """areal-project/AReaL 408, review: ``if`` in place of ``elif``."""
    batch = {"action_mask": MASK, "old_log_probs": OLD, "ref_log_probs": REFERENCE}
    distance = OLD - REFERENCE
    flags = "--kl_estimator k2"
    assert not judged({**batch, "kl": distance.square() / 2}, flags)
    found = judged({**batch, "kl": (-distance).exp() - 1 + distance}, flags)
    assert place(found, "kl") == ("kl", "row 0", 0)
    assert found["kl"]["hints"] == ["--kl_estimator k3"]


def test_verl_3805_padding_is_trained_on_where_no_end_of_text_is(judged):
    attention = torch.cat([torch.ones(4, 2), MASK.float()], dim=1)  # prompts of two tokens
    batch = {"attention_mask": attention, "old_log_probs": OLD}
    assert not judged({**batch, "response_mask": MASK.float()})
    wrong = MASK.float()
    wrong[1] = 1.0  # of two tokens, without an end
    found = judged({**batch, "response_mask": wrong})
    assert place(found, "mask") == ("response_mask", "row 1", 2)


def test_trl_5773_a_reward_that_is_not_a_number(judged):
    """A NaN in a group makes its mean, deviation and advantages NaN."""
    scores = torch.tensor([1.0, torch.nan])
    advantages = (scores - scores.mean())[:, None]
    found = judged({"action_mask": torch.ones(2, 1), "advantages": advantages, "scores": scores})
    assert place(found, "finite numbers") == ("advantages", "row 0", 0)
    advantages = torch.tensor([[torch.inf], [0.0]])
    found = judged({"action_mask": torch.ones(2, 1), "advantages": advantages})
    assert found["finite numbers"]["largest"] is None  # infinite, which JSON has no number for
