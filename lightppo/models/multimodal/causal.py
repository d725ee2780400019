"""A causal LM around a text model that transformers has only inside a class with towers (Qwen2.5-VL, Qwen3-VL, GLM-4V)."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from lightppo.models.batches import cache_argument


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
