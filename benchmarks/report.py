"""The tables of docs/performance.md and docs/asynchronous.md, and the plot, from what the benchmarks wrote.

python benchmarks/report.py            # show the tables
python benchmarks/report.py --write    # put them into the page, and the plot beside it
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from commands import REPO
from results import PHASES, check_compare

PAGE, PLOT = REPO / "docs" / "performance.md", REPO / "docs" / "performance.png"
ASYNC_PAGE = REPO / "docs" / "asynchronous.md"
NAMES = {"trl": "TRL", "lightppo": "lightppo"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [" | ".join(cells).rstrip("| ") for cells in (head, *rows)]
    return "\n".join([lines[0], "|".join(["---"] * len(head)), *lines[1:]])


def machine_line(about: dict[str, Any], date: str) -> str:
    """What it was measured on, and when."""
    gpu = about["gpu"] or "no GPU was at hand"
    peak, unit = about["peak_flops"] / 1e9, "GFLOP/s"
    if about["gpu"]:
        peak, unit = peak / 1e3, "TFLOP/s"
    return (
        f"{date}, {about['cpu']}, {about['cores']} cores, {about['threads']} threads, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB, {gpu}; torch {about['torch']}; "
        f"matrix peak {peak:.0f} {unit}."
    )


def _load_line(loads: list[float], cores: int) -> str:
    """Load, and what it means where other work was going on."""
    text = f" Load average of the machine {min(loads):.1f} to {max(loads):.1f}."
    if max(loads) > cores + 1:
        text += " **Other work was going on: these times show that the benchmark runs, not how fast anything is.**"
    return text


def ratio_per_token(entry: dict[str, Any]) -> float:
    """TRL's seconds for a token of prompts and responses / lightppo's: each side samples responses of its own."""
    each = []
    for side in ("trl", "lightppo"):
        numbers = entry[side]
        tokens = numbers["prompt_tokens"] + numbers["generated_tokens"]
        each.append(sum(numbers["iterations"]) / len(numbers["iterations"]) / tokens)
    return each[0] / each[1]


def compare_block(data: dict[str, Any]) -> str:
    """Both sides of each workload."""
    head = [
        "side",
        "iteration",
        *PHASES,
        "generated/s",
        "trained/s",
        "peak memory",
        "MFU",
        "MFU training",
    ]
    head += ["ratio", "per token"]
    rows, loads = [], []
    for name, entry in data["workloads"].items():
        for side, title in NAMES.items():
            numbers = entry[side]
            loads += numbers["load"]
            cells = [f"{name} {title}", f"{numbers['seconds']:.1f} s"]
            cells += [f"{numbers['phases'][phase]:.1f} s" for phase in PHASES]
            cells += [
                f"{numbers['generated_tokens_per_second']:,.0f}",
                f"{numbers['trained_tokens_per_second']:,.0f}",
            ]
            cells += [f"{numbers['peak_memory_bytes'] / 2**30:.2f} GiB"]
            cells += [f"{numbers['mfu']:.1%}", f"{numbers['mfu_training']:.1%}"]
            ratios = (
                [f"{entry['ratio']:.2f}", f"{ratio_per_token(entry):.2f}"]
                if side == "lightppo"
                else ["", ""]
            )
            rows.append([*cells, *ratios])
    iterations = {
        name: len(entry["trl"]["iterations"]) for name, entry in data["workloads"].items()
    }
    counts = " and ".join(
        f"{number} for {', '.join(name for name in iterations if iterations[name] == number)}"
        for number in sorted(set(iterations.values()), reverse=True)
    )
    count = f" Median of the iterations after a warm-up: {counts}."
    versions = "; ".join(
        dict.fromkeys(
            f"{name} with {entry['trl']['version']}" for name, entry in data["workloads"].items()
        )
    )
    return "\n\n".join(
        [
            machine_line(data["machine"], data["date"])
            + _load_line(loads, data["machine"]["cores"])
            + count,
            table(head, rows),
            versions + ".",
        ]
    )


def scaling_block(data: dict[str, Any]) -> str:
    """Microseconds per real token along each axis."""
    rows = [
        [axis, f"{point['value']:,}", f"{point['real_tokens']:,.0f}"]
        + [f"{point[f'{phase}_us_per_token']:,.0f}" for phase in PHASES]
        for axis, points in data["axes"].items()
        for point in points
    ]
    head = ["axis", "value", "real tokens", *(f"{phase}, µs" for phase in PHASES)]
    return (
        machine_line(data["machine"], data["date"])
        + _load_line([data["load"]], data["machine"]["cores"])
        + "\n\n"
        + table(head, rows)
    )


def memory_block(data: dict[str, Any]) -> str:
    """Peak of a rank over model size, and bytes per parameter between the smallest and the largest model."""
    sizes = data["sizes"]
    stages = list(sizes[0]["peak_bytes"])
    rows = [
        [
            f"{row['parameters'] / 1e6:.1f}M",
            *(f"{row['peak_bytes'][stage] / 2**30:.2f} GiB" for stage in stages),
        ]
        for row in sizes
    ]
    first, last = sizes[0], sizes[-1]
    if last["parameters"] > first["parameters"]:
        more = last["parameters"] - first["parameters"]
        slopes = [
            f"{(last['peak_bytes'][s] - first['peak_bytes'][s]) / more:.0f} bytes" for s in stages
        ]
        rows.append(["per further parameter", *slopes])
    return f"{data['date']}.\n\n" + table(
        ["parameters of a model", *(f"ZeRO {stage}" for stage in stages)], rows
    )


def rollout_engines_block(data: dict[str, Any]) -> str:
    """Tokens per second of each engine, seconds of a push, and its share of a step."""
    batches = [key for key in next(iter(data["engines"].values())) if key.isdigit()]
    speed = [
        [engine, *(f"{row[batch]:,.0f}" for batch in batches)]
        for engine, row in data["engines"].items()
    ]
    push = [
        [engine, *(f"{models[name]['push_seconds']:.3f} s" for name in models)]
        for engine, models in data["push"].items()
    ]
    step = []
    for engine, row in data["step"].items():
        seconds = [row[f"{part}_seconds"] for part in ("step", "rollout", "push")]
        step.append(
            [engine, *(f"{value:.2f} s" for value in seconds), f"{seconds[2] / seconds[0]:.1%}"]
        )
    models = next(iter(data["push"].values()), {})
    sizes = [f"{row['parameters'] / 1e6:.1f}M parameters" for row in models.values()]
    blocks = [
        machine_line(data["machine"], data["date"])
        + _load_line([data["load"]], data["machine"]["cores"])
        + f" Median of {data['rounds']}.",
        "Response tokens per second:",
        table(["engine", *(f"{batch} responses" for batch in batches)], speed),
    ]
    if push:
        blocks += ["A push of weights:", table(["engine", *sizes], push)]
    if step:
        head = ["engine", "step", "rollouts", "push", "push / step"]
        blocks += ["Steps of W1 (64 prompts, up to 128 tokens):", table(head, step)]
    return "\n\n".join(blocks)


def asynchronous_block(data: dict[str, Any]) -> str:
    """Return the parts of a synchronous step of each workload, and each side beside the least that overlapping allows."""
    parts = []
    rows = []
    for name, entry in data["workloads"].items():
        of_parts = [entry["parts"][part] for part in ("sampling", "rewards", "training", "push")]
        cells = [f"{seconds:.2f} s" for seconds in (*of_parts, entry["limit"])]
        parts.append([f"{name}: {entry['about']}", *cells])
        for side, numbers in entry["sides"].items():
            seconds = numbers["seconds"]
            cells = [f"{name}, {side}", f"{seconds:.2f} s", f"{numbers['ratio']:.2f}"]
            cells.append(f"{seconds / entry['limit']:.2f}" if side == "ahead" else "")
            cores = 2 if side == "in process" else 1
            busy = {who: numbers.get(f"{who}_busy") for who in ("server", "trainer")}
            if cores == 2:
                busy["server"] = None
            for share in busy.values():
                cells.append("" if share is None else f"{max(0.0, 1 - share / cores):.0%}")
            rows.append([*cells, f"{numbers['staleness']:.0f}"])
    head = ["run", "step", "/ synchronous", "/ limit", "server idle", "trainer idle", "staleness"]
    return "\n\n".join(
        [
            machine_line(data["machine"], data["date"])
            + _load_line([data["load"]], data["machine"]["cores"])
            + f" Medians of {data['steps']} steps after a warm-up. The server has one core and the trainer the other, "
            "a thread each; *in process* is vLLM in the trainer, with both cores. GRPO, optimizer steps of 16 samples.",
            table(["workload", "G", "R", "T", "P", "limit: max(G + R, T) + P"], parts),
            table(head, rows),
        ]
    )


def staleness_block(data: dict[str, Any]) -> str:
    """Return each side's accuracy at equal samples, its difference from the synchronous run, and that at equal time."""
    rows = []
    for setting, sides in data["settings"].items():
        for side, numbers in sides.items():
            *early, last = numbers["samples"]
            cells = [str(numbers["seeds"]), *(f"{mean:.3f}" for mean, _ in early)]
            cells.append("{:.3f} ± {:.3f}".format(*last))
            is_other = side != "synchronous"
            cells.append("{:+.3f} ± {:.3f}".format(*numbers["difference"]) if is_other else "")
            cells += [f"{mean:.3f}" for mean, _ in numbers["time"]]
            rows.append([f"{setting}, {side}", *cells])
    quarter, half, steps = data["steps"] // 4, data["steps"] // 2, data["steps"]
    head = ["run", "seeds", f"step {quarter}", f"step {half}", f"step {steps}", "− synchronous"]
    head += [f"time of {quarter} synchronous steps", f"of {half}"]
    return "\n\n".join(
        [
            f"{data['date']}: the quickstart's task from its supervised model, {steps} steps of 256 samples, 4 optimizer "
            "steps each. Accuracy on held-out prompts at temperature 1: means over seeds, ± standard error. *Ahead* "
            "samples in process, before the step before is trained. Equal time: a step ahead takes "
            f"{data['ratio']:.2f} of a synchronous one, as *plain* did that day.",
            table(head, rows),
        ]
    )


def gpu_check_block(data: dict[str, Any]) -> str:
    """Goals, and of each part what was measured, in the rows' own names."""
    about = data["machine"] | {"gpu": data["machine"]["gpu"] if data["device"] == "cuda" else None}
    blocks = [
        machine_line(about, data["date"]),
        table(["goal", "aim", "measured", "where"], data["goals"]),
    ]
    for part, found in data["parts"].items():
        told = {"skipped": "not measured", "error": "failed"}
        good = {name: row for name, row in found["rows"].items() if not row.keys() & told.keys()}
        names = dict.fromkeys(
            key
            for row in good.values()
            for key in row
            if key != "seconds" and not isinstance(row[key], list)
        )
        rows = [[name, *(_cell(row.get(key, "")) for key in names)] for name, row in good.items()]
        title = (
            f"**{part}**"
            if found.get("state") == "done"
            else f"**{part}** ({found.get('state', 'not finished')})"
        )
        blocks += (
            [title, table(["", *(key.replace("_", " ") for key in names)], rows)]
            if good
            else [title]
        )
        for key, said in told.items():
            other = [
                f"{name} ({_reason(row[key])})" for name, row in found["rows"].items() if key in row
            ]
            blocks += [f"{said}: {'; '.join(other)}."] if other else []
    return "\n\n".join(blocks)


def _reason(text: str) -> str:
    """Why a row has no numbers, in a line."""
    if "out of memory" in text.lower():
        return "out of memory"
    return " ".join(text.split())[-160:]


def _cell(value: Any) -> str:
    """A number in few characters."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def write(found: dict[str, dict[str, Any]]) -> None:
    """Blocks of these names into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, data in found.items():
        page = replace_block(page, name, BLOCKS[name](data))
    PAGE.write_text(page, encoding="utf-8")
    print(f"\nwrote {PAGE}")


BLOCKS = {
    "gpu_check": gpu_check_block,
    "compare": compare_block,
    "scaling": scaling_block,
    "memory": memory_block,
    "rollout_engines": rollout_engines_block,
}
ASYNC_BLOCKS = {"asynchronous": asynchronous_block, "staleness": staleness_block}


def replace_block(page: str, name: str, text: str) -> str:
    """The page with another text between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: the page has no such place.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(
            f"the page has no place for {name}: put <!-- {name} --> and <!-- end of {name} --> into it"
        )
    return pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def plot(data: dict[str, Any], path: Path) -> None:
    """Seconds of the phases of both sides, stacked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        figsize=(7, 0.7 + 0.7 * 2 * len(data["workloads"])), layout="constrained"
    )
    bars = [(f"{name} {title}", entry[side]) for name, entry in data["workloads"].items()
            for side, title in NAMES.items()]  # fmt: skip
    left = [0.0] * len(bars)
    for phase in PHASES:
        seconds = [numbers["phases"][phase] for _, numbers in bars]
        axes.barh([label for label, _ in bars], seconds, left=left, label=phase)
        left = [a + b for a, b in zip(left, seconds)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds per iteration")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument(
        "--write",
        action="store_true",
        help="into docs/performance.md, its picture and docs/asynchronous.md",
    )
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    async_page = ASYNC_PAGE.read_text(encoding="utf-8")
    for name, block in (BLOCKS | ASYNC_BLOCKS).items():
        file = options.run_dir / f"{name}.json"
        if not file.is_file():
            print(f"{file} is missing: the page keeps what it has")
            continue
        data = json.loads(file.read_text())
        if name == "compare" and (problems := check_compare(data)):
            raise SystemExit("\n".join(problems))
        text = block(data)
        print(f"\n{name}\n{text}")
        if name in ASYNC_BLOCKS:
            async_page = replace_block(async_page, name, text)
        else:
            page = replace_block(page, name, text)
        if name == "compare" and options.write:
            plot(data, PLOT)
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        ASYNC_PAGE.write_text(async_page, encoding="utf-8")
        print(f"\nwrote {PAGE}, {ASYNC_PAGE} and {PLOT}")


if __name__ == "__main__":
    main()
