"""``lightppo audit``: recompute the numbers that any trainer wrote, and name the first that departs."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from lightppo.algorithms.option_values import weights_of_parts
from lightppo.audit.formulas import formula_of, formula_options
from lightppo.config.cli import exit_on_mistakes, parse_section
from lightppo.errors import ConfigError, UserError
from lightppo.logging.report_page import options_of
from lightppo.option import Section, option
from lightppo.redaction import plain

if TYPE_CHECKING:
    from lightppo.audit.checks import Finding
    from lightppo.audit.dumps import Column, Dump


_OF_LOSSES = "policy_loss eps_clip eps_clip_low eps_clip_high dual_clip dppo_ratio_max dppo_drift_coef loss_agg_mode"
_OF_WEIGHTS = "rollout_correction correction_low correction_high correction_veto"


class _OwnConfig(Section):
    form: Literal["slime", "verl", "prime-rl", "trl", "openrlhf", "lightppo"] | None = option(
        None, "Trainer that wrote the dump. None: by the names in it."
    )
    logged: tuple[str, ...] = option(
        (),
        "Numbers that the trainer logged for this step, NAME=NUMBER: policy_loss, value_loss, distill_loss, kl_loss, "
        "clip_ratio, dual_clip_ratio, approx_kl, reward. They are held against the dump's tokens.",
    )
    reward_columns: tuple[str, ...] = option(
        (),
        "trl: the columns that are rewards, NAME or NAME=WEIGHT. Default: all columns of numbers.",
    )
    masked_rows: Literal["count", "leave_out"] | None = option(
        None,
        "Whether the score of a response without a trained token counts in its group. None: as in the trainer; "
        "lightppo leaves it out, all others count it.",
    )
    whole_step: bool = option(
        False, "lightppo: the recorded samples are all of the step, not some of them."
    )
    json: bool = option(False, "Print JSON.")


class AuditConfig(_OwnConfig, declared=_OwnConfig.options() | formula_options()):
    """Recompute the numbers of a dump by a stated formula, and name the first that departs.

    The formula has the options of lightppo ppo; None: the default of the trainer that wrote the dump. Exit code 0: all
    that could be judged agrees; 1: a number departs; 2: the dump or an option cannot be used.
    """


def main(arguments: Sequence[str], program: str = "lightppo audit") -> None:
    """Judge a dump."""
    words = list(arguments)
    path = words.pop(0) if words and not words[0].startswith("-") else None
    config = parse_section(AuditConfig, lambda _, __: _problems(path), words, f"{program} DUMP")
    with exit_on_mistakes(program, UserError):
        logged = dict(map(_named_number, config.logged))
        from lightppo.audit import checks, dumps

        dump = dumps.read(
            str(path),
            config.form,
            config.n_samples_per_prompt,
            weights_of_parts(config.reward_columns, "--reward_columns"),
        )
        of_run = _of_run(str(path), dump.form)
        step = of_run.get("rollout_batch_size", math.inf) * of_run.get("n_samples_per_prompt", 1)
        dump = replace(
            dump,
            logged=dump.logged | {name: _as_column(name, text) for name, text in logged.items()},
            is_whole=dump.is_whole or config.whole_step or len(dump.rows) >= step,
        )
        given = {name: value for name, value in vars(config).items() if value is not None}
        of_run.pop("n_samples_per_prompt", None)  # its dumps name their prompts
        formula = formula_of(dump.form, of_run | given)
        findings = checks.audit(dump, formula)
    if config.json:
        print(json.dumps(_as_json(dump, findings), indent=1))
    else:
        print(plain("\n".join(_lines(str(path), dump, formula, findings))))
    if any(finding.departing for finding in findings):
        raise SystemExit(1)


def _problems(path: str | None) -> list[str]:
    if path is None:
        return [
            "DUMP is required, before all flags: lightppo audit DUMP --advantage_estimator grpo"
        ]
    return []


def _of_run(path: str, form: str) -> dict[str, Any]:
    """Return the options of the run of lightppo in whose folder a dump stands; none elsewhere."""
    if form != "lightppo":
        return {}
    of_runs = [options_of(folder) for folder in list(Path(path).absolute().parents)[:2]]
    return next(filter(None, of_runs), {})


def _named_number(text: str) -> tuple[str, str]:
    from lightppo.audit.dumps import LOGGED_NAMES

    name, _, number = text.partition("=")
    try:
        is_number = math.isfinite(float(number))
    except ValueError:
        is_number = False
    if name not in LOGGED_NAMES or not is_number:
        raise ConfigError(
            f"--logged {text}: write NAME=NUMBER, with a name of {', '.join(LOGGED_NAMES)}"
        )
    return name, number


def _as_column(name: str, text: str) -> Column:
    """Return a number as it was written: with a point, it is rounded to half a unit of its last digit."""
    import torch

    from lightppo.audit.dumps import Column

    mantissa, _, exponent = text.lower().partition("e")
    _, point, decimals = mantissa.partition(".")
    digits = 0.5 * 10.0 ** (int(exponent or 0) - len(decimals)) if point else 0.0
    return Column(torch.tensor(float(text), dtype=torch.float64), f"logged {name}", digits=digits)


# -- what is said ----------------------------------------------------------------------------------------------------


def _lines(
    path: str, dump: Dump, formula: SimpleNamespace, findings: Sequence[Finding]
) -> Iterator[str]:
    judged = {finding.quantity for finding in findings if not finding.missing}
    yield f"{path}: {_described(dump)}"
    yield from _wrapped(f"formula: {' '.join(_flags(formula, judged))}")
    yield f"\n{'quantity':<24}{'compared':>9}{'departing':>11}{'most by':>11}"
    for finding in findings:
        if finding.quantity in judged:
            most = f"{finding.largest:>11.3g}" if finding.departing else f"{'-':>11}"
            yield f"{finding.quantity:<24}{finding.compared:>9}{finding.departing:>11}{most}"
    yield ""
    yield from _departures(findings)
    absent = [each.quantity for each in findings if each.missing.startswith("the dump has no")]
    unlogged = [each.quantity for each in findings if each.missing.startswith("--logged")]
    if absent:
        yield from _wrapped(f"not in the dump: {', '.join(absent)}")
    if unlogged:
        yield from _wrapped(f"not known without --logged: {', '.join(unlogged)}")
    for finding in findings:
        if finding.missing and finding.quantity not in (*absent, *unlogged):
            yield f"not judged: {finding.quantity}: {finding.missing}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _described(dump: Dump) -> str:
    text = f"{dump.form}, {len(dump.rows)} samples"
    if dump.has_tokens:
        text += f", {int(dump.mask.sum())} trained tokens"
        if untrained := int((~dump.mask.any(1)).sum()):
            text += f", {untrained} samples without any"
    if dump.groups is None:
        return text
    sizes_of = dump.groups.unique(return_counts=True)[1]
    sizes = sizes_of.unique().tolist()
    text += f", {len(sizes_of)} prompts of {' or '.join(map(str, sizes))} samples"
    if "scores" in dump.columns:
        scores = dump.columns["scores"].values
        groups = dump.groups.unique(return_inverse=True)[1]
        low, high = (
            scores.new_zeros(len(sizes_of)).scatter_reduce(
                0, groups, scores, end, include_self=False
            )
            for end in ("amin", "amax")
        )
        same = int((low == high).sum())
        text += f", {same} of them with equal scores"
    return text


def _flags(formula: SimpleNamespace, judged: Collection[str]) -> Iterator[str]:
    """Yield the options that what was judged depends on."""
    estimator = formula.estimator
    has_losses = any("loss" in quantity or "clip" in quantity for quantity in judged)
    acts = {
        "gamma": estimator.discounted,
        "lambd": estimator.needs_critic,
        "group_std_norm": estimator.divides_by_std,
        "grpo_std_eps": estimator.divides_by_std and formula.group_std_norm,
        "grpo_std_scope": estimator.divides_by_std and formula.group_std_norm,
        "adv_std_unbiased": formula.adv_norm,
        "masked_rows": estimator.per_sample,
        "n_samples_per_prompt": estimator.per_sample or estimator.min_group_size > 1,
        "value_clip": "value loss" in judged,
        "generate_max_len": formula.loss_agg_mode.endswith("norm"),
        **dict.fromkeys(("use_kl_loss", "kl_estimator", "kl_clip"), formula.init_kl_coef),
        **dict.fromkeys(_OF_LOSSES.split(), has_losses),
        **dict.fromkeys(_OF_WEIGHTS.split(), "importance weights" in judged),
    }
    for name in (*formula_options(), "masked_rows"):
        value = getattr(formula, name)
        if value is None or not acts.get(name, True):
            continue
        if isinstance(value, bool):
            yield f"--{'' if value else 'no_'}{name}"
        else:
            shown = (
                " ".join(f"{each:g}" for each in value)
                if isinstance(value, tuple | list)
                else value
            )
            yield f"--{name} {shown}"


def _departures(findings: Sequence[Finding]) -> Iterator[str]:
    departing = [(finding, finding.first) for finding in findings if finding.first is not None]
    if not departing:
        judged = [finding.quantity for finding in findings if not finding.missing]
        yield f"all agrees: {', '.join(judged)}"
    for finding, first in departing:
        place = f"{first.row}, " if first.row else ""
        position = "" if first.position is None else f", token {first.position}"
        yield (
            f"first that departs, {finding.quantity}: {place}column {first.column}{position}: {first.found:.6g}, by the "
            f"formula {first.expected:.6g}, off by {abs(first.found - first.expected):.3g}"
        )
        if finding.hints:
            yield f"    all of them agree with: {'; '.join(finding.hints)}"


def _as_json(dump: Dump, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what JSON can hold: numbers that are not finite are null."""
    plain_findings = []
    for finding in findings:
        content = asdict(finding)
        content["largest"] = _finite(finding.largest)
        if finding.first is not None:
            first = finding.first._asdict()
            content["first"] = {name: _finite(value) for name, value in first.items()}
        plain_findings.append(content)
    return {"form": dump.form, "samples": len(dump.rows), "findings": plain_findings}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
