"""The language model of a checkpoint with towers trains alone; an export is the whole checkpoint with its new weights.

The towers are never loaded: they stay in the files of the checkpoint and go from there into exports, byte for byte.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from lightppo.errors import ModelLoadError
from lightppo.files import MANIFEST
from lightppo.models.batches import cache_argument
from lightppo.models.heads import head_names
from lightppo.models.multimodal.parts import listed, parts_of
from lightppo.models.pretrained import checkpoint_files, is_dropout, open_tensors
from lightppo.zero3 import is_sharded

# a language model in transformers' models with towers, and in those of transformers 4
_INSIDE = (r"^model\.language_model\.", r"^language_model\.model\.")
# files of a processor, which a hub id may not have brought yet
_PROCESSOR = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip
_NO_COPY = re.compile(
    r"\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack)$|\.index\.json$|^README|^\."
)


class Whole:
    """The language model of a checkpoint with more parts, and what keeps the others; ``model.whole`` of that model."""

    config: PretrainedConfig  # of the language model alone
    has_class: bool  # transformers has one for it, which other engines may know
    options: dict[str, Any]  # further ones of from_pretrained
    architecture: str | None  # the class that the whole checkpoint is of
    auto_class: str  # what reads it
    # For adapters: patterns of names in the whole model → names in the language model alone.
    adapter_names: dict[str, str]
    digest: str  # of all that stays as it came; checkpoints hold no towers, only this to compare them by

    def __init__(
        self, auto_class: Any, path: str, config: PretrainedConfig, display_name: str
    ) -> None:
        text_config = copy.deepcopy(config.get_text_config())
        self.has_class = type(text_config) is not type(config) and know(text_config)
        obstacles = {
            "it brings code of its own": hasattr(config, "auto_map"),
            "it is quantised": getattr(config, "quantization_config", None) is not None,
            f"transformers has no {auto_class.__name__} of its language model alone, {text_config.model_type}": (
                type(text_config) is type(config)
                or type(text_config) not in auto_class._model_mapping
            ),
        }
        for obstacle in (reason for reason, applies in obstacles.items() if applies):
            raise ModelLoadError(
                f"{display_name} has an image or audio tower and cannot be trained: {obstacle}"
            )
        self.path = path
        self.name = display_name
        self.files = checkpoint_files(path)
        self.parts = parts_of(self.files, display_name)
        if self.parts.head is None and config.tie_word_embeddings:
            text_config.tie_word_embeddings = True
        text_config.name_or_path = path
        text_config.dtype = text_config.dtype or config.dtype
        if auto_class is AutoModelForSequenceClassification:
            text_config.num_labels = config.num_labels
            # where older transformers read it
            config.get_text_config().num_labels = config.num_labels
        self.config = text_config
        self.requested = config.to_dict()
        self.as_it_came = AutoConfig.from_pretrained(path)
        model_class = auto_class._model_mapping[type(text_config)]
        text_config.architectures = [model_class.__name__]
        self.base = model_class.base_model_prefix + "."
        self.options = {"key_mapping": self._renamed()}
        self.adapter_names = dict.fromkeys(_INSIDE, self.base)
        self.architecture, self.auto_class = _class_of(auto_class, config)

    def __deepcopy__(self, memo: Any) -> Whole:
        return self  # of files that nothing changes

    def _renamed(self) -> dict[str, str]:
        """Return transformers' key mapping, from names in the checkpoint to those of the language model alone."""
        key_mapping = {f"^{re.escape(self.parts.body)}": self.base}
        if self.parts.head:
            key_mapping[f"^{re.escape(self.parts.head)}lm_head"] = "lm_head"
        return {
            saved_prefix: model_prefix
            for saved_prefix, model_prefix in key_mapping.items()
            if saved_prefix != f"^{re.escape(model_prefix)}"
        }

    def name_of(self, name: str) -> str:
        """Return the name in the whole checkpoint of a weight of the language model alone."""
        if name.startswith(self.base):
            return self.parts.body + name.removeprefix(self.base)
        if not name.startswith("lm_head."):
            return name
        if self.parts.head is not None:
            return self.parts.head + name
        # A head that is the embedding, which vLLM wants by both names, stands beside the body.
        if f".{self.parts.body}".endswith(f".{self.base}"):
            return self.parts.body.removesuffix(self.base) + name
        return name

    # -- at the start --------------------------------------------------------------------------------------------------

    def belongs_to(self, model: PreTrainedModel) -> None:
        """Become ``model.whole``, and keep open what an export needs. Under ZeRO-3 collective.

        Raises:
            ModelLoadError: a weight is not the checkpoint's, or the checkpoint has some that the model lacks.
        """
        model._weight_conversions = self._conversions(model)
        file_names = sorted(set(self.files.values()))
        opened_files = {file: open_tensors(cached_file(self.path, file)) for file in file_names}
        # The files are mapped, so they stay readable when somebody removes them.
        self.read = {name: opened_files[file][1] for name, file in self.files.items()}
        self._compare(model)
        self.digest = self._tower_digest()
        self.beside = dict(_files_beside(self.path))
        if self.architecture is not None:  # else transformers has a classifier of the text alone
            model.whole = self

    def _conversions(self, model: PreTrainedModel) -> list[Any]:
        """Return conversions from memory to the checkpoint; none where it has each weight as it is held, such
        as all experts of a layer together."""
        self.tied = _names_of_tied(model)
        self.heads = set()
        if not model.can_generate():
            self.heads = {f"{head}.weight" for head in head_names(model)}
        untied_names = model.state_dict(keep_vars=True).keys() - self.heads - self.tied.keys()
        if all(self.name_of(name) in self.files for name in untied_names):
            return []
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        return [entry for entry in conversions if not isinstance(entry, PrefixChange)]

    def _compare(self, model: PreTrainedModel) -> None:
        """Compare each weight of the model with the one of its name in the checkpoint, in the model's type."""
        compared_names = set()
        for name, weight in _weights(model):
            checkpoint_name = self.name_of(name)
            # A value head is set later. A tied weight may have only one name in the checkpoint.
            if name in self.heads or (name in self.tied and checkpoint_name not in self.files):
                continue
            if checkpoint_name not in self.files:
                raise self._differs([name], "the checkpoint has no such weights")
            saved_weight = self.read[checkpoint_name](checkpoint_name)
            if not torch.equal(saved_weight.to(weight.dtype), weight.cpu()):
                raise self._differs([checkpoint_name], "the model has other values")
            compared_names.add(checkpoint_name)
        unread_names = self.parts.language - compared_names
        if not model.can_generate():  # heads are read elsewhere, or of another kind
            unread_names = {name for name in unread_names if name.startswith(self.parts.body)}
        if unread_names:
            raise self._differs(unread_names, "transformers does not load these weights")
        self.loaded = compared_names

    def _differs(self, names: Iterable[str], reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.name}: its language model cannot be told from its towers: {reason}: {listed(names)}"
        )

    def _tower_digest(self) -> str:
        """Return the SHA-256 of all that stays as it came: names, types, shapes and bytes."""
        digest = hashlib.sha256()
        for name in self.parts.kept:
            tensor = self.read[name](name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    # -- exports -------------------------------------------------------------------------------------------------------

    def write(self, model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
        """Write the checkpoint with ``tensors``, the language model's weights on the CPU by the names in memory.

        Raises:
            ModelLoadError: the files of the checkpoint have changed since the start.
        """
        if self._tower_digest() != self.digest:
            raise ModelLoadError(
                f"{self.name}: its towers have changed since the start, and an export would have others: put the files "
                "back as they were, and use `lightppo convert` on the last checkpoint"
            )
        trained_weights = revert_weight_conversion(model, tensors)
        for names in self.tied.values():  # a tied weight comes by one of its names
            given_names = [name for name in names if name in trained_weights]
            for name in names if given_names else ():
                trained_weights.setdefault(name, trained_weights[given_names[0]])
        checkpoint_weights = {
            self.name_of(name): tensor for name, tensor in trained_weights.items()
        }
        if missing_names := self.loaded - checkpoint_weights.keys():
            raise self._differs(missing_names, "the trained model has no such weights any more")
        _save(self._shards(checkpoint_weights), folder)
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        config_entries = self._new_config(next(iter(tensors.values())).dtype)
        (folder / "config.json").write_text(json.dumps(config_entries, indent=2) + "\n")

    def _shards(self, trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return tensors by file, as in the checkpoint; the last one has a value head that is new."""
        shards: dict[str, dict[str, Tensor]] = {}
        for name, file in sorted(self.files.items()):
            if name not in self.parts.language:
                shards.setdefault(file, {})[name] = self.read[name](name)
            elif name in trained:  # a classifier has no output head
                shards.setdefault(file, {})[name] = trained[name]
        last_shard = shards[max(shards)]
        last_shard.update({name: trained[name] for name in self.heads})
        return shards

    def _new_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return config.json with what ``--override_config`` has changed, and a type that loses no digits."""
        config_entries = json.loads(self.beside["config.json"])
        original_config = self.as_it_came
        _change(config_entries, original_config.to_dict(), self.requested)
        config_entries["architectures"] = [self.architecture]
        original_type = original_config.dtype
        if not isinstance(original_type, torch.dtype):
            original_type = dtype
        wide_type = torch.promote_types(original_type, dtype)
        if wide_type != original_type or original_config.dtype is None:
            config_entries.pop("torch_dtype", None)
            config_entries["dtype"] = str(wide_type).removeprefix("torch.")
        return config_entries


def _change(
    config_entries: dict[str, Any],
    original_entries: Mapping[str, Any],
    current_entries: Mapping[str, Any],
) -> None:
    """Enter what is no longer as before, but not that dropout is off: training alone wants that."""
    for name, value in current_entries.items():
        original_value = original_entries.get(name)
        values = (value, original_value, config_entries.get(name))
        if all(isinstance(each, dict) for each in values):
            _change(config_entries[name], original_value, value)
        elif value != original_value and not (value == 0.0 and is_dropout(name)):
            config_entries[name] = value


def _class_of(auto_class: Any, config: PretrainedConfig) -> tuple[str | None, str]:
    """Return the class of the whole checkpoint, or of a classifier around it, and what reads it."""
    model_type = config.model_type
    if auto_class is AutoModelForSequenceClassification:
        known_classes = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        return known_classes.get(model_type), auto_class.__name__
    reads_images = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto_name = "AutoModelForImageTextToText" if reads_images else "AutoModelForMultimodalLM"
    known_classes = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return next(iter(config.architectures or ()), known_classes.get(model_type)), auto_name


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights by their names in a checkpoint of this model, layer by layer. Under ZeRO-3 collective."""
    named_tensors = model.state_dict(keep_vars=True).items()
    for _, pairs in itertools.groupby(named_tensors, key=lambda pair: pair[0].rpartition(".")[0]):
        layer_tensors = dict(pairs)
        with _gathered(layer_tensors.values()):
            whole_tensors = {name: tensor.detach() for name, tensor in layer_tensors.items()}
            yield from revert_weight_conversion(model, whole_tensors).items()


def _gathered(tensors: Iterable[Tensor]) -> AbstractContextManager:
    sharded_tensors = [tensor for tensor in tensors if is_sharded(tensor)]
    if not sharded_tensors:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded_tensors)


def _names_of_tied(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return each name of a weight that has several → all of them."""
    names_by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in names_by_tensor.values() if len(names) > 1 for name in names}


def _files_beside(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield names and content of config, processor and what else is beside the weights."""
    folder = Path(path)
    if not folder.is_dir():  # a hub id
        for name in _PROCESSOR:
            cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        folder = Path(cached_file(path, "config.json")).parent
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != MANIFEST and not _NO_COPY.search(file.name):
            yield file.name, file.read_bytes()


def _save(shards: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """Write safetensors files, and their index if there are several."""
    from safetensors.torch import save_file

    shards_by_file = {
        name.replace("pytorch_model", "model").replace(".bin", ".safetensors"): shard
        for name, shard in shards.items()
    }
    weight_map: dict[str, str] = {}
    total_size = 0
    for name, shard in shards_by_file.items():
        # Tied weights are copied, because they may not share memory in a file.
        stored_addresses: set[int] = set()
        separate_tensors = {}
        for tensor_name, tensor in shard.items():
            tensor = tensor.contiguous()
            if tensor.data_ptr() in stored_addresses:
                tensor = tensor.clone()
            stored_addresses.add(tensor.data_ptr())
            separate_tensors[tensor_name] = tensor
            weight_map[tensor_name] = name
            total_size += tensor.nbytes
        save_file(separate_tensors, folder / name, metadata={"format": "pt"})
    if len(shards_by_file) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        index_text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(index_text)


# -- a text model that transformers has only inside a class with towers (Qwen2.5-VL, Qwen3-VL, GLM-4V) ----------------


def know(config: PretrainedConfig) -> bool:
    """Register a causal LM for the text model of this config; tell whether transformers has a class for it."""
    config_class = type(config)
    known_class = AutoModelForCausalLM._model_mapping.get(config_class, None)
    if known_class is None and config_class in MODEL_MAPPING:
        new_class = causal_class(MODEL_MAPPING[config_class], config_class)
        # exist_ok: transformers ignores what others register for its own configs
        AutoModelForCausalLM.register(config_class, new_class, exist_ok=True)
    return known_class is not None and known_class.__module__ != __name__


@cache
def causal_class(body_class: type[PreTrainedModel], kind: type[PretrainedConfig]) -> type:
    """Return a class of ``body_class`` and a head over its vocabulary, which may be the embedding."""
    # The base class says which attention and which layers the model has.
    family_class = next(base for base in body_class.__bases__ if issubclass(base, PreTrainedModel))

    class ForCausalLM(family_class, GenerationMixin):
        config_class = kind
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body_class(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.model.get_input_embeddings()

        def forward(
            self, *arguments: Any, logits_to_keep: int | Tensor = 0, **options: Any
        ) -> CausalLMOutputWithPast:
            """Run as transformers' classes do; no labels."""
            output = self.model(*arguments, **options)
            hidden = output.last_hidden_state  # (B, S, H)
            keeps_last = isinstance(logits_to_keep, int)
            kept_places = slice(-logits_to_keep, None) if keeps_last else logits_to_keep
            cache_name = cache_argument(self)
            return CausalLMOutputWithPast(
                logits=self.lm_head(hidden[:, kept_places]),
                hidden_states=output.get("hidden_states"),
                attentions=output.get("attentions"),
                **{cache_name: output.get(cache_name)},
            )

    # whoever asks what the model takes gets the body's parameters, as this version of transformers calls them
    body_signature = inspect.signature(body_class.forward)
    head_signature = inspect.signature(ForCausalLM.forward)
    parameters = body_signature.parameters | {
        "logits_to_keep": head_signature.parameters["logits_to_keep"]
    }
    ordered_parameters = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    ForCausalLM.forward.__signature__ = body_signature.replace(parameters=ordered_parameters)
    class_name = body_class.__name__.removesuffix("Model") + "ForCausalLM"
    ForCausalLM.__name__ = ForCausalLM.__qualname__ = class_name
    return ForCausalLM
