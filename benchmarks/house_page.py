"""The numbers in docs/design.md and README.md: ``python benchmarks/house_page.py`` writes them, as ``make docs`` does.

What is read from the code is counted anew; what a traced run says is kept in docs/data/house.json by ``make house``.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "data" / "house.json"
_STEP = "one GRPO step"

PAGES = {  # each plugin: what it does, and the page of docs/ that describes it
    "adapters": ("LoRA and frozen 4-bit weights", "lora.md"),
    "algorithms": ("rarely used estimators and losses, off-policy corrections", "algorithms.md"),
    "averages": ("a moving average of the actor, a reference that moves", "algorithms.md"),
    "cadence": ("what is due every N episodes or seconds", "checkpoints.md"),
    "checks": ("checks before a run starts or goes on, dry runs, the memory budget", "memory.md"),
    "compat": ("constructors and call forms of OpenRLHF and LightRFT scripts", "migrating.md"),
    "distillation": ("a teacher that judges the samples", "algorithms.md#distillation"),
    "episodes": ("environments and tools over several turns", "environments.md"),
    "evaluation": ("answers to held-out prompts, `lightppo eval`", "commands.md"),
    "exports": ("models for transformers while a run goes on, the best one", "checkpoints.md"),
    "families": (
        "attention and value heads by family of models, changes of configs",
        "models.md",
    ),
    "hints": (
        "`--help`, options without effect, what a mistyped name may have meant",
        "commands.md",
    ),
    "hybrids": ("recurrent layers in packed rows and decoding slots", "dataflow.md"),
    "http": ("rewards over HTTP, the reward server", "rewards.md#http-servers"),
    "kernels": ("fused norms, CPU products, compiled layers", "performance.md"),
    "decoding": ("continuous batching of the hf engine, CUDA graphs", "rollouts.md"),
    "measures": ("summaries of samples, times and speeds, the line of a step", "metrics.md"),
    "migration": ("option names of other trainers", "migrating.md"),
    "ops": ("signals, the watchdog, files that survive a crash, URLs", "faults.md"),
    "packing": ("rows without padding, prompts that run once for all their samples", "dataflow.md"),
    "records": ("the run folder, metrics, trackers, alarms, recorded samples", "metrics.md"),
    "report": ("the report page, `watch`, `diff`, `replay`", "report.md"),
    "reshape": (
        "checkpoints for other ranks or ZeRO stages",
        "checkpoints.md#other-ranks-other-zero-stages",
    ),
    "reward_sources": (
        "sums and routes of rewards, several reward models; functions of verl, TRL and AReaL, threads, retries",
        "rewards.md",
    ),
    "sampling_rules": ("penalties, words that are never sampled, stop strings", "rollouts.md"),
    "selection": ("dynamic sampling, best of n, balanced ranks", "rollouts.md#dynamic-sampling"),
    "shaping": (
        "scores before training, the returns of a critic",
        "algorithms.md#shaping-of-scores",
    ),
    "sources": ("rows of the hub, CSV and tables, blends; folders of models", "data.md"),
    "supervised": ("SFT, reward models, DPO, the PTX loss", "supervised.md"),
    "tape": ("replies from outside, written down and replayed", "environments.md#the-tape"),
    "tools": ("`lightppo data`, `chat`, `convert`, `merge`, `tiny-model`", "commands.md"),
    "towers": ("text training of checkpoints with image or audio towers", "limits.md"),
    "verifiers": ("mathematics, formats, code, the sandbox", "rewards.md"),
    "vllm": ("vLLM in the same process or as a server", "rollouts.md"),
}


def row(*cells: object) -> str:
    shown = (f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in cells)
    return " | ".join(shown)


def comparison(stored: Mapping[str, Any]) -> str:
    """The tree before there were plugins, and the present one."""
    before, now = stored["before"], stored["now"]
    parts = now["parts"]
    plugins = len(parts) - 3  # without core, all and plugins/__init__.py
    lines = [
        f"measure | before (`{before['commit']}`) | now: core | now: core and plugins",
        "---|---:|---:|---:",
    ]
    for measure in parts["all"]:
        lines.append(
            row(
                measure,
                before["parts"]["all"][measure],
                parts["core"][measure],
                parts["all"][measure],
            )
        )
    lines.append(row("plugins", 0, "", plugins))
    run = now["run"]
    for measure, count in run.items():
        if not measure.endswith("of the core"):
            of_core = run[f"{measure} of the core"]
            lines.append(row(measure, before["run"].get(measure, ""), of_core, count))
    return "\n".join(lines)


def plugin_table(stored: Mapping[str, Any]) -> str:
    """A line for each plugin."""
    lines = [
        "plugin | what it does | files | tokens | tokens per line | letters per name | argument tuples"
    ]
    lines.append("---|---|---:|---:|---:|---:|---:")
    for part, numbers in stored["now"]["parts"].items():
        name = part.removeprefix("plugins/")
        if name in PAGES:
            about, page = PAGES[name]
            counts = (value for measure, value in numbers.items() if measure != "lines")
            lines.append(row(f"[`{name}`]({page})", about, *counts))
    return "\n".join(lines)


def counts() -> str:
    """How many there are of what a user chooses from."""
    from lightppo.algorithms.entries import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
    from lightppo.config.options import all_options
    from lightppo.plugin import COMMANDS

    def different(table: Mapping[str, Any]) -> int:
        """Without second names of an entry."""
        return len({str(entry.function) for entry in table.values()})

    tests = sum(
        len(re.findall(r"(?m)^ *def test_", path.read_text()))
        for path in (ROOT / "tests").rglob("*.py")
    )
    return (
        f"{different(ADVANTAGE_ESTIMATORS)} advantage estimators, {len(POLICY_LOSSES)} policy losses, "
        f"{len(KL_ESTIMATORS)} KL estimators, {len(list(all_options()))} options of `lightppo ppo`, "
        f"{len(COMMANDS)} commands, and more than {tests // 100 * 100:,} test functions"
    )


def size(stored: Mapping[str, Any]) -> str:
    parts, run = stored["now"]["parts"], stored["now"]["run"]
    core, whole = parts["core"], parts["all"]
    text = (
        f"The core has {core['files']:,} files and {core['tokens of code']:,} tokens of code; with its "
        f"{len(parts) - 3} plugins {whole['files']:,} files and {whole['tokens of code']:,} tokens."
    )
    if run:
        text += (
            f" A GRPO step runs through {run[f'{_STEP}: files of the core']} files and "
            f"{run[f'{_STEP}: lines of functions of the core']:,} lines of functions of the core."
        )
    return text


def written(page: str, name: str, text: str) -> str:
    """The page with the text between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    pattern = rf"(?s)(<!-- {name}: generated by `make docs` -->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda marks: f"{marks[1]}{text}\n{marks[2]}", page)


def pages(stored: Mapping[str, Any]) -> dict[Path, str]:
    """Each page with the numbers in it, as it should be."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    design = written(design, "house", comparison(stored))
    design = written(design, "plugins", plugin_table(stored))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = written(readme, "counts", textwrap.fill(f"It has {counts()}. {size(stored)}", 132))
    return {ROOT / "docs" / "design.md": design, ROOT / "README.md": readme}


if __name__ == "__main__":
    for path, text in pages(json.loads(STORED.read_text())).items():
        path.write_text(text, encoding="utf-8")
