"""Tests of the user's models before the first step, with tiny rows: padded batches, training, decoding with a cache.

A family of models that transformers gets wrong there is refused, in one line, before a wrong step is taken. Recurrent ones
may run over the padding (RecurrentGemma), and experts may be chosen by the place in the batch (Doge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.data.records import Prompt
from lightppo.errors import ModelLoadError
from lightppo.experience.rollout_check import ROUNDING
from lightppo.logging.run_folder import versions
from lightppo.logging.run_paths import MODELS
from lightppo.models.attention.row_attention import caps_scores
from lightppo.models.batches import Batch
from lightppo.models.packing import alike, is_models_own, one_line
from lightppo.models.wrapper import PretrainedWrapper
from lightppo.ranks import Ranks
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.storage import in_cache

if TYPE_CHECKING:
    from lightppo.trainer.building import Building


LONG, SHORT, RIGHT = 20, 4, 3  # tokens of the two rows, and the padding behind the short one
_FEW = 3.0  # the mean of six tokens may be that much larger than one of many
_PROMPTS, _NEW_TOKENS = ([3, 10, 17, 24, 31], [5, 12]), 3  # token ids, taken modulo the vocabulary


def check_padding(models: Mapping[str, Any], strategy: Ranks, always_padded: bool = False) -> None:
    """Raise ModelLoadError for a model, by its flag, whose padded batches are wrong. Collective.

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
    if right:
        advice = f"set --attn_implementation {right[0]}"
    else:
        advice = "no other attention helps: choose another model"
    kind = wrapper.hf_model.config.get_text_config().model_type
    raise ModelLoadError(
        f"{flag}: transformers' model type {kind!r} is wrong in padded batches: {reason}; {advice}"
    )


def check_training(models: Mapping[str, Any], strategy: Ranks) -> None:
    """Raise ModelLoadError for a model that trains, by its flag, whose numbers are then others. Collective."""
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
    """Return the first reason of all ranks. Collective."""
    return next(filter(None, strategy.all_gather_object(reason)), None)


def check_decoding(engine: Any, actor: Any, strategy: Ranks) -> None:
    """Raise ModelLoadError if the HF engine's own code or log probs do not fit this model. Collective.

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
    """Say why responses of this engine are not the actor's, of one rank; None: they are. Under ZeRO-3 on all ranks."""
    text = actor.hf_model.config.get_text_config()
    positions = (
        getattr(text, "max_position_embeddings", None) or max(map(len, _PROMPTS)) + _NEW_TOKENS
    )
    if positions < max(map(len, _PROMPTS)) + _NEW_TOKENS:
        return None
    vocabulary = actor.valid_vocab_size or text.vocab_size
    prompts = [
        Prompt("", [i % vocabulary for i in ids], index=position)
        for position, ids in enumerate(_PROMPTS)
    ]
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=actor.temperature)
    was_training = actor.training
    runner = engine.runner
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
    """Return for each response |log prob while sampling - log prob of the forward pass| (A,)."""
    for rollout in engine.generate(prompts, sampling):
        row = torch.tensor([rollout.prompt.token_ids + rollout.response_ids], device=device)
        scored = actor.score_actions(row, len(rollout.response_ids)).log_probs[0]
        yield (scored - torch.tensor(rollout.log_probs, device=device)).abs()


# -- padded batches, and training ----------------------------------------------------------------------------------


@torch.no_grad()
def padding_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """Return what is wrong with a padded batch of two rows; None: each is as alone. Under ZeRO-3 on all ranks together."""
    long, short = tiny_rows(wrapper.hf_model, device)
    end = long.shape[1] - RIGHT
    columns = slice(end - SHORT, end)
    padded = torch.full_like(long, pad_id(wrapper.hf_model))
    padded[:, columns] = short
    ids = torch.cat([long, padded])  # (2, LONG)
    mask = torch.ones_like(ids)
    mask[1, : columns.start] = mask[1, columns.stop :] = 0
    try:
        with evaluating(wrapper.hf_model):
            together = wrapper.run_rows(Batch(ids, mask))
            alone = [wrapper.run_rows(Batch(row, torch.ones_like(row))) for row in (long, short)]
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"its code fails on a padded batch: {one_line(error)}"
    in_batch = [together[:1], together[1:, columns]]
    # Numbers that are not finite come from broken weights, which other checks report.
    if all(
        alike(output, expected) or not expected.isfinite().all()
        for output, expected in zip(in_batch, alone)
    ):
        return None
    return f"{distance(wrapper, in_batch, alone)} between a padded batch and its rows alone"


@torch.no_grad()
def training_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """Return what is wrong with a row in training; None: it is as in evaluation, or dropout was asked for. As above.

    PhiMoE draws its experts at random there, so that no ratio of a policy loss would mean anything.
    """
    model = wrapper.hf_model
    if has_dropout(model):
        return None
    row, _ = tiny_rows(model, device)
    was_training = model.training
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(generators):
            model.eval()
            expected = wrapper.run_rows(Batch(row, torch.ones_like(row)))
            model.train()
            trained = wrapper.run_rows(Batch(row, torch.ones_like(row)))
    finally:
        model.train(was_training)
    if alike(trained, expected) or not expected.isfinite().all():
        return None
    return f"{distance(wrapper, [trained], [expected])} between training and evaluation, without dropout"


def has_dropout(model: PreTrainedModel) -> bool:
    """Return whether anything is left out at random, by an option or by a caller's own model."""
    return any(
        (isinstance(module, torch.nn.Dropout) and module.p > 0)
        or any(
            isinstance(value, float) and value > 0 and "drop" in name
            for name, value in vars(module).items()
        )
        for module in model.modules()
    )


def other_attentions(model: PreTrainedModel) -> list[str]:
    """Return values of ``--attn_implementation`` that run on any device, beside the present one."""
    if not model._can_set_attn_implementation():
        return []
    names = ["eager"] + ["sdpa"] * (model._supports_sdpa and not caps_scores(model.config))
    return [name for name in names if name != model.config._attn_implementation]


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention for a while."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Leave out dropout and compiled layers, which would be compiled again for each tiny shape."""
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


def tiny_rows(model: PreTrainedModel, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (1, LONG) and (1, SHORT) token ids; the first is shorter if the model has fewer positions."""
    text = model.config.get_text_config()
    length = min(LONG, getattr(text, "max_position_embeddings", None) or LONG)
    vocabulary = text.vocab_size
    places = torch.arange(length, device=device)[None]
    return (7 * places + 3) % vocabulary, (5 * places[:, :SHORT] + 2) % vocabulary


def pad_id(model: PreTrainedModel) -> int:
    """Return the pad token if the config names one, else id 0."""
    configured = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(configured, int) and configured >= 0:
        return configured
    return 0


def distance(
    wrapper: PretrainedWrapper,
    outputs: list[Tensor],
    expected: list[Tensor],
) -> str:
    """Return how far outputs are apart: a causal LM's in nats, others in parts of their size."""
    pairs = [(output.float(), reference.float()) for output, reference in zip(outputs, expected)]
    if wrapper.hf_model.can_generate():
        nats = max(
            (output.log_softmax(-1) - reference.log_softmax(-1)).abs().max().item()
            for output, reference in pairs
        )
        return f"log probs differ by up to {nats:.2g} nats"
    share = max(
        ((output - reference).abs().mean() / reference.abs().mean()).item()
        for output, reference in pairs
    )
    return f"hidden states differ by {100 * share:.2g}%"


# -- what need not be tested again: a mark in this node's cache says what has passed ------------------------------------

_SECTIONS = ("model", "adapter", "strategy", "engine")  # whose options a self-test depends on
_OPTIONS = ("packing_samples", "share_prompts", "temperature", "pretrain_data")


def once_per_model(run: Building, test_name: str, test: Callable[[], None]) -> None:
    """Run a self-test in a dry run, and else where these models have not passed it with these options. Collective.

    A model with code of its own, whose files may change, is tested at each start.
    """
    strategy = run.strategy
    flat = run.config.flat()
    has_own_code = flat["trust_remote_code"] or flat["external_lib"] is not None
    if not run.keeps or has_own_code:
        return test()
    mark = in_cache("tested_models", tested(run), test_name)
    if strategy.broadcast_object(mark.exists()):
        return None
    test()
    strategy.on_rank_0(lambda: _write(mark), "mark what was tested")


def tested(run: Building) -> dict[str, Any]:
    """Return all that a self-test depends on: contents of models, options, versions and the device."""
    flat = run.config.flat()
    content = run.content
    kinds = run.config.sections()
    device = run.strategy.device
    is_gpu = device.type == "cuda"
    names = [name for title in _SECTIONS if title in kinds for name in kinds[title].options()]
    return {
        "models": {name: content[name] for name in MODELS if name in content},
        "options": {name: repr(flat[name]) for name in (*names, *_OPTIONS) if name in flat},
        "versions": dict(versions()),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "ranks": run.strategy.world_size,
    }


def _write(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:  # a cache that cannot be written: the next start tests again
        pass
