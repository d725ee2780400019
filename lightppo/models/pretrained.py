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
        """Tell whether ZeRO stage 3 shards the weights while they load."""
        stage = (self.ds_config or {}).get("zero_optimization", {}).get("stage")
        return stage == 3 and not self.load_in_4bit


def read_config(path: str, flag: str, options: LoadOptions) -> tuple[str, PretrainedConfig]:
    """Return the path as transformers takes it, and the config with its changes, and no dropout but theirs."""
    path = model_path(path, flag)
    if options.external_lib:
        _import_modules(options.external_lib)
    with errors_name(path, flag):
        config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    # transformers would add it to the weights, in which it may be already
    if not options.init_from_scratch and find_adapter_config_file(path) is not None:
        look(path, flag, "model")
        raise ModelLoadError(f"{flag} {path} has an adapter beside its weights")
    for config_part in (config, config.get_text_config()):
        zero_dropout(config_part)
    if options.override_config:
        override(config, options.override_config, path, flag)
    return path, config


def _import_modules(module_names: str) -> None:
    for module_name in filter(
        None, (listed_name.strip() for listed_name in module_names.split(","))
    ):
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"--external_lib {module_name}: {error}: install it, or set PYTHONPATH"
            ) from error
        except BaseException as error:
            if not is_users_fault(error):
                raise
            raise ModelLoadError(f"--external_lib {module_name}: {error_text(error)}") from error


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


def disable_dropout(model: nn.Module, allowed_rates: Container[float] = ()) -> None:
    """Set every dropout (and router jitter) of a built model to 0, so that train and eval mode agree.

    Rates in ``allowed_rates`` stay: the config that the model was built from has no others that are not a class's own.
    """
    for module in model.modules():
        zero_dropout(module, allowed_rates)


def dropout_rates(config: PretrainedConfig) -> list[dict[str, float]]:
    """Return the rates of dropout (and router jitter) in a config, and in that of its text model."""
    return [
        {
            name: rate
            for name, rate in vars(config_part).items()
            if is_dropout(name) and isinstance(rate, float)
        }
        for config_part in (config, config.get_text_config())
    ]


def is_dropout(name: str) -> bool:
    """Tell whether an entry of a config is a rate of dropout, or of a router's jitter."""
    return "drop" in name or "jitter" in name


def zero_dropout(owner: PretrainedConfig | nn.Module, allowed_rates: Container[float] = ()) -> None:
    # PhiMoE's choice of experts depends on this number, which is no noise there; elsewhere only configs have it
    is_threshold = isinstance(owner, nn.Module) or owner.model_type == "phimoe"
    for attribute, value in list(vars(owner).items()):
        if attribute == "router_jitter_noise" and is_threshold:
            continue
        is_rate = is_dropout(attribute) or (attribute == "p" and isinstance(owner, nn.Dropout))
        if is_rate and isinstance(value, float) and value not in allowed_rates:
            setattr(owner, attribute, 0.0)


def _override(config: PretrainedConfig, changes: dict[str, Any], option_name: str) -> None:
    for entry, value in _with_rope(config, changes, option_name).items():
        if not hasattr(config, entry):
            hint = nearest(entry, config.to_dict())
            raise ModelLoadError(
                f"{option_name}: the config of {config.model_type} has no {entry!r}{hint}"
            )
        current = getattr(config, entry)
        if isinstance(current, PretrainedConfig) and isinstance(value, dict):
            _override(current, value, f"{option_name}.{entry}")
        else:
            setattr(config, entry, value)


def _with_rope(
    config: PretrainedConfig, changes: dict[str, Any], option_name: str
) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling`` as in transformers 5: in ``rope_parameters``, whose rest stays."""
    current_parameters = getattr(config, "rope_parameters", None)
    other_changes = dict(changes)
    if not isinstance(current_parameters, dict):
        return other_changes
    new_parameters = {}
    if "rope_theta" in other_changes:
        new_parameters["rope_theta"] = other_changes.pop("rope_theta")
    rope_scaling = dict(other_changes.pop("rope_scaling", None) or {})
    if "type" in rope_scaling:
        rope_scaling["rope_type"] = rope_scaling.pop("type")
    new_parameters |= rope_scaling
    new_parameters |= other_changes.pop("rope_parameters", None) or {}
    layer_kinds = [entry for entry, value in current_parameters.items() if isinstance(value, dict)]
    if layer_kinds and not new_parameters.keys() <= set(layer_kinds):
        raise ModelLoadError(
            f"{option_name}: give rope_parameters for each kind of layer: {', '.join(layer_kinds)}"
        )
    if new_parameters:
        for kind in new_parameters.keys() & set(layer_kinds):
            new_parameters[kind] = current_parameters[kind] | new_parameters[kind]
        other_changes["rope_parameters"] = current_parameters | new_parameters
    return other_changes


def override(config: PretrainedConfig, changes: dict[str, Any] | str, path: str, flag: str) -> None:
    """Set attributes, which are given by name or as JSON; ``flag`` names the model."""
    if isinstance(changes, str):
        changes = json.loads(changes)
    _override(config, changes, "--override_config")
    if any(name.startswith("rope_") for name in changes):
        with errors_name(path, f"--override_config of {flag}"):
            config.standardize_rope_params()
            config.validate_rope()


# -- tensors ----------------------------------------------------------------------------------------------------------


def checkpoint_files(path: str) -> dict[str, str]:
    """Return which file of a local folder or a hub id holds which tensor, {name: file}."""
    find_file = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    for filename in ("model.safetensors", "pytorch_model.bin"):
        if (index_file := find_file(f"{filename}.index.json")) is not None:
            return json.loads(Path(index_file).read_text(encoding="utf-8"))["weight_map"]
        if (weights_file := find_file(filename)) is not None:
            return dict.fromkeys(open_tensors(weights_file)[0], filename)
    return {}


def open_tensors(weights_file: str) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    """Return the names of a checkpoint file's tensors, and a function that reads one by name, on the CPU."""
    if weights_file.endswith(".safetensors"):
        open_file = safe_open(weights_file, framework="pt")
        return open_file.keys(), open_file.get_tensor
    weights = tensor_file.read(weights_file, mapped=True)
    return weights.keys(), weights.__getitem__


def loading_options(config: OptionSet) -> dict[str, Any]:
    """Return how all models but reward models are loaded."""
    model_options = config.model
    flat_options = config.flat()
    # The reference too, so that it is what the actor without adapters would be; scores of reward models stay exact.
    changes = {
        name: flat_options[name]
        for name in ("load_in_4bit", "override_config")
        if name in flat_options
    }
    return changes | {
        "attn_implementation": model_options.attn_implementation,
        "trust_remote_code": model_options.trust_remote_code,
        "external_lib": model_options.external_lib,
        "seed": config.strategy.seed,
        "init_from_scratch": model_options.init_from_scratch,
    }
