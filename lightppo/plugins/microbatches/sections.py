"""Options of the sizes of micro batches, and what they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lightppo.config.options import Options
from lightppo.config.rules import MicroBatchSpec, condition_text, holds, scoring_calls
from lightppo.errors import ConfigError
from lightppo.option import Section, option
from lightppo.plugin import ROLLOUT_PASSES
from lightppo.suggestions import nearest


class MicroBatchesConfig(Section, adds_to="training", resume_safe=True):
    """Micro batches by tokens, and of single calls."""

    max_tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens per training or scoring pass, instead of a number of samples; padding counts.",
        "tokens per rank",
        ge=1,
    )
    micro_batch_specs: tuple[str, ...] = option(
        (),
        "Sizes of single calls, CALL=SAMPLES or CALL=TOKENSt such as reference=64 actor_train=4096t. Calls: "
        "actor, reference, critic, reward (scoring), actor_train, critic_train.",
    )

    @staticmethod
    def problems(o: Any) -> Iterator[str]:
        """Specs that cannot be read, or of calls that the run does not make."""
        if not hasattr(o, "plan_problem"):  # models were made by hand
            return
        try:
            specs = parse_specs(o.micro_batch_specs)
        except ConfigError as error:
            yield str(error)
            return
        needed = {
            "critic": "critic",
            "critic_train": "critic",
            "reference": "init_kl_coef>0",
            "reward": "reward_pretrain",
        }
        needed |= {name: entry.needs for name, entry in ROLLOUT_PASSES.items() if entry.needs}
        for call in specs:
            if call in needed and not holds(needed[call], vars(o) | o.facts):
                yield f"--micro_batch_specs {call}=…: the call needs {condition_text(needed[call])}; leave it out"


def asked_spec(config: Options, call: str) -> MicroBatchSpec | None:
    """What holds for a call: its own spec, or the token budget."""
    training = config.training
    own = parse_specs(training.micro_batch_specs).get(call)
    if own is None and training.max_tokens_per_micro_batch is not None:
        own = MicroBatchSpec(training.max_tokens_per_micro_batch, "tokens")
    return own


def parse_specs(texts: tuple[str, ...]) -> dict[str, MicroBatchSpec]:
    """``("actor=16", "actor_train=4096t")`` → call → spec; a ConfigError for another form, or a call named twice."""
    specs: dict[str, MicroBatchSpec] = {}
    known = (*scoring_calls(), "actor_train", "critic_train")
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
