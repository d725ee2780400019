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

    def __init__(self, auto_class: Any, path: str, config: PretrainedConfig, name: str) -> None:
        text = copy.deepcopy(config.get_text_config())
        self.has_class = type(text) is not type(config) and know(text)
        obstacles = {
            "it brings code of its own": hasattr(config, "auto_map"),
            "it is quantised": getattr(config, "quantization_config", None) is not None,
            f"transformers has no {auto_class.__name__} of its language model alone, {text.model_type}": (
                type(text) is type(config) or type(text) not in auto_class._model_mapping
            ),
        }
        for obstacle in (reason for reason, holds in obstacles.items() if holds):
            raise ModelLoadError(
                f"{name} has an image or audio tower and cannot be trained: {obstacle}"
            )
        self.path = path
        self.name = name
        self.files = checkpoint_files(path)
        self.parts = parts_of(self.files, name)
        if self.parts.head is None and config.tie_word_embeddings:
            text.tie_word_embeddings = True
        text.name_or_path = path
        text.dtype = text.dtype or config.dtype
        if auto_class is AutoModelForSequenceClassification:
            text.num_labels = config.num_labels
        self.config = text
        self.asked = config.to_dict()
        self.as_it_came = AutoConfig.from_pretrained(path)
        kind = auto_class._model_mapping[type(text)]
        text.architectures = [kind.__name__]
        self.base = kind.base_model_prefix + "."
        self.options = {"key_mapping": self._renamed()}
        self.adapter_names = dict.fromkeys(_INSIDE, self.base)
        self.architecture, self.auto_class = _class_of(auto_class, config)

    def __deepcopy__(self, memo: Any) -> Whole:
        return self  # of files that nothing changes

    def _renamed(self) -> dict[str, str]:
        """For transformers: from names in the checkpoint to those of the language model alone."""
        renamed = {f"^{re.escape(self.parts.body)}": self.base}
        if self.parts.head:
            renamed[f"^{re.escape(self.parts.head)}lm_head"] = "lm_head"
        return {old: new for old, new in renamed.items() if old != f"^{re.escape(new)}"}

    def name_of(self, name: str) -> str:
        """A weight of the language model alone as the whole checkpoint calls it."""
        if name.startswith(self.base):
            return self.parts.body + name.removeprefix(self.base)
        if not name.startswith("lm_head."):
            return name
        if self.parts.head is not None:
            return self.parts.head + name
        # A head that is the embedding, which vLLM wants by both names, stands beside the body.
        beside = f".{self.parts.body}".endswith(f".{self.base}")
        if beside:
            return self.parts.body.removesuffix(self.base) + name
        return name

    # -- at the start --------------------------------------------------------------------------------------------------

    def belongs_to(self, model: PreTrainedModel) -> None:
        """Becomes ``model.whole``, and keeps open what an export needs. Under ZeRO-3 collective.

        Raises:
            ModelLoadError: a weight is not the checkpoint's, or the checkpoint has some that the model lacks.
        """
        model._weight_conversions = self._conversions(model)
        files = sorted(set(self.files.values()))
        opened = {file: open_tensors(cached_file(self.path, file)) for file in files}
        # The files are mapped, so they stay readable when somebody removes them.
        self.read = {name: opened[file][1] for name, file in self.files.items()}
        self._compare(model)
        self.digest = self._digest_of_kept()
        self.beside = dict(_files_beside(self.path))
        if self.architecture is not None:  # else transformers has a classifier of the text alone
            model.whole = self

    def _conversions(self, model: PreTrainedModel) -> list[Any]:
        """From memory to the checkpoint, by transformers; none where the checkpoint has each weight as it is held, such
        as all experts of a layer together."""
        self.tied = _names_of_tied(model)
        self.heads = set() if model.can_generate() else {f"{n}.weight" for n in head_names(model)}
        single = model.state_dict(keep_vars=True).keys() - self.heads - self.tied.keys()
        if all(self.name_of(name) in self.files for name in single):
            return []
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        return [one for one in conversions if not isinstance(one, PrefixChange)]

    def _compare(self, model: PreTrainedModel) -> None:
        """Each weight of the model is the one of its name in the checkpoint, in the model's type."""
        seen = set()
        for name, weight in _weights(model):
            ours = self.name_of(name)
            # A value head is set later. A tied weight may have only one name in the checkpoint.
            if name in self.heads or (name in self.tied and ours not in self.files):
                continue
            if ours not in self.files:
                raise self._differs([name], "the checkpoint has no such weights")
            theirs = self.read[ours](ours)
            if theirs.shape != weight.shape or not torch.equal(
                theirs.to(weight.dtype), weight.cpu()
            ):
                raise self._differs([ours], "the model has other values")
            seen.add(ours)
        left = self.parts.language - seen
        if not model.can_generate():  # heads are read elsewhere, or of another kind
            left = {name for name in left if name.startswith(self.parts.body)}
        if left:
            raise self._differs(left, "transformers does not load these weights")
        self.loaded = seen

    def _differs(self, names: Iterable[str], why: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.name}: its language model cannot be told from its towers: {why}: {listed(names)}"
        )

    def _digest_of_kept(self) -> str:
        """SHA-256 of all that stays as it came: names, types, shapes and bytes."""
        digest = hashlib.sha256()
        for name in self.parts.kept:
            tensor = self.read[name](name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    # -- exports -------------------------------------------------------------------------------------------------------

    def write(self, model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
        """The checkpoint with ``tensors``, the language model's weights on the CPU by the names in memory.

        Raises:
            ModelLoadError: the files of the checkpoint have changed since the start.
        """
        if self._digest_of_kept() != self.digest:
            raise ModelLoadError(
                f"{self.name}: its towers have changed since the start, and an export would have others: put the files "
                "back as they were, and use `lightppo convert` on the last checkpoint"
            )
        trained = revert_weight_conversion(model, tensors)
        for name, others in self.tied.items():  # a tied weight comes by one of its names
            given = next((other for other in others if other in trained), None)
            if name not in trained and given is not None:
                trained[name] = trained[given]
        named = {self.name_of(name): tensor for name, tensor in trained.items()}
        if lost := self.loaded - named.keys():
            raise self._differs(lost, "the trained model has no such weights any more")
        _save(self._shards(named), folder)
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        told = self._told(next(iter(tensors.values())).dtype)
        (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")

    def _shards(self, trained: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Tensors by file, as in the checkpoint; the last one has a value head that is new."""
        shards: dict[str, dict[str, Tensor]] = {}
        for name, file in sorted(self.files.items()):
            if name not in self.parts.language:
                shards.setdefault(file, {})[name] = self.read[name](name)
            elif name in trained:  # a classifier has no output head
                shards.setdefault(file, {})[name] = trained[name]
        last = shards[max(shards)]
        last.update({name: trained[name] for name in self.heads})
        return shards

    def _told(self, dtype: torch.dtype) -> dict[str, Any]:
        """The checkpoint's config.json with what ``--override_config`` has changed, and a type that loses no digits."""
        told = json.loads(self.beside["config.json"])
        before = self.as_it_came
        _change(told, before.to_dict(), self.asked)
        told["architectures"] = [self.architecture]
        own = before.dtype if isinstance(before.dtype, torch.dtype) else dtype
        if (wide := torch.promote_types(own, dtype)) != own or before.dtype is None:
            told.pop("torch_dtype", None)
            told["dtype"] = str(wide).removeprefix("torch.")
        return told


def _change(told: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Enters what is no longer as before, but not that dropout is off: training alone wants that."""
    for name, value in now.items():
        was = before.get(name)
        if isinstance(value, dict) and isinstance(was, dict) and isinstance(told.get(name), dict):
            _change(told[name], was, value)
        elif value != was and not (value == 0.0 and is_dropout(name)):
            told[name] = value


def _class_of(auto_class: Any, config: PretrainedConfig) -> tuple[str | None, str]:
    """The class of the whole checkpoint, or of a classifier around it; what reads it."""
    kind = config.model_type
    if auto_class is AutoModelForSequenceClassification:
        known = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        return known.get(kind), auto_class.__name__
    reads_images = kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = "AutoModelForImageTextToText" if reads_images else "AutoModelForMultimodalLM"
    known = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return next(iter(config.architectures or ()), known.get(kind)), auto


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by their names in a checkpoint of this model, layer by layer. Under ZeRO-3 collective."""
    named = model.state_dict(keep_vars=True).items()
    for _, layer in itertools.groupby(named, key=lambda pair: pair[0].rpartition(".")[0]):
        layer = dict(layer)
        with _gathered(layer.values()):
            whole = {name: tensor.detach() for name, tensor in layer.items()}
            yield from revert_weight_conversion(model, whole).items()


def _gathered(tensors: Iterable[Tensor]) -> AbstractContextManager:
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def _names_of_tied(model: PreTrainedModel) -> dict[str, list[str]]:
    """Each name of a weight that has several → all of them."""
    of_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        of_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in of_tensor.values() if len(names) > 1 for name in names}


def _files_beside(path: str) -> Iterator[tuple[str, bytes]]:
    """Config, processor and what else is beside the weights: names and content."""
    folder = Path(path)
    if not folder.is_dir():  # a hub id
        for name in _PROCESSOR:
            cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        folder = Path(cached_file(path, "config.json")).parent
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != MANIFEST and not _NO_COPY.search(file.name):
            yield file.name, file.read_bytes()


def _save(shards: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    """safetensors files, and their index if there are several."""
    from safetensors.torch import save_file

    named = {
        name.replace("pytorch_model", "model").replace(".bin", ".safetensors"): shard
        for name, shard in shards.items()
    }
    for name, shard in named.items():
        # Tied weights are copied, because they may not share memory in a file.
        held: set[int] = set()
        apart = {}
        for key, tensor in shard.items():
            tensor = tensor.contiguous()
            apart[key] = tensor.clone() if tensor.data_ptr() in held else tensor
            held.add(tensor.data_ptr())
        save_file(apart, folder / name, metadata={"format": "pt"})
    if len(named) > 1:
        sizes = [tensor.nbytes for shard in named.values() for tensor in shard.values()]
        weight_map = {key: name for name, shard in named.items() for key in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(text)


# -- a text model that transformers has only inside a class with towers (Qwen2.5-VL, Qwen3-VL, GLM-4V) ----------------


def know(config: PretrainedConfig) -> bool:
    """Has ``AutoModelForCausalLM`` read the text model of this config; whether transformers has a class for it."""
    kind = type(config)
    known = AutoModelForCausalLM._model_mapping.get(kind, None)
    if known is None and kind in MODEL_MAPPING:
        made = causal_class(MODEL_MAPPING[kind], kind)
        # exist_ok: transformers ignores what others register for its own configs
        AutoModelForCausalLM.register(kind, made, exist_ok=True)
    return known is not None and known.__module__ != __name__


@cache
def causal_class(body: type[PreTrainedModel], kind: type[PretrainedConfig]) -> type:
    """``body`` and a head over its vocabulary, which may be the embedding."""
    # The base class says which attention and which layers the model has.
    family = next(base for base in body.__bases__ if issubclass(base, PreTrainedModel))

    class ForCausalLM(family, GenerationMixin):
        config_class = kind
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body(config)
            self.vocab_size = config.vocab_size
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.model.get_input_embeddings()

        def forward(
            self, *args: Any, logits_to_keep: int | Tensor = 0, **kwargs: Any
        ) -> CausalLMOutputWithPast:
            """As of transformers' classes; no labels."""
            output = self.model(*args, **kwargs)
            hidden = output.last_hidden_state  # (B, S, H)
            last = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if last else logits_to_keep
            cache = cache_argument(self)
            return CausalLMOutputWithPast(
                logits=self.lm_head(hidden[:, kept]),
                hidden_states=output.get("hidden_states"),
                attentions=output.get("attentions"),
                **{cache: output.get(cache)},
            )

    # whoever asks what the model takes gets the body's parameters, as this version of transformers calls them
    of_body = inspect.signature(body.forward)
    own = inspect.signature(ForCausalLM.forward)
    parameters = of_body.parameters | {"logits_to_keep": own.parameters["logits_to_keep"]}
    order = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    ForCausalLM.forward.__signature__ = of_body.replace(parameters=order)
    name = body.__name__.removesuffix("Model") + "ForCausalLM"
    ForCausalLM.__name__ = ForCausalLM.__qualname__ = name
    return ForCausalLM
