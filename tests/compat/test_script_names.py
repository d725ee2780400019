"""Names that scripts of LightRFT and OpenRLHF import, and what those scripts do with them."""

from __future__ import annotations

import pytest
import torch

import lightppo
from lightppo import (
    Actor,
    ActorLanguage,
    DistributedSampler,
    NaiveReplayBuffer,
    compute_approx_kl,
    masked_mean,
    unpacking_samples,
)
from lightppo.compat.script_names import check_actor
from lightppo.config import PPOConfig
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.errors import ConfigError
from lightppo.experience.experience import Experience

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_the_mean_of_what_a_mask_keeps():
    values = torch.tensor([[1.0, 2.0, torch.nan], [4.0, 5.0, 6.0]])
    assert masked_mean(values, MASK).item() == pytest.approx(7 / 3)
    assert masked_mean(values, MASK, dim=-1).tolist() == [1.5, 4.0]
    # no element of the last column counts
    assert masked_mean(values, MASK.bool(), dim=0).tolist() == [2.5, 2.0, 0.0]
    assert masked_mean(values[1], None).item() == 5.0
    assert masked_mean(values[1:], None, dim=1).tolist() == [5.0]


def test_the_gradient_of_what_is_masked_is_zero():
    values = torch.tensor([[1.0, torch.inf]], requires_grad=True)
    masked_mean(values, torch.tensor([[1, 0]])).backward()
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_packed_samples_come_apart():
    values = torch.arange(8.0)
    for packed in (values, values[None]):
        assert [part.tolist() for part in unpacking_samples(packed, [3, 2])] == [[0, 1, 2], [3, 4]]
        lengths = torch.tensor([1, 7])
        assert [len(part) for part in unpacking_samples(packed, lengths)] == [1, 7]
    with pytest.raises(ValueError, match="sum to 9, but there are 8"):
        unpacking_samples(values, [4, 5])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, -1.0, 0.0]),
        ({"kl_estimator": "k2"}, [0.125, 0.5, 0.0]),
        (
            {"kl_estimator": "k3"},
            [torch.tensor(-0.5).exp() - 0.5, torch.tensor(1.0).exp() - 2, 0.0],
        ),
        (
            {"use_kl_estimator_k3": True},
            [torch.tensor(-0.5).exp() - 0.5, torch.tensor(1.0).exp() - 2, 0.0],
        ),
    ],
)
def test_the_kl_of_each_token(options, expected):
    log_probs, base = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0]])
    found = compute_approx_kl(log_probs, base, mask, **options)
    torch.testing.assert_close(found, torch.tensor([expected]))
    positional = compute_approx_kl(log_probs, base, mask, *options.values())
    torch.testing.assert_close(positional, found)
    assert compute_approx_kl(log_probs, base)[0, 2] == -8.0


def test_a_samplers_arguments_by_position_and_its_start():
    rows = list(range(10))
    first, second = (DistributedSampler(rows, 2, rank, False, 3, True) for rank in (0, 1))
    assert (list(first), list(second)) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    second.set_epoch(0, consumed_samples=4)
    assert list(second) == [5, 7, 9]
    with pytest.raises(ValueError, match="process group"):
        DistributedSampler(rows)  # of which there is none here
    strategy = DeepspeedStrategy()
    assert isinstance(strategy.setup_dataloader(rows, 2).sampler, DistributedSampler)


def test_a_buffer_has_the_seeds_arguments():
    buffer = NaiveReplayBuffer(2, 3, True, True)
    for value in range(4):
        one = Experience.placeholder()
        one.info["reward"] = torch.tensor([float(value)])
        buffer.append(one)
    assert (len(buffer), buffer.sample_batch_size, buffer.limit) == (3, 2, 3)
    assert buffer.collate_fn(buffer.items).info["reward"].tolist() == [1.0, 2.0, 3.0]


def test_an_actor_by_lightrfts_name(tmp_path):
    from support.tiny import save_causal_lm

    path = save_causal_lm(tmp_path / "model")
    actor = ActorLanguage(
        path, bf16=False, lora_rank=2, high_entropy_token_ratio=0.2, packing_samples=False
    )
    assert isinstance(actor, Actor)
    assert actor.high_entropy_token_ratio == 0.2
    assert all("lora" in name for name, weight in actor.named_parameters() if weight.requires_grad)
    assert ActorLanguage(path).hf_model.dtype == torch.bfloat16  # LightRFT's default
    for ratio in (None, 0.5):
        with pytest.raises(
            ConfigError, match=rf"high_entropy_token_ratio 0\.2, strategy.args {ratio}"
        ):
            check_actor(PPOConfig.from_flat(high_entropy_token_ratio=ratio), actor)
    check_actor(PPOConfig.from_flat(high_entropy_token_ratio=0.2), actor)
    check_actor(PPOConfig(), ActorLanguage(path))
    with pytest.raises(ConfigError, match="device_map"):
        ActorLanguage(path, device_map={"": 0})


def test_every_public_name_is_there():
    for name in lightppo.__all__:
        assert getattr(lightppo, name) is not None
