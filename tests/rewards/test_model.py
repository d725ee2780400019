"""The core's source of rewards from one model."""

from types import SimpleNamespace

import pytest
import torch
from support import fakes

from lightppo.config import PPOConfig
from lightppo.config.rules import MicroBatchSpec
from lightppo.errors import RewardError
from lightppo.ranks import Alone
from lightppo.rewards.model import RewardModelSource
from lightppo.rewards.registry import RewardRequest, model_reward


def source_of(model, size=2, unit="samples"):
    spec = MicroBatchSpec(size, unit)
    return RewardModelSource(model, pad_token_id=9, micro_batch=spec, ranks=Alone("cpu"))


def test_scores_prompt_and_response_in_micro_batches_of_alike_rows():
    shapes = []

    def last_id(sequences, attention_mask):
        shapes.append(tuple(sequences.shape))
        assert bool((sequences[attention_mask == 0] == 9).all())  # padding, on the right
        return sequences.gather(1, attention_mask.sum(1, keepdim=True) - 1)[:, 0].float()

    rollouts = [
        fakes.make_rollout([1], [4]),
        fakes.make_rollout([1, 2, 3], [5, 6]),
        fakes.make_rollout([1, 2], [7, 8]),
    ]
    assert source_of(last_id).score(rollouts).scores == [4.0, 6.0, 8.0]
    assert shapes == [(2, 5), (1, 2)]


def test_a_module_scores_in_evaluation_mode():
    class Mode(torch.nn.Module):
        def forward(self, sequences, attention_mask):
            return torch.full((len(sequences),), float(self.training))

    model = Mode().train()
    assert source_of(model).score([fakes.make_rollout([1], [2])]).scores == [0.0]


def test_another_shape_is_refused():
    with pytest.raises(RewardError, match=r"reward_model must return .* shape \(1,\), got shape"):
        source_of(lambda ids, mask: ids.float()).score([fakes.make_rollout([1], [2])])


def test_a_run_of_the_core_has_one_model():
    def request(*models):
        config = PPOConfig.from_flat(reward_pretrain=["a"] * len(models))
        tokenizer = SimpleNamespace(pad_token_id=9)
        return RewardRequest(config, tokenizer, Alone("cpu"), models)

    def length(sequences, attention_mask):
        return attention_mask.sum(1).float()

    source = model_reward(request(length))
    assert source.score([fakes.make_rollout([1, 2], [3])]).scores == [3.0]
    with pytest.raises(ValueError, match="--reward_pretrain: no plugin combines"):
        model_reward(request(length, length))
