"""``--micro_batch_specs``: sizes of the micro batches of single calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lightppo.config.option_needs import condition_text, facts_of, holds
from lightppo.config.options import Options
from lightppo.config.rules import MicroBatchSpec, scoring_calls
from lightppo.errors import ConfigError
from lightppo.option import Section, option
from lightppo.suggestions import nearest


def calls() -> tuple[str, ...]:
    """All that ``--micro_batch_specs`` may name."""
    return (*scoring_calls(), "actor_train", "critic_train")


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """``("actor=16", "actor_train=4096t")`` → call → spec; a ConfigError for another form, or a call named twice."""
    specs: dict[str, MicroBatchSpec] = {}
    known = calls()
    for text in texts:
        form = re.fullmatch(r"(\w+)=([1-9]\d*)(t?)", text)
        if form is None or form[1] not in known:
            hint = nearest(text.partition("=")[0], known)
            raise ConfigError(
                f"--micro_batch_specs {text!r}: write CALL=SAMPLES or CALL=TOKENSt; calls: {', '.join(known)}{hint}"
            )
        if form[1] in specs:
            raise ConfigError(f"--micro_batch_specs names {form[1]} twice")
        specs[form[1]] = MicroBatchSpec(int(form[2]), "tokens" if form[3] else "samples")
    return specs


def spec_of(config: Options, call: str) -> MicroBatchSpec | None:
    """The size that the option gives a call."""
    return parse_specs(config.training.micro_batch_specs).get(call)


class MicroBatchConfig(Section, adds_to="training", resume_safe=True):
    """Sizes of micro batches."""

    micro_batch_specs: tuple[str, ...] = option(
        (),
        "Sizes of single calls, CALL=SAMPLES or CALL=TOKENSt such as reference=64 actor_train=4096t. Calls: "
        "actor, reference, critic, reward (scoring), actor_train, critic_train.",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        """Specs that cannot be read, or of calls that the run does not make."""
        if options.by_hand:
            return
        try:
            specs = parse_specs(options.micro_batch_specs)
        except ConfigError as error:
            yield str(error)
            return
        needed = {
            "critic": "critic",
            "critic_train": "critic",
            "reference": "init_kl_coef>0",
            "reward": "reward_pretrain",
            "teacher": "teacher_pretrain",
        }
        values = vars(options) | facts_of(options.config)
        for call in specs:
            if call in needed and not holds(needed[call], values):
                words = condition_text(needed[call])
                yield f"--micro_batch_specs {call}=…: the call needs {words}; leave it out"
