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
from lightppo.files import Digest, change, digest, write_text
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
_held: dict[Path, IO[str]] = {}  # lock files of this process


def _leave_to_parent() -> None:
    """Close the locks in a process that was forked off, such as a worker: it does not hold them."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def refuse_overlaps(config: OptionSet, ranks: Ranks) -> None:
    """Raise ConfigError if a run, of a resolved config, would write over what it reads. Collective."""
    problem = None
    if ranks.is_rank_0():
        try:
            check_places(config)
        except ConfigError as error:
            problem = str(error)
    if problem := ranks.broadcast_object(problem):
        raise ConfigError(problem)


def claim(folders: Mapping[str, str], ranks: Ranks) -> None:
    """Make the folders, by their flags, and keep other processes out of them until this one ends. Collective.

    For a URL, what is needed to go on is brought to this node.

    Raises:
        ConfigError: another process holds one, it cannot be written, or a node does not see what rank 0 writes there.
    """
    if ranks.is_rank_0():
        _warn_of_memory(folders)
    steps = (do(flag, folder) for do in (_claim, _prepare) for flag, folder in folders.items())
    problem = next(filter(None, steps), None) if ranks.is_rank_0() else None
    if problem := ranks.broadcast_object(problem):
        raise ConfigError(problem)
    # A name that no node has looked for before.
    name = ranks.broadcast_object(f".seen-{uuid.uuid4().hex}")
    for flag, folder in folders.items():
        mark = local_folder(folder) / name
        before = mark.parent.stat() if ranks.is_rank_0() else None
        ranks.on_rank_0(mark.touch, f"write into {folder}")
        hosts = ranks.all_gather_object((socket.gethostname(), mark.exists()))

        def remove(mark: Path = mark, before: Any = before) -> None:
            mark.unlink()  # and the folder of a run that is complete is as it was
            os.utime(mark.parent, ns=(before.st_atime_ns, before.st_mtime_ns))

        ranks.on_rank_0(remove, f"remove {mark}")
        if blind := [
            f"rank {rank} on {host}" for rank, (host, seen) in enumerate(hosts) if not seen
        ]:
            remedy = "set LIGHTPPO_CACHE to a folder" if is_url(folder) else "name one"
            raise ConfigError(
                f"{flag} {folder}: {blind[0]} does not see what rank 0 on {hosts[0][0]} writes "
                f"{'here first' if is_url(folder) else 'there'} ({len(blind)} of {len(hosts)} ranks do not): {remedy} "
                "that all nodes share"
            )


def _warn_of_memory(folders: Mapping[str, str]) -> None:
    """Warn that a run in the memory of its process cannot be resumed."""
    for flag, folder in folders.items():
        if is_in_memory(folder):
            logger.warning(
                "%s %s: memory:// is the memory of this process and ends with it: the next start cannot go on from it, "
                "and begins anew. Copies of what is written are in %s; choose a folder, or a URL of a server",
                flag,
                folder,
                local_folder(folder),
            )


def _claim(flag: str, folder: str) -> str | None:
    """Make a folder and lock it; what is in the way."""
    local = local_folder(folder)
    made = [path for path in (local, *local.parents) if not path.exists()]
    try:
        local.mkdir(parents=True, exist_ok=True)
        problem = _lock((local / _LOCK).open("a+"), f"{flag} {folder}")
    except OSError as error:
        return f"{flag} {folder}: cannot be written ({error.strerror})"
    if made and not problem:
        atexit.register(_leave_nothing, made, os.getpid())
    return problem


def _leave_nothing(made: Sequence[Path], owner: int) -> None:
    """Remove the folders that a run has made which was refused before it wrote a file, the deepest one first."""
    if os.getpid() != owner:
        return
    with suppress(OSError):  # others write there, too
        if [path.name for path in made[0].iterdir()] == [_LOCK]:
            (made[0] / _LOCK).unlink()
            for path in made:
                path.rmdir()


def _prepare(flag: str, folder: str) -> str | None:
    """Bring what is needed to go on from a URL; what is in the way."""
    if not is_url(folder):
        return None
    try:
        probe(folder)
        if is_forgotten(folder):
            reason = "ended, and its memory with it"
        else:
            reason = "could not send all it wrote"
        # These files belong to no run any more: only what is at the URL counts.
        if (aside := set_unsent_aside(folder, besides=_LOCK)) is not None:
            logger.warning(
                "%s %s: an earlier process %s; its files are now in %s", flag, folder, reason, aside
            )
        download_marks(folder)
        kinds = tuple(name.partition(".")[0] for name in RECORDS)
        download(folder, lambda name: name.startswith(kinds))
    except OSError as error:
        return f"{flag} {folder}: cannot be written ({error if isinstance(error, StagingError) else error.strerror})"
    return None


def _lock(file: IO[str], name: str) -> str | None:
    import fcntl

    path = Path(file.name).resolve()
    if path in _held:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return f"{name} is in use by {file.read() or 'another process'}: wait for it, or choose another --save_path"
    except OSError as error:
        logger.warning(
            "%s: no locks on this file system (%s): nothing keeps another run out",
            name,
            error.strerror,
        )
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file
    return None


def is_at(path: Path, file: IO[str]) -> bool:
    """Return whether an open file is still the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def locks_of(folders: Iterable[str]) -> dict[Path, str]:
    """Return the lock file of each folder → the folder."""
    return {(local_folder(folder) / _LOCK).resolve(): folder for folder in folders if folder}


def hold(locks: Mapping[Path, str]) -> None:
    """Make folders of this process that were removed again, and keep others out of them; ``locks``: :func:`locks_of`.

    Raises:
        ConfigError: another process has one by now, or it cannot be made.
    """
    for path, folder in locks.items():
        if path in _held and not is_at(path, _held[path]):
            logger.warning(
                "%s was removed while the run goes on: it is made again, what was in it is lost",
                folder,
            )
            _held.pop(path).close()
            if problem := _claim("the folder", folder):
                raise ConfigError(problem)


def release(folders: Iterable[str]) -> None:
    """Let others have the folders, before this process ends."""
    for folder in folders:
        if (file := _held.pop((local_folder(folder) / _LOCK).resolve(), None)) is not None:
            file.close()


# -- no other run's files --------------------------------------------------------------------------------------------


def set_aside(*paths: Path) -> None:
    """Number what an earlier run left under these names: ``metrics.jsonl`` becomes ``metrics.1.jsonl``."""
    found = [
        path
        for path in dict.fromkeys(paths)
        if path.is_file() or (path.is_dir() and any(path.iterdir()))
    ]

    def numbered(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}.{number}{path.suffix}")

    number = next(
        i for i in itertools.count(1) if not any(numbered(path, i).exists() for path in paths)
    )
    for path in found:
        path.rename(numbered(path, number))
    if found:
        names = [f"{path.name} → {numbered(path, number).name}" for path in found]
        more = f", … ({len(names)} in all)" if len(names) > 6 else ""
        print(
            f"{found[0].parent}: an earlier run's files are kept apart: {', '.join(names[:6])}{more}",
            flush=True,
        )


def set_records_aside(config: OptionSet) -> None:
    """Keep apart what an earlier run has recorded where this one will."""
    logs = config.logging
    folder = config.checkpoint.save_path
    paths = [local_folder(folder).absolute() / name for name in RECORDS]
    if logs.use_tensorboard:
        paths.append(Path(logs.use_tensorboard).absolute() / run_name(logs, folder))
    if (rollout_data_dir := config.flat().get("rollout_data_dir")) is not None:
        rollouts = Path(rollout_data_dir).absolute()
        steps = sorted(rollouts.glob("step*.jsonl"))
        # The folder may hold other things too.
        alone = rollouts.is_dir() and len(steps) == len(list(rollouts.iterdir()))
        paths += [rollouts] if alone or rollouts in paths else steps
    set_aside(*paths)
    upload(folder, *RECORDS)  # what is no longer here goes there, too
    upload_records(folder)


class RecordSums:
    """Sizes and sums of what a run has recorded. A checkpoint keeps them; the next start says what of it is lost.

    Args:
        metrics: the file of the metrics, where it is not in the run's folder.
    """

    def __init__(self, folder: str, metrics: Path) -> None:
        self.folder = local_folder(folder).absolute()
        self.metrics = metrics.absolute()
        # (size, time of the last change) and digest of each file.
        self._known: dict[Path, tuple[tuple[int, int], Digest]] = {}

    def take(self) -> dict[str, tuple[int, str]]:
        """(size, SHA-256) of each file, by its name in the run's folder."""
        below = [path for kind in ("eval", SAMPLES) for path in (self.folder / kind).rglob("*")]
        files = [path for path in (self.metrics, self.folder / METADATA, *below) if path.is_file()]
        return {os.path.relpath(path, self.folder): tuple(self._digest(path)) for path in files}

    def _digest(self, path: Path) -> Digest:
        stat = path.stat()
        mark = (stat.st_size, stat.st_mtime_ns)
        if self._known.get(path, (None,))[0] != mark:
            self._known[path] = (mark, digest(path))
        return self._known[path][1]

    def lost(self, taken: Mapping[str, tuple[int, str]]) -> list[str]:
        """Return what is no longer as it was ``taken``, a text per file. A file of lines may have more of them by now."""
        found = []
        for name, (size, sha256) in taken.items():
            written = Digest(size, sha256)
            found.append(change(self.folder, name, written, grows=name.endswith(".jsonl")))
        return [text for text in found if text is not None]


def upload_records(folder: str) -> None:
    """Send what the run has recorded since it was last sent, where the folder is a URL."""
    kinds = [name.partition(".")[0] for name in RECORDS]
    local = local_folder(folder)
    upload(folder, *unsent(folder, {path for kind in kinds for path in local.glob(f"{kind}*")}))


def cut_samples(folder: str, last: int) -> None:
    """Remove the samples of steps after ``last``, which a resumed run does again."""
    steps = {
        path: int(path.name[4:-9])
        for path in (local_folder(folder) / SAMPLES).glob("step*.jsonl.gz")
    }
    late = [path for path, step in steps.items() if step > last]
    for path in late:
        path.unlink()
    upload(folder, *(f"{SAMPLES}/{path.name}" for path in late))


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
    flat = config.flat()
    marks = {}
    is_answered = bool(flat.get("tape_from"))  # then files of code outside may be gone
    if ranks.is_rank_0():
        for name, spec in _code_of(config).items():
            if is_answered and isinstance(spec, str) and _is_gone(spec):
                continue
            if not is_object(spec):
                marks[name] = _digest(split_python_spec(spec, name)[0].read_bytes())
            elif (source := source_of(spec)) is not None:
                marks[name] = _digest(source.encode())
        if (routes := flat.get("reward_routes")) and not routes.lstrip().startswith("{"):
            marks["reward_routes"] = _digest(Path(routes).expanduser().read_bytes())
        for name in () if is_answered else WORLDS:
            contents = filter(None, map(_content_of_world, flat.get(name, ())))
            if given := [_digest(content) for content in contents]:
                marks[name] = " ".join(given)
        own = ("pretrain", "ref_pretrain", "critic_pretrain", "teacher_pretrain")
        models = {name: (flat.get(name),) for name in own}
        for name, paths in (models | {"reward_pretrain": flat.get("reward_pretrain", ())}).items():
            if given := [
                checkpoint_mark(stage_to_local(path)) for path in paths if path is not None
            ]:
                marks[name] = " ".join(given)
        marks |= {name: _rows_mark(of_option) for name, of_option in rows.items()}
        # Where one folder lies from the other: both may have been moved together.
        checkpoint = config.checkpoint
        if is_url(checkpoint.save_path):
            marks["save_path"] = shown_url(checkpoint.save_path)
        else:
            marks["save_path"] = os.path.relpath(checkpoint.save_path, checkpoint.ckpt_path)
    return ranks.broadcast_object(marks)


def _content_of_world(entry: Any) -> bytes | None:
    """Of an entry of ``--env`` or ``--tools``: its file, or an object's source; None where there is neither."""
    if is_object(entry):
        source = source_of(entry)
        return None if source is None else source.encode()
    file = file_of_world(entry)
    if file is None:
        return None
    return Path(file).expanduser().read_bytes()


def _rows_mark(rows: Any, batch: int = 1000) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(rows), batch):
        columns = {
            name: column
            for name, column in rows[start : start + batch].items()
            if name != ORIGIN_COLUMN
        }
        digest.update(json.dumps(columns, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _code_of(config: OptionSet) -> dict[str, Any]:
    """Return the functions, objects and files with them that a resumed run must find unchanged, by option."""
    flat = config.flat()
    given = {
        one.name: flat[one.name]
        for one in config.all_options()
        if one.may_be_object and not one.resume_safe
    }
    urls = flat.get("remote_rm_url", ())
    given |= {"remote_rm_url": urls[0] if len(urls) == 1 and "://" not in urls[0] else None}
    return {
        name: spec
        for name, spec in given.items()
        if is_object(spec) or (isinstance(spec, str) and ".py" in spec)
    }


def _is_gone(spec: str) -> bool:
    """Return whether the file of ``path.py:name`` is not there any more."""
    return not Path(spec.rpartition(".py")[0] + ".py").expanduser().is_file()


def source_of(value: Any) -> str | None:
    """Return the source of a function, or of the class of an object; None where Python does not have it."""
    while isinstance(value, functools.partial):
        value = value.func
    definition = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):  # typed at a prompt, or built in
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


_MARKED = ("config.json", "tokenizer*.json", "*.safetensors", "pytorch_model*.bin")


def checkpoint_mark(path: str, blocks: int = 16, size: int = 1 << 16) -> str:
    """Return a mark of a checkpoint's content: config and tokenizer whole, of each weight file its length and some blocks.

    Cheap for any size, and the same wherever and whenever the files were copied.
    """
    folder = Path(path).expanduser()
    folder = folder if folder.is_dir() else Path(cached_file(path, "config.json")).parent
    digest = hashlib.sha256()
    for file in sorted(file for kind in _MARKED for file in folder.glob(kind)):
        length = file.stat().st_size
        digest.update(f"{file.name} {length}".encode())
        with file.open("rb") as stream:
            for i in range(blocks if file.suffix != ".json" else 1):
                stream.seek(max(0, length - size) * i // (blocks - 1))
                digest.update(stream.read(size if file.suffix != ".json" else -1))
    return digest.hexdigest()[:16]


# -- what a run says of itself ---------------------------------------------------------------------------------------


def save_run_config(config: OptionSet, ranks: Ranks) -> None:
    """Keep the options as they were given in ``run_config.yaml``, which ``--config`` reads, and beside it in
    ``run_config.resolved.yaml`` with what None stood for. Collective."""
    problem = write_run_config(config) if ranks.is_rank_0() else None
    if problem := ranks.broadcast_object(problem):
        raise ConfigError(problem)


def write_run_config(config: OptionSet) -> str | None:
    """Write both files whole or not at all; returns what went wrong."""
    folder = config.checkpoint.save_path
    local = local_folder(folder)
    try:
        local.mkdir(parents=True, exist_ok=True)
        for name, options in {
            "run_config": config,
            "run_config.resolved": config.resolved(),
        }.items():
            values = {
                n: list(v) if isinstance(v, tuple) else v
                for n, v in public_options(options).items()
            }
            del values["config"]
            write_text(
                local / f"{name}.yaml",
                yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True),
            )
        upload_records(folder)
    except OSError as error:
        return f"--save_path {folder}: cannot be written ({error.strerror or error})"
    return None


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
        row = {"step": step, "time": time.time(), "ranks": ranks.world_size, "device": str(device)}
        row |= {"total_steps": total_steps, "versions": dict(versions()), "content": dict(content)}
        with (local_folder(folder) / METADATA).open("a") as file:
            file.write(json.dumps(row) + "\n")
        upload_records(folder)

    ranks.on_rank_0(write, f"write {METADATA} in {folder}")


@functools.cache
def versions() -> Mapping[str, str]:
    """Of what computes: packages, Python, and lightppo with a mark of its source, which changes between releases.

    Looked up once: what a process has imported stays.
    """
    source = Path(__file__).parents[1]
    code = b"".join(path.read_bytes() for path in sorted(source.rglob("*.py")))
    found = {"lightppo": f"{__version__} ({_digest(code)})", "python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed", "numpy", "peft", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# -- while it is built -----------------------------------------------------------------------------------------------


def claim_folders(building: Any) -> None:
    """Take the run's folders, which are its own from here on. Collective."""
    config = building.config
    if not isinstance(config, PPOConfig):
        refuse_overlaps(building.asked, building.strategy)
    folders = {"--save_path": config.checkpoint.save_path}
    # an evaluation may look at the checkpoints of a run that goes on
    if not config.flat().get("val_only"):
        folders["--ckpt_path"] = config.checkpoint.ckpt_path
    claim(folders, building.strategy)


def mark_content(building: Any) -> None:
    """Mark what the options name, so that a resumed run finds it unchanged. Collective."""
    rows = {name: data.dataset for name, data in building.rows.items()}
    building.content = content_of(building.config, rows, building.strategy)
