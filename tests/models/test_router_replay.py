"""Experts that were chosen in one forward pass are used in another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families.zoo import random_model
from support.ranks import WITH_SUPPORT, run_ranks
from torch import Tensor

from lightppo.errors import ConfigError
from lightppo.models.actor import Actor
from lightppo.models.router_replay import ReplayPass, RouterReplay, find_routers, unknown
from lightppo.version import release_of

OLDER = pytest.mark.skipif(
    release_of("transformers") < (5, 14, 0), reason="this router does not choose itself"
)
# softmax before the choice, after it; sigmoid, groups
FORMS = ["qwen3_moe", "gpt_oss", pytest.param("deepseek_v3", marks=OLDER)]
ACTIONS = 4


def actor_of(family: str, packs: bool = False, checkpoints: bool = False) -> Actor:
    model = random_model(family, attention="sdpa" if family != "gpt_oss" else "eager")
    actor = Actor(model, packing_samples=packs)
    if checkpoints:
        actor.gradient_checkpointing_enable()
    actor.router_replay = RouterReplay(actor.hf_model)
    return actor.train()


def samples() -> tuple[Tensor, Tensor]:
    """Two samples of a prompt of three, and one of a prompt of two with a shorter response: (B, S) ids and mask."""
    sequences = torch.tensor(
        [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 12, 13, 14, 15], [0, 20, 21, 22, 23, 0, 0]]
    )
    return sequences, (sequences != 0).long()


def other_choices(replay: RouterReplay, *shape: int) -> Tensor:
    """Choices at random; a shared prompt's are those of its first sample."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(*shape, len(replay.layers), replay.experts, generator=generator)
    choices = scores.topk(replay.top_k).indices.to(replay.dtype)
    choices[1, :3] = choices[0, :3]
    return choices


def score(actor: Actor, **options: object) -> tuple[object, list[Tensor]]:
    """The scores, and the gradients of their sum."""
    sequences, mask = samples()
    actor.hf_model.zero_grad()
    scores = actor.score_actions(sequences, ACTIONS, mask, **options)
    scores.log_probs.sum().backward()
    return scores, [
        weight.grad.clone() for weight in actor.hf_model.parameters() if weight.grad is not None
    ]


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FORMS)
def test_recorded_choices_replay_to_the_bit(family: str, packs: bool) -> None:
    actor = actor_of(family, packs)
    plain, plain_gradients = score(actor)
    recorded, recorded_gradients = score(actor, record_experts=True)
    replayed, gradients = score(actor, experts=recorded.experts)
    assert torch.equal(plain.log_probs, recorded.log_probs)
    assert torch.equal(plain.log_probs, replayed.log_probs)
    for plain_gradient, *others in zip(plain_gradients, recorded_gradients, gradients, strict=True):
        assert all(torch.equal(plain_gradient, other) for other in others)
    assert replayed.replaced_experts.sum() == 0
    _, mask = samples()
    is_unknown = (recorded.experts == unknown(recorded.experts.dtype)).all(-1)  # (B, S, L)
    assert is_unknown[mask == 0].all()
    if not packs:  # packed, the last layer runs where something is read
        assert not is_unknown[mask == 1].any()


@pytest.mark.parametrize("family", FORMS)
def test_other_choices_decide_padded_and_packed_alike(family: str) -> None:
    padded = actor_of(family)
    packed = actor_of(family, packs=True)
    choices = other_choices(padded.router_replay, 3, 7)
    plain, _ = score(padded)
    in_padded, padded_gradients = score(padded, experts=choices)
    in_packed, packed_gradients = score(packed, experts=choices)
    assert (in_padded.log_probs - plain.log_probs).abs().max() > 0.05
    assert torch.allclose(in_padded.log_probs, in_packed.log_probs, atol=1e-5)
    for in_rows, in_row in zip(padded_gradients, packed_gradients, strict=True):
        assert torch.allclose(in_rows, in_row, atol=1e-4)
    assert torch.equal(in_padded.replaced_experts, in_packed.replaced_experts)
    assert 0.3 < in_padded.replaced_experts[0].mean() <= 1
    assert in_padded.replaced_experts[2, 3] == 0  # padding


def test_the_gradient_of_a_layer_by_hand() -> None:
    """Weights are softmax over all experts, divided by their sum over the replayed ones."""
    model = random_model("qwen3_moe").double()
    replay = RouterReplay(model)
    block = next(iter(find_routers(model).values()))
    block.norm_topk_prob = True
    hidden = torch.randn(5, block.hidden_dim, dtype=torch.double)
    choices = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]])
    factors = torch.randn(5, 2, dtype=torch.double)
    replay_pass = ReplayPass(choices.to(replay.dtype)[:, None].expand(-1, 2, -1))
    with replay.entered(replay_pass):
        _, weights, experts = block(hidden)
    (weights * factors).sum().backward()
    for token, (chosen, is_replaced) in enumerate(zip(choices, replay_pass.replaced[0])):
        assert sorted(experts[token].tolist()) == sorted(chosen.tolist())
        assert not is_replaced or experts[token].tolist() == chosen.tolist()
    # w_i = p_i / (p_a + p_b), so dw_i/dz_i = w_i (1 - w_i), dw_i/dz_j = -w_i w_j; no other logit counts
    logits = hidden @ block.weight.detach().T
    by_hand = torch.zeros(5, block.num_experts, dtype=torch.double)
    for token in range(5):
        chosen = experts[token]
        share = logits[token, chosen].softmax(0)
        by_hand[token, chosen] = share * (factors[token] - (share * factors[token]).sum())
    assert torch.allclose(block.weight.grad, by_hand.T @ hidden, atol=1e-5)


def test_checkpointed_layers_choose_as_in_their_own_pass() -> None:
    plain = actor_of("qwen3_moe")
    checkpointed = actor_of("qwen3_moe", checkpoints=True)
    choices = other_choices(plain.router_replay, 3, 7)
    sequences, mask = samples()
    _, expected = score(plain, experts=choices)
    scores = checkpointed.score_actions(sequences, ACTIONS, mask, experts=choices)
    checkpointed.score_actions(sequences, ACTIONS, mask)  # another pass before the backward pass
    scores.log_probs.sum().backward()
    gradients = [weight.grad for weight in checkpointed.hf_model.parameters()]
    for gradient, wanted in zip((g for g in gradients if g is not None), expected, strict=True):
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize(
    ("family", "reason"), [("llama", "no experts"), ("phimoe", "none that are known")]
)
def test_families_without_a_known_router_are_refused(family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--router_replay: model type '{family}' .*{reason}"):
        RouterReplay(random_model(family))


def test_experts_in_groups_are_refused() -> None:
    model = random_model("deepseek_v2")
    model.config.topk_method = "group_limited_greedy"
    with pytest.raises(ConfigError, match="chooses groups of experts first"):
        RouterReplay(model)


@pytest.mark.slow
def test_pieces_of_rows_record_and_replay_as_whole_rows(tmp_path: Path) -> None:
    """On two ranks that hold rows together (``--sequence_parallel_size``)."""
    worker = Path(__file__).with_name("router_pieces_worker.py")
    run_ranks(worker, tmp_path, world_size=2, env=WITH_SUPPORT)
    for rank in range(2):
        for whole, pieces in torch.load(tmp_path / f"rank{rank}.pt").values():
            assert torch.equal(pieces["experts"], whole["experts"])
            assert torch.equal(pieces["replaced"], whole["replaced"])
            assert whole["replaced"].sum() > 0
            assert pieces["replaced again"].sum() == 0
            torch.testing.assert_close(pieces["log_probs"], whole["log_probs"], rtol=0, atol=2e-6)
            for name, gradient in whole["gradients"].items():
                difference = float((pieces["gradients"][name] - gradient).abs().max())
                assert difference < 3e-6 * max(1.0, float(gradient.abs().max())), name
