"""The folder of a run: held by one process, apart from what an earlier run left; and what makes it this run."""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml
from transformers.utils import cached_file

from lightppo.checkpoint.run_checkpointer import download_marks
from lightppo.config import PPOConfig
from lightppo.config.options import LoggingConfig, OptionSet, public_options
from lightppo.data.rows import ORIGIN_COLUMN
from lightppo.errors import ConfigError, StagingError
from lightppo.files import Digest, blocks_of, change, digest, write_text
from lightppo.logging.run_paths import (
    METADATA,
    RECORDS,
    SAMPLES,
    WORLDS,
    check_places,
    file_of_world,
)
from lightppo.option import is_object
from lightppo.ranks import Ranks
from lightppo.redaction import shown_url
from lightppo.storage import (
    download,
    is_forgotten,
    is_in_memory,
    is_url,
    local_folder,
    probe,
    set_unsent_aside,
    stage_to_local,
    unsent,
    upload,
)
from lightppo.user_code import split_python_spec
from lightppo.version import __version__

logger = logging.getLogger(__name__)

# Both write the same values; Python's takes five times as long.
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# -- one process -----------------------------------------------------------------------------------------------------

_LOCK = ".lock"
held_locks: dict[Path, IO[str]] = {}  # lock files of this process


def _leave_to_parent() -> None:
    """Close the locks in a process that was forked off, such as a worker: it does not hold them."""
    for file in held_locks.values():
        file.close()
    held_locks.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def claim(folders: Mapping[str, str], ranks: Ranks) -> None:
    """Make the folders, by their flags, and keep other processes out of them until this one ends. Collective.

    For a URL, what is needed to go on is brought to this node.

    Raises:
        ConfigError: another process holds one, it cannot be written, or a node does not see what rank 0 writes there.
    """

    def claim_on_rank_0() -> None:
        _warn_of_memory(folders)
        for folder_flag, folder in folders.items():
            claim_folder(folder_flag, folder)
        for folder_flag, folder in folders.items():
            _download(folder_flag, folder)

    ranks.on_rank_0(claim_on_rank_0, "claim the folders")
    # A name that no node has looked for before.
    mark_name = ranks.broadcast_object(f".seen-{uuid.uuid4().hex}")
    for folder_flag, folder in folders.items():
        mark = local_folder(folder) / mark_name
        times = mark.parent.stat() if ranks.is_rank_0() else None
        ranks.on_rank_0(mark.touch, f"write into {folder}")
        hosts = ranks.all_gather_object((socket.gethostname(), mark.exists()))

        def remove(mark: Path = mark, times: Any = times) -> None:
            mark.unlink()  # and the folder of a run that is complete is as it was
            os.utime(mark.parent, ns=(times.st_atime_ns, times.st_mtime_ns))

        ranks.on_rank_0(remove, f"remove {mark}")
        blind_ranks = [
            f"rank {rank_number} on {host}"
            for rank_number, (host, sees_mark) in enumerate(hosts)
            if not sees_mark
        ]
        if blind_ranks:
            destination = "there"
            remedy = "name one"
            if is_url(folder):
                destination = "here first"
                remedy = "set LIGHTPPO_CACHE to a folder"
            raise ConfigError(
                f"{folder_flag} {folder}: {blind_ranks[0]} does not see what rank 0 on {hosts[0][0]} writes "
                f"{destination} ({len(blind_ranks)} of {len(hosts)} ranks do not): {remedy} that all nodes share"
            )


def _warn_of_memory(folders: Mapping[str, str]) -> None:
    """Warn that a run in the memory of its process cannot be resumed."""
    for folder_flag, folder in folders.items():
        if is_in_memory(folder):
            logger.warning(
                "%s %s: memory:// is the memory of this process and ends with it: the next start cannot go on from it, "
                "and begins anew. Copies of what is written are in %s; choose a folder, or a URL of a server",
                folder_flag,
                folder,
                local_folder(folder),
            )


def claim_folder(flag: str, folder: str, other: str = "--save_path") -> None:
    """Make a folder and lock it; ConfigError says what is in the way, and which option chooses an ``other`` folder."""
    local = local_folder(folder)
    new_folders = [path for path in (local, *local.parents) if not path.exists()]
    try:
        local.mkdir(parents=True, exist_ok=True)
        _lock((local / _LOCK).open("a+"), f"{flag} {folder}", other)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: cannot be written ({error.strerror})") from error
    if new_folders:
        atexit.register(_leave_nothing, new_folders, os.getpid())


def _leave_nothing(new_folders: Sequence[Path], owner: int) -> None:
    """Remove the folders that a run has made which was refused before it wrote a file, the deepest one first."""
    if os.getpid() != owner:
        return
    with suppress(OSError):  # others write there, too
        if [path.name for path in new_folders[0].iterdir()] == [_LOCK]:
            (new_folders[0] / _LOCK).unlink()
            for folder in new_folders:
                folder.rmdir()


def _download(flag: str, folder: str) -> None:
    """Bring what is needed to go on from a URL; ConfigError says what is in the way."""
    if not is_url(folder):
        return
    try:
        probe(folder)
        reason = "could not send all it wrote"
        if is_forgotten(folder):
            reason = "ended, and its memory with it"
        # These files belong to no run any more: only what is at the URL counts.
        if (unsent_folder := set_unsent_aside(folder, besides=_LOCK)) is not None:
            logger.warning(
                "%s %s: an earlier process %s; its files are now in %s",
                flag,
                folder,
                reason,
                unsent_folder,
            )
        download_marks(folder)
        record_prefixes = tuple(file_name.partition(".")[0] for file_name in RECORDS)
        download(folder, lambda file_name: file_name.startswith(record_prefixes))
    except OSError as error:
        reason = error if isinstance(error, StagingError) else error.strerror
        raise ConfigError(f"{flag} {folder}: cannot be written ({reason})") from error


def _lock(file: IO[str], folder_name: str, other: str) -> None:
    import fcntl

    lock_path = Path(file.name).resolve()
    if lock_path in held_locks:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "another process"
        raise ConfigError(
            f"{folder_name} is in use by {holder}: wait for it, or choose another {other}"
        ) from None
    except OSError as error:
        logger.warning(
            "%s: no locks on this file system (%s): nothing keeps another run out",
            folder_name,
            error.strerror,
        )
        return
    held_locks[lock_path] = file
    _name_holder(file, "")


def _name_holder(file: IO[str], others: str) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}{others}")
    file.flush()


def lock_of(folder: str | os.PathLike[str]) -> IO[str] | None:
    """Return the lock file of a folder, which a process that inherits it holds, too; None where this process has none."""
    return held_locks.get((local_folder(folder) / _LOCK).resolve())


def name_holders(folder: str | os.PathLike[str], processes: Iterable[int]) -> None:
    """Name in the lock of a folder the processes that have inherited it: they go on if this one is killed."""
    if (file := lock_of(folder)) is not None:
        numbers = ", ".join(map(str, processes))
        text = f" or a run that it started (process {numbers}; SIGTERM stops it)" if numbers else ""
        _name_holder(file, text)


def locks_of(folders: Iterable[str]) -> dict[Path, str]:
    """Return the lock file of each folder → the folder."""
    return {(local_folder(folder) / _LOCK).resolve(): folder for folder in folders if folder}


def lock_again(lock_path: Path, folder: str) -> None:
    """Make a folder of this process that was removed again, and keep others out of it.

    Raises:
        ConfigError: another process has it by now, or it cannot be made.
    """
    logger.warning(
        "%s was removed while the run goes on: it is made again, what was in it is lost", folder
    )
    held_locks.pop(lock_path).close()
    claim_folder("the folder", folder)


def release(folders: Iterable[str]) -> None:
    """Let others have the folders, before this process ends."""
    for folder in folders:
        if (file := held_locks.pop((local_folder(folder) / _LOCK).resolve(), None)) is not None:
            file.close()


# -- no other run's files --------------------------------------------------------------------------------------------


def set_aside(*paths: Path) -> None:
    """Rename what an earlier run left under these names: ``metrics.jsonl`` becomes ``metrics.1.jsonl``."""

    def numbered(older_path: Path, copy_number: int) -> Path:
        return older_path.with_name(f"{older_path.stem}.{copy_number}{older_path.suffix}")

    copy_number = next(
        copy_number
        for copy_number in itertools.count(1)
        if not any(numbered(older_path, copy_number).exists() for older_path in paths)
    )
    leftovers = [
        older_path
        for older_path in dict.fromkeys(paths)
        if older_path.is_file() or (older_path.is_dir() and any(older_path.iterdir()))
    ]
    renamings = [
        f"{older_path.name} → {numbered(older_path, copy_number).name}" for older_path in leftovers
    ]
    for older_path in leftovers:
        older_path.rename(numbered(older_path, copy_number))
    if len(renamings) > 6:
        renamings[6:] = [f"… ({len(renamings)} in all)"]
    if renamings:
        folder = leftovers[0].parent
        print(
            f"{folder}: an earlier run's files are kept apart: {', '.join(renamings)}", flush=True
        )


def set_run_files_aside(config: OptionSet) -> None:
    """Keep apart what an earlier run has recorded where this one will."""
    folder = config.checkpoint.save_path
    record_paths = [local_folder(folder).absolute() / record_name for record_name in RECORDS]
    if config.logging.use_tensorboard:
        events = Path(config.logging.use_tensorboard).absolute()
        record_paths.append(events / run_name(config.logging, folder))
    if (rollout_data_dir := config.flat().get("rollout_data_dir")) is not None:
        rollouts = Path(rollout_data_dir).absolute()
        steps = sorted(rollouts.glob("step*.jsonl"))
        # The folder may hold other things too.
        has_steps_alone = rollouts.is_dir() and len(steps) == len(list(rollouts.iterdir()))
        record_paths += [rollouts] if has_steps_alone or rollouts in record_paths else steps
    set_aside(*record_paths)
    upload(folder, *RECORDS)  # what is no longer here goes there, too
    upload_run_files(folder)


class RunFileSums:
    """Sizes and sums of what a run has recorded. A checkpoint keeps them; the next start says what of it is lost.

    Args:
        metrics: the file of the metrics, where it is not in the run's folder.
    """

    def __init__(self, folder: str, metrics: Path) -> None:
        self.folder = local_folder(folder).absolute()
        self.metrics = metrics.absolute()
        # (size, time of the last change) and digest of each file.
        self._digests: dict[Path, tuple[tuple[int, int], Digest]] = {}

    def take(self) -> dict[str, tuple[int, str]]:
        """Return (size, SHA-256) of each file, by its name in the run's folder."""
        below = [
            record_path
            for folder_name in ("eval", SAMPLES)
            for record_path in (self.folder / folder_name).rglob("*")
        ]
        files = [
            record_path
            for record_path in (self.metrics, self.folder / METADATA, *below)
            if record_path.is_file()
        ]
        return {
            os.path.relpath(record_path, self.folder): tuple(self._digest(record_path))
            for record_path in files
        }

    def _digest(self, path: Path) -> Digest:
        stat = path.stat()
        file_state = (stat.st_size, stat.st_mtime_ns)
        if self._digests.get(path, (None,))[0] != file_state:
            self._digests[path] = (file_state, digest(path))
        return self._digests[path][1]

    def lost(self, taken: Mapping[str, tuple[int, str]]) -> list[str]:
        """Return what is no longer as it was ``taken``, a text per file. A file of lines may have more of them by now."""
        changes = (
            change(self.folder, file_name, Digest(*sums), grows=file_name.endswith(".jsonl"))
            for file_name, sums in taken.items()
        )
        return [change_text for change_text in changes if change_text is not None]


def upload_run_files(folder: str) -> None:
    """Send what the run has recorded since it was last sent, where the folder is a URL."""
    prefixes = [record_name.partition(".")[0] for record_name in RECORDS]
    local = local_folder(folder)
    upload(
        folder, *unsent(folder, {path for prefix in prefixes for path in local.glob(f"{prefix}*")})
    )


def cut_samples(folder: str, last_step: int) -> None:
    """Remove the samples of steps after ``last_step``, which a resumed run does again."""
    removed_names = []
    for sample_path in (local_folder(folder) / SAMPLES).glob("step*.jsonl.gz"):
        if int(sample_path.name.removeprefix("step").removesuffix(".jsonl.gz")) > last_step:
            sample_path.unlink()
            removed_names.append(f"{SAMPLES}/{sample_path.name}")
    upload(folder, *removed_names)


def run_name(config: LoggingConfig, folder: str) -> str:
    """Return the name of the run in TensorBoard and Weights & Biases."""
    return config.wandb_run_name or local_folder(folder).resolve().name


# -- what makes the run ----------------------------------------------------------------------------------------------


def content_of(config: OptionSet, rows: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
    """Return a mark of the content behind each option that names some: reward files, models, data. Collective.

    Args:
        config: resolved.
        rows: the rows of a run, by the option that names their files.
    """
    marks = _content_marks(config, rows) if ranks.is_rank_0() else None
    return ranks.broadcast_object(marks)


def _content_marks(config: OptionSet, rows: Mapping[str, Any]) -> dict[str, str]:
    values = config.flat()
    has_tape = bool(values.get("tape_from"))  # then files of code outside may be gone
    contents: dict[str, list[bytes | None]] = {}
    for option_name, option_code in _code_of(config).items():
        if is_object(option_code):
            contents[option_name] = [source_of(option_code)]
        elif not has_tape or Path(option_code.rpartition(".py")[0] + ".py").expanduser().is_file():
            contents[option_name] = [split_python_spec(option_code, option_name)[0].read_bytes()]
    if (routes := values.get("reward_routes")) and not routes.lstrip().startswith("{"):
        contents["reward_routes"] = [Path(routes).expanduser().read_bytes()]
    for option_name in () if has_tape else WORLDS:
        contents[option_name] = [
            _content_of_world(environment_entry)
            for environment_entry in values.get(option_name, ())
        ]
    content_marks = {
        option_name: " ".join(
            _digest(content) for content in option_contents if content is not None
        )
        for option_name, option_contents in contents.items()
    }
    models = ("pretrain", "ref_pretrain", "critic_pretrain", "teacher_pretrain", "reward_pretrain")
    for option_name in models:
        model_paths = values.get(option_name) or ()
        if isinstance(model_paths, str):
            model_paths = [model_paths]
        content_marks[option_name] = " ".join(
            checkpoint_mark(stage_to_local(model_path)) for model_path in model_paths
        )
    content_marks = {
        option_name: content_mark
        for option_name, content_mark in content_marks.items()
        if content_mark
    }
    content_marks |= {
        option_name: _rows_mark(option_rows) for option_name, option_rows in rows.items()
    }
    # Where one folder lies from the other: both may have been moved together.
    save_path = config.checkpoint.save_path
    if is_url(save_path):
        content_marks["save_path"] = shown_url(save_path)
    else:
        content_marks["save_path"] = os.path.relpath(save_path, config.checkpoint.ckpt_path)
    return content_marks


def _content_of_world(entry: Any) -> bytes | None:
    """Return the file of an entry of ``--env`` or ``--tools``, or an object's source; None where there is neither."""
    if is_object(entry):
        return source_of(entry)
    file = file_of_world(entry)
    return None if file is None else Path(file).expanduser().read_bytes()


def _rows_mark(rows: Any, batch: int = 1000) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(rows), batch):
        columns = {
            column_name: column
            for column_name, column in rows[start : start + batch].items()
            if column_name != ORIGIN_COLUMN
        }
        digest.update(json.dumps(columns, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _code_of(config: OptionSet) -> dict[str, Any]:
    """Return the functions, objects and files with them that a resumed run must find unchanged, by option."""
    values = config.flat()
    option_code = {
        option.name: values[option.name]
        for option in config.all_options()
        if option.may_be_object and not option.resume_safe
    }
    urls = values.get("remote_rm_url", ())
    if len(urls) == 1 and "://" not in urls[0]:
        option_code["remote_rm_url"] = urls[0]
    return {
        option_name: code_spec
        for option_name, code_spec in option_code.items()
        if is_object(code_spec) or (isinstance(code_spec, str) and ".py" in code_spec)
    }


def source_of(value: Any) -> bytes | None:
    """Return the source of a function, or of the class of an object; None where Python does not have it."""
    while isinstance(value, functools.partial):
        value = value.func
    definition = value
    if not inspect.isroutine(value) and not inspect.isclass(value):
        definition = type(value)
    try:
        return inspect.getsource(definition).encode()
    except (OSError, TypeError):  # typed at a prompt, or built in
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_MARKED = ("config.json", "tokenizer*.json", "*.safetensors", "pytorch_model*.bin")


def checkpoint_mark(path: str) -> str:
    """Return a mark of a checkpoint's content: config and tokenizer whole, of each weight file its length and some blocks.

    Cheap for any size, and the same wherever and whenever the files were copied.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = Path(cached_file(path, "config.json")).parent
    digest = hashlib.sha256()
    for model_file in sorted(
        model_file for pattern in _MARKED for model_file in folder.glob(pattern)
    ):
        length = model_file.stat().st_size
        digest.update(f"{model_file.name} {length}".encode())
        if model_file.suffix == ".json":
            digest.update(model_file.read_bytes())
            continue
        for block in blocks_of(model_file):
            digest.update(block)
    return digest.hexdigest()[:16]


# -- what a run says of itself ---------------------------------------------------------------------------------------


def save_run_config(config: OptionSet, ranks: Ranks, as_it_runs: OptionSet | None = None) -> None:
    """Keep the options as they were given in ``run_config.yaml``, which ``--config`` reads, and beside it in
    ``run_config.resolved.yaml`` with what None stood for, also by a GPU's memory (``as_it_runs``). Collective."""
    ranks.on_rank_0(lambda: write_run_config(config, as_it_runs), "write run_config.yaml")


def write_run_config(config: OptionSet, as_it_runs: OptionSet | None = None) -> None:
    """Write both files whole or not at all; ConfigError says what went wrong."""
    folder = config.checkpoint.save_path
    local = local_folder(folder)
    try:
        local.mkdir(parents=True, exist_ok=True)
        for file_name, options in {
            "run_config": config,
            "run_config.resolved": as_it_runs or config.resolved(),
        }.items():
            values = {
                option: list(option_value) if isinstance(option_value, tuple) else option_value
                for option, option_value in public_options(options).items()
            }
            del values["config"]
            yaml_text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
            write_text(local / f"{file_name}.yaml", yaml_text)
        upload_run_files(folder)
    except OSError as error:
        raise ConfigError(
            f"--save_path {folder}: cannot be written ({error.strerror or error})"
        ) from error


def record_start(
    config: OptionSet,
    ranks: Ranks,
    step: int,
    content: Mapping[str, str],
    total_steps: int | None = None,
) -> None:
    """Add a line to ``run_metadata.jsonl``: what the run goes on with from ``step`` on. Collective.

    Args:
        content: of :func:`content_of`.
        total_steps: of the whole run, where they are known.
    """
    folder = config.checkpoint.save_path
    device = ranks.device
    if device.type == "cuda":
        import torch

        device = torch.cuda.get_device_name(device)

    def write() -> None:
        start_row = {
            "step": step,
            "time": time.time(),
            "ranks": ranks.world_size,
            "device": str(device),
            "total_steps": total_steps,
            "versions": dict(versions()),
            "content": dict(content),
        }
        with (local_folder(folder) / METADATA).open("a") as file:
            file.write(json.dumps(start_row) + "\n")
        upload_run_files(folder)

    ranks.on_rank_0(write, f"write {METADATA} in {folder}")


@functools.cache
def versions() -> Mapping[str, str]:
    """Return those of packages, Python, and lightppo with a mark of its source, which changes between releases.

    Looked up once: what a process has imported stays.
    """
    source = Path(__file__).parents[1]
    source_code = b"".join(source_file.read_bytes() for source_file in sorted(source.rglob("*.py")))
    version_texts = {
        "lightppo": f"{__version__} ({_digest(source_code)})",
        "python": platform.python_version(),
    }
    for package in ("torch", "transformers", "deepspeed", "numpy", "peft", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            version_texts[package] = metadata.version(package)
    return version_texts


# -- while it is built -----------------------------------------------------------------------------------------------


def claim_folders(building: Any) -> None:
    """Take the run's folders, which are its own from here on. Collective."""
    config = building.config
    if not isinstance(config, PPOConfig):
        building.strategy.on_rank_0(
            lambda: check_places(building.resolved_options), "check the folders"
        )
    folders = {"--save_path": config.checkpoint.save_path}
    # an evaluation may look at the checkpoints of a run that goes on
    if not config.flat().get("val_only"):
        folders["--ckpt_path"] = config.checkpoint.ckpt_path
    claim(folders, building.strategy)


def mark_content(building: Any) -> None:
    """Mark what the options name, so that a resumed run finds it unchanged. Collective."""
    rows = {option_name: data.dataset for option_name, data in building.rows.items()}
    building.content = content_of(building.config, rows, building.strategy)
