"""LoRA: adapters inside a Hugging Face model (arXiv:2106.09685), the reference without them, merged weights.

Uses peft's private ``_disable_adapters``: its public switch also freezes adapters, which ZeRO has already seen.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightppo import tensor_file
from lightppo.errors import ModelLoadError
from lightppo.models.adapters.quantised import (
    check_bitsandbytes,
    dense_weight,
    quantised_layers,
    replaceable_layers,
)
from lightppo.models.heads import head_names, value_head
from lightppo.models.loading import load_causal_lm, load_config, load_sequence_classifier
from lightppo.models.multimodal.parts import is_of_tower
from lightppo.models.pretrained import open_tensors
from lightppo.version import too_old
from lightppo.zero3 import find_whole

logger = logging.getLogger(__name__)

_NAME = "default"  # peft's name for the only adapter
_BASE = ".base_layer."  # between the names of a layer with an adapter and of its frozen weight
_WITHIN = re.compile(r"\.(base_layer|lora_[AB]\..+)$")
_PEFT_PREFIX = "base_model.model."  # starts every name in an adapter's file


@dataclass(frozen=True)
class LoraOptions:
    """Shape and place of the adapters: a layer's output is W x + alpha / r · B A x."""

    rank: int  # r, of A (r, in) and B (out, r)
    alpha: float = 16.0
    # Dropout of x before A, in training. Its noise makes log probs, and so ratios, differ.
    dropout: float = 0.0
    # The ends of the names of linear layers; empty or all-linear: all of them but the head.
    target_modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Any) -> LoraOptions:
        """Return those of the section ``adapter`` of a config."""
        return cls(
            options.lora_rank, options.lora_alpha, options.lora_dropout, options.target_modules
        )


def check_peft() -> None:
    """Raise ModelLoadError if peft is not installed; import nothing."""
    if importlib.util.find_spec("peft") is None:
        raise ModelLoadError(
            "--lora_rank and adapters need peft: pip install 'lightppo[lora]', or pip install peft"
        )
    if outdated := too_old("peft"):
        raise ModelLoadError(f"--lora_rank and adapters: {outdated[0]}")


def add_adapters(
    model: Any,
    options: LoraOptions,
    seed: int = 42,
) -> None:
    """Freeze an actor or critic and put a trained adapter beside each target layer; a value head trains too.

    Call it before ``strategy.create_optimizer`` and ``prepare``; weights may be ZeRO-3 shards. B is 0, so the model's
    results stay the same at first; A depends only on ``seed``, so it is the same on all ranks.
    """
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

    hf_model = model.hf_model
    if getattr(hf_model, "lora", None) is not None:
        raise ModelLoadError(f"this {type(model).__name__} has adapters already")
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=target_layers(hf_model, options.target_modules),
        # GPT-2's layers: transposed weights
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in hf_model.modules()),
        task_type="CAUSAL_LM" if hf_model.can_generate() else "SEQ_CLS",
        base_model_name_or_path=hf_model.config.name_or_path or None,
    )
    target_ends = tuple(f".{target}" for target in config.target_modules)
    linear_layers = replaceable_layers(hf_model)
    expected_layers = {name for name in linear_layers if f".{name}".endswith(target_ends)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, hf_model, adapter_name=_NAME)
        except ValueError as error:
            raise ModelLoadError(f"--target_modules: peft refuses: {error}") from error
    if misplaced_layers := sorted(_layers(hf_model).keys() ^ expected_layers):
        raise ModelLoadError(
            f"--target_modules: peft has not put the adapters where it was told to, such as {misplaced_layers[0]}"
        )
    # From here on the config is what the adapter's file says: it is about the dense model, and for use.
    config.inference_mode = True
    config.fan_in_fan_out |= any(layer.transposed for layer in quantised_layers(hf_model).values())
    if not hf_model.can_generate():
        head_name, head = value_head(hf_model)
        head.requires_grad_(True)
        config.modules_to_save = [head_name]
    hf_model.lora = LoraExport(config, hf_model)  # the strategy looks for it here when it saves
    if hasattr(model, "as_loaded"):  # an Actor, whose module makes adapters by this one
        model.as_loaded = AdaptersOff(model)


def chosen_layers(model: PreTrainedModel, target_modules: tuple[str, ...] = ()) -> set[str]:
    """Return the names of the layers that get an adapter."""
    head_layers = head_names(model)
    linear_layers = replaceable_layers(model)
    ends = set(map(_end, linear_layers))
    expert_ends = {name_end for name_end in ends if goes_to_experts(model, name_end)}
    unknown_ends: list[str] = []
    if target_modules in ((), ("all-linear",)):
        chosen_names = {
            name
            for name in linear_layers
            if name not in head_layers and _end(name) not in expert_ends
        }
        if expert_ends:
            logger.warning(
                "--lora_rank: %s get no adapter: peft would put it on the experts, which are held together",
                ", ".join(sorted(expert_ends)),
            )
    else:
        layers_by_end = {
            name_end: {name for name in linear_layers if f".{name}".endswith(f".{name_end}")}
            for name_end in target_modules
        }
        chosen_names = set().union(*layers_by_end.values())
        # The critic takes the same options, but has no lm_head.
        unknown_ends = [
            name_end
            for name_end in target_modules
            if not layers_by_end[name_end] and (name_end != "lm_head" or model.can_generate())
        ]
    if unknown_ends or not chosen_names:
        possible_ends = ", ".join(sorted(ends - expert_ends))
        raise ModelLoadError(
            f"--target_modules {' '.join(unknown_ends or target_modules) or 'all-linear'}: "
            f"{type(model).__name__} has none that can have an adapter; "
            f"its linear layers that can are {possible_ends or 'none'}"
        )
    for name in sorted(head_layers & chosen_names):
        if not model.can_generate():
            raise ModelLoadError(
                f"--target_modules {name}: the value head trains as a whole; leave it out"
            )
        if model.config.get_text_config().tie_word_embeddings:
            raise ModelLoadError(
                f"--target_modules {name}: it is the embedding, with an adapter it could not be merged"
            )
    if refused_ends := sorted(expert_ends & set(map(_end, chosen_names))):
        raise ModelLoadError(
            f"--target_modules {' '.join(refused_ends)}: peft would put these adapters of {type(model).__name__} on the "
            "experts, which are held together: leave them out"
        )
    return chosen_names


def goes_to_experts(model: PreTrainedModel, layer_end: str) -> bool:
    """Tell whether peft would put the adapter of a layer of this name on experts that are held together instead.

    It does so since transformers 5 in families like DeepSeek-V3, so that shared experts and dense layers would have
    none, and the experts one that no merge here knows.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # of a peft that does not
        return False
    config = LoraConfig(target_modules=[layer_end])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # it asks for the other parts of the experts
        return True
    return layer_end not in config.target_modules


def target_layers(model: PreTrainedModel, target_modules: tuple[str, ...] = ()) -> list[str]:
    """Return :func:`chosen_layers` for peft: ends of their names if these fit no other module, else whole names."""
    chosen_names = chosen_layers(model, target_modules)
    name_ends = set(map(_end, chosen_names))
    matching_names = {name for name, _ in model.named_modules() if _end(name) in name_ends}
    return sorted(name_ends if matching_names == chosen_names else chosen_names)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside; gradients and parameters are not touched."""
    adapted_layers = list(_layers(model).values())
    previous_states = [layer._disable_adapters for layer in adapted_layers]
    for layer in adapted_layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, state in zip(adapted_layers, previous_states):
            layer._disable_adapters = state


class AdaptersOff:
    """The reference of a run with LoRA: the actor without its adapters, called like a reference :class:`Actor`.

    Its forwards have no gradient, and may run between the actor's forward and backward passes.
    """

    def __init__(self, actor: Any) -> None:
        if not _layers(actor.hf_model):
            raise ValueError("the actor has no adapters, so it cannot be its own reference")
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        if name in ("temperature", "valid_vocab_size", "layout"):
            return getattr(self.actor, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Score as :meth:`Actor.forward` does."""
        with torch.no_grad(), adapters_off(self.actor.hf_model):
            return self.actor(*arguments, **options)

    def score_actions(self, *arguments: Any, **options: Any) -> Any:
        """Score as :meth:`Actor.score_actions` does."""
        with torch.no_grad(), adapters_off(self.actor.hf_model):
            return self.actor.score_actions(*arguments, **options)

    def eval(self) -> AdaptersOff:
        """Do nothing: the frozen layers behave the same in both modes."""
        return self


def merge(
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    transposed: bool = False,
) -> Tensor:
    """Return W + scaling · B A, summed in float32, in W's dtype; ``transposed``: W is (in, out) (GPT-2's Conv1D)."""
    weight_change = scaling * (lora_b.float() @ lora_a.float())
    return (weight.float() + (weight_change.T if transposed else weight_change)).to(weight.dtype)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds adapters alone."""
    folder = Path(path).expanduser()
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


@torch.no_grad()
def load_merged(
    adapter: str | os.PathLike[str],
    base: str | None = None,
    flag: str = "--base",
    **loading: Any,
) -> PreTrainedModel:
    """Load the base model of an adapter with the adapter in its weights: summed in float32, in the weights' dtype.

    ``base`` None: what the adapter's config names. Any adapter that peft can merge. ``loading``: how the base is
    loaded, fields of :class:`lightppo.models.pretrained.LoadOptions`.
    """
    check_peft()
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(adapter))
    if (base := base or config.base_model_name_or_path) is None:
        raise ModelLoadError(
            f"{adapter}: adapter_config.json does not name the base model: set {flag}"
        )
    options = {"flag": flag, **loading}
    if getattr(load_config(base, **options), "quantization_config", None) is not None:
        raise ModelLoadError(
            f"{flag} {base} is quantised, and cannot hold a merged adapter: name the dense model"
        )
    if config.task_type == "SEQ_CLS":
        load_base = partial(load_sequence_classifier, kind="critic")
    else:
        load_base = load_causal_lm
    model = load_base(base, dtype="auto", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        try:
            peft_model = PeftModel.from_pretrained(
                model, str(adapter), key_mapping=_names_inside(model, adapter)
            )
        except pickle.UnpicklingError as error:  # peft, too, reads with weights_only
            raise ModelLoadError(tensor_file.explained(adapter, error)) from error
        except (UserWarning, RuntimeError, ValueError) as error:
            reason = textwrap.shorten(str(error), 500, placeholder=" …")
            raise ModelLoadError(f"{adapter} does not fit {flag} {base}: {reason}") from error
    adapted_layers = [
        module
        for module in peft_model.modules()
        if hasattr(module, "lora_A") and hasattr(module, "merge")
    ]
    _untie(model, adapted_layers, f"{adapter} changes")
    for layer in adapted_layers:
        base_layer = layer.get_base_layer()
        types = {name: weight.dtype for name, weight in base_layer.named_parameters()}
        layer.float().merge(safe_merge=True)
        for name, dtype in types.items():
            weight = base_layer.get_parameter(name)
            weight.data = weight.data.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged = peft_model.merge_and_unload()
    head = merged.get_output_embeddings()
    # a head of `modules_to_save`: peft 0.18 leaves the config as it was
    if head is not None and head.weight is not merged.get_input_embeddings().weight:
        _say_untied(merged)
    return merged


def _untie(model: PreTrainedModel, adapted_layers: list[Any], message_start: str) -> None:
    """Give layers with an adapter copies of weights that another layer uses, too, as a tied head and embedding do."""
    weight_uses = Counter(
        weight for module in model.modules() for weight in module.parameters(recurse=False)
    )
    shared_weights = [
        (layer.get_base_layer(), name)
        for layer in adapted_layers
        for name, weight in layer.get_base_layer().named_parameters(recurse=False)
        if weight_uses[weight] > 1
    ]
    if shared_weights and find_whole(model) is not None:
        raise ModelLoadError(
            f"{message_start} a tied head or embedding, and this checkpoint with towers has one weight for both: "
            "merge it by peft"
        )
    for module, name in shared_weights:
        setattr(module, name, nn.Parameter(module.get_parameter(name).detach().clone()))
    if shared_weights:
        _say_untied(model)


def _say_untied(model: PreTrainedModel) -> None:
    """Write into its config that a model's head and embedding are two weights."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def _names_inside(model: PreTrainedModel, adapter: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return peft's key mapping for the language model of a checkpoint with towers; None: names stay as they are."""
    if (whole_checkpoint := find_whole(model)) is None:
        return None
    weight_files = [
        file for kind in ("*.safetensors", "*.bin") for file in Path(adapter).glob(kind)
    ]
    tower_tensors = [
        name for file in weight_files for name in open_tensors(str(file))[0] if is_of_tower(name)
    ]
    if tower_tensors:
        raise ModelLoadError(
            f"{adapter} changes an image or audio tower ({len(tower_tensors)} tensors, such as {tower_tensors[0]}), "
            "which stays as it is here: merge it by peft"
        )
    return whole_checkpoint.adapter_names


def layer_of(name: str) -> str:
    """Return the layer of a parameter: ``model.layers.0.q_proj.lora_A.default.weight`` → ``model.layers.0.q_proj``."""
    return _WITHIN.sub("", name.rpartition(".")[0])


def is_adapter_weight(name: str) -> bool:
    """Tell whether a parameter is a matrix of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


class LoraExport:
    """Merges and writes a model's adapters (``hf_model.lora``); the frozen weights never change, so nothing drifts."""

    layer_of = staticmethod(layer_of)
    is_adapter_weight = staticmethod(is_adapter_weight)

    def __init__(self, config: Any, model: nn.Module) -> None:
        adapted_layers = _layers(model)
        self.config = config
        self.scaling = {name: layer.scaling[_NAME] for name, layer in adapted_layers.items()}
        self.in_4bit = quantised_layers(model)
        self.transposed = {name for name, layer in adapted_layers.items() if layer.fan_in_fan_out}
        packed_names = {name for name, layer in self.in_4bit.items() if layer.transposed}
        self.transposed |= {name.removesuffix(_BASE[:-1]) for name in packed_names}

    def __str__(self) -> str:
        target_names = ", ".join(sorted(self.config.target_modules))
        frozen_note = ", beside weights in 4 bits" if self.in_4bit else ""
        return f"LoRA adapters of rank {self.config.r}, alpha {self.config.lora_alpha:g}, on {target_names}{frozen_note}"

    def merged(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights as in the model's checkpoint, from all layers or some complete ones (:meth:`layer_of`)."""
        merged_weights = {}
        for weight_name, tensor in self._dense(state_dict):
            layer, _, parameter_kind = weight_name.rpartition(_BASE)
            if layer and parameter_kind == "weight":
                lora_a, lora_b = (
                    state_dict[f"{layer}.lora_{side}.{_NAME}.weight"] for side in "AB"
                )
                scaling = self.scaling[layer]
                tensor = merge(tensor, lora_a, lora_b, scaling, layer in self.transposed)
            merged_weights[weight_name.replace(_BASE, ".")] = tensor
        return merged_weights

    def frozen(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights as :meth:`merged` does, without the adapters: what they were trained beside."""
        return {
            weight_name.replace(_BASE, "."): tensor
            for weight_name, tensor in self._dense(state_dict)
        }

    def _dense(self, state_dict: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen weights by their names in memory, none in 4 bits."""
        for weight_name, tensor in state_dict.items():
            if is_adapter_weight(weight_name):
                continue
            layer_name, _, parameter_kind = weight_name.rpartition(".")
            if layer_name in self.in_4bit and parameter_kind == "weight":
                tensor = dense_weight(self.in_4bit[layer_name], tensor)
            yield weight_name, tensor

    def alone(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters' matrices, named as in their file but for peft's prefix: ``….q_proj.lora_A.weight``."""
        return {
            weight_name.replace(f".{_NAME}.", "."): tensor
            for weight_name, tensor in state_dict.items()
            if is_adapter_weight(weight_name)
        }

    def description(self) -> dict[str, Any]:
        """Return the content of the adapter's ``adapter_config.json``."""
        peft_options = self.config.to_dict()
        return {
            option_name: sorted(value) if isinstance(value, set) else value
            for option_name, value in peft_options.items()
        }

    def write(self, state_dict: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapter alone, for ``PeftModel.from_pretrained``."""
        from safetensors.torch import save_file

        head_prefixes = tuple(f"{name}." for name in self.config.modules_to_save or ())
        saved_tensors = self.alone(state_dict)
        saved_tensors |= {
            name: tensor for name, tensor in state_dict.items() if name.startswith(head_prefixes)
        }
        weights = {
            _PEFT_PREFIX + name: tensor.contiguous() for name, tensor in saved_tensors.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return layers with an adapter, by name."""
    return {
        layer_name: module
        for layer_name, module in model.named_modules()
        if hasattr(module, "_disable_adapters")
    }


def check_packages(building: Any) -> None:
    """Raise ModelLoadError on a rank without the packages for adapters and weights in 4 bits."""
    check_peft()
    if building.config.adapter.load_in_4bit:
        check_bitsandbytes()
