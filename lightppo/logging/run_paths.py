"""What a run reads and where it writes: never in one place, or the run would overwrite its own start or data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from lightppo.checkpoint.layout import REPLACED_NAMES
from lightppo.config.options import OptionSet
from lightppo.errors import ConfigError, StagingError
from lightppo.option import is_object
from lightppo.redaction import shown_url
from lightppo.storage import check_scheme, is_url, local_folder

# What a run writes into --save_path beside the model.
METADATA = "run_metadata.jsonl"
SAMPLES = "rollouts"
TAPE = "tape"
RECORDS = ("metrics.jsonl", "eval", SAMPLES, "plot.png", "report.html", "profile")
RECORDS += ("run_config.yaml", "run_config.resolved.yaml", METADATA, TAPE)

# Options that name a file or folder that a run reads; those of rows take several, with commas between. Not --config:
# the run_config.yaml of a folder starts its run again.
MODELS = ("pretrain", "ref_pretrain", "reward_pretrain", "critic_pretrain", "teacher_pretrain")
TOKENIZERS = ("tokenizer_path", "reward_input_tokenizer")
ROWS = ("prompt_data", "eval_data", "pretrain_data", "prompt_metadata", "dataset", "eval_dataset")
CODE = ("reward_fn", "eval_reward_fn", "remote_rm_url", "reward_routes", "callback")
WORLDS = ("env", "tools")  # code, too, in more forms
READ = (*MODELS, *TOKENIZERS, *ROWS, *CODE, *WORLDS, "resume", "tape_from")

# Options that name a place that a run writes to → what of it the run replaces or removes. Other names in it stay.
_EVERYTHING = ("*",)
WRITTEN = {
    "save_path": (*RECORDS, "adapter", "nonfinite"),
    "ckpt_path": REPLACED_NAMES,
    "rollout_data_dir": ("step*.jsonl",),
    "skip_rollout": ("step*", "first*"),
    "use_tensorboard": _EVERYTHING,
    "use_mlflow": ("0", ".trash"),
    "log_file": _EVERYTHING,
}


@dataclass(frozen=True)
class Place:
    """A file or folder, by where it really is."""

    text: str  # as it was given
    server: str  # protocol and host of a URL
    path: PurePath  # absolute, without links

    @classmethod
    def of(cls, given: str) -> Place:
        """``~`` stands for the home folder. StagingError: a URL of an unknown kind."""
        if not is_url(given):
            return cls(
                given, "", Path(os.path.realpath(Path(given.split("://", 1)[-1]).expanduser()))
            )
        file_system = check_scheme(given)
        protocol = file_system.protocol
        host = urlsplit(given).hostname or ""
        path = PurePosixPath(
            os.path.normpath("/" + str(file_system._strip_protocol(given)).lstrip("/"))
        )
        if host in path.parts:  # a bucket
            host = ""
        return cls(
            shown_url(given),
            f"{protocol if isinstance(protocol, str) else protocol[0]}://{host}",
            path,
        )

    def shown(self) -> str:
        """Return as it was given, and where links lead from there."""
        follows_link = not self.server and os.path.abspath(local_folder(self.text)) != str(
            self.path
        )
        if follows_link:
            return f"{self.text} (a link to {self.path})"
        return self.text

    def below(self, folder: Place) -> tuple[str, ...] | None:
        """Return the names that lead from the folder to this place: none if they are the same; ``None`` if it is outside."""
        if self.server != folder.server:
            return None
        for depth, above in enumerate((self.path, *self.path.parents)):
            if above == folder.path or (not self.server and _is_same(above, folder.path)):
                return self.path.parts[len(self.path.parts) - depth :]
        return None


def _is_same(one: PurePath, other: PurePath) -> bool:
    """Return whether two names are of one file or folder, as where a file system ignores case, or is mounted twice."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def check_places(config: OptionSet) -> None:
    """Refuse a run that would write over what it reads; of a resolved config.

    Raises:
        ConfigError: a line for each written place.
    """
    values = config.flat()
    read = [
        (flag, place)
        for flag, text in _named(values, READ)
        if (place := _place_of(text)) is not None
    ]
    read = [
        (flag, place) for flag, place in read if flag != "--resume" or not _is_own(place, values)
    ]
    problems: dict[Place, str] = {}  # by what is written
    for flag, text, names in _written(values):
        written = _place_of(text)
        if written is None or any(written.below(folder) is not None for folder in problems):
            continue
        for read_flag, place in read:
            if problem := overlap(flag, text, names, read_flag, place):
                problems.setdefault(written, problem)
    if problems:
        raise ConfigError("\n".join(problems.values()))


def check_output(output: str | os.PathLike[str], read: Mapping[str, str | None]) -> None:
    """Refuse the output of a command in a folder that it reads; ``read``: by what the command calls it."""
    for name, text in read.items():
        place = None if text is None else _place_of(text)
        if place is not None and (problem := overlap("OUT", os.fspath(output), (), name, place)):
            raise ConfigError(problem)


def overlap(flag: str, text: str, names: Iterable[str], read_flag: str, read: Place) -> str | None:
    """Return what is wrong with writing to a place, and in it to ``names``, beside what is read; ``None`` if nothing is."""
    remedy = f"name another {flag}"
    for written in _with_copy(text):
        said = f"{flag} {written.shown()}"
        if (inside := read.below(written)) == ():
            return (
                f"{said} is also {read_flag} {read.text}, and the run would write over it: {remedy}"
            )
        if inside and any(fnmatch(inside[0], name) for name in names):
            return f"{said}: the run writes to {inside[0]} in it, and {read_flag} {read.text} is there: {remedy}"
        if written.below(read):
            return f"{said} is inside {read_flag} {read.text}, which the run reads: {remedy}"
    return None


def _with_copy(text: str) -> Iterator[Place]:
    """Yield a place, and the folder of this machine that stands for it if it is a URL."""
    place = _place_of(text)
    if place is not None:
        yield place
    if is_url(text):
        yield Place.of(str(local_folder(text)))


def _place_of(text: str) -> Place | None:
    """``None`` for a URL of an unknown kind, which has an error of its own."""
    try:
        return Place.of(text)
    except StagingError:
        return None


def _named(values: Mapping[str, Any], flags: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield flag and path of each file and folder that the options name."""
    for flag in flags:
        given = values.get(flag)
        if is_object(given):
            continue  # a function, say
        if given is None:
            texts = []
        elif isinstance(given, str):
            texts = [given]
        else:
            texts = list(given)
        if flag in ROWS:
            texts = [part.strip() for text in texts for part in text.split(",")]
        if flag in CODE:
            texts = [_without_name(text) for text in texts if not text.lstrip().startswith("{")]
        if flag in WORLDS:
            texts = filter(None, map(file_of_world, texts))
        if flag == "resume":
            texts = [text for text in texts if text not in ("auto", "never")]
        yield from ((f"--{flag}", text) for text in texts if text)


def file_of_world(entry: Any) -> str | None:
    """Return the file of ``path.py:f,g``, ``NAME=path.py:Class`` or ``openrlhf:path.py``; None where there is none."""
    if is_object(entry):
        return None
    found = re.fullmatch(r"(?:[\w-]+=)?(?:openrlhf:)?(.+\.py)(?::[^/]*)?", entry)
    return found[1] if found else None


def _without_name(spec: str) -> str:
    """``path.py`` of ``path.py:name``."""
    path, colon, _ = spec.rpartition(".py:")
    return f"{path}.py" if colon else spec


def _written(values: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield flag, place, and what of it is replaced."""
    for flag, names in WRITTEN.items():
        text = values.get(flag)
        if not text or (flag == "ckpt_path" and values.get("val_only")):
            continue
        if flag == "use_tensorboard":  # an older folder of the run in it is renamed
            run = values["wandb_run_name"] or local_folder(values["save_path"]).resolve().name
            text = os.path.join(text, run)
        if flag == "use_mlflow" and is_url(text):
            continue
        yield f"--{flag}", text, names
    if values.get("save_value_network"):
        yield "--save_path", f"{values['save_path'].rstrip('/')}_critic", ("adapter",)


def _is_own(resumed: Place, values: Mapping[str, Any]) -> bool:
    """Return whether ``--resume`` names the run's own checkpoints, which it goes on with and replaces."""
    own = _place_of(values["ckpt_path"])
    return own is not None and resumed.below(own) == ()
