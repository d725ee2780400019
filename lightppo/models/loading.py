"""Hugging Face models and tokenizers, loaded for RL: no dropout by itself, the requested attention, ZeRO-3 shards.

A weight missing from a checkpoint is an error: only a critic's value head may be new.
"""

from __future__ import annotations

import importlib
import logging
import math
import pickle
import re
import textwrap
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors import SafetensorError
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
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as hf_logging

from lightppo import tensor_file
from lightppo.errors import ModelLoadError
from lightppo.plugin import (
    ATTENTION,
    LANGUAGE_MODELS,
    LOADING,
    MODEL_CONFIGS,
    MODEL_PATHS,
    UNTRAINABLE,
    VALUE_HEADS,
)
from lightppo.user_code import error_text, is_users_fault

logger = logging.getLogger(__name__)

# -- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    attn_implementation: str = "auto"  # or a name of transformers': eager, sdpa, flash_attention_2
    # The type of the weights; auto: as in the checkpoint.
    dtype: torch.dtype | Literal["auto"] = torch.float32
    # DeepSpeed's; ZeRO stage 3 shards the weights while they load
    ds_config: dict[str, Any] | None = None
    trust_remote_code: bool = False  # run the model code that comes with the checkpoint
    # random weights from the config alone (the folder needs only config.json)
    init_from_scratch: bool = False
    # The values of the options in lightppo.plugin.MODEL_CONFIGS.
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    # comma-separated modules to import first (they may register model classes)
    external_lib: str | None = None
    seed: int = 42  # of random weights
    # The names in lightppo.plugin.LOADING that change the model, for which every rank loads all of it.
    changed_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LoadOptions:
        """The fields by name, and options of the tables LOADING and MODEL_CONFIGS of :mod:`lightppo.plugin`."""
        changes = {name: options[name] for name in MODEL_CONFIGS if options.get(name)}
        changed_by = tuple(name for name in LOADING if options.get(name))
        own = {name: options[name] for name in options.keys() - {*LOADING, *MODEL_CONFIGS}}
        return cls(**own, changed_by=changed_by, config_changes=changes)

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO stage 3 shards the weights while they load."""
        stage = (self.ds_config or {}).get("zero_optimization", {}).get("stage")
        return stage == 3 and not self.changed_by


def load_causal_lm(path: str, *, flag: str = "--pretrain", **options: Any) -> PreTrainedModel:
    """Load (or make) a causal LM, in eval mode; ``options`` are fields of :class:`LoadOptions`.

    A checkpoint's dropout is set to 0; what an option sets instead acts in train mode.
    """
    how = LoadOptions.of(options)
    path, config = read_config(path, flag, how)
    model, _ = _load(AutoModelForCausalLM, path, config, flag, how)
    return model


def load_sequence_classifier(
    path: str,
    *,
    kind: Literal["critic", "reward"],
    value_head_prefix: str = "score",
    init_value_head: bool | None = None,
    flag: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with a one-output head (critic, reward) from a classifier, a value-head model or a plain causal LM.

    If a critic's checkpoint has no head (``init_value_head``: in any case), a new one is drawn from N(0, 1/(hidden +
    1)), the same on all ranks and at all ZeRO stages. ``value_head_prefix`` is the head's name in the checkpoint, e.g.
    ``score``.
    """
    how = LoadOptions.of(options)
    flag = flag or f"--{kind}_pretrain"
    path, config = read_config(path, flag, how)
    config.num_labels = 1
    weight = None
    draws_head = how.init_from_scratch or bool(init_value_head)
    for entry in () if draws_head else VALUE_HEADS.values():
        with errors_name(path, flag):
            weight = entry.fn(path, value_head_prefix, kind, flag)
    auto_class = AutoModelForSequenceClassification
    model, has_head = _load(auto_class, path, config, flag, how, any_head=bool(init_value_head))
    if weight is None and not draws_head:
        if has_head:
            return model
        if kind == "reward" or init_value_head is False:
            reason = " and init_value_head is False" if init_value_head is False else ""
            raise ModelLoadError(f"{flag} {path} has no {value_head_prefix}.weight{reason}")
    _set_value_head(model, weight, seed=how.seed)
    return model


def _load(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    flag: str,
    how: LoadOptions,
    any_head: bool = False,
) -> tuple[PreTrainedModel, bool]:
    """The model, and whether the checkpoint has its head; ``any_head``: that one may be of another shape."""
    part = None if how.init_from_scratch else LANGUAGE_MODELS.first(auto_class, path, config, flag)
    config, reason = (config, None) if part is None else (part.config, part.untrainable)
    model_class = auto_class._model_mapping.get(type(config), None)
    if model_class is None and not hasattr(config, "auto_map"):
        raise ModelLoadError(reason or _no_class(auto_class, config, flag, path))
    if auto_class is AutoModelForCausalLM:
        check_language_model(config, flag, path, is_new=how.init_from_scratch)
    attention = ATTENTION.last(how.attn_implementation, how.dtype, model_class, config)
    kwargs: dict[str, Any] = {
        "attn_implementation": attention,
        "dtype": how.dtype,
        "trust_remote_code": how.trust_remote_code,
    }
    hf_deepspeed.unset_hf_deepspeed_config()
    zero3 = _zero3_config(how) if how.is_sharded else None
    has_head = not how.init_from_scratch
    with errors_name(path, flag), _quiet():
        if how.init_from_scratch:
            model = _random_model(auto_class, config, how.seed, kwargs)
        else:
            # Weights of another shape are refused below, with both shapes; ZeRO-3 has only parts of them to compare.
            kwargs["ignore_mismatched_sizes"] = any_head or zero3 is None
            kwargs |= {} if part is None else part.options
            model, info = auto_class.from_pretrained(
                path, config=config, output_loading_info=True, **kwargs
            )
            if info["mismatched_keys"] or info["missing_keys"]:
                has_head = _check_loaded(model, info, f"{flag} {path}", any_head)
    if zero3 is not None:
        _restore_frequencies(model)
    if part is not None:
        with errors_name(path, flag):
            part.belongs_to(model)
    disable_dropout(model, kept=_rates(config) if how.config_changes else ())
    model.own_dropout = _own_dropout(path, how)
    for name in how.changed_by:
        LOADING[name].fn(model)
    model.zero3_load_config = zero3  # keeps transformers' weak reference alive
    model.untrainable = untrainable(model, f"{flag} {path}") if how.init_from_scratch else reason
    return model.eval(), has_head


def _random_model(
    auto_class: Any, config: PretrainedConfig, seed: int, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """The same weights on all ranks; random numbers elsewhere stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto_class.from_config(config, **kwargs)


def attention_as_asked(name: str, *_: Any) -> str | None:
    """For transformers, which chooses where this is None."""
    return None if name == "auto" else name


def untrainable(model: PreTrainedModel, name: str) -> str | None:
    """Why a model that was built is refused for training; ``name`` stands in front."""
    tensors = [tensor for tensor, _ in model.named_parameters()]
    return UNTRAINABLE.first(model.config, tensors, name)


def _no_class(auto_class: Any, config: PretrainedConfig, flag: str, path: str) -> str:
    what = auto_class.__name__.replace("Auto", "", 1)
    text = f"{flag} {path}: transformers has no {what} of model type {config.model_type!r}"
    if flag == "--critic_pretrain":
        return f"{text}, which a critic is: choose another model for it, or an --advantage_estimator without a critic"
    return f"{text}: choose another model"


_OTHER_HEADS = re.compile(
    r"For(SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)$"
)


def check_language_model(
    config: PretrainedConfig, flag: str, path: str, *, is_new: bool = False
) -> None:
    """ModelLoadError for a model that does not say one word after the other; ``is_new``: it has no weights."""
    heads = [name for name in config.architectures or () if _OTHER_HEADS.search(name)]
    if heads and not is_new:
        raise ModelLoadError(
            f"{flag} {path}: it is a {heads[0]}, which gives scores and no text: give a language model here, and this one "
            "as --reward_pretrain or --critic_pretrain"
        )
    reads_both_sides = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    if reads_both_sides and getattr(config, "is_decoder", None) is False:
        raise ModelLoadError(
            f"{flag} {path}: a model of type {config.model_type!r} reads a text from both sides, and cannot continue "
            "one: give a language model"
        )


def _check_loaded(model: PreTrainedModel, info: dict[str, Any], name: str, any_head: bool) -> bool:
    """Refuses a model some of whose weights the checkpoint lacks, or has in another shape; whether it has the head."""
    heads = set() if model.can_generate() else {f"{head}.weight" for head in head_names(model)}
    other = sorted(
        shapes for shapes in info["mismatched_keys"] if not (any_head and shapes[0] in heads)
    )
    if other:
        weight, in_file, asked = other[0]
        raise ModelLoadError(
            f"{name}: {len(other)} weights have another shape than its config says: {weight} is {tuple(in_file)}, not "
            f"{tuple(asked)}: config.json (or --override_config) and the weights are of two models"
        )
    missing = set(info["missing_keys"])
    if lost := missing - heads:
        raise ModelLoadError(
            f"{name}: {len(lost)} weights are missing from the checkpoint ({', '.join(sorted(lost)[:3])}, …): it "
            "is incomplete, or of another kind than this model"
        )
    return missing.isdisjoint(heads)


def load_config(path: str, *, flag: str = "--pretrain", **options: Any) -> PretrainedConfig:
    """The config that a model of this path would have; ``options`` are fields of :class:`LoadOptions`."""
    how = LoadOptions.of(options)
    path, config = read_config(path, flag, how)
    if how.init_from_scratch:
        return config
    part = LANGUAGE_MODELS.first(AutoModelForCausalLM, path, config, flag)
    return config if part is None else part.config


def read_config(path: str, flag: str, options: LoadOptions) -> tuple[str, PretrainedConfig]:
    """The path as transformers takes it, and the config with its changes, and no dropout but theirs."""
    path = _model_path(path, flag)
    if options.external_lib:
        _import_modules(options.external_lib)
    with errors_name(path, flag):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    # transformers would add it to the weights, in which it may be already
    if not options.init_from_scratch and find_adapter_config_file(path) is not None:
        _look_at(path, flag)
        raise ModelLoadError(f"{flag} {path} has an adapter beside its weights")
    for part in (config, config.get_text_config()):
        _zero_dropout(part)
    for name, value in options.config_changes.items():
        MODEL_CONFIGS[name].fn(config, value, path, flag)
    return path, config


def _import_modules(names: str) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"--external_lib {name}: {error}: install it, or set PYTHONPATH"
            ) from error
        except BaseException as error:
            if not is_users_fault(error):
                raise
            raise ModelLoadError(f"--external_lib {name}: {error_text(error)}") from error


def _model_path(path: str, flag: str, kind: str = "model") -> str:
    """``~`` expanded. An error: what ``MODEL_PATHS`` refuses, and a URL, which must be copied before."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return str(folder)
    if "://" in path:
        raise ModelLoadError(
            f"{flag} {path}: no such folder. Give a folder with a Hugging Face model, or a hub id"
        )
    _look_at(path, flag, kind)
    return path


def _look_at(path: str, flag: str, kind: str = "model") -> None:
    """ModelLoadError where a plugin sees what is wrong."""
    for entry in MODEL_PATHS.values():
        entry.fn(path, flag, kind)


@contextmanager
def errors_name(path: str, flag: str, kind: str = "model") -> Iterator[None]:
    """Put the flag and the path in front of transformers' error messages, if ``MODEL_PATHS`` has no better one."""
    try:
        yield
    except ModelLoadError:
        raise
    except pickle.UnpicklingError as error:  # transformers, too, reads with weights_only
        raise ModelLoadError(f"{flag} {tensor_file.explained(path, error)}") from error
    except (OSError, ValueError, RuntimeError, LookupError, EOFError, SafetensorError) as error:
        if kind == "tokenizer" or Path(path, "config.json").is_file():
            _look_at(path, flag, kind)
        # One line: transformers may list pages of class names.
        reason = textwrap.shorten(str(error), 1000, placeholder=" …")
        raise ModelLoadError(f"{flag} {path} could not be loaded: {reason}") from error


def disable_dropout(model: nn.Module, kept: Container[float] = ()) -> None:
    """Set every dropout (and router jitter) of a built model to 0, so that train and eval mode agree.

    Rates in ``kept`` stay: the config that the model was built from has no others that are not a class's own.
    """
    for module in model.modules():
        _zero_dropout(module, kept)


def _rates(config: PretrainedConfig) -> list[float]:
    """Rates of dropout (and router jitter) that an option has set: those of the checkpoint are 0."""
    parts = (vars(config), vars(config.get_text_config()))
    return [
        value
        for part in parts
        for name, value in part.items()
        if is_dropout(name) and isinstance(value, float)
    ]


def _own_dropout(path: str, how: LoadOptions) -> list[dict[str, float]]:
    """The rates in the checkpoint's config, and in that of its text model: an export has them again."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=how.trust_remote_code)
    return [
        {
            name: value
            for name, value in vars(part).items()
            if is_dropout(name) and isinstance(value, float)
        }
        for part in (config, config.get_text_config())
    ]


def is_dropout(name: str) -> bool:
    """Whether an entry of a config is a rate of dropout, or of a router's jitter."""
    return "drop" in name or "jitter" in name


def _zero_dropout(owner: PretrainedConfig | nn.Module, kept: Container[float] = ()) -> None:
    # PhiMoE's choice of experts depends on this number, which is no noise there; elsewhere only configs have it
    is_threshold = isinstance(owner, nn.Module) or owner.model_type == "phimoe"
    for key, value in list(vars(owner).items()):
        if key == "router_jitter_noise" and is_threshold:
            continue
        is_rate = is_dropout(key) or (key == "p" and isinstance(owner, nn.Dropout))
        if is_rate and isinstance(value, float) and value not in kept:
            setattr(owner, key, 0.0)


class _Zero3LoadConfig(SimpleNamespace):
    """Replaces ``transformers.integrations.HfDeepSpeedConfig``, which needs accelerate for these two attributes."""

    config: dict[str, Any]

    def is_zero3(self) -> bool:
        return True


def _zero3_config(how: LoadOptions) -> _Zero3LoadConfig:
    """Tells transformers to shard the weights that it loads."""
    if not torch.distributed.is_initialized():
        raise ModelLoadError("loading under ZeRO stage 3 needs strategy.setup_distributed() first")
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    told = [
        dtype for name, dtype in types.items() if how.ds_config.get(name, {}).get("enabled")
    ] or [torch.float32]
    if told != [how.dtype]:
        raise ModelLoadError(
            f"the model is loaded in {how.dtype}, but its ds_config says {told[0]}"
        )
    zero3 = _Zero3LoadConfig(config=how.ds_config)
    hf_deepspeed.set_hf_deepspeed_config(zero3)
    return zero3


def _restore_frequencies(model: nn.Module) -> None:
    """Rotary frequencies in float32, as without ZeRO-3: there DeepSpeed makes every new tensor in the weights' type,
    and the angle of bfloat16's 0.5625 for 0.56234 is 0.65 too large at position 4,096."""
    for module in model.modules():
        if any("inv_freq" in name for name in module._buffers) and hasattr(module, "config"):
            made = type(module)(module.config)
            for name in (*made._buffers, *vars(made)):
                if isinstance(value := getattr(made, name), Tensor):
                    setattr(module, name, value.to(getattr(module, name).device))


@contextmanager
def _quiet() -> Iterator[None]:
    """No load report and no progress bar: missing weights are checked here, and errors say more than a table."""
    level = hf_logging.get_verbosity()
    bar = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()


# -- heads ------------------------------------------------------------------------------------------------------------


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer that makes the score."""
    children = model.named_children()
    heads = [
        (name, module)
        for name, module in children
        if name != model.base_model_prefix and isinstance(module, nn.Linear)
    ]
    if len(heads) != 1:
        raise ModelLoadError(
            f"{type(model).__name__} has {len(heads)} linear layers beside its base model; 1 is needed"
        )
    return heads[0]


def head_names(model: PreTrainedModel) -> set[str]:
    """Names of a causal LM's output head, or of the value head."""
    if not model.can_generate():
        return {value_head(model)[0]}
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is head}


@torch.no_grad()
def _set_value_head(
    model: PreTrainedModel,
    weight: Tensor | None,
    *,
    seed: int,
) -> None:
    """Set the head to ``weight`` (1, hidden), or to N(0, 1/(hidden + 1)) for None; a bias becomes 0."""
    _, head = value_head(model)
    if weight is None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, head.in_features, generator=generator) / math.sqrt(
            head.in_features + 1
        )
    whole: AbstractContextManager = nullcontext()
    if hasattr(head.weight, "ds_id"):  # a ZeRO-3 shard
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(list(head.parameters()), modifier_rank=0)
    with whole:
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


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
    path = _model_path(pretrain, flag, "tokenizer")
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
    """Itself, or the one that an Actor, a Critic, a RewardModel or an engine holds."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(
        f"get_tokenizer needs a Hugging Face model or a wrapper of one, not {type(model).__name__}"
    )


def valid_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id plus one; higher logits belong to padding rows of the embedding."""
    return max(tokenizer.get_vocab().values()) + 1


def fit_to_model(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, path: str, flag: str
) -> None:
    """Refuse ids that the model's embedding lacks; the model's config gets the pad token."""
    rows = model.get_input_embeddings().num_embeddings
    needed = valid_vocab_size(tokenizer)
    if needed > rows:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed - 1}, but the model has only {rows} embedding rows. "
            "If tokens were added, call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
