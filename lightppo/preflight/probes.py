"""Tried with tiny rows before the first step: padded batches, and decoding with a cache.

A family of models that transformers gets wrong there is refused, in one line, before a wrong step is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightppo.data.records import Prompt
from lightppo.errors import ModelLoadError
from lightppo.experience.rollout_check import ROUNDING
from lightppo.models.packing.trials import is_models_own, one_line
from lightppo.preflight.padding import (
    attending,
    other_attentions,
    padding_problem,
    training_problem,
)
from lightppo.ranks import Ranks
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

_FEW = 3.0  # the mean of six tokens may be that much larger than one of many
_PROMPTS, _NEW_TOKENS = ([3, 10, 17, 24, 31], [5, 12]), 3  # token ids, taken modulo the vocabulary


def check_padding(models: Mapping[str, Any], strategy: Ranks, always_padded: bool = False) -> None:
    """ModelLoadError for a model, by its flag, whose padded batches are wrong. Collective.

    A model that packs is tried only if it also pads (``always_padded``: the actor with a language-model loss).
    """
    for flag, model in models.items():
        if model is None:
            continue
        wrapper = getattr(model, "module", model)  # a critic is in its engine
        if not wrapper.layout.packs or (always_padded and flag == "--pretrain"):
            _check_one(flag, wrapper, strategy)


def _check_one(flag: str, wrapper: Any, strategy: Ranks) -> None:
    reason = _agreed(strategy, padding_problem(wrapper, strategy.device))
    if reason is None:
        return
    right = []
    for name in other_attentions(wrapper.hf_model):
        with attending(wrapper.hf_model, name):
            right += [] if _agreed(strategy, padding_problem(wrapper, strategy.device)) else [name]
    advice = (
        f"set --attn_implementation {right[0]}"
        if right
        else "no other attention helps: choose another model"
    )
    kind = wrapper.hf_model.config.get_text_config().model_type
    raise ModelLoadError(
        f"{flag}: transformers' model type {kind!r} is wrong in padded batches: {reason}; {advice}"
    )


def check_training(models: Mapping[str, Any], strategy: Ranks) -> None:
    """ModelLoadError for a model that trains, by its flag, whose numbers are then others. Collective."""
    for flag in ("--pretrain", "--critic_pretrain"):
        if (model := models.get(flag)) is None:
            continue
        wrapper = getattr(model, "module", model)
        if reason := _agreed(strategy, training_problem(wrapper, strategy.device)):
            kind = wrapper.hf_model.config.get_text_config().model_type
            raise ModelLoadError(
                f"{flag}: transformers' model type {kind!r} cannot be trained: {reason}; choose another model"
            )


def _agreed(strategy: Ranks, reason: str | None) -> str | None:
    """The first reason of all ranks. Collective."""
    return next(filter(None, strategy.all_gather_object(reason)), None)


def check_decoding(engine: Any, actor: Any, strategy: Ranks) -> None:
    """ModelLoadError if the HF engine's own code or log probs do not fit this model. Collective.

    Two short prompts get a few tokens, whose log probs must be those of a forward pass of each row alone.
    """
    if not isinstance(engine, HFRolloutEngine):
        return
    if reason := _agreed(strategy, decoding_problem(engine, actor, strategy.device)):
        kind = actor.hf_model.config.get_text_config().model_type
        raise ModelLoadError(
            f"--rollout_engine hf does not work with model type {kind!r}: {reason}. Set --rollout_engine vllm or "
            "vllm_server, if vLLM has the model"
        )


@torch.no_grad()
def decoding_problem(engine: HFRolloutEngine, actor: Any, device: torch.device) -> str | None:
    """Why responses of this engine are not the actor's, of one rank; None: they are. Under ZeRO-3 on all ranks."""
    text = actor.hf_model.config.get_text_config()
    positions = (
        getattr(text, "max_position_embeddings", None) or max(map(len, _PROMPTS)) + _NEW_TOKENS
    )
    if positions < max(map(len, _PROMPTS)) + _NEW_TOKENS:
        return None
    vocabulary = actor.valid_vocab_size or text.vocab_size
    prompts = [Prompt("", [i % vocabulary for i in ids], index=n) for n, ids in enumerate(_PROMPTS)]
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=actor.temperature)
    was_training, runner = actor.training, engine.runner
    engine.runner = None  # nothing is captured for these shapes
    actor.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            apart = torch.cat([*_differences(engine, actor, prompts, sampling, device)])
    except FloatingPointError:
        return None  # weights that are not finite: the first rollout says so, and names its prompt
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"it fails: {one_line(error)}"
    finally:
        actor.train(was_training)
        engine.runner = runner
        engine.last_stats = {}
    rounding = ROUNDING[str(actor.hf_model.dtype).removeprefix("torch.")]
    if apart.mean() <= _FEW * rounding.get(device.type, rounding["cuda"]):
        return None
    return f"log probs while decoding differ by up to {apart.max():.2g} nats from those of a forward pass"


def _differences(
    engine: HFRolloutEngine,
    actor: Any,
    prompts: list[Prompt],
    sampling: SamplingParams,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """For each response |log prob while sampling - log prob of the forward pass| (A,)."""
    for rollout in engine.generate(prompts, sampling):
        row = torch.tensor([rollout.prompt.token_ids + rollout.response_ids], device=device)
        scored = actor.score_actions(row, len(rollout.response_ids)).log_probs[0]
        yield (scored - torch.tensor(rollout.log_probs, device=device)).abs()
