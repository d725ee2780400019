"""Hugging Face models and tokenizers, loaded for RL: no dropout by itself, the requested attention, ZeRO-3 shards.

A weight missing from a checkpoint is an error: only a critic's value head may be new.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.models.auto import modeling_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging as hf_logging

from lightppo.config import PPOConfig
from lightppo.config.rules import needs_critic
from lightppo.errors import ModelLoadError
from lightppo.files import stage_to_local
from lightppo.models.adapters.quantised import quantise
from lightppo.models.attention.row_attention import resolve_attn_implementation
from lightppo.models.heads import drawn_head, head_from_checkpoint, head_names, set_value_head
from lightppo.models.multimodal.parts import is_of_tower
from lightppo.models.multimodal.whole_checkpoint import Whole
from lightppo.models.pretrained import (
    LoadOptions,
    checkpoint_files,
    disable_dropout,
    dropout_rates,
    errors_name,
    loading_options,
    model_path,
    read_config,
)

logger = logging.getLogger(__name__)

# -- models -----------------------------------------------------------------------------------------------------------


def load_causal_lm(path: str, *, flag: str = "--pretrain", **options: Any) -> PreTrainedModel:
    """Load (or make) a causal LM, in eval mode; ``options`` are fields of :class:`LoadOptions`.

    A checkpoint's dropout is set to 0; what an option sets instead acts in train mode.
    """
    load_options = LoadOptions(**options)
    path, config = read_config(path, flag, load_options)
    model, _ = _load(AutoModelForCausalLM, path, config, flag, load_options)
    return model


def load_sequence_classifier(
    path: str,
    *,
    kind: Literal["critic", "reward"],
    value_head_prefix: str = "score",
    init_value_head: bool | None = None,
    draws_head: bool = False,
    flag: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with a one-output head (critic, reward) from a classifier, a value-head model or a plain causal LM.

    If a critic's checkpoint has no head (``init_value_head``: in any case), a new one is 0, or with ``draws_head`` of
    N(0, 1/(hidden + 1)), the same on all ranks and at all ZeRO stages. ``value_head_prefix`` is the head's name in the
    checkpoint, e.g. ``score``.
    """
    load_options = LoadOptions(**options)
    flag = flag or f"--{kind}_pretrain"
    path, config = read_config(path, flag, load_options)
    config.num_labels = 1
    head_weight = None
    is_new = load_options.init_from_scratch or bool(init_value_head)
    if not is_new:
        with errors_name(path, flag):
            head_weight = head_from_checkpoint(path, value_head_prefix, kind, flag)
    auto_class = AutoModelForSequenceClassification
    any_head = bool(init_value_head)
    model, has_head = _load(auto_class, path, config, flag, load_options, any_head)
    if head_weight is None and not is_new:
        if has_head:
            return model
        if kind == "reward" or init_value_head is False:
            reason = " and init_value_head is False" if init_value_head is False else ""
            raise ModelLoadError(f"{flag} {path} has no {value_head_prefix}.weight{reason}")
    if head_weight is None:
        head_weight = drawn_head(model, load_options.seed) if draws_head else torch.zeros(())
    set_value_head(model, head_weight)
    return model


def _load(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    flag: str,
    load_options: LoadOptions,
    any_head: bool = False,
) -> tuple[PreTrainedModel, bool]:
    """Return the model, and whether the checkpoint has its head; ``any_head``: that one may be of another shape."""
    language_model = reason = None
    if not load_options.init_from_scratch:
        language_model, reason = language_model_or_reason(auto_class, path, config, flag)
    if language_model is not None:
        config = language_model.config
    model_class = auto_class._model_mapping.get(type(config), None)
    if model_class is None and not hasattr(config, "auto_map"):
        raise ModelLoadError(reason or _no_class(auto_class, config, flag, path))
    if auto_class is AutoModelForCausalLM:
        check_language_model(config, flag, path, is_new=load_options.init_from_scratch)
    attention = resolve_attn_implementation(
        load_options.attn_implementation, load_options.dtype, model_class, config
    )
    loading_arguments: dict[str, Any] = {
        "attn_implementation": attention,
        "dtype": load_options.dtype,
        "trust_remote_code": load_options.trust_remote_code,
    }
    hf_deepspeed.unset_hf_deepspeed_config()
    zero3_config = _zero3_config(load_options) if load_options.is_sharded else None
    has_head = not load_options.init_from_scratch
    with errors_name(path, flag), quiet():
        if load_options.init_from_scratch:
            # the same weights on all ranks; random numbers elsewhere stay
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(load_options.seed)
                model = auto_class.from_config(config, **loading_arguments)
        else:
            # Weights of another shape are refused below, with both shapes; ZeRO-3 has only parts of them to compare.
            loading_arguments["ignore_mismatched_sizes"] = any_head or zero3_config is None
            if language_model is not None:
                loading_arguments |= language_model.options
            model, loading_info = auto_class.from_pretrained(
                path, config=config, output_loading_info=True, **loading_arguments
            )
            if loading_info["mismatched_keys"] or loading_info["missing_keys"]:
                has_head = check_loaded(model, loading_info, f"{flag} {path}", any_head)
    if zero3_config is not None:
        _restore_frequencies(model)
    if language_model is not None:
        with errors_name(path, flag):
            language_model.belongs_to(model)
    allowed_rates: list[float] = []
    if load_options.override_config:  # the rates of the checkpoint are 0 in the config
        allowed_rates = [rate for rates in dropout_rates(config) for rate in rates.values()]
    disable_dropout(model, allowed_rates)
    checkpoint_config = AutoConfig.from_pretrained(
        path, trust_remote_code=load_options.trust_remote_code
    )
    model.own_dropout = dropout_rates(checkpoint_config)  # an export has these again
    if load_options.load_in_4bit:
        quantise(model, head_names(model))
    model.zero3_load_config = zero3_config  # keeps transformers' weak reference alive
    if load_options.init_from_scratch:
        reason = why_untrainable(model.config, dict(model.named_parameters()), f"{flag} {path}")
    model.untrainable = reason
    return model.eval(), has_head


def _no_class(auto_class: Any, config: PretrainedConfig, flag: str, path: str) -> str:
    class_name = auto_class.__name__.replace("Auto", "", 1)
    message = f"{flag} {path}: transformers has no {class_name} of model type {config.model_type!r}"
    if flag == "--critic_pretrain":
        return f"{message}, which a critic is: choose another model for it, or an --advantage_estimator without a critic"
    return f"{message}: choose another model"


_OTHER_HEADS = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)$"
)


def check_language_model(
    config: PretrainedConfig, flag: str, path: str, *, is_new: bool = False
) -> None:
    """Raise ModelLoadError for a model that does not say one word after the other; ``is_new``: it has no weights."""
    other_heads = [name for name in config.architectures or () if _OTHER_HEADS.search(name)]
    if other_heads and not is_new:
        raise ModelLoadError(
            f"{flag} {path}: it is a {other_heads[0]}, which gives scores and no text: give a language model here, "
            "and this one as --reward_pretrain or --critic_pretrain"
        )
    reads_both_sides = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    if reads_both_sides and getattr(config, "is_decoder", None) is False:
        raise ModelLoadError(
            f"{flag} {path}: a model of type {config.model_type!r} reads a text from both sides, and cannot continue "
            "one: give a language model"
        )


def check_loaded(
    model: PreTrainedModel, loading_info: dict[str, Any], model_name: str, any_head: bool
) -> bool:
    """Refuse a model that lacks weights, or has some in another shape; tell whether it has the head."""
    head_weights = set()
    if not model.can_generate():
        head_weights = {f"{head}.weight" for head in head_names(model)}
    mismatches = sorted(
        shapes
        for shapes in loading_info["mismatched_keys"]
        if not (any_head and shapes[0] in head_weights)
    )
    if mismatches:
        weight_name, saved_shape, expected_shape = mismatches[0]
        raise ModelLoadError(
            f"{model_name}: {len(mismatches)} weights have another shape than its config says: {weight_name} is "
            f"{tuple(saved_shape)}, not {tuple(expected_shape)}: config.json (or "
            "--override_config) and the weights are of two models"
        )
    missing = set(loading_info["missing_keys"])
    if missing_weights := missing - head_weights:
        raise ModelLoadError(
            f"{model_name}: {len(missing_weights)} weights are missing from the checkpoint "
            f"({', '.join(sorted(missing_weights)[:3])}, …): it is incomplete, or of another kind than this model"
        )
    return missing.isdisjoint(head_weights)


def load_config(path: str, *, flag: str = "--pretrain", **options: Any) -> PretrainedConfig:
    """Return the config that a model of this path would have; ``options`` are fields of :class:`LoadOptions`."""
    load_options = LoadOptions(**options)
    path, config = read_config(path, flag, load_options)
    if load_options.init_from_scratch:
        return config
    language_model, _ = language_model_or_reason(AutoModelForCausalLM, path, config, flag)
    return config if language_model is None else language_model.config


class _Zero3LoadConfig(SimpleNamespace):
    """Replaces ``transformers.integrations.HfDeepSpeedConfig``, which needs accelerate for these two attributes."""

    config: dict[str, Any]

    def is_zero3(self) -> bool:
        return True


def _zero3_config(load_options: LoadOptions) -> _Zero3LoadConfig:
    """Have transformers shard the weights that it loads."""
    if not torch.distributed.is_initialized():
        raise ModelLoadError("loading under ZeRO stage 3 needs strategy.setup_distributed() first")
    config = load_options.ds_config or {}
    configured_type = torch.float32
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if config.get(name, {}).get("enabled"):
            configured_type = dtype
    if configured_type != load_options.dtype:
        raise ModelLoadError(
            f"the model is loaded in {load_options.dtype}, but its ds_config says {configured_type}"
        )
    zero3_config = _Zero3LoadConfig(config=config)
    hf_deepspeed.set_hf_deepspeed_config(zero3_config)
    return zero3_config


def _restore_frequencies(model: nn.Module) -> None:
    """Make rotary frequencies in float32, as without ZeRO-3: DeepSpeed makes new tensors in the weights' type,
    and the angle of bfloat16's 0.5625 for 0.56234 is 0.65 too large at position 4,096."""
    for module in model.modules():
        if any("inv_freq" in name for name in module._buffers) and hasattr(module, "config"):
            fresh_module = type(module)(module.config)
            for name in (*fresh_module._buffers, *vars(fresh_module)):
                if isinstance(buffer := getattr(fresh_module, name), Tensor):
                    setattr(module, name, buffer.to(getattr(module, name).device))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide load reports and progress bars: missing weights are checked here, and errors say more than a table."""
    verbosity = hf_logging.get_verbosity()
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shows_progress:
            hf_logging.enable_progress_bar()


# -- checkpoints with image or audio towers -----------------------------------------------------------------------------
# ``AutoModelForCausalLM`` reads some checkpoints without their tower (Qwen3.5), so that an export would have lost it. It
# reads others with it (Gemma 3), which weight decay would then change although no gradient reaches it.

_PART = re.compile(r"vision|visual|image|audio|speech|video|vq")  # in the name of a config's part


_MAPPINGS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def why_untrainable(
    config: PretrainedConfig,
    tensors: Iterable[str],
    name: str,
) -> str | None:
    """Return why a model with this config and these ``tensors`` is refused for training; None: it is a text model.

    ``name`` stands in front, e.g. ``--pretrain FOLDER``.
    """
    if not reads_more_than_text(config):
        return None
    tower_tensors = [tensor for tensor in tensors if is_of_tower(tensor)]
    if not tower_tensors:
        return None
    return (
        f"{name} has an image or audio tower ({len(tower_tensors)} tensors, such as {tower_tensors[0]}), which "
        "training would drop or change: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Tell whether the config is of a model that can have a tower."""
    has_known_type = any(
        config.model_type in getattr(modeling_auto, mapping, ()) for mapping in _MAPPINGS
    )
    part_names = (
        name
        for name, config_part in vars(config).items()
        if isinstance(config_part, PretrainedConfig | dict)
    )
    return has_known_type or any(_PART.search(name) for name in part_names)


def check_trainable(path: str, *, flag: str = "--pretrain", **options: Any) -> bool:
    """Tell whether the language model alone would train, beside towers. It reads names alone.

    ``options`` are fields of :class:`LoadOptions`. Random weights are looked at when they are made.

    Raises:
        ModelLoadError: an image or audio tower cannot be told from what would train.
    """
    load_options = LoadOptions(**options)
    path, config = read_config(path, flag, load_options)
    if load_options.init_from_scratch:
        return False
    return language_model(AutoModelForCausalLM, path, config, flag) is not None


def language_model(auto_class: Any, path: str, config: PretrainedConfig, flag: str) -> Whole | None:
    """Return the language model that ``auto_class`` loads of a checkpoint with towers; None for a text model.

    Raises:
        ModelLoadError: it cannot be told from the towers, or transformers has no class for it alone.
    """
    if not reads_more_than_text(config):
        return None
    with errors_name(path, flag):
        reason = why_untrainable(config, checkpoint_files(path), f"{flag} {path}")
    if reason is None:
        return None
    return Whole(auto_class, path, config, f"{flag} {path}")


def language_model_or_reason(
    auto_class: Any, path: str, config: PretrainedConfig, flag: str
) -> tuple[Whole | None, str | None]:
    """Return :func:`language_model`; where it raises, None and why what transformers loads cannot train."""
    try:
        return language_model(auto_class, path, config, flag), None
    except ModelLoadError as error:
        return None, str(error)


def check_trained_models(building: Any) -> None:
    """Refuse a run where what trains cannot be told from image or audio towers; of a PPO run the critic's too."""
    config = building.config
    if config.flat().get("val_only"):
        return
    options = loading_options(config)
    pretrain = config.model.pretrain
    check_trainable(stage_to_local(pretrain), **options)
    if isinstance(config, PPOConfig) and needs_critic(config):
        critic = config.model.critic_pretrain
        if critic is not None and critic != pretrain:
            options["init_from_scratch"] = False
            check_trainable(stage_to_local(critic), flag="--critic_pretrain", **options)


# -- tokenizers -------------------------------------------------------------------------------------------------------


def get_tokenizer(
    pretrain: str,
    model: nn.Module | None = None,
    padding_side: Literal["left", "right"] = "left",
    strategy: Any = None,
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--pretrain",
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has EOS and a pad token and fits the model, whose config gets the pad token.

    A missing pad token becomes EOS (masks come from lengths, never from the pad id). A model may have more embedding
    rows than the tokenizer has entries: sample with :func:`valid_vocab_size`. ``strategy`` is not used: scripts have it
    in this place.
    """
    if isinstance(strategy, bool):
        use_fast = strategy
    path = model_path(pretrain, flag, "tokenizer")
    with errors_name(path, flag, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            path, use_fast=use_fast, trust_remote_code=trust_remote_code
        )
    if not use_fast and tokenizer.is_fast:  # transformers 5 does not look at use_fast
        raise ModelLoadError(
            f"{flag} {path} has only a fast tokenizer: leave --disable_fast_tokenizer out"
        )
    tokenizer.padding_side = padding_side
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(
            f'{flag} {path}: the tokenizer has no EOS token to end an answer: set "eos_token" in tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        logger.info("the tokenizer of %s has no pad token; EOS %r pads", path, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    if model is not None:
        fit_to_model(tokenizer, _hf_model_in(model), path, flag)
    return tokenizer


def _hf_model_in(model: nn.Module) -> PreTrainedModel:
    """Return the model itself, or the one that an Actor, a Critic, a RewardModel or an engine holds."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(
        f"get_tokenizer needs a Hugging Face model or a wrapper of one, not {type(model).__name__}"
    )


def valid_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest id plus one; higher logits belong to padding rows of the embedding."""
    return max(tokenizer.get_vocab().values()) + 1


def fit_to_model(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str, flag: str
) -> None:
    """Refuse ids that the model's embedding lacks; the model's config gets the pad token."""
    embedding_rows = model.get_input_embeddings().num_embeddings
    needed_rows = valid_vocab_size(tokenizer)
    if needed_rows > embedding_rows:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed_rows - 1}, but the model has only {embedding_rows} "
            "embedding rows. If tokens were added, call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    head = model.get_output_embeddings() if model.can_generate() else None  # Inkling2's is narrower
    outputs = getattr(head, "out_features", needed_rows)
    if needed_rows > outputs:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed_rows - 1}, but the model has logits of {outputs} ids "
            "alone: choose the tokenizer of this model"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
