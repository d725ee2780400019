"""What each column of a dump should be by the formula, out of the other columns; and where it departs.

A check takes a dump and a formula and returns a :class:`Claim`: pure functions, which call lightppo's algorithms and
compute nothing on their own. Where a column is not there, it raises :class:`MissingError`.

**Tolerance.** A number departs if it is off by more than ``1e-5`` of itself (float16: 2.5e-3, bfloat16: 2e-2) plus
``1e-6`` of the column's size (the root mean square of the expected numbers, at least 1) times the square root of the
tokens in a row, over which trainers add up in float32; and by more than the rounding of the inputs can
make: the change of the expected number when all inputs move by eight times their rounding, but at most 0.01. So rounding
that a formula amplifies, as in a group of nearly equal scores, is an alarm only where it is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from lightppo.algorithms.advantages import advantage_fn, compute_token_rewards, reward_to_go
from lightppo.algorithms.correction import correction_weights
from lightppo.algorithms.kl import approx_kl, k3
from lightppo.algorithms.losses import LossInputs, PolicyLoss, ValueLoss
from lightppo.algorithms.masking import LossNormalizer, aggregate_loss, whiten
from lightppo.audit.dumps import Column, Dump
from lightppo.audit.formulas import neighbours

_RELATIVE = 1e-5
_ABSOLUTE = 1e-6
_ROUNDING = 8.0
_NUDGES = 2
_MOST_ROUNDING = 0.01


class MissingError(Exception):
    """Columns, or other facts, without which there is nothing to judge."""


class Claim(NamedTuple):
    """A column and what it should be."""

    found: Column
    expected: Tensor  # of the same shape
    where: Tensor  # bool, the numbers that are compared
    size: Tensor | None = None  # what an absolute error is measured by; None: the expected numbers
    is_yes_or_no: bool = False  # 0 or 1, by a bound: not compared where rounding decides


class Departure(NamedTuple):
    """The first number that departs."""

    column: str
    row: str  # "" for a number of the whole step
    position: int | None  # in the response, from 0; None: a number of the row
    found: float
    expected: float


@dataclass(frozen=True)
class Finding:
    """What a check says of a dump."""

    quantity: str
    compared: int = 0
    departing: int = 0
    first: Departure | None = None
    largest: float = 0.0  # difference
    hints: tuple[str, ...] = ()  # formulas by which all would agree
    missing: str = ""  # why it was not judged


Check = Callable[[Dump, SimpleNamespace], Claim]


def audit(dump: Dump, formula: SimpleNamespace) -> list[Finding]:
    """Return what each check says of the columns that the dump has."""
    dumps = [dump, *(dump.nudged(seed, _ROUNDING) for seed in range(_NUDGES))]
    return [_judged(quantity, check, dumps, formula) for quantity, check in CHECKS.items()]


def _judged(
    quantity: str, check: Check, dumps: Sequence[Dump], formula: SimpleNamespace
) -> Finding:
    dump = dumps[0]
    try:
        claim, bad = _departing(check, dumps, formula)
    except MissingError as missing:
        return Finding(quantity, missing=str(missing))
    except ValueError as error:  # of an algorithm that cannot work with these columns
        return Finding(quantity, missing=" ".join(str(error).split()))
    compared = int(claim.where.sum())
    if not bad.any():
        return Finding(quantity, compared)
    first = bad.nonzero()[0].tolist()
    index = tuple(first)
    difference = (claim.found.values - claim.expected).abs()[bad]
    return Finding(
        quantity,
        compared,
        int(bad.sum()),
        Departure(
            claim.found.source,
            dump.rows[first[0]] if first else "",
            first[1] if len(first) > 1 and dump.has_tokens else None,
            claim.found.values[index].item(),
            claim.expected[index].item(),
        ),
        difference.nan_to_num(torch.inf, torch.inf).max().item(),
        tuple(_hints(check, dumps, formula)),
    )


def _departing(
    check: Check, dumps: Sequence[Dump], formula: SimpleNamespace
) -> tuple[Claim, Tensor]:
    """Return a claim, and which numbers are off by more than the tolerance; ``dumps``: the dump, and nudged ones."""
    claim = check(dumps[0], formula)
    found = claim.found.values
    expected = claim.expected
    size = claim.size
    if size is None:
        used = expected[claim.where]
        size = used.square().mean().sqrt().clamp(min=1.0) if used.numel() else torch.tensor(1.0)
        if expected.dim() == 2:
            size = size * expected.shape[1] ** 0.5
    relative = max(_RELATIVE, 2.6 * claim.found.eps if claim.found.eps > 1e-4 else 0.0)
    tolerance = relative * expected.abs() + _ABSOLUTE * size + claim.found.digits
    most = 1.0 if claim.is_yes_or_no else max(_MOST_ROUNDING, 10 * claim.found.eps)
    for nudged in dumps[1:]:
        change = (check(nudged, formula).expected - expected).abs()
        tolerance = tolerance.maximum(change.clamp(max=most))
    return claim, claim.where & ~((found - expected).abs() <= tolerance)  # also where it is NaN


def _hints(check: Check, dumps: Sequence[Dump], formula: SimpleNamespace) -> Iterator[str]:
    for flag, other in neighbours(formula):
        try:
            if not _departing(check, dumps, other)[1].any():
                yield flag
        except (MissingError, ValueError):
            continue


# -- what checks read ------------------------------------------------------------------------------------------------


def need(dump: Dump, *names: str) -> list[Tensor]:
    """Return columns; MissingError names all that are not there."""
    if missing := [name for name in names if name not in dump.columns]:
        _in_all_rows(dump, *missing)
        raise MissingError(f"needs {', '.join(missing)}")
    return [dump.columns[name].values for name in names]


def _in_all_rows(dump: Dump, *names: str) -> None:
    """MissingError for a column that some rows have and others have not."""
    for name in names:
        if name in dump.lacking:
            raise MissingError(dump.lacking[name])


def _found(dump: Dump, name: str) -> Column:
    if name not in dump.columns:
        _in_all_rows(dump, name)
        raise MissingError(f"the dump has no {name}")
    return dump.columns[name]


def _whole_step(dump: Dump) -> None:
    if not dump.is_whole:
        raise MissingError("needs all samples of the step: --whole_step if the file has them")


def _kl(dump: Dump, formula: SimpleNamespace) -> Tensor:
    """Return the KL per token from the log probs; as the dump has it where they are not there."""
    if "ref_log_probs" not in dump.columns and "kl" in dump.columns:
        return dump.columns["kl"].values
    log_probs, reference = need(dump, "old_log_probs", "ref_log_probs")
    return approx_kl(log_probs, reference, formula.kl_estimator, formula.kl_clip, dump.mask)


def _kl_coef(formula: SimpleNamespace) -> float:
    return 0.0 if formula.use_kl_loss else formula.init_kl_coef


def _scores(dump: Dump, formula: SimpleNamespace) -> Tensor:
    if "scores" not in dump.columns and "token_scores" in dump.columns:
        return dump.columns["token_scores"].values.sum(1)
    (scores,) = need(dump, "scores")
    if formula.reward_clip_range is not None and formula.form != "openrlhf":
        return scores.clamp(*formula.reward_clip_range)
    return scores


def _token_rewards(dump: Dump, formula: SimpleNamespace, scores: Tensor | None = None) -> Tensor:
    """Return the rewards per token by the formula, out of ``scores``, by default those of the dump."""
    kl_coef = _kl_coef(formula)
    kl = _kl(dump, formula) if kl_coef else None
    mask = dump.mask
    if scores is None and "token_scores" in dump.columns and formula.form == "verl":
        tokens = dump.columns["token_scores"].values
        return compute_token_rewards(
            tokens[:, 0] * 0, mask, kl=kl, kl_coef=kl_coef, token_scores=tokens
        )
    scores = _scores(dump, formula) if scores is None else scores
    if formula.form == "openrlhf" and formula.reward_clip_range is not None:
        scores = scores.clamp(*formula.reward_clip_range)
    return compute_token_rewards(scores, mask, kl=kl, kl_coef=kl_coef)


# -- advantages ------------------------------------------------------------------------------------------------------


def _estimated(dump: Dump, formula: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Return advantages (B, A) before whitening, and returns."""
    if formula.beyond_advantages:
        raise MissingError(f"the run had --{formula.beyond_advantages}, which no check follows")
    if formula.estimator.per_sample and formula.form in ("openrlhf", "slime"):
        return _of_shaped_scores(dump, formula)
    if "token_rewards" in dump.columns:
        token_rewards = dump.columns["token_rewards"].values
        if formula.form != "verl":  # which compares what is outside its mask, too
            token_rewards = token_rewards.masked_fill(~dump.mask, 0.0)
    else:
        token_rewards = _token_rewards(dump, formula)
    scores = token_rewards.sum(1)
    untrained = ~dump.mask.any(1)
    if formula.masked_rows == "count" and untrained.any() and "token_rewards" not in dump.columns:
        scores = torch.where(untrained, _scores(dump, formula), scores)
    return _call(dump, formula, token_rewards * dump.mask, scores)


def _call(
    dump: Dump, formula: SimpleNamespace, token_rewards: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Call the estimator. Rows without a trained token get one for it where they count in their group."""
    entry = formula.estimator
    mask = dump.mask
    groups = dump.groups
    if (entry.per_sample or entry.min_group_size > 1) and groups is None:
        raise MissingError("needs the prompt of each sample: --n_samples_per_prompt")
    if entry.per_sample and formula.grpo_std_scope == "batch":
        _whole_step(dump)
    values = need(dump, "values")[0] if entry.needs_critic else None
    baselines = need(dump, "baseline_scores")[0] if entry.needs_greedy_baseline else None
    if entry.needs_score_norms or entry.inputs:
        raise MissingError(f"{formula.advantage_estimator} needs what no dump has")
    if entry.per_sample and formula.masked_rows == "count":
        mask = mask.clone()
        mask[:, 0] |= ~mask.any(1)
    advantages, returns = advantage_fn(entry)(
        token_rewards=token_rewards,
        action_mask=mask,
        scores=scores,
        group_ids=groups,
        values=values,
        baseline_scores=baselines,
        gamma=formula.gamma,
        lambd=formula.lambd,
        std_eps=formula.grpo_std_eps,
        divide_std=formula.group_std_norm,
        batch_std=formula.grpo_std_scope == "batch",
    )
    return advantages * dump.mask, returns


def _shaped_scores(dump: Dump, formula: SimpleNamespace) -> Tensor:
    """Return what the estimator makes of each score (B,), without any KL."""
    if not formula.estimator.per_sample:
        return _scores(dump, formula)
    scores = _scores(dump, formula)
    one = torch.ones(len(scores), 1, dtype=torch.bool)
    if formula.masked_rows == "leave_out":
        one = dump.mask.any(1, keepdim=True)
    alone = Dump(dump.form, dump.rows, one, dump.columns, dump.groups)
    return _call(alone, formula, scores[:, None] * one, scores)[0][:, 0]


def _of_shaped_scores(dump: Dump, formula: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """OpenRLHF compares scores alone, and takes the KL of a token and all later ones away; slime's KL has no effect."""
    shaped = _shaped_scores(dump, formula)
    if formula.form == "slime":
        if formula.advantage_estimator.startswith("reinforce") and _kl_coef(formula):
            raise MissingError(
                "slime takes each token's own KL away, which no option of lightppo does"
            )
        returns = shaped[:, None] * dump.mask
    else:
        returns = reward_to_go(_token_rewards(dump, formula, shaped), dump.mask)
    return returns, returns


def _advantages(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "advantages")
    advantages, _ = _estimated(dump, formula)
    if formula.adv_norm:
        _whole_step(dump)
        advantages = whiten(advantages, dump.mask, unbiased=formula.adv_std_unbiased)
    return Claim(found, advantages, dump.mask)


def _returns(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "returns")
    if formula.estimator.per_sample and formula.form != "lightppo":
        raise MissingError("nothing reads them without a critic")
    return Claim(found, _estimated(dump, formula)[1], dump.mask)


def _group_scores(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "shaped_scores")
    return Claim(
        found, _shaped_scores(dump, formula), torch.ones_like(found.values, dtype=torch.bool)
    )


def _rewards_of_tokens(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "token_rewards")
    return Claim(found, _token_rewards(dump, formula), dump.mask)


# -- masks -----------------------------------------------------------------------------------------------------------


def _mask(dump: Dump, formula: SimpleNamespace) -> Claim:
    """Claim that a mask is 0 or 1, and 0 where there is no token."""
    found = _found(dump, "action_mask")
    expected = dump.mask.double()
    if "attention_mask" in dump.columns:
        expected = expected * (dump.columns["attention_mask"].values != 0)
    return Claim(found, expected, torch.ones_like(dump.mask))


def _lengths(dump: Dump, formula: SimpleNamespace) -> Claim:
    """Claim that all columns of a row are as long as its response; of the first column where they are not."""
    each_row = torch.ones(len(dump.rows), dtype=torch.bool)
    lengths = [each for each in dump.columns.values() if each.lengths is not None]
    if not lengths:
        found = _found(dump, "response_length")
        last = torch.arange(1, dump.mask.shape[1] + 1) * dump.mask
        return Claim(
            found, found.values.maximum(last.amax(1)), each_row
        )  # none behind its end is trained
    expected = dump.columns.get("action_mask", lengths[0]).lengths
    if "response_length" in dump.columns:
        expected = dump.columns["response_length"].values
    for each in lengths:
        claim = Claim(Column(each.lengths, f"{each.source} (numbers)"), expected, each_row)
        if not each.lengths.equal(expected):
            break
    return claim


def _finite(dump: Dump, formula: SimpleNamespace) -> Claim:
    """Claim that all numbers at trained tokens are finite, of the first column where they are not."""
    columns = [each for each in dump.columns.values() if each.values.dim() == 2]
    rows = [each for each in dump.columns.values() if each.values.dim() == 1]
    for each in (*columns, *rows):
        where = (
            dump.mask if each.values.dim() == 2 else torch.ones_like(each.values, dtype=torch.bool)
        )
        claim = Claim(each, each.values.nan_to_num(0.0, 0.0, 0.0), where)
        if not (each.values.isfinite() | ~where).all():
            break
    return claim


# -- KL, ratios, weights ---------------------------------------------------------------------------------------------


def _kl_column(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "kl")
    need(dump, "old_log_probs", "ref_log_probs")
    if not formula.init_kl_coef:
        raise MissingError("with --init_kl_coef 0 nothing reads it")
    return Claim(found, _kl(dump, formula), dump.mask)


def _of_log_probs(name: str, expected: Callable[[Tensor, Tensor], Tensor]) -> Check:
    """Return the check of a column that follows from new and old log probs."""

    def check(dump: Dump, formula: SimpleNamespace) -> Claim:
        found = _found(dump, name)
        new, old = need(dump, "log_probs", "old_log_probs")
        return Claim(found, expected(new, old), dump.mask)

    return check


def _weights(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "loss_weights")
    old, rollout = need(dump, "old_log_probs", "rollout_log_probs")
    if formula.rollout_correction == "none":
        raise MissingError("needs --rollout_correction")
    if formula.beyond_weights:
        raise MissingError(f"the run had --{formula.beyond_weights}, which no check follows")
    weights = correction_weights(
        formula.rollout_correction,
        old,
        rollout,
        dump.mask,
        low=formula.correction_low,
        high=formula.correction_high,
        veto=formula.correction_veto,
    )
    return Claim(found, weights, dump.mask)


# -- losses ----------------------------------------------------------------------------------------------------------


def _policy_loss(formula: SimpleNamespace) -> PolicyLoss:
    loss = PolicyLoss(
        clip_eps=formula.eps_clip,
        clip_eps_low=formula.eps_clip_low,
        clip_eps_high=formula.eps_clip_high,
        policy_loss=formula.policy_loss,
        loss_agg_mode=formula.loss_agg_mode,
    )
    if loss.selects_tokens:
        raise MissingError(f"{formula.policy_loss} needs the tokens that were selected at random")
    own = {name: getattr(formula, name, None) for name in loss.entry.defaults}
    return PolicyLoss(
        clip_eps_low=loss.clip_eps_low,
        clip_eps_high=loss.clip_eps_high,
        policy_loss=formula.policy_loss,
        loss_agg_mode=formula.loss_agg_mode,
        options=own,
    )


def _of_tokens(dump: Dump, formula: SimpleNamespace) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the policy loss of each token (B, A), and its metrics."""
    new, old, advantages = need(dump, "log_probs", "old_log_probs", "advantages")
    loss = _policy_loss(formula)
    masked = [each * dump.mask for each in (new, old, advantages)]
    inputs = LossInputs(
        *masked, action_mask=dump.mask, eps_low=loss.clip_eps_low, eps_high=loss.clip_eps_high
    )
    token_loss, metrics = loss.of_tokens(inputs, **loss.options)
    _in_all_rows(dump, "loss_weights")
    if "loss_weights" in dump.columns:
        token_loss = token_loss * dump.columns["loss_weights"].values
    return token_loss, metrics


def _policy_losses(dump: Dump, formula: SimpleNamespace) -> Claim:
    found = _found(dump, "policy_losses")
    return Claim(found, _of_tokens(dump, formula)[0], dump.mask)


def _clipped(name: str, side: int) -> Check:
    """Return the check of which tokens the loss clips; ``side``: where A is above (1) or below (-1) 0, or anywhere."""

    def check(dump: Dump, formula: SimpleNamespace) -> Claim:
        found = _found(dump, name)
        clipped = _of_tokens(dump, formula)[1]["clip_ratio"]
        advantages = dump.columns["advantages"].values
        if side:
            clipped = clipped * (advantages * side > 0)
        where = dump.mask & (advantages != 0)  # else it makes no difference
        return Claim(found, clipped, where, is_yes_or_no=True)

    return check


def _logged(name: str, token_values: Callable[[Dump, SimpleNamespace], Tensor]) -> Check:
    """Return the check of a number of the step, which is the aggregate of numbers of the tokens."""

    def check(dump: Dump, formula: SimpleNamespace) -> Claim:
        if name not in dump.logged:
            raise MissingError(f"--logged {name}=NUMBER gives what the trainer logged")
        _whole_step(dump)
        values = token_values(dump, formula)
        mode = formula.loss_agg_mode if name.endswith("loss") else "token-mean"
        expected = _aggregate(dump, formula, values, mode)
        size = _aggregate(dump, formula, values.abs(), mode)
        return Claim(dump.logged[name], expected, torch.tensor(True), 10 * size)

    return check


def _of_step(dump: Dump, formula: SimpleNamespace, of_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a loss of the step out of ``of_rows(rows)``, which normalises by these rows alone.

    That is the loss of all rows at once; with ``per_micro_batch``, of a faulty trainer, the mean or sum of the losses of
    micro batches.
    """
    every = torch.ones(len(dump.rows), dtype=torch.bool)
    if formula.per_micro_batch is None:
        return of_rows(every)
    if dump.micro_batches is None:
        raise MissingError("needs the micro batch of each sample")
    parts = [dump.micro_batches == number for number in dump.micro_batches.unique()]
    total = torch.stack([of_rows(part) for part in parts]).sum()
    return total / len(parts) if formula.per_micro_batch == "mean" else total


def _aggregate(dump: Dump, formula: SimpleNamespace, values: Tensor, mode: str) -> Tensor:
    """Return the aggregate of numbers of the tokens (B, A)."""

    def of_rows(rows: Tensor) -> Tensor:
        mask = dump.mask[rows]
        normalizer = LossNormalizer.from_masks([mask], scale=float(formula.generate_max_len))
        return aggregate_loss(values[rows], mask, mode, normalizer)

    return _of_step(dump, formula, of_rows)


def _policy_token_loss(dump: Dump, formula: SimpleNamespace) -> Tensor:
    if "policy_losses" in dump.columns and "log_probs" not in dump.columns:
        return dump.columns["policy_losses"].values
    return _of_tokens(dump, formula)[0]


def _value_loss(dump: Dump, formula: SimpleNamespace) -> Claim:
    if "new_values" not in dump.columns:
        return _logged("value_loss", lambda dump, _: need(dump, "value_losses")[0])(dump, formula)
    if "value_loss" not in dump.logged:
        raise MissingError("--logged value_loss=NUMBER gives what the trainer logged")
    _whole_step(dump)
    tensors = [*need(dump, "new_values", "values", "returns"), dump.mask]
    horizon = float(formula.generate_max_len)
    loss = ValueLoss(formula.value_clip, formula.loss_agg_mode, horizon=horizon)
    expected = _of_step(dump, formula, lambda rows: loss(*(tensor[rows] for tensor in tensors)))
    return Claim(dump.logged["value_loss"], expected, torch.tensor(True), 10 * expected.abs())


def _kl_of_training(dump: Dump, formula: SimpleNamespace) -> Tensor:
    """Return the KL of the policy in training, which is the old one in a first optimizer step."""
    if "log_probs" not in dump.columns:
        return _kl(dump, formula)
    log_probs, reference = need(dump, "log_probs", "ref_log_probs")
    return approx_kl(log_probs, reference, formula.kl_estimator, formula.kl_clip, dump.mask)


def _metric(name: str) -> Callable[[Dump, SimpleNamespace], Tensor]:
    def of_tokens(dump: Dump, formula: SimpleNamespace) -> Tensor:
        metrics = _of_tokens(dump, formula)[1]
        if name not in metrics:
            raise MissingError(f"--policy_loss {formula.policy_loss} has no {name}")
        return metrics[name]

    return of_tokens


def _reward(dump: Dump, formula: SimpleNamespace) -> Claim:
    if "reward" not in dump.logged:
        raise MissingError("--logged reward=NUMBER gives what the trainer logged")
    _whole_step(dump)
    scores = need(dump, "scores")[0]
    return Claim(dump.logged["reward"], scores.mean(), torch.tensor(True), scores.abs().mean())


CHECKS: dict[str, Check] = {
    "finite numbers": _finite,
    "mask": _mask,
    "lengths of rows": _lengths,
    "kl": _kl_column,
    "scores in their groups": _group_scores,
    "token rewards": _rewards_of_tokens,
    "returns": _returns,
    "advantages": _advantages,
    "log ratio": _of_log_probs("log_ratio", lambda new, old: new - old),
    "ratio": _of_log_probs("ratio", lambda new, old: (new - old).exp()),
    "mismatch kl": _of_log_probs("mismatch_kl", lambda new, old: k3(old - new)),
    "probability change": _of_log_probs("prob_delta", lambda new, old: new.exp() - old.exp()),
    "importance weights": _weights,
    "clipped tokens": _clipped("clipped", 0),
    "clipped tokens (A > 0)": _clipped("clipped_high", 1),
    "clipped tokens (A < 0)": _clipped("clipped_low", -1),
    "policy loss of tokens": _policy_losses,
    "policy loss": _logged("policy_loss", _policy_token_loss),
    "clip ratio": _logged("clip_ratio", _metric("clip_ratio")),
    "dual clip ratio": _logged("dual_clip_ratio", _metric("dual_clip_ratio")),
    "approx kl": _logged("approx_kl", _metric("approx_kl")),
    "kl loss": _logged("kl_loss", _kl_of_training),
    "value loss": _value_loss,
    "distillation loss": _logged("distill_loss", lambda dump, _: need(dump, "distill_losses")[0]),
    "mean reward": _reward,
}
"""In the order in which a step computes."""
