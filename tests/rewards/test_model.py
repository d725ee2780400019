from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightppo.data.records import Rollout
from lightppo.errors import RewardError
from lightppo.rewards import RewardModelSource, score_rollouts
from lightppo.rewards.model import SameIds

PAD = 99


class LastToken(nn.Module):
    """Scores a row with its last real id plus a tenth of its length; remembers the shapes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[list[int]], list[list[int]]]] = []

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append((sequences.tolist(), attention_mask.tolist()))
        lengths = attention_mask.sum(1)
        last = sequences.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
        return (last + lengths / 10).bfloat16().double()


def source(*models: Any, **options: Any) -> RewardModelSource:
    return RewardModelSource(models, **({"device": "cpu", "pad_token_id": PAD, "micro_batch_size": 2} | options))


def test_scores_prompt_and_response_ids(make_rollout: Callable[..., Rollout]) -> None:
    rollouts = [make_rollout(i) for i in range(3)]
    rollouts[2].response_ids = [7]
    model = LastToken()
    # rows [10,3], [11,3,3], [12,7]: 3 + .2, 3 + .3, 7 + .2, each to bf16
    output = source(model).score(rollouts)
    assert output.scores == pytest.approx([3.2, 3.3, 7.2], abs=0.02)
    assert output.metrics == {}
    # longest first, so that rows of one forward are of like lengths
    assert model.seen == [([[11, 3, 3], [10, 3, PAD]], [[1, 1, 1], [1, 1, 0]]), ([[12, 7]], [[1, 1]])]


def test_batches_are_of_like_lengths_and_scores_in_the_order_of_the_samples(
    make_rollout: Callable[..., Rollout],
) -> None:
    rollouts = [make_rollout(i) for i in (0, 5, 1, 4)]  # rows of 2, 7, 3 and 6 ids
    model = LastToken()
    output = source(model).score(rollouts)
    assert [[sum(row) for row in mask] for _, mask in model.seen] == [[7, 6], [3, 2]]
    assert output.scores == source(LastToken(), micro_batch_size=1).score(rollouts[::-1]).scores[::-1]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 100])
def test_micro_batch_size_changes_nothing(rollouts: list[Rollout], micro_batch_size: int) -> None:
    expected = source(LastToken(), micro_batch_size=1).score(rollouts).scores
    assert source(LastToken(), micro_batch_size=micro_batch_size).score(rollouts).scores == expected


def test_several_models_are_combined_over_the_whole_batch(rollouts: list[Rollout]) -> None:
    calls = []

    def combine(scores: list[Tensor]) -> Tensor:
        calls.append([(tensor.shape, tensor.dtype) for tensor in scores])
        return scores[0] - 0.5 * scores[1]

    def length(sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(1)  # integers: 2, 3, 4, 5, 6

    def four(sequences: Tensor, attention_mask: Tensor) -> Tensor:
        return torch.full((len(sequences),), 4.0, dtype=torch.bfloat16)

    score_rollouts(source(length, four, reward_fn=combine), rollouts)
    assert calls == [[((5,), torch.float32)] * 2]
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0, 4.0]  # 2 − 4/2, 3 − 4/2, …
    assert rollouts[1].extras == {"reward_model_0": 3.0, "reward_model_1": 4.0}


def test_one_model_may_have_reward_fn(rollouts: list[Rollout]) -> None:
    output = source(LastToken(), reward_fn=lambda scores: -scores[0]).score(rollouts)
    assert output.scores == [-score for score in output.metrics["reward_model_0"]]


@pytest.mark.parametrize("n", [0, 2, 5])
def test_every_rank_does_the_same_number_of_forwards(rollouts: list[Rollout], n: int) -> None:
    models = [LastToken(), LastToken()]
    asked = []

    def same_count(count: int) -> int:
        asked.append(count)
        return 4  # another rank has four micro batches

    alone = source(LastToken()).score(rollouts[:n]).scores if n else []
    output = source(*models, reward_fn=lambda scores: scores[0], same_count=same_count).score(rollouts[:n])
    assert asked == [(n + 1) // 2] * 2  # of each model
    assert [len(model.seen) for model in models] == [4, 4]
    assert models[0].seen[-1] == ([[PAD]], [[1]])
    assert output.scores == alone


def test_no_sample_anywhere_no_forward() -> None:
    model = LastToken()
    assert source(model).score([]).scores == []
    assert model.seen == []


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda s, m: torch.zeros(len(s), 1), r"shape \(2, 1\)"),
        (lambda s, m: torch.tensor(0.0), r"shape \(\)"),
        (lambda s, m: [0.0] * len(s), "list"),
    ],
)
def test_a_model_of_another_shape_is_an_error(rollouts: list[Rollout], answer: Any, got: str) -> None:
    models = (LastToken(), answer)
    with pytest.raises(RewardError, match=rf"model 1 must return a tensor of shape \(2,\), got {got}"):
        source(*models, reward_fn=lambda scores: scores[0]).score(rollouts)


@pytest.mark.parametrize("combined", [torch.zeros(()), torch.zeros(5, 1), [0.0] * 5])
def test_reward_fn_of_another_shape_is_an_error(rollouts: list[Rollout], combined: Any) -> None:
    with pytest.raises(RewardError, match=r"--reward_fn must return a tensor of shape \(5,\)"):
        source(LastToken(), reward_fn=lambda scores: combined).score(rollouts)


def test_nan_names_the_sample(rollouts: list[Rollout]) -> None:
    def nan_at_length_four(sequences: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1).float()
        return lengths.masked_fill(lengths == 4, float("nan"))

    with pytest.raises(RewardError, match=r"^reward_model: the score of sample 2 \(prompt row 102"):
        score_rollouts(source(nan_at_length_four), rollouts)


def test_a_sample_without_tokens_is_an_error(rollouts: list[Rollout]) -> None:
    rollouts[1].prompt.token_ids, rollouts[1].response_ids = [], []
    with pytest.raises(RewardError, match=r"sample 1 \(prompt row 101.* has no token"):
        source(LastToken()).score(rollouts)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        source()
    with pytest.raises(ValueError, match="2 reward models need --reward_fn"):
        source(LastToken(), LastToken())
    for options, message in (
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"reward_max_length": 1}, "--reward_max_length must be at least 2"),
        ({"reward_truncation": "right"}, "--reward_truncation must be one of error, left"),
        ({"pad_token_id": None}, "pad_token_id or inputs"),
        ({"inputs": [SameIds(0)] * 2}, "2 inputs for 1 reward models"),
    ):
        with pytest.raises(ValueError, match=message):
            source(LastToken(), **options)


def test_long_rows_are_an_error_or_cut_and_counted(rollouts: list[Rollout]) -> None:
    with pytest.raises(RewardError, match=r"sample 3 \(prompt row 103, .* 5 tokens .* --reward_max_length 4"):
        source(LastToken(), reward_max_length=4).score(rollouts)
    model = LastToken()
    inputs = [SameIds(PAD, bos_token_id=13)]  # the prompt of sample 3 is the one id 13
    options = {"inputs": inputs, "reward_max_length": 4, "reward_truncation": "left", "micro_batch_size": 5}
    output = source(model, **options).score(rollouts)
    assert output.metrics == {"input_truncated": [0.0, 0.0, 0.0, 1.0, 1.0]}
    assert model.seen[0][0][:3] == [[12, 3, 3, 3], [13, 3, 3, 3], [3, 3, 3, 3]]  # begin-of-text stays
    assert source(LastToken(), reward_max_length=6).score(rollouts).metrics == {"input_truncated": [0.0] * 5}


def test_each_model_has_its_own_inputs(rollouts: list[Rollout]) -> None:
    class Reversed(SameIds):
        def encode(self, rollouts: list[Rollout]) -> list[list[int]]:
            return [row[::-1] for row in super().encode(rollouts)]

    models = [LastToken(), LastToken()]
    source(*models, inputs=[SameIds(PAD), Reversed(77)], reward_fn=lambda scores: scores[0]).score(rollouts[:2])
    assert [model.seen[0][0] for model in models] == [[[11, 3, 3], [10, 3, PAD]], [[3, 3, 11], [3, 10, 77]]]
