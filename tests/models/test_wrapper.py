"""Padded batches: what is real in them, and the micro batches that become them."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from lightppo.config.rules import MicroBatchSpec
from lightppo.models.actor import Actor
from lightppo.models.batches import (
    PaddedLayout,
    check_num_actions,
    layout_of_all,
    micro_batches,
    position_ids_from_mask,
    real_actions,
)
from lightppo.ranks import Alone

MakeModel = Callable[..., PreTrainedModel]
MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
LENGTHS = [(3, 2), (4, 9), (1, 1), (4, 4), (2, 8)]  # 5, 13, 2, 8, 10 tokens


def test_position_ids_start_at_the_first_real_token() -> None:
    assert position_ids_from_mask(MASK).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]


def test_real_actions_need_a_real_token_before_them() -> None:
    # A = 4 looks at tokens 2..5, predicted from 1..4. Row 0: token 2 is predicted from padding, token 5 is padding.
    assert real_actions(MASK, 4).tolist() == [[False, True, True, False], [True, True, True, True]]


@pytest.mark.parametrize("num_actions", [0, 6, 7, -1, [1, 2]])
def test_num_actions_out_of_range(num_actions: object) -> None:
    with pytest.raises(ValueError, match=r"num_actions .* 5 "):
        check_num_actions(num_actions, 6)


def test_by_samples_longest_first() -> None:
    assert micro_batches(LENGTHS, MicroBatchSpec(2)) == [[1, 4], [3, 0], [2]]
    assert micro_batches(LENGTHS, MicroBatchSpec(9)) == [[1, 4, 3, 0, 2]]
    assert micro_batches([], MicroBatchSpec(2)) == []


def test_by_tokens_counts_the_padding() -> None:
    # 2 × (longest prompt 4 + longest response 9) = 26; 3 × (4 + 4) = 24
    assert micro_batches(LENGTHS, MicroBatchSpec(26, "tokens")) == [[1, 4], [3, 0, 2]]
    # 2 × (longest prompt 4 + longest response 8) = 24
    assert micro_batches(LENGTHS, MicroBatchSpec(24, "tokens")) == [[1], [4, 3], [0, 2]]


def test_a_row_beyond_the_budget_is_alone() -> None:
    assert [1] in micro_batches(LENGTHS, MicroBatchSpec(12, "tokens"))
    assert micro_batches([(5, 5), (6, 6)], MicroBatchSpec(1, "tokens")) == [[1], [0]]


@pytest.mark.parametrize("budget", [1, 40, 97, 1000, 10**6])
def test_every_row_once_and_within_the_budget(budget: int) -> None:
    draw = random.Random(budget)
    for count in (1, 2, 30):
        lengths = [(draw.randint(1, 40), draw.randint(1, 60)) for _ in range(count)]
        parts = micro_batches(lengths, MicroBatchSpec(budget, "tokens"))
        assert sorted(i for part in parts for i in part) == list(range(count))
        for part in parts:
            rows = [lengths[i] for i in part]
            padded = len(rows) * (max(p for p, _ in rows) + max(r for _, r in rows))
            assert len(part) == 1 or padded <= budget


def test_padded_rows_share_nothing() -> None:
    spec = MicroBatchSpec(2)
    split = PaddedLayout().split(LENGTHS, spec, Alone(), prompts=["a", "b", "a", "b", "a"])
    assert split == micro_batches(LENGTHS, spec)


def test_micro_batches_have_the_layout_that_all_models_run() -> None:
    """What has no layout, such as a server, does not matter."""
    layouts = {
        "padded": PaddedLayout(),
        "packed": SimpleNamespace(packs=True, shares_prompts=False),
        "shared": SimpleNamespace(packs=True, shares_prompts=True),
    }
    models = {name: SimpleNamespace(layout=layout) for name, layout in layouts.items()}
    server = SimpleNamespace()
    all_of = lambda *names: layout_of_all([None, server, *map(models.get, names)])  # noqa: E731
    assert all_of("shared", "padded", "packed") is layouts["padded"]
    assert all_of("shared", "packed") is layouts["packed"]
    assert all_of("shared", "shared") is layouts["shared"]
    assert not all_of().packs


def test_no_model_attends_by_cudnn(causal_lm: MakeModel) -> None:
    """It makes a plan for each new length, and a GPU of 2022 and later gets it unasked."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    Actor(causal_lm())
    assert not torch.backends.cuda.cudnn_sdp_enabled()
