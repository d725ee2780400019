"""Hugging Face models and tokenizers, loaded for RL: no dropout by itself, the requested attention, ZeRO-3 shards.

A weight missing from a checkpoint is an error: only a critic's value head may be new.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import pickle
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
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
from transformers.utils import cached_file, is_flash_attn_2_available
from transformers.utils import logging as hf_logging

from lightppo import tensor_file
from lightppo.errors import ModelLoadError
from lightppo.plugin import LANGUAGE_MODELS, LOADING, MODEL_PATHS
from lightppo.suggestions import nearest

try:
    from torch.nn.attention.varlen import varlen_attn

    VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # an older torch
    VARLEN_TAKES = frozenset()

logger = logging.getLogger(__name__)

# -- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    attn_implementation: str = "auto"  # or a name of transformers': eager, sdpa, flash_attention_2
    # of the weights; auto: as in the checkpoint
    dtype: torch.dtype | Literal["auto"] = torch.float32
    # DeepSpeed's; ZeRO stage 3 shards the weights while they load
    ds_config: dict[str, Any] | None = None
    trust_remote_code: bool = False  # run the model code that comes with the checkpoint
    # random weights from the config alone (the folder needs only config.json)
    init_from_scratch: bool = False
    # config attributes to set before the model is built
    override_config: dict[str, Any] | None = None
    # comma-separated modules to import first (they may register model classes)
    external_lib: str | None = None
    seed: int = 42  # of random weights
    # names in lightppo.plugin.LOADING, for which every rank loads the whole model
    changed_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LoadOptions:
        """The fields by name, and names in :data:`lightppo.plugin.LOADING` that are on or off."""
        fields = {name: value for name, value in options.items() if name not in LOADING}
        changed_by = tuple(name for name in LOADING if options.get(name))
        return cls(**fields, changed_by=changed_by)


def load_causal_lm(
    path: str,
    *,
    flag: str = "--pretrain",
    **options: Any,
) -> PreTrainedModel:
    """Load (or make) a causal LM, in eval mode; ``options`` are fields of :class:`LoadOptions`.

    A checkpoint's dropout is set to 0; what ``override_config`` sets acts in train mode.
    """
    how = LoadOptions.of(options)
    path, config = _load_config(path, flag, how)
    return _load(AutoModelForCausalLM, path, config, flag, how)


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
    path, config = _load_config(path, flag, how)
    config.num_labels = 1
    weight = None
    if not (how.init_from_scratch or init_value_head):
        with _errors_name(path, flag):
            weight = _head_from_checkpoint(path, value_head_prefix, kind, flag)
        if weight is None and init_value_head is False:
            raise ModelLoadError(
                f"{flag} {path} has no {value_head_prefix}.weight and init_value_head is False"
            )
    model = _load(
        AutoModelForSequenceClassification, path, config, flag, how, any_head=bool(init_value_head)
    )
    _set_value_head(model, weight, seed=how.seed)
    return model


def _load(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    flag: str,
    how: LoadOptions,
    any_head: bool = False,
) -> PreTrainedModel:
    """A value head is set later, so that it may be missing, or with ``any_head`` of another shape."""
    part, reason = None, None
    if not how.init_from_scratch:
        part, reason = _language_model(auto_class, path, config, flag)
    config = config if part is None else part.config
    model_class = auto_class._model_mapping.get(type(config), None)
    if model_class is None and not hasattr(config, "auto_map"):
        raise ModelLoadError(reason or _no_class(auto_class, config, f"{flag} {path}"))
    kwargs: dict[str, Any] = {
        "attn_implementation": resolve_attn_implementation(
            how.attn_implementation, how.dtype, model_class, config
        ),
        "dtype": how.dtype,
        "trust_remote_code": how.trust_remote_code,
    }
    zero3 = _zero3_config(how)
    with _errors_name(path, flag), _quiet():
        if how.init_from_scratch:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(how.seed)
                model = auto_class.from_config(config, **kwargs)
        else:
            # Weights of another shape are refused below, with both shapes; ZeRO-3 has only parts of them to compare.
            kwargs |= {
                "output_loading_info": True,
                "ignore_mismatched_sizes": any_head or zero3 is None,
            }
            kwargs |= {} if part is None else part.options
            model, info = auto_class.from_pretrained(path, config=config, **kwargs)
            _check_loaded(model, info, f"{flag} {path}", any_head)
    if zero3 is not None:
        _restore_frequencies(model)
    if part is not None:
        with _errors_name(path, flag):
            part.belongs_to(model)
    disable_dropout(model, kept=dropouts(how.override_config or {}))
    for name in how.changed_by:
        LOADING[name].fn(model)
    model.zero3_load_config = zero3  # keeps transformers' weak reference alive
    if how.init_from_scratch:
        reason = untrainable(config, dict(model.named_parameters()), f"{flag} {path}")
    model.untrainable = reason
    return model.eval()


def _no_class(auto_class: Any, config: PretrainedConfig, name: str) -> str:
    kind = f"{name}: transformers has no {auto_class.__name__.replace('Auto', '', 1)}"
    if auto_class is AutoModelForCausalLM:
        return f"{kind} of model type {config.model_type!r}: choose another model"
    return (
        f"{kind} of model type {config.model_type!r}, which a critic or a reward model is: choose another model for it, "
        "or an --advantage_estimator without a critic"
    )


def check_trainable(path: str, *, flag: str = "--pretrain", **options: Any) -> bool:
    """Whether what trains of a checkpoint is the language model alone, beside towers. It reads names alone.

    ``options`` are fields of :class:`LoadOptions`. Random weights are looked at when they are made.

    Raises:
        ModelLoadError: an image or audio tower cannot be told from what would train.
    """
    how = LoadOptions.of(options)
    path, config = _load_config(path, flag, how)
    if how.init_from_scratch:
        return False
    part, reason = _language_model(AutoModelForCausalLM, path, config, flag)
    if reason is not None:
        raise ModelLoadError(reason)
    return part is not None


class LanguageModel(Protocol):
    """The language model of a checkpoint with more parts, and what keeps the others; ``model.whole`` of that model."""

    config: PretrainedConfig  # of the language model alone
    has_class: bool  # transformers has one for it, which other engines may know
    options: dict[str, Any]  # further ones of from_pretrained
    architecture: str  # the class that the whole checkpoint is of
    auto_class: str  # what reads it
    # of adapters: names in the whole model, as patterns, → in the language model alone
    adapter_names: dict[str, str]
    digest: str  # of all that stays as it came; the checkpoints of a run remember it

    def belongs_to(self, model: PreTrainedModel) -> None:
        """Becomes ``model.whole``, if ``model`` has what the checkpoint has. Under ZeRO-3 collective."""

    def write(self, model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
        """The whole checkpoint, with these weights of the language model."""

    def name_of(self, name: str) -> str:
        """A weight of the language model alone as the whole checkpoint calls it."""


def _language_model(
    auto_class: Any, path: str, config: PretrainedConfig, flag: str
) -> tuple[LanguageModel | None, str | None]:
    """What to load of a checkpoint with towers, or why it cannot train; neither for a text model."""
    if not reads_more_than_text(config):
        return None, None
    with _errors_name(path, flag):
        reason = untrainable(config, checkpoint_files(path), f"{flag} {path}")
    if reason is None:
        return None, None
    entry = next(reversed(LANGUAGE_MODELS.values()), None)
    if entry is None:
        return None, reason
    try:
        return entry.fn(auto_class, path, config, f"{flag} {path}"), None
    except ModelLoadError as error:
        return None, str(error)


def _check_loaded(
    model: PreTrainedModel,
    info: dict[str, Any],
    name: str,
    any_head: bool,
) -> None:
    """Refuses a model some of whose weights the checkpoint lacks, or has in another shape."""
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
    if missing := set(info["missing_keys"]) - heads:
        raise ModelLoadError(
            f"{name}: {len(missing)} weights are missing from the checkpoint ({', '.join(sorted(missing)[:3])}, …): it "
            "is incomplete, or of another kind than this model"
        )


def load_config(
    path: str,
    *,
    flag: str = "--pretrain",
    **options: Any,
) -> PretrainedConfig:
    """The config that a model of this path would have; ``options`` are fields of :class:`LoadOptions`."""
    how = LoadOptions.of(options)
    path, config = _load_config(path, flag, how)
    if how.init_from_scratch:
        return config
    part, _ = _language_model(AutoModelForCausalLM, path, config, flag)
    return config if part is None else part.config


def _load_config(
    path: str,
    flag: str,
    options: LoadOptions,
) -> tuple[str, PretrainedConfig]:
    """The path as transformers takes it, and the config with the overrides, and no dropout but theirs."""
    path = _model_path(path, flag)
    for name in filter(None, (part.strip() for part in (options.external_lib or "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"--external_lib {name}: {error}: install it, or set PYTHONPATH"
            ) from error
    with _errors_name(path, flag):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    for part in (config, config.get_text_config()):
        _zero_dropout_attributes(part)
    _override(config, options.override_config or {}, "--override_config")
    if any(name.startswith("rope_") for name in options.override_config or ()):
        with _errors_name(path, f"--override_config of {flag}"):
            config.standardize_rope_params()
            config.validate_rope()
    return path, config


def _model_path(
    path: str,
    flag: str,
    kind: str = "model",
) -> str:
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
def _errors_name(path: str, flag: str) -> Iterator[None]:
    """Put the flag and the path in front of transformers' error messages."""
    try:
        yield
    except ModelLoadError:
        raise
    except pickle.UnpicklingError as error:  # transformers, too, reads with weights_only
        raise ModelLoadError(f"{flag} {tensor_file.explained(path, error)}") from error
    except (OSError, ValueError, RuntimeError, LookupError, EOFError, SafetensorError) as error:
        if Path(path, "config.json").is_file():
            _look_at(path, flag)
        # One line: transformers may list pages of class names.
        reason = textwrap.shorten(str(error), 1000, placeholder=" …")
        raise ModelLoadError(f"{flag} {path} could not be loaded: {reason}") from error


def _override(config: PretrainedConfig, values: dict[str, Any], name: str) -> None:
    for key, value in _with_rope(config, values, name).items():
        if not hasattr(config, key):
            hint = nearest(key, config.to_dict())
            raise ModelLoadError(f"{name}: the config of {config.model_type} has no {key!r}{hint}")
        current = getattr(config, key)
        if isinstance(current, PretrainedConfig) and isinstance(value, dict):
            _override(current, value, f"{name}.{key}")
        else:
            setattr(config, key, value)


def _with_rope(
    config: PretrainedConfig,
    values: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` as transformers 5 has them: part of ``rope_parameters``, whose rest stays."""
    before = getattr(config, "rope_parameters", None)
    rest = dict(values)
    if not isinstance(before, dict):
        return rest
    told = {"rope_theta": rest.pop("rope_theta")} if "rope_theta" in rest else {}
    scaling = rest.pop("rope_scaling", None) or {}
    told |= {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    told |= rest.pop("rope_parameters", None) or {}
    layers = [key for key, value in before.items() if isinstance(value, dict)]
    if layers and not told.keys() <= set(layers):
        raise ModelLoadError(
            f"{name}: give rope_parameters for each kind of layer: {', '.join(layers)}"
        )
    merged = {key: before[key] | value if key in layers else value for key, value in told.items()}
    return rest | ({"rope_parameters": before | merged} if told else {})


def disable_dropout(model: nn.Module, kept: Container[float] = ()) -> None:
    """Set every dropout (and router jitter) of a built model to 0, so that train and eval mode agree.

    Rates in ``kept`` stay: the config that the model was built from has no others that are not a class's own.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p not in kept:
            module.p = 0.0
        _zero_dropout_attributes(module, kept)


def dropouts(override_config: dict[str, Any]) -> list[float]:
    """The rates of dropout (and router jitter) that ``--override_config`` sets, those of its parts too."""
    rates: list[float] = []
    for name, value in override_config.items():
        if isinstance(value, dict):
            rates += dropouts(value)
        elif is_dropout(name) and isinstance(value, float):
            rates.append(value)
    return rates


def is_dropout(name: str) -> bool:
    """Whether an entry of a config is a rate of dropout, or of a router's jitter."""
    return "drop" in name or "jitter" in name


def _zero_dropout_attributes(
    owner: PretrainedConfig | nn.Module, kept: Container[float] = ()
) -> None:
    # PhiMoE's choice of experts depends on this number, which is no noise there; elsewhere only configs have it
    is_threshold = isinstance(owner, nn.Module) or owner.model_type == "phimoe"
    for key, value in list(vars(owner).items()):
        if key == "router_jitter_noise" and is_threshold:
            continue
        if isinstance(value, float) and is_dropout(key) and value not in kept:
            setattr(owner, key, 0.0)


def resolve_attn_implementation(
    name: str,
    dtype: torch.dtype | Literal["auto"],
    model_class: type | None = None,
    config: PretrainedConfig | None = None,
) -> str | None:
    """The flag for transformers; None: it chooses. "auto" is flash_attention_2 if usable, after torch's own kernel.

    Capped scores (Gemma 2) are left out by transformers' sdpa, so that "auto" is then eager. Falcon's alibi is right
    under sdpa only.
    """
    capped = caps_scores(config)
    if name == "sdpa" and capped:
        raise ModelLoadError(
            "--attn_implementation sdpa leaves out this model's attn_logit_softcapping: leave the option out, or set "
            """--override_config '{"attn_logit_softcapping": null}' to train without it"""
        )
    if name == "eager" and adds_alibi_twice(config):
        raise ModelLoadError(
            "--attn_implementation eager adds this model's alibi twice (Falcon in transformers): leave the option out"
        )
    if name not in ("auto", "flash_attention_2") or (
        name == "auto" and torch_has_flash(model_class, config)
    ):
        return None if name == "auto" else name
    # code of its own: try
    supported = getattr(model_class, "_supports_flash_attn", name == "flash_attention_2")
    # gpt-oss, Granite with sinks, MiMo: transformers would fetch one of these kernels from the hub instead
    own_kernels = getattr(model_class, "_compatible_flash_implementations", None) or [
        "flash_attention_2"
    ]
    obstacles = {
        "there is no CUDA device": not torch.cuda.is_available(),
        "the flash-attn package (2.3.3 or newer) is not installed": not is_flash_attn_2_available(),
        "it needs --bf16 or --fp16": dtype not in (torch.bfloat16, torch.float16),
        f"{getattr(model_class, '__name__', None)} does not support it": not supported,
        f"{getattr(model_class, '__name__', None)} takes {', '.join(own_kernels)} only": (
            "flash_attention_2" not in own_kernels
        ),
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if reasons and name == "flash_attention_2":
        raise ModelLoadError(
            f"--attn_implementation flash_attention_2 (--flash_attn) cannot be used: {'; '.join(reasons)}. "
            "Set --attn_implementation sdpa."
        )
    return ("eager" if capped else None) if reasons else "flash_attention_2"


def adds_alibi_twice(config: PretrainedConfig | None) -> bool:
    """Whether eager attention is wrong: Falcon's mask has the alibi in it, and its eager layers add it once more."""
    return config is not None and config.model_type == "falcon" and bool(config.alibi)


def caps_scores(config: PretrainedConfig | None) -> bool:
    """Whether attention squeezes its scores between two bounds."""
    text = None if config is None else config.get_text_config()
    return getattr(text, "attn_logit_softcapping", None) is not None


def torch_has_flash(model_class: type | None, config: PretrainedConfig | None) -> bool:
    """Whether sdpa runs packed rows of this model by FlashAttention, as torch does from 2.11 on.

    It is the same kernel as flash-attn's, without waiting in each layer, and shares prompts; decoding keeps its slots.
    """
    flash = "window_size" in VARLEN_TAKES and getattr(model_class, "_supports_sdpa", False)
    return flash and not caps_scores(config)


class _Zero3LoadConfig(SimpleNamespace):
    """Replaces ``transformers.integrations.HfDeepSpeedConfig``, which needs accelerate for these two attributes."""

    config: dict[str, Any]

    def is_zero3(self) -> bool:
        return True


def _zero3_config(how: LoadOptions) -> _Zero3LoadConfig | None:
    """Tells transformers whether it shards the weights that it loads; the caller keeps the result alive."""
    hf_deepspeed.unset_hf_deepspeed_config()
    if how.changed_by or (how.ds_config or {}).get("zero_optimization", {}).get("stage") != 3:
        return None
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

# Names of other people's heads, to tell "no head yet" from "a head under another name".
# A router's "e_score_correction_bias" is none.
_HEAD_LIKE = re.compile(
    r"(^|[._])(v_head|value_head|score|reward_head|regression_head|classifier|summary)([._].*)?\.(weight|bias)$"
)


def is_value_head(name: str) -> bool:
    """Whether a tensor looks like the head of a critic or reward model."""
    return _HEAD_LIKE.search(name) is not None


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


def _head_from_checkpoint(
    path: str,
    prefix: str,
    kind: str,
    flag: str,
) -> Tensor | None:
    """The head's weight (1, hidden); None for a critic whose checkpoint has none."""
    files = checkpoint_files(path)
    fitting = [
        name for name in files if re.search(rf"(^|\.){re.escape(prefix)}\.(weight|bias)$", name)
    ]
    if any(name.endswith(".bias") for name in fitting):
        raise ModelLoadError(
            f"{flag} {path}: the head {prefix} has a bias, which value heads here do not have"
        )
    if len(fitting) > 1:
        raise ModelLoadError(
            f"{flag} {path}: --value_head_prefix {prefix} fits several weights: {sorted(fitting)}"
        )
    if not fitting:
        others = ", ".join(sorted(name for name in files if _HEAD_LIKE.search(name))[:3])
        if others:
            hint = (
                f"It has {others}: set --value_head_prefix, or init_value_head=True for a new head"
            )
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight. {hint}")
        if kind == "reward":
            raise ModelLoadError(
                f"{flag} {path} has no {prefix}.weight: train it as a reward model first"
            )
        logger.info("%s has no %s.weight; the critic's value head is new", path, prefix)
        return None
    _, read = open_tensors(cached_file(path, files[fitting[0]]))
    weight = read(fitting[0])
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelLoadError(
            f"{flag} {path}: {fitting[0]} has shape {tuple(weight.shape)}; a {kind} needs one output, (1, hidden)"
        )
    return weight


def checkpoint_files(path: str) -> dict[str, str]:
    """Which file of a local folder or a hub id holds which tensor, {name: file}."""
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    for filename in ("model.safetensors", "pytorch_model.bin"):
        if (index := find(f"{filename}.index.json")) is not None:
            return json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        if (whole := find(filename)) is not None:
            return dict.fromkeys(open_tensors(whole)[0], filename)
    return {}


def open_tensors(file: str) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    """Names of a checkpoint file's tensors, and a function that reads one by name, on the CPU."""
    if file.endswith(".safetensors"):
        opened = safe_open(file, framework="pt")
        return opened.keys(), opened.get_tensor
    weights = tensor_file.read(file, mapped=True)
    return weights.keys(), weights.__getitem__


# -- tokenizers -------------------------------------------------------------------------------------------------------


def get_tokenizer(
    path: str,
    model: nn.Module | None = None,
    padding_side: Literal["left", "right"] = "left",
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--pretrain",
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has EOS and a pad token and fits the model, whose config gets the pad token.

    A missing pad token becomes EOS (masks come from lengths, never from the pad id). A model may have more embedding
    rows than the tokenizer has entries: sample with :func:`valid_vocab_size`.
    """
    path = _model_path(path, flag, "tokenizer")
    try:
        with _errors_name(path, flag):
            tokenizer = AutoTokenizer.from_pretrained(
                path, use_fast=use_fast, trust_remote_code=trust_remote_code
            )
    except ModelLoadError:
        _look_at(path, flag, "tokenizer")  # says more, if files are missing
        raise
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
        fit_to_model(tokenizer, model, path, flag)
    return tokenizer


def valid_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id plus one; higher logits belong to padding rows of the embedding."""
    return max(tokenizer.get_vocab().values()) + 1


def fit_to_model(
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    path: str,
    flag: str,
) -> None:
    """Refuse ids that the model's embedding lacks; the model's config gets the pad token."""
    # Actor, Critic, RewardModel and engines hold one
    hf_model = next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
    )
    if hf_model is None:
        raise TypeError(
            f"get_tokenizer needs a Hugging Face model or a wrapper of one, not {type(model).__name__}"
        )
    rows = hf_model.get_input_embeddings().num_embeddings
    needed = valid_vocab_size(tokenizer)
    if needed > rows:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed - 1}, but the model has only {rows} embedding rows. "
            "If tokens were added, call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    hf_model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(hf_model, "generation_config", None) is not None:
        hf_model.generation_config.pad_token_id = tokenizer.pad_token_id


# -- image and audio towers ------------------------------------------------------------------------------------------

# ``AutoModelForCausalLM`` reads some checkpoints without their tower (Qwen3.5), so that an export would have lost it. It
# reads others with it (Gemma 3), which weight decay would then change although no gradient reaches it.

_PART = re.compile(r"vision|visual|image|audio|speech|video|vq")  # in the name of a config's part
_TENSOR = re.compile(
    r"(^|[._])(vision|visual|image|audio|speech|video|vq|multi_modal|multimodal|mm_projector|vpm|apm|resampler"
    r"|connector|projector|aligner|perceiver)"
)

_MAPPINGS = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def untrainable(
    config: PretrainedConfig,
    tensors: Iterable[str],
    name: str,
) -> str | None:
    """Why a model with this config and these ``tensors`` is refused for training; None: it is a text model.

    ``name`` stands in front, e.g. ``--pretrain FOLDER``.
    """
    if not reads_more_than_text(config):
        return None
    towers = [tensor for tensor in tensors if is_of_tower(tensor)]
    if not towers:
        return None
    return (
        f"{name} has an image or audio tower ({len(towers)} tensors, such as {towers[0]}), which training would drop "
        "or change: train its language model alone, saved as a folder of its own, see docs/limits.md"
    )


def is_of_tower(name: str) -> bool:
    """Whether a tensor of such a checkpoint, or a part of it, is of a tower or between tower and language model."""
    return _TENSOR.search(name) is not None


def reads_more_than_text(config: PretrainedConfig) -> bool:
    """Whether the config is of a model that can have a tower."""
    known = any(config.model_type in getattr(modeling_auto, mapping, ()) for mapping in _MAPPINGS)
    parts = (
        name for name, part in vars(config).items() if isinstance(part, PretrainedConfig | dict)
    )
    return known or any(_PART.search(name) for name in parts)
