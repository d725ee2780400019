"""Padded batches are tried before they are trusted: wrong families are told, right ones are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.zoo import config_of, families_here
from families.zoo import random_model as random_family
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    FalconConfig,
    GptOssConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)
from transformers.models.falcon import modeling_falcon

from lightppo.errors import ModelLoadError, PackingNotSupportedError
from lightppo.models import packing
from lightppo.models.actor import Actor
from lightppo.models.critic import Critic
from lightppo.models.loading import load_causal_lm
from lightppo.preflight.probes import (
    attending,
    other_attentions,
    padding_problem,
    training_problem,
)
from lightppo.version import release_of

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FALCON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "alibi": True,
    "initializer_range": 0.2,
}
WRONG = {
    "doge": lambda: DogeConfig(**SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(**SIZES, lru_width=32, num_key_value_heads=2),
    "rwkv": lambda: RwkvConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    ),
}


def random_model(
    config: Any, kind: Any = AutoModelForCausalLM, attention: str | None = None
) -> Any:
    """Also of what begins as zeros or ones: a bias of 0 hides what padding does to it."""
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("kind", WRONG)
def test_a_family_that_is_wrong_is_told_and_by_how_much(kind):
    found = padding_problem(Actor(random_model(WRONG[kind]())), CPU)
    assert found is not None
    if kind == "doge" and release_of("transformers") < (5, 19, 0):
        pytest.skip("this transformers' Doge fails before that")
    assert "log probs differ by up to " in found
    assert " nats between a padded batch and its rows alone" in found


def test_a_family_that_is_right(
    family: str, attention: str, causal_lm: Callable[..., Any], classifier: Any
):
    actor, critic = Actor(causal_lm(family, attention)), Critic(classifier(family, attention))
    assert (padding_problem(actor, CPU), padding_problem(critic, CPU)) == (None, None)
    actor.train()
    padding_problem(actor.to(torch.bfloat16), CPU)
    assert actor.training
    assert padding_problem(actor, CPU) is None


def test_a_critic_is_tried_too(classifier):
    critic = Critic(classifier("llama"))
    critic.hf_model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output - output.mean(1, True)
    )
    assert "hidden states differ by " in padding_problem(critic, CPU)


def test_code_that_fails_on_padding_is_told_and_a_lack_of_memory_is_not(causal_lm):
    def fails(error: type[Exception]) -> Actor:
        actor = Actor(causal_lm("llama"))

        def hook(module: Any, args: Any) -> None:
            if len(args[0]) == 2:
                raise error("two\nlines")

        actor.hf_model.get_input_embeddings().register_forward_pre_hook(hook)
        return actor

    assert (
        padding_problem(fails(IndexError), CPU)
        == "its code fails on a padded batch: IndexError: two lines"
    )
    with pytest.raises(torch.OutOfMemoryError):
        padding_problem(fails(torch.OutOfMemoryError), CPU)


def test_weights_that_are_not_finite_and_few_positions_are_no_matter_of_padding(causal_lm):
    actor = Actor(causal_lm("gpt2"))
    with torch.no_grad():
        actor.hf_model.lm_head.weight.fill_(float("nan"))
    assert padding_problem(actor, CPU) is None
    from transformers import GPT2Config

    few = GPT2Config(vocab_size=5, n_embd=32, n_layer=1, n_head=2, n_positions=8)
    assert padding_problem(Actor(random_model(few)), CPU) is None


def test_another_attention_for_a_while(causal_lm):
    model = causal_lm("llama", "sdpa")
    assert other_attentions(model) == ["eager"]
    with attending(model, "eager"):
        assert model.config._attn_implementation == "eager"
        assert other_attentions(model) == ["sdpa"]
    assert model.config._attn_implementation == "sdpa"
    assert other_attentions(causal_lm("gemma2", "eager")) == []  # sdpa leaves out its capping


# -- Falcon's alibi, and families that cannot pack ---------------------------------------------------------------------


def test_falcons_alibi_is_right_under_sdpa_only(tmp_path, monkeypatch):
    ids = torch.arange(3, 15)[None]
    logits = {
        name: random_model(FalconConfig(**FALCON), attention=name)(ids).logits
        for name in ("sdpa", "eager")
    }
    # if not, transformers is mended: drop the refusal
    assert (logits["eager"] - logits["sdpa"]).abs().max() > 0.05
    alibi = modeling_falcon.build_alibi_tensor
    monkeypatch.setattr(
        modeling_falcon, "build_alibi_tensor", lambda *args, **kw: alibi(*args, **kw) / 2
    )
    halved = random_model(FalconConfig(**FALCON), attention="eager")(ids).logits
    # eager adds the whole of it twice
    torch.testing.assert_close(halved, logits["sdpa"], atol=1e-5, rtol=0)
    monkeypatch.undo()
    random_model(FalconConfig(**FALCON)).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match="--attn_implementation eager adds this model's alibi twice"
    ):
        load_causal_lm(str(tmp_path), attn_implementation="eager")
    torch.testing.assert_close(
        load_causal_lm(str(tmp_path))(ids).logits, logits["sdpa"], atol=1e-5, rtol=0
    )


def test_falcons_alibi_by_hand():
    """Its first attention is softmax((q·k + slope (j - i)) / sqrt(d)) v, as in the code that Falcon came with."""
    ids = torch.arange(3, 15)[None]
    apart = {}
    for name in ("sdpa", "eager"):
        model = random_model(FalconConfig(**FALCON), attention=name)
        layer, seen = model.transformer.h[0].self_attention, []
        layer.register_forward_hook(
            lambda module, args, output, seen=seen: seen.extend((args[0], output[0]))
        )
        model(ids)
        hidden, output = (tensor[0] for tensor in seen)  # (S, H)
        apart[name] = (output - attended(layer, hidden)).abs().max().item()
    assert apart["sdpa"] < 1e-5
    assert apart["eager"] > 1e-2


def attended(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """(S, H) -> (S, H): four heads with queries of their own, and one key and value for all."""
    *queries, key, value = layer.query_key_value(hidden).split(8, -1)  # (S, 8) each
    places = torch.arange(len(hidden))
    outputs = []
    for query, slope in zip(queries, (1 / 4, 1 / 16, 1 / 64, 1 / 256)):
        scores = (query @ key.T + slope * (places[None] - places[:, None])) / 8**0.5
        future = places[None] > places[:, None]
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value)
    return layer.dense(torch.cat(outputs, -1))


def test_a_family_whose_code_cannot_pack_is_padded_or_refused_in_one_line():
    doge = DogeConfig(**SIZES)
    reason = Actor(random_model(doge), packing_samples=None).layout.try_packing(CPU)
    assert "model type 'doge': its code fails on a packed row: RuntimeError: " in reason
    actor = Actor(random_model(doge), packing_samples=True)
    with pytest.raises(
        PackingNotSupportedError, match="model type 'doge': its code fails on a packed row"
    ):
        actor(torch.arange(10)[None], 3)


def test_a_family_without_sdpa_says_why_it_cannot_pack(monkeypatch):
    monkeypatch.delitem(packing._OF_FAMILIES, "packed_eager")
    config = GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_scaling=None,
    )
    actor = Actor(random_model(config), packing_samples=True)
    with pytest.raises(
        PackingNotSupportedError, match=r"with eager attention .* and GptOssForCausalLM has no sdpa"
    ):
        actor(torch.arange(10)[None], 3)
    reason = Actor(random_model(config), packing_samples=None).layout.try_packing(CPU)
    assert (
        reason == "GptOssForCausalLM has no sdpa, and its eager attention does not keep rows apart"
    )


# -- training and evaluation -------------------------------------------------------------------------------------------


def test_experts_that_are_drawn_at_random_in_training_are_told():
    actor = Actor(random_family("phimoe"))
    before = torch.get_rng_state()
    assert re.fullmatch(
        r"log probs differ by up to \d.* nats between training and evaluation, without dropout",
        training_problem(actor, CPU),
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_training_that_changes_nothing_and_dropout_that_was_asked_for(causal_lm):
    actor = Actor(causal_lm("mixtral"))
    actor.hf_model.eval()
    assert training_problem(actor, CPU) is None
    assert not actor.hf_model.training
    noisy = Actor(causal_lm("gpt2"))
    assert training_problem(noisy, CPU) is None
    noisy.hf_model.transformer.drop.p = 0.5
    assert training_problem(noisy, CPU) is None


# -- another attention than the default, of all families of docs/models.md ---------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("family", families_here())
def test_eager_attention_pads_as_rightly(family):
    config = config_of(family)
    if config.model_type in ("doge", "falcon", "phimoe", "recurrent_gemma", "rwkv"):
        pytest.skip("refused, or wrong with alibi")
    assert padding_problem(Actor(random_family(family, attention="eager")), CPU) is None
