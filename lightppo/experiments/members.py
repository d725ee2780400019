"""The runs of an experiment as processes side by side: ordinary commands, each with a log of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lightppo.checkpoint.layout import parts_of, saved_tags, step_of
from lightppo.config import PPOConfig
from lightppo.config.options import OptionSet, public_options
from lightppo.episodes.tape_files import check_folder
from lightppo.errors import ConfigError
from lightppo.experiments.contents import mark_now, marks_of
from lightppo.files import write_text
from lightppo.logging.report_page import options_of, read_jsonl
from lightppo.redaction import plain

_LOOK_EVERY = 0.1  # seconds
_LONGEST_SAVE = 600.0  # seconds in which a run that was stopped has written its checkpoint
_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Member:
    """One run of an experiment."""

    name: str
    folder: Path  # its --save_path
    ranks: int = 1

    @property
    def config_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def contents(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.contents.json")

    def command(self) -> list[str]:
        """Return the words that start it: those of ``lightppo ppo``, under torchrun where it has several ranks."""
        train = ["lightppo", "ppo", "--config", str(self.config_file)]
        if self.ranks == 1:
            return [sys.executable, "-m", *train]
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(self.ranks)]
        return [sys.executable, "-m", *launcher, "-m", *train]

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return what it has recorded, by step."""
        return recorded_rows(self.folder)


def recorded_rows(run: Path) -> dict[int, dict[str, Any]]:
    """Return all rows of a run's metrics by step; none where it has recorded nothing."""
    metrics_path = run / "metrics.jsonl"
    if not metrics_path.is_file() or not metrics_path.stat().st_size:
        return {}
    rows: dict[int, dict[str, Any]] = {}
    for row in read_jsonl(metrics_path):
        rows.setdefault(row["step"], {}).update(row)
    return rows


def steps_with_checkpoints(root: Path) -> list[int]:
    """Return the steps of which a checkpoint has all parts, rising."""
    tags = [set(saved_tags(root, part.name.removeprefix("_"))) for part in parts_of(root)]
    return sorted(map(step_of, set.intersection(*tags))) if tags else []


def has_saved(run: Path) -> bool:
    """Tell whether a run has a checkpoint of its own to go on from."""
    return bool(steps_with_checkpoints(run / "checkpoints_ppo"))


def plain_options(config: OptionSet) -> dict[str, Any]:
    """Return all options as YAML has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in public_options(config).items()
        if name != "config"
    }


def options_text(config: OptionSet) -> str:
    """Return a file for ``--config``, with the options that are not the default."""
    defaults = plain_options(type(config)())
    values = {
        name: value for name, value in plain_options(config).items() if value != defaults[name]
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def had_options(run: Path, config: OptionSet) -> bool:
    """Tell whether a run was started with these options; what it did not know had its default.

    Its folder may have another name since then, or be named in another way.
    """
    had = options_of(run, "run_config.yaml")
    defaults = plain_options(type(config)())
    names = defaults.keys() - {"local_rank", "save_path"}
    wanted = yaml.safe_load(yaml.safe_dump(plain_options(config)))
    return all(had.get(name, defaults[name]) == wanted[name] for name in names)


def check_place(flag: str, path: Path | None) -> None:
    """Raise ConfigError where a file that is written at the end could not be."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{flag} {path}: {reason}: name a file in a folder that is there")


def write_options(path: Path, config: OptionSet) -> None:
    """Write a file for ``--config``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, options_text(config))


# -- files that options name -----------------------------------------------------------------------------------------


def problems_of(config: PPOConfig, ranks: int) -> list[str]:
    """Return what each run with these options would end with at its start, as a file that is not there."""
    from lightppo.preflight.before_imports import preflight  # it loads numpy

    try:
        check_folder(config, ranks)
        # a run looks at its own checkpoints itself
        preflight(config.with_options(resume="never").resolved())
    except ConfigError as error:
        return str(error).split("\n")
    return []


def record_contents(member: Member) -> None:
    """Keep what is in the files that the options of a member name, which begins."""
    options = yaml.safe_load(member.config_file.read_text(encoding="utf-8"))
    write_text(member.contents, json.dumps(marks_of(options), indent=1))


def recorded_contents(member: Member) -> dict[str, str]:
    """Return what was in the files when it began; nothing for one that an older version started."""
    path = member.contents
    return read_kept(path, f"remove it and {member.folder}") if path.is_file() else {}


def read_kept(path: Path, cure: str) -> dict[str, Any]:
    """Return what an experiment has kept in a file; ConfigError, with the ``cure``, where that is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: {cure}")
    return content


def check_unedited(members: Sequence[Member], place: str) -> None:
    """Refuse to run more members after an edit: they would be compared with these, which ran before.

    Args:
        place: option that chooses another folder.

    Raises:
        ConfigError: it names the first member and its file.
    """
    known: dict[str, str | None] = {}
    for member in members:
        for name, mark in recorded_contents(member).items():
            if name not in known:
                known[name] = mark_now(name)
            if known[name] != mark:
                what = "is gone" if known[name] is None else "was edited"
                raise ConfigError(
                    f"{member.name}: {name} {what} since this run began: set it back, name another {place}, or remove "
                    f"{member.folder} and what else ran with it"
                )


def check_alike(members: Sequence[Member]) -> None:
    """Refuse to compare members if a file was edited while they ran.

    Raises:
        ConfigError: it names the file, and a member before and after that.
    """
    known: dict[str, tuple[str, Member]] = {}
    for member in members:
        for name, mark in recorded_contents(member).items():
            expected, other = known.setdefault(name, (mark, member))
            if mark != expected:
                raise ConfigError(
                    f"{name} was edited between {other.name} and {member.name}: remove {member.folder} or "
                    f"{other.folder}, and what else ran with that content, and repeat the command"
                )


# -- processes -------------------------------------------------------------------------------------------------------


def devices_of(slot: int, ranks: int, devices: Sequence[str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of the member in this slot; None where there are no GPUs to share out."""
    if not devices:
        return None
    return ",".join(devices[slot * ranks : (slot + 1) * ranks])


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use, without loading torch."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in named.split(",") if device not in ("", "-1")]
    return [str(number) for number in range(len(list(_NVIDIA.glob("*"))))]


def check_scipy() -> None:
    """Raise ConfigError where the intervals of a report could not be computed."""
    if find_spec("scipy") is None:
        raise ConfigError("intervals need scipy: pip install 'lightppo[experiments]'")


def places(jobs: int | None, ranks: int) -> int:
    """Return how many members run at once: ``--jobs``, or what GPUs allow; on a CPU two."""
    devices = visible_devices()
    if devices and len(devices) < ranks * (jobs or 1):
        raise ConfigError(
            f"--jobs {jobs or 1}: each run has {ranks} ranks, and {len(devices)} GPUs are visible: lower it"
        )
    return jobs or (len(devices) // ranks if devices else 2)


def run_members(members: Sequence[Member], at_once: int, folder: Path) -> dict[str, int]:
    """Run all, so many at once; return the exit codes by name. A failed one is said, and ends no other.

    If this process is stopped, so are they, as by SIGTERM: each saves a checkpoint and goes on from it the next time. If
    it is killed, they go on, and hold the lock of the experiment's ``folder`` until the last one has ended.
    """
    waiting = deque(members)
    running: dict[int, tuple[Member, subprocess.Popen]] = {}
    codes: dict[str, int] = {}
    devices = visible_devices()
    from lightppo.logging.run_folder import name_holders  # it loads transformers

    with _ended_by_signals():
        try:
            while waiting or running:
                for slot in range(at_once):
                    if waiting and slot not in running:
                        member = waiting.popleft()
                        running[slot] = (member, _started(member, slot, devices, folder))
                        name_holders(folder, [each.pid for _, each in running.values()])
                time.sleep(_LOOK_EVERY)
                for slot, (member, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        name_holders(folder, [each.pid for _, each in running.values()])
                        codes[member.name] = process.returncode
                        _tell(member, process.returncode, len(codes), len(members))
        finally:
            if running:
                print(
                    f"stopping {len(running)} runs, which may save a checkpoint; the same command continues",
                    flush=True,
                )
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                try:
                    process.wait(_LONGEST_SAVE)
                except subprocess.TimeoutExpired:
                    process.kill()
    return codes


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end this process without a traceback, so that the members are stopped."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT)
        if signal.getsignal(number) is not signal.SIG_IGN  # as of a command in the background
    ]
    previous = {
        number: signal.signal(number, lambda number, frame: sys.exit(128 + number))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _started(member: Member, slot: int, devices: Sequence[str], folder: Path) -> subprocess.Popen:
    from lightppo.logging.run_folder import lock_of

    environment = dict(os.environ)
    if (own_devices := devices_of(slot, member.ranks, devices)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = own_devices
    record_contents(member)
    lock = lock_of(folder)
    with member.log.open("a") as log:
        return subprocess.Popen(
            member.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[] if lock is None else [lock.fileno()],
            start_new_session=True,  # Ctrl-C reaches it through this process alone
        )


def _tell(member: Member, code: int, done: int, total: int) -> None:
    outcome = "done"
    if code:
        outcome = f"FAILED with exit code {code}: {last_line(member.log)} (all of it: {member.log})"
    print(plain(f"[{done}/{total}] {member.name}: {outcome}"), flush=True)


def last_line(log: Path) -> str:
    """Return the line of a log that says why a run failed: its last error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower()]
    return (errors or lines or ["it wrote nothing"])[-1]
