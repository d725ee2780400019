"""Metrics: means over micro batches, ranks and steps; names."""

from __future__ import annotations

import math

import pytest
import torch
from support.fakes import FakeStrategy, on_ranks

from lightppo.logging import step_metrics as m
from lightppo.logging.step_metrics import with_namespace

NAN = math.nan


def test_a_status_is_the_mean_over_micro_batches_and_ranks_then_over_steps():
    def status(strategy: FakeStrategy) -> dict[str, float]:
        first = (
            [{"loss": 1.0, "lr": 0.1}, {"loss": 3.0, "norm": NAN}],
            [{"loss": 8.0, "mine": 2.0}],
        )[strategy.rank]
        # a rank without samples in this step
        second = ([{"loss": 5.0, "norm": 4.0}], [])[strategy.rank]
        return m.optimizer_status([first, second], strategy)

    # loss: ((1 + 3 + 8)/3 + 5)/2; the norm of the first step is left out
    assert on_ranks(2, status) == [{"loss": 4.5, "lr": 0.1, "mine": 2.0, "norm": 4.0}] * 2
    assert m.optimizer_status([], FakeStrategy()) == {}
    assert math.isnan(m.optimizer_status([[{"norm": NAN}]], FakeStrategy())["norm"])


def test_the_status_of_a_micro_batch_has_its_metrics_at_scale():
    metrics = {"policy_loss": torch.tensor(0.25, requires_grad=True), "entropy": torch.tensor(1.5)}
    status = m.micro_batch_status(metrics, 2.0)
    assert m.checked_status(status) == {"policy_loss": 0.5, "entropy": 3.0}


def test_names_of_the_users_own_are_logged_under_train():
    assert with_namespace(m.checked_status({"mine": torch.tensor(2.0), "other/x": 1})) == {
        "train/mine": 2,
        "other/x": 1,
    }
    assert m.checked_status(None) == {}
    with pytest.raises(TypeError, match="'text'"):
        m.checked_status({"text": "abc"})
