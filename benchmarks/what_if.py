"""What `lightppo what-if` finds on the quickstart's task: 20 known effects, 8 large ones, 20 changes without one.

    python benchmarks/what_if.py [--quick] [--resume]

One run of the two-digit sums is forked once. Each question has branches with the same seeds; they share the base
branches. All branches are trained in this process, which gives the numbers of processes. For each question: the variance
of a pair's difference beside that of runs with different seeds, whether the interval of so many pairs excludes 0, and in
how many steps, the branches times their steps, pairs and runs with different seeds see an effect of that size. Writes
``runs/bench/what_if.json``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median, stdev, variance
from typing import Any

from commands import REPO

MEASURES = {"reward": "rollout/reward", "length": "rollout/response_length"}
FORK_AT = 4
STEPS = 6  # of a branch
PAIRS = 8
SEEDS = 20  # of base branches, for the noise of seeds alone
RATE = 3e-4

# What each does to the reward or the length within a few steps is known: larger or smaller steps, or more of them, other
# tokens, another aim. They are of the size that one would ask about: a few runs with other seeds do not show them.
EFFECTS = {
    **{f"rate × {factor}": [f"actor_learning_rate={RATE * factor:g}"]
       for factor in (0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5)},
    **{f"temperature {value}": [f"temperature={value}"] for value in (0.95, 0.98, 1.02, 1.05)},
    **{f"top_p {value}": [f"top_p={value}"] for value in (0.98, 0.99)},
    "top_k 10": ["top_k=10"],
    **{f"entropy bonus {value}": [f"entropy_coef={value}"] for value in (0.02, 0.05, 0.1)},
    "betas 0.9": ["adam_betas=0.9 0.9"],
    "2 optimizer steps": ["ppo_n_minibatches=2"],
    "8 optimizer steps": ["ppo_n_minibatches=8", "micro_train_batch_size=16"],
}  # fmt: skip
# After these, few tokens are the same, and a few runs show them: what pairs cannot save.
LARGE = {
    "rate × 0": ["actor_learning_rate=0"],
    **{f"temperature {value}": [f"temperature={value}"] for value in (0.9, 1.1)},
    "top_p 0.95": ["top_p=0.95"],
    **{f"top_k {value}": [f"top_k={value}"] for value in (5, 8)},
    "reward turned": ["reward_scaling=-1"],
    "2 epochs": ["max_epochs=2"],
}
# Changes of rounding, or so small that what they do is far below what any number of pairs here could see.
NULLS = {
    **{f"rate × {factor}": [f"actor_learning_rate={RATE * factor:.8g}"]
       for factor in (0.999, 0.9995, 0.9999, 1.0001, 1.0005, 1.001)},
    **{f"betas {second}": [f"adam_betas=0.9 {second}"] for second in (0.9495, 0.9499, 0.9501, 0.9505)},
    "weight decay 1e-6": ["l2=1e-6"],
    "weight decay 1e-5": ["l2=1e-5"],
    "entropy bonus 1e-6": ["entropy_coef=1e-6"],
    "entropy bonus 2e-6": ["entropy_coef=2e-6"],
    "reward × 2, in groups": ["reward_scaling=2"],
    "reward - 1, in groups": ["reward_bias=1"],
    "temperature 0.9999": ["temperature=0.9999"],
    "temperature 1.0001": ["temperature=1.0001"],
    "gradient norm 1.001": ["max_norm=1.001"],
    "micro batches of 16": ["micro_train_batch_size=16"],
}  # fmt: skip

Rows = dict[int, dict[str, Any]]
Curves = dict[str, list[list[float]]]  # measure → by seed its values at the steps


# -- training ----------------------------------------------------------------------------------------------------------


def base_run(folder: Path) -> Path:
    """Make model and data, and train the run that is forked, unless it is there."""
    from support.addition import short_run, warm_start

    run = folder / "run"
    if (run / "lightppo_manifest.json").is_file():
        return run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    warm_start(folder)
    options = short_run(folder, run) | {
        "advantage_estimator": "grpo",
        "rollout_batch_size": 32,
        "micro_rollout_batch_size": 128,
        "micro_train_batch_size": 32,
        "actor_learning_rate": RATE,
        "save_steps": FORK_AT,
        "total_training_steps": 30,
        "benchmark_steps": FORK_AT,
    }
    del options["ckpt_path"]
    train(options)
    return run


def train(options: Mapping[str, Any] | Any) -> None:
    from lightppo import PPOConfig, PPOTrainer
    from lightppo.logging.run_folder import release

    config = PPOConfig.from_flat(options) if isinstance(options, Mapping) else options
    trainer = PPOTrainer.from_config(config)
    is_branch = config.checkpoint.resume != "auto"
    trainer.keeps_files = not is_branch  # of a branch the metrics are enough
    trainer.fit()
    release([config.checkpoint.save_path, trainer.config.checkpoint.ckpt_path])
    if is_branch:
        shutil.rmtree(trainer.config.checkpoint.ckpt_path, ignore_errors=True)


def branches(run: Path, out: Path, changes: Sequence[str], kind: str, seeds: int) -> Curves:
    """Train one branch of a question for each seed, those that are not there; return its measures."""
    from lightppo.experiments.fork import Branch, Fork
    from lightppo.experiments.members import recorded_rows
    from lightppo.experiments.what_if import arguments_of

    words = [str(run), "--step", str(FORK_AT), "--steps", str(STEPS), "--out", str(out)]
    fork = Fork(arguments_of([*words, "--set", *changes], "what-if"))
    fork.claim()
    curves: Curves = {measure: [] for measure in MEASURES}
    for seed in range(seeds):
        branch = Branch(42 + seed, kind, out / f"{kind}_seed{42 + seed}")
        if not fork.has_steps(branch.run):
            shutil.rmtree(branch.run, ignore_errors=True)
            train(fork.options(branch))
        rows: Rows = recorded_rows(branch.run)
        for measure, metric in MEASURES.items():
            curves[measure].append([rows[step][metric] for step in fork.steps])
    return curves


# -- what is found -----------------------------------------------------------------------------------------------------


def question(base: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what pairs and runs with different seeds say of one measure; ``base`` may have more seeds."""
    from lightppo.experiments.intervals import mean_of, unpaired_difference

    old, new = means(base), means(changed)
    differences = [after - before for after, before in zip(new, old)]
    paired, unpaired = mean_of(differences), unpaired_difference(new, old[: len(new)])
    noise = math.hypot(stdev(old), stdev(new))
    needed = [fewest_steps(base, changed, groups) for groups in (1, 2)]
    return {
        "effect": paired.value,
        "interval": [paired.low, paired.high],
        "found": paired.excludes_zero,
        "found_unpaired": unpaired.excludes_zero,
        "variance_ratio": variance(differences) / noise**2 if noise else None,
        "steps_in_pairs": needed[0],
        "steps_in_unlike_seeds": needed[1],
    }


def means(curves: Sequence[Sequence[float]], steps: int | None = None) -> list[float]:
    """Return the mean over the first steps (all) for each seed."""
    return [mean(values[:steps]) for values in curves]


def fewest_steps(
    base: Sequence[Sequence[float]], changed: Sequence[Sequence[float]], groups: int
) -> int | None:
    """Return the fewest steps of changed branches whose interval would exclude 0: runs × steps of each.

    Long branches have a larger effect, short ones are cheap: each length is tried. ``groups`` is 1 for pairs and 2 for
    runs with different seeds; None where no length shows an effect.
    """
    from lightppo.experiments.intervals import count_for_width

    needed = []
    for steps in range(1, len(base[0]) + 1):
        old, new = means(base, steps), means(changed, steps)
        differences = [after - before for after, before in zip(new, old)]
        effect = abs(mean(differences))
        deviation = stdev(differences) if groups == 1 else math.hypot(stdev(old), stdev(new))
        if effect and (count := count_for_width(deviation, 2 * effect, groups)):
            needed.append(count * steps)
    return min(needed, default=None)


def false_positives(base: Sequence[float], size: int, draws: int = 2000) -> float:
    """Return how often the interval of pairs of unlike seeds, between which there is no difference, excludes 0."""
    from lightppo.experiments.intervals import mean_of

    generator = random.Random(0)
    found = 0
    for _ in range(draws):
        drawn = generator.sample(list(base), 2 * size)
        found += mean_of([a - b for a, b in zip(drawn[::2], drawn[1::2])]).excludes_zero
    return found / draws


def binomial_interval(found: int, count: int) -> list[float]:
    """Return the exact (Clopper-Pearson) 95% interval of a share."""

    def tail(share: float, counts: range) -> float:
        return sum(math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in counts)

    def solve(counts: range, rises: bool) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (tail(middle, counts) < 0.025) == rises else (low, middle)
        return low

    low = solve(range(found, count + 1), True) if found else 0.0
    high = solve(range(found + 1), False) if found < count else 1.0
    return [low, high]


def of_effects(known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the answers to questions with an effect say of one measure."""
    steps = [(each["steps_in_pairs"], each["steps_in_unlike_seeds"]) for each in known]
    steps = [(pairs, unlike) for pairs, unlike in steps if pairs and unlike]
    shares = [pairs / unlike for pairs, unlike in steps] or [math.nan]
    in_pairs, in_unlike_seeds = map(sum, zip(*steps)) if steps else (math.nan, math.nan)
    return {
        "effects": len(known),
        "effects_found": sum(each["found"] for each in known),
        "effects_found_unpaired": sum(each["found_unpaired"] for each in known),
        "share_of_steps_median": median(shares),
        "share_of_steps_in_all": in_pairs / in_unlike_seeds,
        "at_most_a_third_of_the_steps": sum(share <= 1 / 3 for share in shares),
    } | of_variances(known)


def of_variances(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [each["variance_ratio"] for each in answers if each["variance_ratio"] is not None]
    return {
        "variance_ratio_median": median(ratios or [math.nan]),
        "variance_at_most_a_fifth": sum(ratio <= 0.2 for ratio in ratios),
    }


def of_nulls(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the answers to questions without an effect say of one measure."""
    found = sum(each["found"] for each in answers)
    return {
        "nulls": len(answers),
        "false_positives": found,
        "false_positives_interval": binomial_interval(found, len(answers)),
    } | of_variances(answers)


def results(curves: Mapping[str, Mapping[str, Curves]], base: Curves) -> dict[str, Any]:
    """Return all that is reported, of the curves by kind and question."""
    answers = {
        kind: {
            name: {measure: question(base[measure], values[measure]) for measure in MEASURES}
            for name, values in questions.items()
        }
        for kind, questions in curves.items()
    }
    size = min(PAIRS, len(base["reward"]) // 2)
    of_kind = {"effects": of_effects, "large": of_effects, "nulls": of_nulls}
    return {
        "summary": {
            measure: {
                kind: of_kind[kind]([each[measure] for each in of.values()])
                for kind, of in answers.items()
                if of
            }
            | {"false_positives_of_unlike_seeds": false_positives(means(base[measure]), size)}
            for measure in MEASURES
        },
        **answers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the base branches")
    parser.add_argument("--resume", action="store_true", help="keep the branches that are there")
    parser.add_argument(
        "--quick", action="store_true", help="2 questions of a kind, 3 pairs: does it work?"
    )
    options = parser.parse_args()
    kinds = {"effects": EFFECTS, "large": LARGE, "nulls": NULLS}
    if options.quick:
        options.pairs, options.seeds = 3, 6
        kinds = {kind: dict(itertools.islice(of.items(), 2, 4)) for kind, of in kinds.items()}
    sys.path.insert(0, str(REPO / "tests"))
    folder = options.run_dir.resolve() / "what_if"
    if not options.resume:
        shutil.rmtree(folder, ignore_errors=True)

    from lightppo.distributed.deepspeed import DeepspeedStrategy

    DeepspeedStrategy(zero_stage=0).setup_distributed()
    start = time.monotonic()
    run = base_run(folder / "assets")
    any_change = [f"actor_learning_rate={RATE / 3}"]
    base = branches(run, folder / "base", any_change, "base", options.seeds)
    curves: dict[str, dict[str, Curves]] = {kind: {} for kind in kinds}
    # in turn, so that what is written after each question has some of both kinds
    turns = itertools.zip_longest(*([(kind, name) for name in of] for kind, of in kinds.items()))
    for kind, name in filter(None, itertools.chain(*turns)):
        out = folder / f"{kind}, {name}"
        curves[kind][name] = branches(run, out, kinds[kind][name], "changed", options.pairs)
        reward = question(base["reward"], curves[kind][name]["reward"])
        print(f"{kind}, {name}: {json.dumps(reward)}", flush=True)
        result = {
            "date": datetime.date.today().isoformat(),
            "steps": STEPS,
            "pairs": options.pairs,
            "seeds": options.seeds,
            "seconds": time.monotonic() - start,
            "base": base,
            "curves": curves,
            **results(curves, base),
        }
        folder.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1), folder.with_suffix(".json"), sep="\n")


if __name__ == "__main__":
    main()
