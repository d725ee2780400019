"""Peak memory of a rank over model size at ZeRO 0 to 3, two ranks.

    python benchmarks/memory.py [--quick]

Runs PPO with critic and reference, one iteration, under torchrun; the peak is the largest resident set of a rank, so
it includes the libraries; what a parameter costs is the slope. Writes ``runs/bench/memory.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from commands import run
from workloads import SCALES, WORKLOADS, Scale, lightppo_flags

# Short texts, so that weights and optimizer states are what is seen.
SMALL = {"prompt_tokens": (4, 8), "new_tokens": 8}
WIDTHS = (256, 512, 1024)
STAGES = (0, 1, 2, 3)


def scale_changes(width: int) -> dict[str, Any]:
    """Of the scale, for a width of the model."""
    return SMALL | {"hidden": width, "intermediate": width * 43 // 16}


def parameters(scale: Scale) -> int:
    """Of one model with its embedding and head."""
    return scale.body_parameters + 2 * scale.head_parameters


def measure(width: int, stage: int, folder: Path, options: argparse.Namespace) -> int:
    """Bytes of the larger rank."""
    changes, name = scale_changes(width), f"memory-{width}-{stage}"
    scale, workload = replace(SCALES["cpu"], **changes), replace(WORKLOADS["W1"], prompts=32)
    assets, output, log = (
        folder / name / "assets",
        folder / name / "run",
        folder / "logs" / f"{name}.log",
    )
    run([sys.executable, "benchmarks/make_assets.py", "--output_dir", assets, "--prompts", workload.prompts,
         "--changes", json.dumps(changes)], log=log, timeout=600)  # fmt: skip
    with socket.socket() as probe:  # the default port may belong to another run on this machine
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = lightppo_flags(workload, scale, assets, output, 1)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        2,
        "--master_port",
        port,
    ]
    done = run([*torchrun, "examples/train_ppo.py", *flags, "--zero_stage", stage], log=log, timeout=options.timeout,
               OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # fmt: skip
    shutil.rmtree(folder / name)
    return done.peak_memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run_dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--quick", action="store_true", help="two sizes, ZeRO 0 and 3")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one run")
    options = parser.parse_args()
    folder = options.run_dir.resolve()
    widths, stages = (WIDTHS[::2], STAGES[::3]) if options.quick else (WIDTHS, STAGES)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "load": os.getloadavg()[0],
        "sizes": [],
    }
    for width in widths:
        count = parameters(replace(SCALES["cpu"], **scale_changes(width)))
        row = {"parameters": count, "peak_bytes": {}}
        for stage in stages:
            row["peak_bytes"][str(stage)] = measure(width, stage, folder, options)
            print(
                f"{count / 1e6:.1f}M parameters, ZeRO {stage}: {row['peak_bytes'][str(stage)] / 2**30:.2f} GiB"
            )
        result["sizes"].append(row)
        (folder / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
