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

from lightppo.config.rules import ROUNDING
from lightppo.data.records import Prompt
from lightppo.errors import ModelLoadError
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


LONG_ROW = 20  # tokens
SHORT_ROW = 4
RIGHT_PADDING = 3  # behind the short row
_TOLERANCE = 3.0  # the mean of six tokens may be that much larger than one of many
_PROMPTS = ([3, 10, 17, 24, 31], [5, 12])  # token ids, taken modulo the vocabulary
_NEW_TOKENS = 3


def check_padding(models: Mapping[str, Any], strategy: Ranks, always_padded: bool = False) -> None:
    """Raise ModelLoadError for a model, by its flag, whose padded batches are wrong. Collective.

    A model that packs is tried only if it also pads (``always_padded``: the actor with a language-model loss).
    """
    for flag, model in models.items():
        if model is None:
            continue
        wrapper = getattr(model, "module", model)  # a critic is in its engine
        if wrapper.layout.packs and not (always_padded and flag == "--pretrain"):
            continue
        problem = _agreed(strategy, padding_problem(wrapper, strategy.device))
        if problem is None:
            continue
        alternatives = []
        for attention in other_attentions(wrapper.hf_model):
            with attending(wrapper.hf_model, attention):
                if _agreed(strategy, padding_problem(wrapper, strategy.device)) is None:
                    alternatives.append(attention)
        cure = "no other attention helps: choose another model"
        if alternatives:
            cure = f"set --attn_implementation {alternatives[0]}"
        raise ModelLoadError(
            f"{flag}: transformers' model type {_type_of(wrapper)!r} is wrong in padded batches: {problem}; {cure}"
        )


def check_training(models: Mapping[str, Any], strategy: Ranks) -> None:
    """Raise ModelLoadError for a model that trains, by its flag, whose numbers are then others. Collective."""
    for flag in ("--pretrain", "--critic_pretrain"):
        model = models.get(flag)
        if model is None:
            continue
        wrapper = getattr(model, "module", model)
        if problem := _agreed(strategy, training_problem(wrapper, strategy.device)):
            raise ModelLoadError(
                f"{flag}: transformers' model type {_type_of(wrapper)!r} cannot be trained: {problem}; choose "
                "another model"
            )


def _type_of(wrapper: PretrainedWrapper) -> str:
    return wrapper.hf_model.config.get_text_config().model_type


def _agreed(strategy: Ranks, problem: str | None) -> str | None:
    """Return the first reason of all ranks. Collective."""
    return next(filter(None, strategy.all_gather_object(problem)), None)


def check_decoding(engine: Any, actor: Any, strategy: Ranks) -> None:
    """Raise ModelLoadError if the HF engine's own code or log probs do not fit this model. Collective.

    Two short prompts get a few tokens, whose log probs must be those of a forward pass of each row alone.
    """
    if not isinstance(engine, HFRolloutEngine):
        return
    # Dory: such a cache has other keys than a pass over the whole text, by less than coarse types round
    text_config = actor.hf_model.config.get_text_config()
    if getattr(text_config, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ModelLoadError(
            "--rollout_engine hf: with recurrent_kv_cache_mode 'last_loop' answers are sampled from other numbers than "
            'those that train: set --override_config \'{"recurrent_kv_cache_mode": "per_loop"}\''
        )
    if problem := _agreed(strategy, decoding_problem(engine, actor, strategy.device)):
        raise ModelLoadError(
            f"--rollout_engine hf does not work with model type {_type_of(actor)!r}: {problem}. Set --rollout_engine "
            "vllm or vllm_server, if vLLM has the model"
        )


@torch.no_grad()
def decoding_problem(engine: HFRolloutEngine, actor: Any, device: torch.device) -> str | None:
    """Say why responses of this engine are not the actor's, of one rank; None: they are. Under ZeRO-3 on all ranks."""
    model_config = actor.hf_model.config.get_text_config()
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions and positions < max(map(len, _PROMPTS)) + _NEW_TOKENS:
        return None
    vocabulary = actor.valid_vocab_size or model_config.vocab_size
    prompts = [
        Prompt("", [token % vocabulary for token in token_ids], index=index)
        for index, token_ids in enumerate(_PROMPTS)
    ]
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, temperature=actor.temperature)
    was_training = actor.training
    runner = engine.runner
    engine.runner = None  # nothing is captured for these shapes
    actor.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            differences = torch.cat([*_differences(engine, actor, prompts, sampling, device)])
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
    if differences.mean() <= _TOLERANCE * rounding.get(device.type, rounding["cuda"]):
        return None
    return f"log probs while decoding differ by up to {differences.max():.2g} nats from those of a forward pass"


def _differences(
    engine: HFRolloutEngine,
    actor: Any,
    prompts: list[Prompt],
    sampling: SamplingParams,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Return for each response |log prob while sampling - log prob of the forward pass| (A,)."""
    for rollout in engine.generate(prompts, sampling):
        token_ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids], device=device)
        log_probs = actor.score_actions(token_ids, len(rollout.response_ids)).log_probs[0]
        yield (log_probs - torch.tensor(rollout.log_probs, device=device)).abs()


# -- padded batches, and training ----------------------------------------------------------------------------------


@torch.no_grad()
def padding_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """Return what is wrong with a padded batch of two rows; None: each is as alone. Under ZeRO-3 on all ranks together."""
    long_row, short_row = tiny_rows(wrapper.hf_model, device)
    end = long_row.shape[1] - RIGHT_PADDING
    columns = slice(end - SHORT_ROW, end)
    padded_row = torch.full_like(long_row, pad_id(wrapper.hf_model))
    padded_row[:, columns] = short_row
    token_ids = torch.cat([long_row, padded_row])  # (2, LONG_ROW)
    mask = torch.ones_like(token_ids)
    mask[1, : columns.start] = 0
    mask[1, columns.stop :] = 0
    try:
        with evaluating(wrapper.hf_model):
            batch_output = wrapper.run_rows(Batch(token_ids, mask))
            expected = [
                wrapper.run_rows(Batch(token_row, torch.ones_like(token_row)))
                for token_row in (long_row, short_row)
            ]
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"its code fails on a padded batch: {one_line(error)}"
    outputs = [batch_output[:1], batch_output[1:, columns]]
    # Numbers that are not finite come from broken weights, which other checks report.
    if all(map(_is_alike, outputs, expected)):
        return None
    return f"{distance(wrapper, outputs, expected)} between a padded batch and its rows alone"


def _is_alike(output: Tensor, expected: Tensor) -> bool:
    return alike(output, expected) or not expected.isfinite().all()


@torch.no_grad()
def training_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """Return what is wrong with a row in training; None: it is as in evaluation, or dropout was asked for. As above.

    PhiMoE draws its experts at random there, so that no ratio of a policy loss would mean anything.
    """
    model = wrapper.hf_model
    if has_dropout(model):
        return None
    row, _ = tiny_rows(model, device)
    batch = Batch(row, torch.ones_like(row))
    was_training = model.training
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(generators):
            model.eval()
            expected = wrapper.run_rows(batch)
            model.train()
            output = wrapper.run_rows(batch)
    finally:
        model.train(was_training)
    if _is_alike(output, expected):
        return None
    return f"{distance(wrapper, [output], [expected])} between training and evaluation, without dropout"


def has_dropout(model: PreTrainedModel) -> bool:
    """Return whether anything is left out at random, by an option or by a caller's own model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


def other_attentions(model: PreTrainedModel) -> list[str]:
    """Return values of ``--attn_implementation`` that run on any device, beside the present one."""
    if not model._can_set_attn_implementation():
        return []
    attentions = ["eager"]
    if model._supports_sdpa and not caps_scores(model.config):
        attentions.append("sdpa")
    return [attention for attention in attentions if attention != model.config._attn_implementation]


@contextmanager
def attending(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Use another attention for a while."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(attention)
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
    """Return (1, LONG_ROW) and (1, SHORT_ROW) token ids; the first is shorter if the model has fewer positions."""
    config = model.config.get_text_config()
    length = min(LONG_ROW, getattr(config, "max_position_embeddings", None) or LONG_ROW)
    places = torch.arange(length, device=device)[None]
    long_row = (7 * places + 3) % config.vocab_size
    short_row = (5 * places[:, :SHORT_ROW] + 2) % config.vocab_size
    return long_row, short_row


def pad_id(model: PreTrainedModel) -> int:
    """Return the pad token if the config names one, else id 0."""
    configured = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(configured, int) and configured >= 0:
        return configured
    return 0


def distance(wrapper: PretrainedWrapper, outputs: list[Tensor], expected: list[Tensor]) -> str:
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


def once_per_model(building: Building, test_name: str, test: Callable[[], None]) -> None:
    """Run a self-test in a dry run, and else where these models have not passed it with these options. Collective.

    A model with code of its own, whose files may change, is tested at each start.
    """
    strategy = building.strategy
    options = building.config.flat()
    has_own_code = options["trust_remote_code"] or options["external_lib"] is not None
    if not building.keeps_files or has_own_code:
        return test()
    mark_path = in_cache("tested_models", tested(building), test_name)
    if strategy.broadcast_object(mark_path.exists()):
        return None
    test()
    strategy.on_rank_0(lambda: _write(mark_path), "mark what was tested")


def tested(building: Building) -> dict[str, Any]:
    """Return all that a self-test depends on: contents of models, options, versions and the device."""
    options = building.config.flat()
    sections = building.config.sections()
    option_names = [
        option_name
        for section in _SECTIONS
        if section in sections
        for option_name in sections[section].options()
    ]
    option_names += _OPTIONS
    device = building.strategy.device
    device_name = device.type
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "models": {
            option_name: building.content[option_name]
            for option_name in MODELS
            if option_name in building.content
        },
        "options": {
            option_name: repr(options[option_name])
            for option_name in option_names
            if option_name in options
        },
        "versions": dict(versions()),
        "device": device_name,
        "ranks": building.strategy.world_size,
    }


def _write(mark_path: Path) -> None:
    try:
        mark_path.parent.mkdir(parents=True, exist_ok=True)
        mark_path.touch()
    except OSError:  # a cache that cannot be written: the next start tests again
        pass
