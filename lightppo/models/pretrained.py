"""A checkpoint of Hugging Face's before its model is built: path, config with its changes, dropout, tensors."""

from __future__ import annotations

import importlib.util
import json
import pickle
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import cached_file, find_adapter_config_file

from lightppo import tensor_file
from lightppo.config.options import OptionSet
from lightppo.data.folders import look
from lightppo.errors import ModelLoadError
from lightppo.suggestions import nearest
from lightppo.user_code import error_text, is_users_fault


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
    # changes of the config, by name or as JSON
    override_config: Mapping[str, Any] | str | None = None
    # comma-separated modules to import first (they may register model classes)
    external_lib: str | None = None
    seed: int = 42  # of random weights
    # hold the body's weights in 4 bits; every rank then loads the whole model
    load_in_4bit: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO stage 3 shards the weights while they load."""
        stage = (self.ds_config or {}).get("zero_optimization", {}).get("stage")
        return stage == 3 and not self.load_in_4bit


def read_config(path: str, flag: str, options: LoadOptions) -> tuple[str, PretrainedConfig]:
    """The path as transformers takes it, and the config with its changes, and no dropout but theirs."""
    path = model_path(path, flag)
    if options.external_lib:
        _import_modules(options.external_lib)
    with errors_name(path, flag):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    # transformers would add it to the weights, in which it may be already
    if not options.init_from_scratch and find_adapter_config_file(path) is not None:
        look(path, flag, "model")
        raise ModelLoadError(f"{flag} {path} has an adapter beside its weights")
    for part in (config, config.get_text_config()):
        zero_dropout(part)
    if options.override_config:
        override(config, options.override_config, path, flag)
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


def model_path(path: str, flag: str, kind: str = "model") -> str:
    """Expand ``~``. An error: what is no model or tokenizer, and a URL, which must be copied before."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return str(folder)
    if "://" in path:
        raise ModelLoadError(
            f"{flag} {path}: no such folder. Give a folder with a Hugging Face model, or a hub id"
        )
    look(path, flag, kind)
    return path


@contextmanager
def errors_name(path: str, flag: str, kind: str = "model") -> Iterator[None]:
    """Put the flag and the path in front of transformers' error messages, if :func:`.folders.look` has no better one."""
    try:
        yield
    except ModelLoadError:
        raise
    except pickle.UnpicklingError as error:  # transformers, too, reads with weights_only
        raise ModelLoadError(f"{flag} {tensor_file.explained(path, error)}") from error
    except (OSError, ValueError, RuntimeError, LookupError, EOFError, SafetensorError) as error:
        if kind == "tokenizer" or Path(path, "config.json").is_file():
            look(path, flag, kind)
        # One line: transformers may list pages of class names.
        reason = textwrap.shorten(str(error), 1000, placeholder=" …")
        raise ModelLoadError(f"{flag} {path} could not be loaded: {reason}") from error


def disable_dropout(model: nn.Module, kept: Container[float] = ()) -> None:
    """Set every dropout (and router jitter) of a built model to 0, so that train and eval mode agree.

    Rates in ``kept`` stay: the config that the model was built from has no others that are not a class's own.
    """
    for module in model.modules():
        zero_dropout(module, kept)


def dropout_rates(config: PretrainedConfig) -> list[float]:
    """Rates of dropout (and router jitter) that an option has set: those of the checkpoint are 0."""
    parts = (vars(config), vars(config.get_text_config()))
    return [
        value
        for part in parts
        for name, value in part.items()
        if is_dropout(name) and isinstance(value, float)
    ]


def own_dropout(path: str, how: LoadOptions) -> list[dict[str, float]]:
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


def zero_dropout(owner: PretrainedConfig | nn.Module, kept: Container[float] = ()) -> None:
    # PhiMoE's choice of experts depends on this number, which is no noise there; elsewhere only configs have it
    is_threshold = isinstance(owner, nn.Module) or owner.model_type == "phimoe"
    for key, value in list(vars(owner).items()):
        if key == "router_jitter_noise" and is_threshold:
            continue
        is_rate = is_dropout(key) or (key == "p" and isinstance(owner, nn.Dropout))
        if is_rate and isinstance(value, float) and value not in kept:
            setattr(owner, key, 0.0)


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


def override(config: PretrainedConfig, changes: dict[str, Any] | str, path: str, flag: str) -> None:
    """Set attributes, which are given by name or as JSON; ``flag`` names the model."""
    values = json.loads(changes) if isinstance(changes, str) else changes
    _override(config, values, "--override_config")
    if any(name.startswith("rope_") for name in values):
        with errors_name(path, f"--override_config of {flag}"):
            config.standardize_rope_params()
            config.validate_rope()


# -- tensors ----------------------------------------------------------------------------------------------------------


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


def loading_options(config: OptionSet) -> dict[str, Any]:
    """Return how all models but reward models are loaded."""
    asked = config.model
    flat = config.flat()
    # The reference too, so that it is what the actor without adapters would be; scores of reward models stay exact.
    changes = {name: flat[name] for name in ("load_in_4bit", "override_config") if name in flat}
    return changes | {
        "attn_implementation": asked.attn_implementation,
        "trust_remote_code": asked.trust_remote_code,
        "external_lib": asked.external_lib,
        "seed": config.strategy.seed,
        "init_from_scratch": asked.init_from_scratch,
    }
