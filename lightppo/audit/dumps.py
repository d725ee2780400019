"""Dumps of several trainers, read into one form: columns by common names, with the name that the file gives each.

The layouts are those of these versions, whose code was read:

==========  =======================================================================================================
slime       0.3.1 (624b824a), ``save-debug-train-data``: ``{"format_version": 2, "samples": [one dict each], …}``
verl        0.10.0.dev (1dda039b), ``trainer.rollout_data_dir``: JSONL of texts and scores. ``DataProto.save_to_disk``
            pickles objects and is refused; ``torch.save({**data.batch, "uid": list(uid)}, path)`` keeps its tensors
prime-rl    0.8.1.dev67 (559b4477), ``enable_token_export``: ``token_exports/step_N/rank_R.jsonl``
trl         1.10.0.dev0 (f2cd5771), ``log_completions``: ``completions/completions_N.parquet``
openrlhf    0.11.0 (3c3be623) writes no dump: ``torch.save([vars(e) for e in experiences], path)`` keeps its Experiences
lightppo    ``--rollout_data_dir``, ``--record_samples``, ``nonfinite/*.pt``, and any dict of tensors by common names
==========  =======================================================================================================
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightppo import tensor_file
from lightppo.errors import CheckpointError, DataError

FLOAT32 = torch.finfo(torch.float32).eps

# Common names of columns of one number per token, and of one number per sample.
_TOKEN_COLUMNS = (
    "action_mask attention_mask token_scores token_rewards log_probs old_log_probs rollout_log_probs ref_log_probs kl "
    "values new_values returns advantages loss_weights policy_losses value_losses distill_losses log_ratio ratio "
    "mismatch_kl prob_delta clipped clipped_high clipped_low"
)
TOKEN_COLUMNS = tuple(_TOKEN_COLUMNS.split())
ROW_COLUMNS = ("scores", "shaped_scores", "baseline_scores", "response_length")
_LOGGED = "policy_loss value_loss distill_loss kl_loss clip_ratio dual_clip_ratio approx_kl reward"
LOGGED_NAMES = tuple(_LOGGED.split())
"""Numbers of a whole step, which a dump may hold, or its trainer's log."""


class Column(NamedTuple):
    """Numbers of a dump."""

    values: Tensor  # (B, A) or (B,) float64; 0 beyond the end of a row
    source: str  # its name in the file
    eps: float = FLOAT32  # how far it is rounded, relative to each number
    digits: float = 0.0  # the same, absolute: half a unit of the last digit
    lengths: Tensor | None = None  # (B,) float64, where the file has rows of their own lengths


@dataclass(frozen=True)
class Dump:
    """B samples of one step."""

    form: str
    rows: list[str]  # what the file calls each sample
    mask: Tensor  # (B, A) bool, the trained tokens; (B, 1) where a file has no tokens
    columns: dict[str, Column]
    groups: Tensor | None = None  # (B,) integers, equal for the samples of one prompt
    order: Tensor | None = None  # (B,) integers: where each sample stood when it was sampled
    micro_batches: Tensor | None = None  # (B,) integers
    logged: dict[str, Column] = field(default_factory=dict)  # () each, see LOGGED_NAMES
    has_tokens: bool = True
    is_whole: bool = True  # it holds all samples of a step
    # columns that some rows have and others have not, with what is said of each
    lacking: dict[str, str] = field(default_factory=dict)

    def nudged(self, seed: int, times: float) -> Dump:
        """Return a dump whose numbers are off by so many times their rounding, up or down at random."""
        generator = torch.Generator().manual_seed(seed)

        def nudge(column: Column) -> Column:
            size = column.values.abs() * max(column.eps, FLOAT32) + column.digits
            signs = torch.randint(2, size.shape, generator=generator) * 2.0 - 1.0
            return column._replace(values=column.values + times * signs * size)

        return replace(self, columns={name: nudge(each) for name, each in self.columns.items()})


def read(path: str, form: str | None, group_size: int | None, weights: Mapping[str, float]) -> Dump:
    """Read a dump.

    Args:
        form: one of READERS; None: by its content.
        group_size: samples of a prompt, which were sampled one after the other; only for dumps that name no prompt.
        weights: of columns that are rewards, for trl; none: each numeric column counts 1.

    Raises:
        DataError: there is no such file, it is empty, damaged, or has another form; or it names prompts itself.
    """
    content = _content(Path(path).expanduser())
    form = form or _form_of(content)
    if form is None:
        raise DataError(
            f"{path} is no dump that is known ({_described(content)}): name its form by --form, one of "
            f"{', '.join(READERS)}; docs/experiments.md has their layouts"
        )
    try:
        dump = READERS[form](content, weights)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path} is no dump of {form} ({reason}): name its form by --form, or write it again"
        ) from error
    if not dump.rows:
        raise DataError(f"{path} has no samples: dump a step with samples")
    if group_size is not None:
        if dump.groups is not None:
            raise DataError(
                f"--n_samples_per_prompt {group_size}: {path} says which samples share a prompt: leave it out"
            )
        order = torch.arange(len(dump.rows)) if dump.order is None else dump.order
        dump = replace(dump, groups=order // group_size)
    return _of_one_width(path, dump)


def _of_one_width(path: str, dump: Dump) -> Dump:
    """Return a dump whose token columns are all (B, A); DataError where a column has other rows."""
    count, width = dump.mask.shape
    longest = [each.values.shape[1] for each in dump.columns.values() if each.lengths is not None]
    widest = max([width, *longest])
    for name, each in dump.columns.items():
        expected = (count,) if name in ROW_COLUMNS else (count, width)
        shape = tuple(each.values.shape)
        if shape != expected and not (each.lengths is not None and shape[0] == count):
            raise DataError(
                f"{path}: the column {each.source} has the shape {shape}, and {expected} is needed: a number for each "
                f"{'sample' if name in ROW_COLUMNS else 'token, as the mask has'}"
            )
    for numbers in (dump.groups, dump.micro_batches):
        if numbers is not None and numbers.shape != (count,):
            raise DataError(
                f"{path}: there are {count} samples, but {tuple(numbers.shape)} numbers of groups or micro batches"
            )

    def widened(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, widest - values.shape[1]))

    columns = {
        name: each if name in ROW_COLUMNS else each._replace(values=widened(each.values))
        for name, each in dump.columns.items()
    }
    return replace(dump, mask=widened(dump.mask), columns=columns)


# -- files -----------------------------------------------------------------------------------------------------------


def _content(path: Path) -> Any:
    """Return what a file holds: a list of rows for JSON lines, a dict of columns for parquet, or what torch saved."""
    if path.is_dir():
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path  # of a run of lightppo
        files = sorted(each for each in folder.iterdir() if each.is_file())
        shown = [str(file.relative_to(path)) for file in files if file.name[0] != "."][:3]
        such = f"name one file of it, such as {', '.join(shown)}" if shown else "no file is in it"
        raise DataError(f"{path} is a folder: {such}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file: name the file that the trainer wrote")
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        raise DataError(f"{path} is empty: the trainer wrote nothing, or was ended while writing")
    if start[:2] == b"\x1f\x8b":
        return _json_rows(path, gzip.open)
    if start == b"PAR1":
        return _parquet(path)
    if start[:1] in b"{[ \n":
        return _json_rows(path, open)
    try:
        with warnings.catch_warnings(action="ignore"):  # of a pickle's protocol
            return tensor_file.read(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): it is torn: dump the step again"
        ) from error
    except CheckpointError as error:
        raise DataError(
            f"{error}. A dump must be JSON lines, parquet, or torch.save of tensors, lists and texts alone"
        ) from error


def _json_rows(path: Path, opened: Callable[..., Any]) -> list[dict[str, Any]]:
    rows: list[Any] = []
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            rows += (json.loads(line) for line in file if line.strip())
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path}, line {len(rows) + 1}: cannot be read ({error}): was the trainer ended while writing? Remove what "
            "is torn, or dump the step again"
        ) from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} must hold a JSON object in each line")
    return rows


def _parquet(path: Path) -> dict[str, list]:
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:  # pyarrow's errors are these
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read ({reason}): dump the step again") from error
    if not any(columns.values()):
        raise DataError(f"{path} has no rows: dump a step with samples")
    return columns


def _form_of(content: Any) -> str | None:
    """Return the form that the names in a file tell; None: none."""
    first = content[0] if isinstance(content, list | tuple) and content else content
    names = set(first) if isinstance(first, Mapping) else set()
    is_list = isinstance(content, list | tuple)
    marks = [
        ("prime-rl", "trainer_logprobs inference_logprobs"),
        ("slime", "samples format_version"),
        ("trl", "prompt completion advantage"),
        ("lightppo", "sample_index input" if is_list else "micro_batches facts"),
        ("verl", "input output score" if is_list else "response_mask"),
        ("openrlhf" if is_list else "lightppo", "action_mask"),
    ]
    return next((form for form, columns in marks if names >= {*columns.split()}), None)


def _described(content: Any) -> str:
    first = content[0] if isinstance(content, list | tuple) and content else content
    if isinstance(first, Mapping) and first:
        return f"it has {', '.join(map(str, list(first)[:6]))}"
    return f"it holds {type(content).__name__}"


# -- numbers ---------------------------------------------------------------------------------------------------------


def column(values: Any, source: str, digits: float = 0.0) -> Column:
    """Return numbers as a column: a tensor, or a list of numbers, of lists or of tensors, which are padded with 0."""
    if isinstance(values, Tensor):
        _check_real(values, source)
        eps = torch.finfo(values.dtype).eps if values.is_floating_point() else FLOAT32
        return Column(values.double(), source, eps, digits)
    parts = [_row(value, f"{source} of sample {n}") for n, value in enumerate(values)]
    eps = max(
        [torch.finfo(each.dtype).eps for each in parts if each.is_floating_point()], default=FLOAT32
    )
    if not any(_is_row(value) for value in values):
        return Column(torch.cat(parts).double(), source, eps, digits)
    lengths = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
    padded = pad_sequence([part.double() for part in parts], batch_first=True)
    return Column(padded, source, eps, digits, lengths)


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)


def _check_real(values: Tensor, place: str) -> None:
    if values.is_complex():
        raise TypeError(f"{place} is complex, where real numbers should be")


def _row(value: Any, place: str) -> Tensor:
    """Return a row's numbers (A,); None, which stands for what is not finite, is NaN."""
    if isinstance(value, Tensor):
        _check_real(value, place)
        return value.reshape(-1)
    numbers = value if isinstance(value, list | tuple) else [value]
    if texts := [number for number in numbers if isinstance(number, str)]:
        raise TypeError(f"{place} has the text {texts[0][:20]!r}, where a number should be")
    numbers = [float("nan") if number is None else float(number) for number in numbers]
    return torch.tensor(numbers, dtype=torch.float64)


def number_ids(names: Iterable[Any]) -> Tensor:
    """Return an integer for each name (B,), equal for equal ones."""
    numbers: dict[str, int] = {}
    keys = [json.dumps(name, default=str) for name in names]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def taken(
    values: Mapping[str, Any], names: Mapping[str, str], digits: float = 0.0
) -> dict[str, Column]:
    """Return the columns that are there: ``names`` has the file's name of a common one, which itself may stand there."""
    columns = {}
    others = set(names.values())
    for common in (*TOKEN_COLUMNS, *ROW_COLUMNS):
        sources = [names.get(common), None if common in others else common]
        source = next((each for each in sources if each in values), None)
        if source is not None and values[source] is not None:
            columns[common] = column(values[source], source, digits)
    return columns


def common_names(rows: Sequence[Mapping[str, Any]]) -> tuple[set[str], dict[str, int]]:
    """Return the names that all rows have, and for each of the others the number of the first row without it."""
    names = set().union(*rows)
    firsts = {
        name: next((n for n, row in enumerate(rows) if name not in row), None) for name in names
    }
    without = {name: n for name, n in firsts.items() if n is not None}
    return names - without.keys(), without


def lacking_columns(
    without: Mapping[str, int], rows: Sequence[str], names: Mapping[str, str]
) -> dict[str, str]:
    """Return what is said of each column that some rows do not have, by common name."""
    sources = {common: names.get(common, common) for common in (*TOKEN_COLUMNS, *ROW_COLUMNS)}
    return {
        common: f"{rows[without[source]]} has no {source}, which other rows have"
        for common, source in sources.items()
        if source in without
    }


def logged_numbers(values: Mapping[str, Any]) -> dict[str, Column]:
    return {
        name: Column(torch.as_tensor(values[name]).double(), name)
        for name in LOGGED_NAMES
        if name in values and torch.as_tensor(values[name]).numel() == 1
    }


def _mask_of(columns: Mapping[str, Column]) -> Tensor:
    if "action_mask" in columns:
        return columns["action_mask"].values != 0
    widths = [each.values for each in columns.values() if each.values.dim() == 2]
    return torch.ones_like(widths[0], dtype=torch.bool)


# -- forms -----------------------------------------------------------------------------------------------------------

_SLIME = {
    "action_mask": "loss_masks",
    "log_probs": "new_log_probs",  # of a further optimizer step; slime itself keeps the first one's
    "old_log_probs": "log_probs",
    "scores": "raw_reward",
    "shaped_scores": "rewards",
    "response_length": "response_lengths",
}


def _slime(content: Any, _: Any) -> Dump:
    samples = content["samples"]
    values = {name: [sample[name] for sample in samples] for name in samples[0]}
    if "raw_reward" in content:  # of the whole batch, in the order of the samples
        values["raw_reward"] = content["raw_reward"]
    columns = taken(values, _SLIME)
    order = None
    if "rollout_position" in values:
        order = torch.tensor(values["rollout_position"])
    return Dump(
        "slime",
        [f"samples[{number}]" for number in range(len(samples))],
        _mask_of(columns),
        columns,
        number_ids(values["group_index"]) if "group_index" in values else None,
        order,
        _slime_micro_batches(content.get("dp_shards", ()), values.get("rollout_position")),
        logged_numbers(content),
    )


def _slime_micro_batches(shards: Sequence[Mapping], positions: list[int] | None) -> Tensor | None:
    """Return the micro batch of each sample, which the layout of the ranks says; None: it does not."""
    batches = [
        [shard["partition"][index] for index in batch]
        for shard in shards
        for batch in shard.get("micro_batch_indices") or ()
    ]
    if not batches or positions is None:
        return None
    numbers = {position: n for n, batch in enumerate(batches) for position in batch}
    return torch.tensor([numbers[position] for position in positions])


_VERL = {
    "action_mask": "response_mask",
    "token_scores": "token_level_scores",
    "token_rewards": "token_level_rewards",
    "ref_log_probs": "ref_log_prob",
    "loss_weights": "rollout_is_weights",
    "baseline_scores": "reward_baselines",
}


def _verl(content: Any, _: Any) -> Dump:
    if isinstance(content, list):
        return _texts("verl", content, number_ids(row["input"] for row in content))
    columns = taken(content, _VERL)
    if "attention_mask" in columns:  # of prompt and response
        width = columns["action_mask"].values.shape[1]
        whole = columns["attention_mask"]
        columns["attention_mask"] = whole._replace(values=whole.values[:, -width:])
    return Dump(
        "verl",
        [f"row {number}" for number in range(len(columns["action_mask"].values))],
        _mask_of(columns),
        columns,
        number_ids(content["uid"]) if "uid" in content else None,
        micro_batches=content.get("micro_batches"),
        logged=logged_numbers(content),
    )


def _texts(form: str, content: list[dict], groups: Tensor | None) -> Dump:
    """Return a dump of texts and scores, which has no tokens."""
    rows = [f"line {number}" for number in range(1, len(content) + 1)]
    if without := [name for name, row in zip(rows, content) if "score" not in row]:
        raise KeyError(f"{without[0]} has no score")
    columns = {"scores": column([row["score"] for row in content], "score")}
    mask = torch.ones(len(rows), 1, dtype=torch.bool)
    return Dump(form, rows, mask, columns, groups, has_tokens=False)


_PRIME_RL = {
    "action_mask": "loss_mask",
    "log_probs": "trainer_logprobs",
    "rollout_log_probs": "inference_logprobs",
    "log_ratio": "log_importance_ratio",
    "ratio": "importance_ratio",
    "clipped": "is_masked",
    "clipped_high": "is_masked_high",
    "clipped_low": "is_masked_low",
}


def _prime_rl(content: Any, _: Any) -> Dump:
    names, without = common_names(content)
    values = {name: [row[name] for row in content] for name in names}
    empty = {  # columns that the loss does not have
        name
        for name, rows in values.items()
        if all(isinstance(row, list) and set(row) <= {None} for row in rows)
    }
    columns = taken({name: values[name] for name in names - empty}, _PRIME_RL)
    if "rollout_log_probs" not in columns:
        raise KeyError("inference_logprobs")
    columns["old_log_probs"] = columns["rollout_log_probs"]  # its ratio is to the engine
    rows = [f"line {number}" for number in range(1, len(content) + 1)]
    lacking = lacking_columns(without, rows, _PRIME_RL)
    return Dump("prime-rl", rows, _mask_of(columns), columns, lacking=lacking)


def _trl(content: Any, weights: Mapping[str, float]) -> Dump:
    count = len(content["advantage"])
    names = list(content)
    between = names[names.index("completion") + 1 : names.index("advantage")]
    numeric = [name for name in between if all(map(_is_reward, content[name]))]
    weights = weights or dict.fromkeys(numeric, 1.0)
    if unknown := [name for name in weights if name not in numeric]:
        raise DataError(
            f"--reward_columns {unknown[0]}: the columns of numbers are {', '.join(numeric)}"
        )
    if not weights:
        raise ValueError(
            "no column between completion and advantage has numbers, which would be rewards"
        )
    parts = torch.stack([column(content[name], name).values for name in weights])  # (K, B)
    factors = torch.tensor(list(weights.values()), dtype=torch.float64)
    scores = Column((parts * factors[:, None]).nansum(0), " + ".join(weights))
    advantages = column(content["advantage"], "advantage")
    steps = content.get("step", [0] * count)
    return Dump(
        "trl",
        [f"row {number}" for number in range(count)],
        ~parts.isnan().all(0)[:, None],  # one that no reward function scored is in no group
        {"scores": scores, "advantages": advantages._replace(values=advantages.values[:, None])},
        number_ids(zip(steps, content["prompt"])),
        has_tokens=False,
    )


def _is_reward(value: Any) -> bool:
    return isinstance(value, int | float | None) and not isinstance(value, bool)


_EXPERIENCE = {
    "old_log_probs": "action_log_probs",
    "ref_log_probs": "base_action_log_probs",
    "scores": "rewards",
}


def _experiences(form: str, batches: Sequence[Mapping[str, Any]]) -> Dump:
    """Return the rows of Experiences, one of them per micro batch; those of lightppo have nearly the same names."""
    common = {*TOKEN_COLUMNS, *ROW_COLUMNS, *_EXPERIENCE.values()} - {"attention_mask"}
    known = [
        {name: batch[name] for name in common if batch.get(name) is not None} for batch in batches
    ]
    names, without = common_names(known)
    values = {name: [row for batch in batches for row in batch[name]] for name in names}
    columns = taken(values, _EXPERIENCE)
    sizes = torch.tensor([len(batch["action_mask"]) for batch in batches])
    groups = [number for batch in batches for number in batch.get("group_ids", ())]
    order = [number for batch in batches for number in batch.get("index") or ()]
    rows = [f"[{n}] row {r}" for n, size in enumerate(sizes.tolist()) for r in range(size)]
    lacking = lacking_columns(without, [f"[{n}]" for n in range(len(batches))], _EXPERIENCE)
    if len(batches) == 1:
        rows = [row.removeprefix("[0] ") for row in rows]
    return Dump(
        form,
        rows,
        _mask_of(columns),
        columns,
        number_ids(map(int, groups)) if len(groups) == len(rows) else None,
        torch.tensor(order) if len(order) == len(rows) else None,
        torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        logged_numbers(batches[0]),
        lacking=lacking,
    )


def _openrlhf(content: Any, _: Any) -> Dump:
    batches = content if isinstance(content, list | tuple) else [content]
    return _experiences("openrlhf", batches)


_TOKENS = {  # of lightppo's recorded samples
    "action_mask": "trained",
    "old_log_probs": "log_prob",
    "log_probs": "new_log_prob",
    "rollout_log_probs": "rollout_log_prob",
    "advantages": "advantage",
    "values": "value",
    "loss_weights": "loss_weight",
    "token_scores": "reward",
}


def _lightppo(content: Any, _: Any) -> Dump:
    if isinstance(content, Mapping):
        names = [name for name in LOGGED_NAMES if name in content]
        logged = {name: content[name] for name in names}
        batches = content.get("micro_batches") or [content]
        batches = [each.get("tensors", each) | each.get("info", {}) | logged for each in batches]
        dump = _experiences(
            "lightppo", [{"rewards": each.get("reward")} | each for each in batches]
        )
        return replace(dump, is_whole="facts" not in content)
    groups = number_ids((row["step"], row["index"]) for row in content)
    texts = _texts("lightppo", content, groups)
    has_tokens = ["tokens" in row for row in content]
    if not any(has_tokens):
        return texts
    if not all(has_tokens):
        raise KeyError(
            f"{texts.rows[has_tokens.index(False)]} has no tokens, which other lines have"
        )
    names, without = common_names([row["tokens"] for row in content])
    values = {name: [row["tokens"][name] for row in content] for name in names}
    if "trained" not in names:
        lengths = [row["response_length"] for row in content]
        values["trained"] = [
            row["tokens"].get("trained", [1] * length) for row, length in zip(content, lengths)
        ]
    columns = taken(values, _TOKENS, digits=5e-5) | texts.columns
    without.pop("trained", None)  # where all are
    lacking = lacking_columns(without, texts.rows, _TOKENS)
    return replace(
        texts,
        mask=_mask_of(columns),
        columns=columns,
        has_tokens=True,
        is_whole=False,
        lacking=lacking,
    )


READERS: dict[str, Callable[[Any, Mapping[str, float]], Dump]] = {
    "slime": _slime,
    "verl": _verl,
    "prime-rl": _prime_rl,
    "trl": _trl,
    "openrlhf": _openrlhf,
    "lightppo": _lightppo,
}
"""Forms of dumps by name."""
