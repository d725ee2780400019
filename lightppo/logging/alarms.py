"""Alarms: what the numbers of the last steps warn of, and what to do. A further alarm is one entry of ``ALARMS``."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import Any

from lightppo.callbacks import Callback

logger = logging.getLogger(__name__)

Series = Mapping[str, Sequence[float]]  # name of a metric → its values, step after step

LASTING = 3  # steps in a row that are bad, where one alone may be chance
WINDOW = 5  # steps whose median is compared with earlier ones
# What a run knows beside its metrics.
SHARE = "the entropy as a share of that of random tokens"
PROMPTS = "the prompts of a step"


@dataclass(frozen=True)
class Alarm:
    """One row of the table."""

    metrics: tuple[str, ...]  # names of what it looks at; the first one is told
    condition: str
    remedy: str
    rings: Callable[..., bool]  # gets the values so far of each of the metrics
    unless_solved: bool = False  # no alarm where scores are as good as they get
    # Whether it goes on once it rings, so that it does not come and go; None: as long as ``rings`` says.
    goes_on: Callable[..., bool] | None = None


def lasting(is_bad: Callable[..., bool], steps: int = LASTING) -> Callable[..., bool]:
    """Return whether numbers are bad in each of the last steps."""
    return lambda *series: (
        len(series[0]) >= steps
        and all(is_bad(*values) for values in zip(*(numbers[-steps:] for numbers in series)))
    )


def falling(numbers: Sequence[float], already: bool = False) -> bool:
    """Return whether the medians of the last steps, as many in a row, are below the best one, by half of the rise before it
    and by more than four times what usually lies between two steps; ``already``: whether the last one is, by half of
    that. The last step of an episode may be a small, odd one."""
    medians = [median(numbers[i : i + WINDOW]) for i in range(len(numbers) - WINDOW + 1)]
    if len(medians) <= WINDOW:
        return False
    usual_change = median(abs(a - b) for a, b in pairwise(numbers))
    least_drop = max((max(medians) - medians[0]) / 2, 4 * usual_change)
    if already:
        return max(medians) - medians[-1] > least_drop / 2
    return max(medians) - max(medians[-WINDOW:]) > least_drop


LIKELIHOOD = 1e-6  # of what is no chance


def at_its_worst(
    means: Sequence[float],
    highest: Sequence[float],
    lowest: Sequence[float],
    prompts: Sequence[float],
) -> bool:
    """Return whether scores were better, and the last steps' means are within 5% of the worst so far: in more steps and
    prompts than chance explains, if the scores of a prompt were as before or the worst."""
    worst = min(lowest)
    score_range = max(highest) - worst
    if not score_range > 0:
        return False
    bad_steps = list(takewhile(lambda mean: mean <= worst + 0.05 * score_range, reversed(means)))
    earlier = means[: len(means) - len(bad_steps)][-LASTING:]
    if not bad_steps or not earlier:
        return False
    share = min(1 - 1e-9, (fmean(earlier) - worst) / score_range)
    return math.log1p(-share) * sum(prompts[-len(bad_steps) :]) < math.log(LIKELIHOOD)


SCORES = ("rollout/reward", "rollout/reward_max", "rollout/reward_min")


def solved(means: Sequence[float], highest: Sequence[float], lowest: Sequence[float]) -> bool:
    """Return whether the last steps' mean score is within 5% of the range of all samples so far from the best of them."""
    best = max(highest, default=0.0)
    worst = min(lowest, default=0.0)
    return best > worst and fmean(means[-LASTING:]) >= best - 0.05 * (best - worst)


LESS = "lower --actor_learning_rate or --max_epochs"
ALARMS = {
    "reward_collapse": Alarm(
        (*SCORES, PROMPTS),
        "at the worst score of the run, and was better: an update has broken the policy",
        "start again, or from a checkpoint before, with a lower --actor_learning_rate, at first a tenth",
        at_its_worst,
    ),
    "clipped_scores": Alarm(
        ("rollout/reward_clip_ratio",),
        "more than a tenth of the scores are beyond --reward_clip_range, and count as its bounds: what differs between "
        "them is lost",
        "--reward_clip_range with bounds that hold your scores, or None; or --reward_scaling",
        lasting(lambda share: share > 0.1, steps=1),
    ),
    "failing_tools": Alarm(
        ("episode/tool_errors", "episode/tool_calls"),
        f"more than half of the calls of tools fail in {LASTING} steps: wrong names, wrong arguments or a ToolError",
        "read conversations (--num_examine 3): does the model know the tools' names and arguments, and write calls as "
        "--tool_format reads them? Does a tool raise whatever it gets?",
        lasting(lambda errors, calls: errors > 0.5 and calls > 0),
    ),
    "kl_explosion": Alarm(
        ("rollout/policy_kl",),
        "above 1 nat per token: the policy is far from the reference",
        f"{LESS}; raise --init_kl_coef, or set --kl_target",
        lasting(lambda kl: kl > 1, steps=1),
    ),
    "large_update": Alarm(
        ("train/approx_kl",),
        "above 0.5 nats per token: one step moves the policy too far",
        f"{LESS}; set --early_stop_kl",
        lasting(lambda kl: kl > 0.5, steps=1),
    ),
    "entropy_collapse": Alarm(
        ("train/entropy",),
        f"below 0.01 nats in {LASTING} steps, scores not at their best: samples of a prompt will be the same",
        "a higher --eps_clip_high (0.28) or --temperature, --entropy_coef 0.001, --policy_loss clip_cov; "
        "a lower --actor_learning_rate if it fell within a few steps",
        lasting(lambda entropy: entropy < 0.01),
        unless_solved=True,
    ),
    "entropy_uniform": Alarm(
        (SHARE,),
        f"above 0.95 in {LASTING} steps: the policy knows nothing",
        "is --pretrain trained, and the tokenizer its own? Else a lower --actor_learning_rate, --entropy_coef or "
        "--temperature",
        lasting(lambda share: share > 0.95),
    ),
    "equal_rewards": Alarm(
        (*SCORES, "rollout/samples"),
        f"the same for all samples in {LASTING} steps, and not their best so far: there is nothing to learn from",
        "read answers (--num_examine 3) and the reward function; easier or harder prompts, a higher --temperature, "
        "more --n_samples_per_prompt",
        lasting(lambda mean, high, low, samples: high == low and samples > 1),
        unless_solved=True,
    ),
    "zero_gradient": Alarm(
        ("train/actor_grad_norm",),
        f"0 in {LASTING} steps, and scores are not at their best: the actor does not change",
        "where groups have equal scores (rollout/equal_groups), --dynamic_sampling or more --n_samples_per_prompt; far "
        "too high a rate breaks a policy so, too: lower --actor_learning_rate",
        lasting(lambda norm: norm == 0),
        unless_solved=True,
    ),
    "truncated": Alarm(
        ("rollout/response_clip_ratio",),
        f"more than half of the answers are cut by --generate_max_len in {LASTING} steps",
        "raise --generate_max_len; a model that never ends its answers needs --apply_chat_template or --stop, and no "
        "--ignore_eos",
        lasting(lambda share: share > 0.5),
    ),
    "not_finite": Alarm(
        ("train/actor_skipped", "train/policy_loss", "train/entropy"),
        "a gradient, the loss or the entropy is not finite",
        f"{LESS}; look at the scores for huge ones (--reward_clip_range); fp32 instead of --bf16 or --fp16",
        lasting(
            lambda skipped, *numbers: skipped > 0 or not all(map(math.isfinite, numbers)), steps=1
        ),
    ),
    "critic_not_finite": Alarm(
        ("train/critic_skipped", "train/critic_loss"),
        "a gradient or the loss of the critic is not finite",
        "lower --critic_learning_rate; --value_norm exp where the returns are large",
        lasting(lambda skipped, loss: skipped > 0 or not math.isfinite(loss), steps=1),
    ),
    "loss_not_finite": Alarm(
        ("train/skipped", "train/loss"),
        "a gradient or the loss is not finite",
        "lower --learning_rate; fp32 instead of --bf16 or --fp16",
        lasting(lambda skipped, loss: skipped > 0 or not math.isfinite(loss), steps=1),
    ),
    "loss_rises": Alarm(
        ("train/loss",),
        f"its median of {WINDOW} steps has lost more than half of what it had gained",
        "lower --learning_rate, or raise --lr_warmup_ratio",
        lambda losses: falling([-loss for loss in losses]),
        goes_on=lambda losses: falling([-loss for loss in losses], already=True),
    ),
    "reward_falls": Alarm(
        ("rollout/reward",),
        f"its median of {WINDOW} steps has lost more than half of what it had gained",
        f"{LESS}; go on from the best checkpoint (--best_metric, --save_steps)",
        falling,
        goes_on=partial(falling, already=True),
    ),
    "accuracy_falls": Alarm(
        ("reward/accuracy",),
        f"its median of {WINDOW} steps has lost more than half of what it had gained",
        "if the reward rises meanwhile, it is not what you want: read answers (--num_examine 3); else as reward_falls",
        falling,
        goes_on=partial(falling, already=True),
    ),
}
ALARMS |= {
    f"{name}underflow": Alarm(
        (f"train/{name}loss_scale",),
        "below 16: gradients that are not huge are lost in float16",
        "--bf16 in place of --fp16; huge scores (--reward_clip_range) and a high learning rate make huge gradients",
        lasting(lambda scale: scale < 16, steps=1),
    )
    for name in ("actor_", "critic_", "")
}


def alarm_descriptions() -> dict[str, str]:
    """Return what each alarm looks at, when it rings, and what to do."""
    return {
        alarm_name: f"{alarm.metrics[0]}: {alarm.condition}. Try: {alarm.remedy}"
        for alarm_name, alarm in ALARMS.items()
    }


class Alarms:
    """Looks at each step's status, which is the same on all ranks; no collective.

    Args:
        vocabulary: number of tokens, for what is uniform; ``None``: nothing is.
        prompts: of a step; ``None``: there are none.
    """

    def __init__(self, vocabulary: int | None = None, prompts: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.prompts = prompts
        self.series: dict[str, list[float]] = defaultdict(list)
        self.ringing: set[str] = set()
        self.announced: set[str] = set()  # of those that ring
        self.rang: dict[str, list[int]] = defaultdict(list)  # in which steps

    def look(self, status: Mapping[str, float], step: int) -> tuple[dict[str, float], list[str]]:
        """Return ``alarm/<name>``, 1 or 0, of what the step has numbers for; and a line for each alarm that begins."""
        status = dict(status)
        if self.vocabulary and "train/entropy" in status:
            status[SHARE] = status["train/entropy"] / math.log(self.vocabulary)
        if self.prompts and SCORES[0] in status:
            status[PROMPTS] = self.prompts
        for metric in {metric for alarm in ALARMS.values() for metric in alarm.metrics}:
            if metric in status:
                self.series[metric].append(status[metric])
        is_solved = solved(*(self.series[metric] for metric in SCORES))
        numbers: dict[str, float] = {}
        messages = []
        for alarm_name, alarm in ALARMS.items():
            if not all(metric in status for metric in alarm.metrics):
                continue
            rings = alarm.rings
            if alarm_name in self.ringing and alarm.goes_on:
                rings = alarm.goes_on
            is_ringing = not (alarm.unless_solved and is_solved) and rings(
                *(self.series[metric] for metric in alarm.metrics)
            )
            numbers[f"alarm/{alarm_name}"] = float(is_ringing)
            if not is_ringing:
                self.ringing.discard(alarm_name)
                self.announced.discard(alarm_name)
                continue
            if alarm_name not in self.announced:
                latest_value = status[alarm.metrics[0]]
                messages.append(
                    f"ALARM {alarm_name}: {alarm.metrics[0]} is {latest_value:.3g}, {alarm.condition}. Try: {alarm.remedy}"
                )
            self.ringing.add(alarm_name)
            self.announced.add(alarm_name)
            self.rang[alarm_name].append(step)
        return numbers, messages

    def summary(self) -> str:
        """Return which have rung, and when; empty if none has."""
        alarm_texts = []
        for alarm_name, ringing_steps in sorted(self.rang.items(), key=lambda item: item[1][0]):
            if len(ringing_steps) > 1:
                alarm_texts.append(
                    f"{alarm_name} in {len(ringing_steps)} steps ({ringing_steps[0]} to {ringing_steps[-1]})"
                )
            else:
                alarm_texts.append(f"{alarm_name} in step {ringing_steps[0]}")
        if not alarm_texts:
            return ""
        advice = "the log at the first of these steps says what to do, as does the report"
        return f"ALARMS: {', '.join(alarm_texts)}: {advice}"

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of all steps so far: a resumed run rings as an uninterrupted one."""
        return {
            "series": dict(self.series),
            "ringing": sorted(self.ringing),
            "rang": dict(self.rang),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; what rings then is told again."""
        if "series" not in state:  # of an older lightppo
            state = {"series": state, "ringing": [], "rang": {}}
        self.series = defaultdict(list, state["series"])
        self.ringing = set(state["ringing"])
        self.rang = defaultdict(list, state["rang"])
        self.announced.clear()


class AlarmBell(Callback):
    """Rings the alarms of a run."""

    def __init__(self, run: Any) -> None:
        self.alarms = Alarms()
        if run.samples_tokens:
            self.alarms = Alarms(len(run.tokenizer), run.config.rollout.rollout_batch_size)
        run.register_state("alarms", self.alarms)

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        numbers, messages = self.alarms.look(metrics, step)
        for message in messages:
            run.strategy.print(f"[step {step}] {message}")
        return numbers

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if (error is None or isinstance(error, SystemExit)) and (summary := self.alarms.summary()):
            run.strategy.print(summary)


class DriftWatch(Callback):
    """Warn if a step's ``rollout/logp_diff_mean`` exceeds the tolerance, and again when it has doubled.

    Samples of an older policy do not count: training has moved the actor away from them.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance = self._warned_at = tolerance

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        name = "rollout/logp_diff_on_policy"
        if name not in metrics:
            if metrics.get("rollout/staleness", 0.0) > 0:  # of all samples
                return
            name = "rollout/logp_diff_mean"
        mean = metrics.get(name, 0.0)
        if not mean > self._warned_at:  # NaN is not
            return
        self._warned_at = 2 * mean
        if run.strategy.is_rank_0():
            logger.warning(
                "step %d: the rollout engine's log probs drift from the trainer's: %s is %.3g, "
                "--logp_diff_tolerance %g; see docs/rollouts.md",
                step,
                name,
                mean,
                self.tolerance,
            )
