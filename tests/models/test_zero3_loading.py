"""Two gloo ranks load models under ZeRO-3: sharded at load time, whole and equal when gathered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.models.actor import Actor
from lightppo.models.critic import Critic

WORKER = Path(__file__).with_name("zero3_worker.py")


@pytest.fixture
def weights(ragged: tuple[Tensor, Tensor, int]) -> Tensor:
    return torch.linspace(-1, 1, 4 * ragged[2]).view(4, ragged[2])


def test_loading_under_zero3(
    causal_lm: Callable[..., PreTrainedModel],
    classifier: Callable[..., PreTrainedModel],
    ragged: tuple[Tensor, Tensor, int],
    weights: Tensor,
    tmp_path: Path,
) -> None:
    models = {name: causal_lm(name) for name in ("llama", "qwen2", "mixtral")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    models["reward"] = classifier()
    models["reward"].save_pretrained(tmp_path / "reward")
    renamed = load_file(tmp_path / "reward" / "model.safetensors")
    renamed["value_head.weight"] = renamed.pop("score.weight")
    save_file(renamed, tmp_path / "reward" / "model.safetensors", metadata={"format": "pt"})
    sequences, mask, num_actions = ragged
    batch = {"sequences": sequences, "mask": mask, "num_actions": num_actions, "weights": weights}
    torch.save(batch, tmp_path / "batch.pt")

    run_ranks(WORKER, tmp_path, launcher="torchrun", timeout=400)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]

    for seen in ranks:
        for name in (*models, "critic", "scratch"):
            assert seen[name]["held"] == 0, name  # no full parameter stays on a rank
            # a shard is half of a parameter; odd sizes are padded by one element
            assert seen[name]["total"] / 2 <= seen[name]["shards"] < seen[name]["total"] * 0.51, name
        for name, model in models.items():
            assert seen[name]["weights"].keys() == dict(model.named_parameters()).keys(), name
            for key, weight in model.named_parameters():
                assert torch.equal(seen[name]["weights"][key], weight), (name, key)
        for name in ("critic", "scratch"):
            for key, weight in ranks[0][name]["weights"].items():
                assert torch.equal(seen[name]["weights"][key], weight), (name, key)
        assert torch.equal(seen["critic"]["weights"]["score.weight"], seen["plain_head"])  # as without sharding
        assert seen["zero3_while_alive"] is True
        assert seen["zero3_after_plain"] is False
    scratch = ranks[0]["scratch"]["weights"]["lm_head.weight"]
    assert not torch.equal(scratch, models["llama"].lm_head.weight)
    assert float(scratch.std()) > 0.1  # initializer_range 0.2

    # The packed forward of the sharded engines, with checkpointing, against one padded process of plain torch.
    actor, critic = Actor(str(tmp_path / "llama")), Critic(str(tmp_path / "llama"), seed=7)
    heads = {"Actor": actor.model.lm_head.weight, "Critic": critic.model.score.weight}
    for wrapper in (actor, critic):
        name = type(wrapper).__name__
        out = wrapper(sequences, num_actions, mask)
        (out * weights).sum().backward()
        for seen in ranks:
            torch.testing.assert_close(seen[f"{name}_out"], out.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(seen[f"{name}_grad"], heads[name].grad, atol=1e-4, rtol=1e-5)
