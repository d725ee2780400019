"""Hugging Face models and tokenizers, loaded for RL: no dropout, the requested attention, sharded under ZeRO-3.

A weight missing from a checkpoint is an error: only a critic's value head may be new.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import logging
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.utils import cached_file, is_flash_attn_2_available
from transformers.utils import logging as hf_logging

from lightppo.errors import ModelLoadError
from lightppo.models.quantised import quantise

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTN_IMPLEMENTATIONS = ("auto", "eager", "sdpa", "flash_attention_2")

# ---------------------------------------------------------------------------------------------------------------------
# models


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    attn_implementation: str = "auto"  # one of ATTN_IMPLEMENTATIONS
    dtype: Literal["fp32", "bf16"] = "fp32"  # of the weights
    ds_config: dict[str, Any] | None = None  # DeepSpeed's; ZeRO stage 3 shards the weights while they load
    trust_remote_code: bool = False  # run the model code that comes with the checkpoint
    init_from_scratch: bool = False  # random weights from the config alone (the folder needs only config.json)
    override_config: dict[str, Any] | None = None  # config attributes to set before the model is built
    external_lib: str | None = None  # comma-separated modules to import first (they may register model classes)
    seed: int = 42  # of random weights
    # Hold the weights of linear layers in 4 bits (lightppo.models.quantised): every rank loads the whole model,
    # and strategy.prepare shards it.
    load_in_4bit: bool = False


def load_causal_lm(path: str, *, flag: str = "--pretrain", **options: Any) -> PreTrainedModel:
    """Load (or make) a causal LM without dropout, in eval mode; ``options`` are fields of :class:`LoadOptions`."""
    o = LoadOptions(**options)
    path, config = _load_config(path, flag, o)
    with _loading(o, config, MODEL_FOR_CAUSAL_LM_MAPPING, path, flag) as (zero3, kwargs):
        if o.init_from_scratch:
            model = _from_scratch(AutoModelForCausalLM, config, o.seed, kwargs)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True, **kwargs)
            _check_missing(info["missing_keys"], path, flag)
    return _finish(model, zero3, o.load_in_4bit)


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
    o, flag = LoadOptions(**options), flag or ("--critic_pretrain" if kind == "critic" else "--reward_pretrain")
    path, config = _load_config(path, flag, o)
    was_classifier = any("SequenceClassification" in name for name in config.architectures or ())
    if was_classifier and config.num_labels != 1 and not (init_value_head or o.init_from_scratch):
        raise ModelLoadError(f"{flag} {path} has {config.num_labels} labels; a {kind} needs one output (num_labels 1)")
    config.num_labels = 1
    weight = None
    with _loading(o, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, path, flag) as (zero3, kwargs):
        if o.init_from_scratch:
            model = _from_scratch(AutoModelForSequenceClassification, config, o.seed, kwargs)
        else:
            weight = None if init_value_head else _head_from_checkpoint(path, value_head_prefix, kind, flag)
            if weight is None and init_value_head is False:
                raise ModelLoadError(f"{flag} {path} has no {value_head_prefix}.weight and init_value_head is False")
            model, info = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, output_loading_info=True, ignore_mismatched_sizes=bool(init_value_head), **kwargs
            )
            head_name, _ = value_head(model)
            mismatched = {name for name, *_ in info["mismatched_keys"]}  # only filled while a new head is asked for
            _check_missing({*info["missing_keys"], *mismatched} - {f"{head_name}.weight"}, path, flag)
    _set_value_head(model, weight, seed=o.seed)
    return _finish(model, zero3, o.load_in_4bit)


def _load_config(path: str, flag: str, options: LoadOptions) -> tuple[str, PretrainedConfig]:
    """The path as transformers takes it, and the config without dropout and with the overrides."""
    path = _model_path(path, flag, needed_file="config.json")
    for name in filter(None, (part.strip() for part in (options.external_lib or "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"--external_lib {name}: {error}. Install it or add its folder to PYTHONPATH"
            ) from error
    with _errors_name(path, flag):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    _override(config, options.override_config or {}, "--override_config")
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        _zero_dropout_attributes(part)
    return path, config


def _model_path(path: str, flag: str, needed_file: str | None) -> str:
    """``~`` expanded; hub ids are left to the hub. A path or URL that does not exist is an error."""
    if not path:
        raise ModelLoadError(f"{flag} is empty: give a folder with a Hugging Face model, or a hub id")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if needed_file is not None and not (folder / needed_file).is_file():
            raise ModelLoadError(f"{flag} {path}: the folder has no {needed_file}, so it is not a Hugging Face model")
        return str(folder)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or folder.exists():
        raise ModelLoadError(f"{flag} {path}: no such folder. Give a folder with a Hugging Face model, or a hub id")
    return path


@contextmanager
def _errors_name(path: str, flag: str) -> Iterator[None]:
    """Put the flag and the path in front of transformers' error messages."""
    try:
        yield
    except ModelLoadError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        # One line: transformers may list pages of class names.
        reason = textwrap.shorten(str(error), 1000, placeholder=" …")
        raise ModelLoadError(f"{flag} {path} could not be loaded: {reason}") from error


def _override(config: PretrainedConfig, values: dict[str, Any], name: str) -> None:
    for key, value in values.items():
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelLoadError(f"{name}: the config of {config.model_type} has no {key!r}{hint}")
        current = getattr(config, key)
        if isinstance(current, PretrainedConfig) and isinstance(value, dict):
            _override(current, value, f"{name}.{key}")
        else:
            setattr(config, key, value)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout (and router jitter) of a built model to 0, so that train and eval mode agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_dropout_attributes(module)


def _zero_dropout_attributes(owner: PretrainedConfig | nn.Module) -> None:
    for key, value in list(vars(owner).items()):
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(owner, key, 0.0)


def resolve_attn_implementation(name: str, dtype: str, model_class: type | None = None) -> str | None:
    """The flag for transformers. "auto" is flash_attention_2 if usable, else None, and transformers chooses."""
    if name not in ATTN_IMPLEMENTATIONS:
        raise ModelLoadError(f"--attn_implementation {name!r} is not one of {', '.join(ATTN_IMPLEMENTATIONS)}")
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)} (fp16 is not supported: use --bf16)")
    if name in ("eager", "sdpa"):
        return name
    obstacles = {
        "there is no CUDA device": not torch.cuda.is_available(),
        "the flash-attn package (2.3.3 or newer) is not installed": not is_flash_attn_2_available(),
        "it needs --bf16": dtype != "bf16",
        f"{getattr(model_class, '__name__', None)} does not support it": not getattr(
            model_class, "_supports_flash_attn", name == "flash_attention_2"
        ),
    }
    reasons = [reason for reason, holds in obstacles.items() if holds]
    if not reasons:
        return "flash_attention_2"
    if name == "auto":
        return None
    raise ModelLoadError(
        f"--attn_implementation flash_attention_2 (--flash_attn) cannot be used: {'; '.join(reasons)}. "
        "Set --attn_implementation sdpa."
    )


class _Zero3LoadConfig:
    """Replaces ``transformers.integrations.HfDeepSpeedConfig``, which needs accelerate for these two attributes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _loading(
    options: LoadOptions, config: PretrainedConfig, classes: Any, path: str, flag: str
) -> Iterator[tuple[_Zero3LoadConfig | None, dict[str, Any]]]:
    """While loading, errors name the flag, and transformers is quiet and knows whether the model is sharded."""
    attention = resolve_attn_implementation(options.attn_implementation, options.dtype, classes.get(type(config), None))
    zero3 = None if options.load_in_4bit else _zero3_config(options.ds_config, options.dtype)
    if zero3 is None:
        hf_deepspeed.unset_hf_deepspeed_config()
    else:
        hf_deepspeed.set_hf_deepspeed_config(zero3)
    kwargs = {"dtype": DTYPES[options.dtype], "attn_implementation": attention}
    kwargs["trust_remote_code"] = options.trust_remote_code
    # No load report and no progress bar: missing weights are checked here, and errors say more than a table.
    level, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with _errors_name(path, flag):
            yield zero3, kwargs
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()


def _zero3_config(ds_config: dict[str, Any] | None, dtype: str) -> _Zero3LoadConfig | None:
    if (ds_config or {}).get("zero_optimization", {}).get("stage") != 3:
        return None
    if not torch.distributed.is_initialized():
        raise ModelLoadError("loading under ZeRO stage 3 needs strategy.setup_distributed() first")
    bf16 = bool(ds_config.get("bf16", {}).get("enabled"))
    if bf16 != (dtype == "bf16"):
        raise ModelLoadError(f"the ds_config has bf16 {'on' if bf16 else 'off'}, but the model is loaded as {dtype}")
    return _Zero3LoadConfig(ds_config)


def _from_scratch(auto_class: Any, config: PretrainedConfig, seed: int, kwargs: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto_class.from_config(config, **kwargs)


def _check_missing(missing: Collection[str], path: str, flag: str) -> None:
    if missing:
        names = sorted(missing)
        raise ModelLoadError(
            f"{flag} {path}: {len(names)} weights are missing from the checkpoint or of another shape "
            f"({', '.join(names[:3])}, …). It is incomplete or of another kind than this model; "
            "nothing is filled in at random"
        )


def _finish(model: PreTrainedModel, zero3: _Zero3LoadConfig | None, load_in_4bit: bool) -> PreTrainedModel:
    disable_dropout(model)
    if load_in_4bit:
        quantise(model, head_names(model))
    model.zero3_load_config = zero3  # keeps transformers' weak reference alive
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# heads

# Names of other people's heads, to tell "no head yet" from "a head under another name".
_HEAD_LIKE = re.compile(r"(^|[._])(v_head|value_head|score|reward_head|regression_head|classifier|summary)[._]")


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer that makes the score."""
    heads = [
        (name, child)
        for name, child in model.named_children()
        if name != model.base_model_prefix and isinstance(child, nn.Linear)
    ]
    if len(heads) != 1:
        raise ModelLoadError(
            f"{type(model).__name__} has {len(heads)} linear layers beside its base model; a critic or reward model "
            "needs exactly one (as in Llama, Qwen2, GPT-2)"
        )
    return heads[0]


def head_names(model: PreTrainedModel) -> set[str]:
    """Names of a causal LM's output head, or of the value head."""
    if not model.can_generate():
        return {value_head(model)[0]}
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is head}


@torch.no_grad()
def _set_value_head(model: PreTrainedModel, weight: Tensor | None, *, seed: int) -> None:
    """Set the head to ``weight`` (1, hidden), or to N(0, 1/(hidden + 1)) for None; a bias becomes 0."""
    _, head = value_head(model)
    if weight is None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, head.in_features, generator=generator) / math.sqrt(head.in_features + 1)
    with _gathered(list(head.parameters())):
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


@contextmanager
def _gathered(params: list[nn.Parameter]) -> Iterator[None]:
    """Full parameters inside the block, keeping rank 0's changes; does nothing unless they are ZeRO-3 shards."""
    if not any(hasattr(param, "ds_id") for param in params):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        yield


def _head_from_checkpoint(path: str, prefix: str, kind: str, flag: str) -> Tensor | None:
    """The head's weight (1, hidden); None for a critic whose checkpoint has none."""
    files = _checkpoint_files(path)
    ends_with = re.compile(rf"(^|\.){re.escape(prefix)}\.(weight|bias)$")
    found = {name: match[2] for name in files if (match := ends_with.search(name))}
    if "bias" in found.values():
        raise ModelLoadError(f"{flag} {path}: the head {prefix} has a bias, which value heads here do not have")
    if not found:
        others = sorted(name for name in files if _HEAD_LIKE.search(name))
        hint = f" It has {', '.join(others[:3])}: set --value_head_prefix." if others else ""
        if kind == "reward":
            hint = hint or " Train it as a reward model first."
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight, so it is not a reward model.{hint}")
        if others:
            raise ModelLoadError(f"{flag} {path} has no {prefix}.weight.{hint} Or pass init_value_head=True.")
        logger.info("%s has no %s.weight; the critic's value head is new", path, prefix)
        return None
    if len(found) > 1:
        raise ModelLoadError(f"{flag} {path}: --value_head_prefix {prefix} fits several weights: {sorted(found)}")
    name = next(iter(found))
    with _opened(files[name]) as (_, read):
        weight = read(name)
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelLoadError(f"{flag} {path}: {name} has shape {tuple(weight.shape)}; one output (1, hidden) is needed")
    return weight


def _checkpoint_files(path: str) -> dict[str, str]:
    """Which file holds which tensor, {name: file}, for a local folder or a hub id."""
    names = ("model.safetensors", "pytorch_model.bin")
    for filename in names:
        index = _find(path, f"{filename}.index.json")
        if index is not None:
            weight_map: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            shards = {shard: _find(path, shard) for shard in set(weight_map.values())}
            missing = sorted(shard for shard, file in shards.items() if file is None)
            if missing:
                raise FileNotFoundError(f"{path}: the index names {', '.join(missing)}, which is not there")
            return {name: shards[shard] for name, shard in weight_map.items()}
        file = _find(path, filename)
        if file is not None:
            with _opened(file) as (tensors, _):
                return dict.fromkeys(tensors, file)
    raise FileNotFoundError(f"{path} has neither {' nor '.join(names)} (nor their .index.json)")


def _find(path: str, filename: str) -> str | None:
    return cached_file(path, filename, _raise_exceptions_for_missing_entries=False)


@contextmanager
def _opened(file: str) -> Iterator[tuple[Iterable[str], Any]]:
    """Names of a checkpoint file's tensors, and a function that reads one by name, on CPU."""
    if file.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as handle:
            yield handle.keys(), handle.get_tensor
    else:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield weights.keys(), weights.__getitem__


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def get_tokenizer(
    path: str,
    model: nn.Module | None = None,
    padding_side: Literal["left", "right"] = "left",
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--pretrain",
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has EOS and a pad token and fits the model, whose config gets the pad token.

    A missing pad token becomes EOS (masks come from lengths, never from the pad id). A missing BOS is fine, and so is a
    model with more embedding rows than the tokenizer has entries: sample with :func:`valid_vocab_size`.
    """
    path = _model_path(path, flag, needed_file=None)
    with _errors_name(path, flag):
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=use_fast, trust_remote_code=trust_remote_code)
    if not use_fast and tokenizer.is_fast:  # transformers 5 does not look at use_fast
        raise ModelLoadError(
            f"{flag} {path}: transformers has no Python tokenizer for it, only {type(tokenizer).__name__}: "
            "leave --disable_fast_tokenizer out"
        )
    tokenizer.padding_side = padding_side
    if tokenizer.eos_token_id is None:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer has no EOS token, so an answer could never end. "
            'Set "eos_token" in its tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        logger.info("the tokenizer of %s has no pad token; EOS %r pads", path, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    if model is not None:
        _fit_to_model(tokenizer, model, path, flag)
    return tokenizer


def valid_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's largest id plus one; higher logits belong to padding rows of the embedding."""
    return max(tokenizer.get_vocab().values()) + 1


def _fit_to_model(tokenizer: PreTrainedTokenizerBase, model: nn.Module, path: str, flag: str) -> None:
    hf_model: Any = model
    while not isinstance(hf_model, PreTrainedModel):  # Actor, Critic, RewardModel, engines around them
        hf_model = getattr(hf_model, "module", None) or getattr(hf_model, "model", None)
        if hf_model is None:
            raise TypeError(f"get_tokenizer needs a Hugging Face model or a wrapper of one, not {type(model).__name__}")
    rows, needed = hf_model.get_input_embeddings().num_embeddings, valid_vocab_size(tokenizer)
    if needed > rows:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed - 1}, but the model has only {rows} embedding rows. "
            "They do not belong together, or tokens were added without resizing: "
            "call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    hf_model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(hf_model, "generation_config", None) is not None:
        hf_model.generation_config.pad_token_id = tokenizer.pad_token_id


# ---------------------------------------------------------------------------------------------------------------------
# faster models


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's repeated blocks, by transformers' names for them; an error if it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelLoadError(f"--torch_compile: {type(model).__name__} does not say which of its modules are layers")
    return layers


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """torch.compile for each layer, in place, for rows of any length; names and weights stay."""
    # Layer by layer: compiles one block, and leaves out the head, which makes log probs chunk by chunk.
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend=backend)


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Liger's kernels (arXiv:2410.10989), except its loss, for norms, rotary embeddings and MLPs, in place."""
    missing = []
    if importlib.util.find_spec("liger_kernel") is None:
        missing.append("liger-kernel is not installed (pip install liger-kernel)")
    if not torch.cuda.is_available():
        missing.append("there is no CUDA device")
    if missing:
        raise ModelLoadError(f"--use_liger_kernel: {'; '.join(missing)}. Leave it out, or mend that.")
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def check_activation_offload(device: torch.device) -> None:
    """ModelLoadError on a CPU, where activations are in CPU memory anyway."""
    if device.type == "cpu":
        raise ModelLoadError(
            "--activation_offload moves activations from a GPU to CPU memory, and there is no GPU here: leave it out"
        )
