"""Models whose log probs are compared have one vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet
from lightppo.config.rules import frozen_models
from lightppo.errors import ConfigError
from lightppo.files import stage_to_local
from lightppo.models import loading
from lightppo.trainer.build import Building


def check_vocabularies(building: Building) -> None:
    """Further models of a run, and the reference of preferences, know the tokens of the model that trains."""
    config = building.config
    for path, flag in _compared(config):
        check_vocabulary(config, path, flag, building.tokenizer)


def _compared(config: OptionSet) -> Iterator[tuple[str, str]]:
    if isinstance(config, PPOConfig):
        yield from ((one.path, one.flag) for one in frozen_models(config).values())
    elif (reference := config.flat().get("ref_pretrain")) is not None:
        yield reference, "--ref_pretrain"


def check_vocabulary(config: OptionSet, path: str, flag: str, tokenizer: Any) -> None:
    """Log probs of this model are of the same tokens as those of the model that trains."""
    tokenizer_of_path = loading.get_tokenizer(
        stage_to_local(path),
        use_fast=not config.model.disable_fast_tokenizer,
        trust_remote_code=config.model.trust_remote_code,
        flag=flag,
    )
    theirs = tokenizer_of_path.get_vocab()
    other = [token for token, index in tokenizer.get_vocab().items() if theirs.get(token) != index]
    if other:
        raise ConfigError(
            f"{flag} {path} has another vocabulary than the model that trains: {len(other)} of its tokens have no id "
            f"there or another one ({', '.join(map(repr, sorted(other)[:3]))}, …): take a model of the same family"
        )
