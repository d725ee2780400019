"""Options of distillation, and which teacher a run loads; docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightppo.config.rules import trains
from lightppo.http_client import check_url
from lightppo.option import Section, option
from lightppo.redaction import shown_value

safe = partial(option, resume_safe=True)
teacher = partial(option, needs="teacher_pretrain or teacher_url")
own_teacher = partial(option, needs="teacher_pretrain")


@dataclass(frozen=True)
class FrozenModel:
    """A further model of a run: a causal LM with the actor's vocabulary that does not train, such as a teacher."""

    path: str
    flag: str  # that names it
    zero_stage: Literal[0, 3] | None  # None in a config that is not resolved
    offload: bool = False  # its shards are in CPU memory


class DistillConfig(Section, of="training"):
    """Distillation: a teacher judges each token of the student's own samples."""

    teacher_pretrain: str | None = option(
        None,
        "Teacher: local path, hub name or fsspec URL of a causal LM with the vocabulary of --pretrain.",
    )
    teacher_url: tuple[str, ...] = safe(
        (), "Teacher: addresses of vLLM servers that share the samples."
    )
    teacher_api_key_env: str | None = safe(
        None, "Environment variable with these servers' API key.", needs="teacher_url"
    )
    teacher_zero_stage: Literal[0, 3] | None = partial(own_teacher, resume_safe=True)(
        None, "ZeRO stage of the teacher. None: as the reference."
    )
    teacher_offload: bool = safe(
        False,
        "Keep the teacher's shards in CPU memory.",
        needs="teacher_zero_stage=3 and teacher_pretrain",
    )
    distill_coef: float = teacher(
        1.0, "Weight of the teacher's term, relative to the reward's.", gt=0
    )
    distill_by: Literal["advantage", "loss"] = teacher(
        "advantage",
        "advantage: add log π_teacher - log π of the sampled token; loss: add a divergence over all tokens.",
    )
    distill_discount: float = teacher(
        0.0,
        "Discount of later tokens' terms in a token's advantage.",
        ge=0,
        le=1,
        also="distill_by=advantage",
    )
    distill_topk: int | None = teacher(
        None,
        "Take the divergence over the teacher's K most likely tokens, which one pass over the rollout finds. None: all.",
        ge=1,
        also="distill_by=loss",
    )
    distill_tail: Literal["rest", "renormalise", "drop"] = teacher(
        "rest",
        "All other tokens: rest: count as one more; renormalise: both models' K sum to 1; drop: are left out.",
        also="distill_topk",
    )
    distill_beta: float = teacher(
        1.0,
        "Divergence in the loss: 1 is KL(student || teacher), 0 KL(teacher || student), between them Jensen-Shannon.",
        ge=0,
        le=1,
        also="distill_by=loss",
    )

    exclusive = (("teacher_pretrain", "teacher_url", "both name the teacher"),)

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        if not config.distill.teacher_pretrain:
            return {}
        strategy = config.strategy
        if strategy.ref_zero_stage is not None:
            return {"teacher_zero_stage": strategy.ref_zero_stage}
        return {"teacher_zero_stage": 3 if strategy.zero_stage == 3 else 0}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        """A teacher that is not there, or cannot do what is asked."""
        is_alone = options.advantage_estimator == "on_policy_distill"
        if is_alone and not (options.teacher_pretrain or options.teacher_url):
            name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
            yield f"{name} learns from a teacher alone: set --teacher_pretrain or --teacher_url"
        if options.distill_tail == "drop" and options.distill_beta > 0:
            yield "--distill_tail drop leaves a sum that may fall below 0 unless --distill_beta is 0: set one of them"
        if not options.teacher_url:
            return
        if options.distill_by == "loss" and options.distill_topk is None:
            likeliest = "--teacher_url gives the --distill_topk likeliest"
            yield f"--distill_by loss over all tokens needs --teacher_pretrain; {likeliest}"
        if options.temperature not in (0, 1):
            yield (
                f"--teacher_url gives log probs at --temperature 1, not {options.temperature:g}: "
                "set 1, or --teacher_pretrain"
            )
        for url in options.teacher_url:
            try:
                check_url(url, "--teacher_url", "--teacher_api_key_env")
            except ValueError as error:
                yield str(error)


def needs_teacher(config: Any) -> bool:
    """Whether a teacher judges the samples of this run."""
    named = config.distill.teacher_pretrain or config.distill.teacher_url
    return bool(named) and trains(config)


def adds(config: Any) -> bool:
    """Whether its term is part of the advantages, not of the loss."""
    return needs_teacher(config) and config.distill.distill_by == "advantage"


def frozen_models(config: Any) -> dict[str, FrozenModel]:
    """Return the further models that this run loads, by their roles: the teacher of ``--teacher_pretrain``."""
    options = config.distill
    if not options.teacher_pretrain or not needs_teacher(config):
        return {}
    teacher = FrozenModel(
        options.teacher_pretrain,
        flag="--teacher_pretrain",
        zero_stage=options.teacher_zero_stage,
        offload=options.teacher_offload,
    )
    return {"teacher": teacher}
