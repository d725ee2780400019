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
    def of(cls, text: str) -> Place:
        """Return the place of a path, where ``~`` is the home folder, or URL. StagingError: a URL of an unknown kind."""
        if not is_url(text):
            path = Path(text.split("://", 1)[-1]).expanduser()
            return cls(text, "", Path(os.path.realpath(path)))
        file_system = check_scheme(text)
        protocol = file_system.protocol
        if not isinstance(protocol, str):
            protocol = protocol[0]
        host = urlsplit(text).hostname or ""
        path = "/" + str(file_system._strip_protocol(text)).lstrip("/")
        path = PurePosixPath(os.path.normpath(path))
        if host in path.parts:  # a bucket
            host = ""
        return cls(shown_url(text), f"{protocol}://{host}", path)

    def description(self) -> str:
        """Return as it was given, and where links lead from there."""
        if self.server or os.path.abspath(local_folder(self.text)) == str(self.path):
            return self.text
        return f"{self.text} (a link to {self.path})"

    def below(self, folder: Place) -> tuple[str, ...] | None:
        """Return the names that lead from the folder to this place: none if they are the same; ``None`` if it is outside."""
        if self.server != folder.server:
            return None
        for depth, parent in enumerate((self.path, *self.path.parents)):
            if parent == folder.path or (not self.server and _is_same(parent, folder.path)):
                return self.path.parts[len(self.path.parts) - depth :]
        return None


def _is_same(first: PurePath, second: PurePath) -> bool:
    """Tell whether two names are of one file or folder, as where a file system ignores case, or is mounted twice."""
    try:
        return os.path.samefile(first, second)
    except OSError:  # one of them is not there
        return False


def check_places(config: OptionSet) -> None:
    """Refuse a run that would write over what it reads; of a resolved config.

    Raises:
        ConfigError: a line for each written place.
    """
    values = config.flat()
    # --resume may name the run's own checkpoints, which it goes on with and replaces.
    checkpoints = _place_of(values["ckpt_path"])
    read_places = []
    for written_flag, path_text in read_paths(values):
        read_place = _place_of(path_text)
        is_own = (
            written_flag == "--resume"
            and checkpoints
            and read_place
            and read_place.below(checkpoints) == ()
        )
        if read_place is not None and not is_own:
            read_places.append((written_flag, read_place))
    problems: dict[Place, str] = {}  # by what is written
    for written_flag, path_text, replaced_names in _written_paths(values):
        written = _place_of(path_text)
        if written is None or any(written.below(folder) is not None for folder in problems):
            continue
        for read_flag, read_place in read_places:
            if problem := overlap(written_flag, path_text, replaced_names, read_flag, read_place):
                problems.setdefault(written, problem)
    if problems:
        raise ConfigError("\n".join(problems.values()))


def check_output(
    output: str | os.PathLike[str], read_paths: Mapping[str, str | None], flag: str = "OUT"
) -> None:
    """Refuse the output of a command in a folder that it reads; ``read_paths``: by what the command calls it."""
    for input_name, path_text in read_paths.items():
        place = None if path_text is None else _place_of(path_text)
        if place is not None and (
            problem := overlap(flag, os.fspath(output), (), input_name, place)
        ):
            raise ConfigError(problem)


def overlap(flag: str, text: str, names: Iterable[str], read_flag: str, read: Place) -> str | None:
    """Return what is wrong with writing to a place, and in it to ``names``, beside what is read; ``None`` if nothing is."""
    remedy = f"name another {flag}"
    places = [_place_of(text)]
    if is_url(text):  # and the folder of this machine that stands for it
        places.append(Place.of(str(local_folder(text))))
    for written in filter(None, places):
        subject = f"{flag} {written.description()}"
        inside = read.below(written)
        if inside == ():
            return f"{subject} is also {read_flag} {read.text}, and the run would write over it: {remedy}"
        if inside and any(fnmatch(inside[0], name) for name in names):
            return f"{subject}: the run writes to {inside[0]} in it, and {read_flag} {read.text} is there: {remedy}"
        if written.below(read):
            return f"{subject} is inside {read_flag} {read.text}, which the run reads: {remedy}"
    return None


def _place_of(text: str) -> Place | None:
    """Return the place; ``None`` for a URL of an unknown kind, which has an error of its own."""
    try:
        return Place.of(text)
    except StagingError:
        return None


def read_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield flag and path of each file and folder that a run reads."""
    for flag in READ:
        paths = values.get(flag) or ()
        if is_object(paths):
            continue  # a function, say
        if isinstance(paths, str):
            paths = [paths]
        if flag in ROWS:
            paths = [path.strip() for path_text in paths for path in path_text.split(",")]
        elif flag in CODE:
            paths = [
                _without_name(path_text)
                for path_text in paths
                if not path_text.lstrip().startswith("{")
            ]
        elif flag in WORLDS:
            paths = map(file_of_world, paths)
        elif flag == "resume":
            paths = [path for path in paths if path not in ("auto", "never")]
        yield from ((f"--{flag}", path) for path in paths if path)


def file_of_world(entry: Any) -> str | None:
    """Return the file of ``path.py:f,g``, ``NAME=path.py:Class`` or ``openrlhf:path.py``; None where there is none."""
    if is_object(entry):
        return None
    path_match = re.fullmatch(r"(?:[\w-]+=)?(?:openrlhf:)?(.+\.py)(?::[^/]*)?", entry)
    return path_match and path_match[1]


def _without_name(spec: str) -> str:
    """Return ``path.py`` of ``path.py:name``."""
    path, colon, _ = spec.rpartition(".py:")
    return f"{path}.py" if colon else spec


def _written_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield flag, place, and what of it is replaced."""
    for flag, replaced_names in WRITTEN.items():
        path_text = values.get(flag)
        if not path_text or (flag == "ckpt_path" and values.get("val_only")):
            continue
        if flag == "use_tensorboard":  # an older folder of the run in it is renamed
            run_name = values["wandb_run_name"] or local_folder(values["save_path"]).resolve().name
            path_text = os.path.join(path_text, run_name)
        if flag == "use_mlflow" and is_url(path_text):
            continue
        yield f"--{flag}", path_text, replaced_names
    if values.get("save_value_network"):
        yield "--save_path", f"{values['save_path'].rstrip('/')}_critic", ("adapter",)
