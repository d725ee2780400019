"""Batches of steps whose numbers are not finite, in files."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from support.fakes import FakeStrategy, make_rollout

from lightppo.experience.batching import Minibatch, plan_step
from lightppo.experience.experience import Experience
from lightppo.logging.skipped_batches import load_batch, save_batch, write_batch


def experience_of(length: int) -> Experience:
    """One response of this length."""
    item = Experience.from_rollouts([make_rollout([1, 2], [1] * length)])
    for name in ("action_log_probs", "advantages", "values"):
        setattr(item, name, torch.linspace(-1, 1, length)[None])
    return item


def test_a_saved_batch_comes_back_whole(tmp_path):
    items = [experience_of(length) for length in (2, 3, 1, 4)]
    parts = [Experience.collate(items[:2]), Experience.collate(items[2:])]
    step = Minibatch(plan_step(parts, FakeStrategy()))
    first = step.micro_batches[0]
    first.advantages[0, 0] = math.nan
    save_batch(tmp_path / "step3_rank0.pt", step, [("1+1=", "2")] * 4, step=3, rank=0)
    loaded, texts, facts = load_batch(tmp_path / "step3_rank0.pt")

    assert (texts, facts) == ([("1+1=", "2")] * 4, {"step": 3, "rank": 0})
    assert loaded.critic_micro_batches is None
    for one, other in zip(step.micro_batches, loaded.micro_batches, strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name in (
            "sequences",
            "attention_mask",
            "action_mask",
            "advantages",
            "values",
            "action_log_probs",
        ):
            torch.testing.assert_close(
                getattr(one, name), getattr(other, name), equal_nan=True, rtol=0, atol=0
            )
        assert one.info.keys() == other.info.keys()
        assert other.part == one.part
    assert [part.non_finite() for part in loaded.micro_batches] == [{"advantages": 1}, {}]
    assert loaded.micro_batches[0].select([0]).non_finite() == {"advantages": 1}


def test_rollouts_are_kept_without_the_episodes_that_failed(tmp_path):
    """Of a step whose scores are not finite; a rank may have nothing else."""
    scored, failed = make_rollout([3, 4], [5, 6]), make_rollout([3, 4], [], turns=[])
    for rollout in (scored, failed):
        rollout.reward = math.nan
    path = tmp_path / "step1_rank0.pt"
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(str(int(i)) for i in ids))
    assert write_batch(tokenizer, path, [failed, scored], {"step": 1}) == {"score": 1}
    assert load_batch(path)[1] == [("3 4", "5 6")]
    assert write_batch(tokenizer, path, [failed], {"step": 1}) == {}
