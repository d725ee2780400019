"""Tokenizers, checked against the model they feed."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightppo.errors import ModelLoadError
from lightppo.models.errors import errors_name, resolve_model_path

logger = logging.getLogger(__name__)


def get_tokenizer(
    path: str,
    model: nn.Module | None = None,
    padding_side: Literal["left", "right"] = "left",
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--pretrain",
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has EOS and a pad token and fits the model.

    Without a pad token EOS pads (masks come from lengths, never from comparing with the pad id). A model with more
    embedding rows than the tokenizer has entries is fine: sample with :func:`valid_vocab_size`. A missing BOS is fine.

    Args:
        path: folder or hub id.
        model: HF model, Actor, Critic or RewardModel; checked, and its config gets the pad token.
        use_fast: False: a tokenizer in Python, an error where transformers has none (for most families since 5.0).
        flag: the flag that ``path`` came from, for error messages.

    Raises:
        ModelLoadError: no tokenizer there, no EOS, or ids beyond the model's embedding.
    """
    path = resolve_model_path(path, flag, needed_file=None)
    with errors_name(path, flag):
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
    """One more than the largest id of the tokenizer; logits from there on belong to padding rows of the embedding."""
    return max(tokenizer.get_vocab().values()) + 1


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding, also where it is sharded."""
    return model.get_input_embeddings().num_embeddings


def _fit_to_model(tokenizer: PreTrainedTokenizerBase, model: nn.Module, path: str, flag: str) -> None:
    hf_model: Any = model
    while not isinstance(hf_model, PreTrainedModel):  # Actor, Critic, RewardModel, engines around them
        hf_model = getattr(hf_model, "module", None) or getattr(hf_model, "model", None)
        if hf_model is None:
            raise TypeError(f"get_tokenizer needs a Hugging Face model or a wrapper of one, not {type(model).__name__}")
    rows, needed = embedding_rows(hf_model), valid_vocab_size(tokenizer)
    if needed > rows:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer's largest id is {needed - 1}, but the model has only {rows} embedding rows. "
            "They do not belong together, or tokens were added without resizing: "
            "call model.resize_token_embeddings(len(tokenizer)) and save both"
        )
    hf_model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(hf_model, "generation_config", None) is not None:
        hf_model.generation_config.pad_token_id = tokenizer.pad_token_id
