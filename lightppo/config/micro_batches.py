"""How much goes through a model at once, call by call: a number of samples, or a budget of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightppo.config.fields import nearest
from lightppo.errors import ConfigError

if TYPE_CHECKING:
    from lightppo.config.ppo import PPOConfig

SCORING_CALLS = ("actor", "reference", "critic", "reward")
CALLS = (*SCORING_CALLS, "actor_train", "critic_train")


@dataclass(frozen=True)
class MicroBatchSpec:
    """At most so many samples, or tokens, in one pass of this rank."""

    size: int
    unit: Literal["samples", "tokens"] = "samples"


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """``("actor=16", "actor_train=4096t")`` → call → spec.

    Raises:
        ConfigError: another form, an unknown call, or one that is named twice.
    """
    specs: dict[str, MicroBatchSpec] = {}
    for text in texts:
        form = re.fullmatch(r"(\w+)=([1-9]\d*)(t?)", text)
        if form is None:
            raise ConfigError(
                f"--micro_batch_specs {text!r}: write CALL=SAMPLES or CALL=TOKENSt, such as reference=64 or "
                f"actor_train=4096t; the calls: {', '.join(CALLS)}"
            )
        call, size, tokens = form.groups()
        if call not in CALLS:
            raise ConfigError(
                f"--micro_batch_specs {text!r}: no such call{nearest(call, CALLS)}; they are {', '.join(CALLS)}"
            )
        if call in specs:
            raise ConfigError(f"--micro_batch_specs names {call} twice")
        specs[call] = MicroBatchSpec(int(size), "tokens" if tokens else "samples")
    return specs


def micro_batch_spec(config: PPOConfig, call: str) -> MicroBatchSpec:
    """What holds for one of ``CALLS``: its own spec, else the token budget, else the number of samples."""
    if (own := parse_specs(config.training.micro_batch_specs).get(call)) is not None:
        return own
    if config.training.max_tokens_per_micro_batch is not None:
        return MicroBatchSpec(config.training.max_tokens_per_micro_batch, "tokens")
    scores = call in SCORING_CALLS
    return MicroBatchSpec(config.rollout.micro_rollout_batch_size if scores else config.training.micro_train_batch_size)


def problems(config: PPOConfig, absent: dict[str, str]) -> list[str]:
    """Specs that cannot be read, or of calls that the run does not make.

    Args:
        config: the options.
        absent: call → why the run does not make it.
    """
    try:
        specs = parse_specs(config.training.micro_batch_specs)
    except ConfigError as error:
        return [str(error)]
    return [f"--micro_batch_specs {call}=…: {absent[call]}; leave it out" for call in specs if call in absent]
