"""Tape of one rank: where it stands, what it holds of the present step, and what is added to it.

A step that is done again, after a crash or by ``lightppo replay``, finds its replies here. An episode answers from the
tape if its last entry is there; one that broke off is played again from its start, because nothing else would bring
its environment to where it was. Failures answer, too, unless they ended the run: then they are asked again.
"""

from __future__ import annotations

import array
import hashlib
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import yaml

from lightppo.callbacks import Callback
from lightppo.checkpoint.engine_state import read_client_state
from lightppo.checkpoint.layout import list_tags, part_folder
from lightppo.episodes.tape_files import (
    FOLDER,
    HEADER,
    VERSION,
    Entry,
    TapeEnd,
    TapeError,
    TapeFile,
    chained,
    check_end,
    check_follows,
    described,
    file_name,
    files_of,
    missing_files,
    numbers_of_ranks,
    read_tape_file,
)
from lightppo.errors import RewardError, RolloutError, StorageError
from lightppo.files import files_in_use, is_url, local_folder
from lightppo.ranks import Ranks

logger = logging.getLogger(__name__)

Phase = Literal["train", "eval"]
END = "end"  # kind of an episode's last entry
REWARD = "reward"
GIVEN_UP = "given up"  # failures so far ended the run


def tape_of(ranks: Ranks, config: Any) -> Tape | None:
    """Return the one tape of this rank of a run, or None where nothing is written and none plays."""
    if not wants_tape(config):
        return None
    if ranks not in _tapes:
        source_folder = config.tape.tape_from
        folder = (
            Path(source_folder).expanduser()
            if source_folder
            else local_folder(config.checkpoint.save_path)
        )
        tape_place = (folder / FOLDER, ranks.get_rank(), ranks.world_size)
        _tapes[ranks] = Tape(*tape_place, plays=source_folder is not None)
    return _tapes[ranks]


_tapes: WeakKeyDictionary[Any, Tape] = WeakKeyDictionary()


def wants_tape(config: Any) -> bool:
    """Tell whether the options ask for a tape; those of training on data have none."""
    return hasattr(config, "tape") and (config.tape.tape_from or config.tape.tape != "off")


class CheckpointedEnd(NamedTuple):
    """Say where a rank's files ended when a checkpoint was saved."""

    head: TapeEnd
    run: str  # the name of the run that saved it
    where: str  # the checkpoint, for messages


class Tape:
    """Keep what one rank was told from outside.

    Args:
        folder: of the files.
        plays: it answers, and nothing is written; without it, a step's own file answers what it holds, and grows.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, *, plays: bool = False) -> None:
        self.folder = folder
        self.rank = rank
        self.ranks = ranks
        self.plays = plays
        self.run = ""  # the name of the run
        # What a run that plays must know of environments that are gone. It is in the first lines of files.
        self.environments: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # names of sources of rewards, by their kinds
        self.answered = 0  # entries that were taken in place of a reply
        self.step: int | None = None  # None: not on the way yet, nothing is kept
        self.phase: Phase = "train"
        self.head: TapeEnd | None = None
        self._before: str | None = None  # the end of the files of another number of ranks
        self._tape_file: TapeFile | None = None  # of the step
        self._file: Any = None
        self._unsynced: set[Path] = set()
        self._lock = threading.RLock()
        self._forget()
        if plays:
            header = self._first_header()
            self.environments = header["environments"]
            self.sources = header["sources"]

    # -- where it stands ---------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Tell whether the run is in a step, or in an evaluation between steps."""
        return self.step is not None

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Train a step inside; what follows until the next one is its evaluation."""
        self.go_to(step, "train")
        yield
        self.go_to(step, "eval")

    def go_to(self, step: int, phase: Phase) -> None:
        """Begin a step: what follows belongs to it. Read what there is of it."""
        with self._lock:
            if step != self.step:
                self._close()
                self.step = step
                self._tape_file = None
                self._forget()
                file_path = self.folder / file_name(step, self.rank, self.ranks)
                if file_path.is_file():
                    self._take_up(file_path)
            self.phase = phase
            self._batches = 0
            self._question_counts = Counter()

    def next_batch(self) -> int:
        """Return the number of a call of the engine in this step, from 0."""
        self._batches += 1
        return self._batches - 1

    def _first_header(self) -> Entry:
        for file_path in files_of(self.folder, self.rank, self.ranks).values():
            if entries := read_tape_file(file_path).entries:
                return entries[0]
        raise TapeError(f"{self.folder}: no file of rank {self.rank} of {self.ranks} is whole")

    def _take_up(self, file_path: Path) -> None:
        tape_file = read_tape_file(file_path)
        if tape_file.torn:
            logger.warning(
                "%s ends in the middle of a line, as after a crash: the last %d bytes are left out",
                file_path,
                tape_file.torn,
            )
        if self.plays:
            if self.head is None or self.head.step != self.step:  # else it is the checkpoint's own
                check_follows(tape_file, self.head and self.head.hash)
            if tape_file.entries:
                self.head = tape_file.head
        elif not self._goes_on_with(tape_file):
            return
        self._tape_file = tape_file
        for entry in tape_file.entries[1:]:
            self._index(entry)

    def _goes_on_with(self, tape_file: TapeFile) -> bool:
        """Tell whether this run has written the file, as it stands now; else the file is set aside."""
        if self.head is not None and self.head.step == self.step:
            follows = bool(tape_file.entries) and tape_file.head == self.head
        else:
            follows = bool(tape_file.entries) and tape_file.before == self._end
        if follows:
            self.head = tape_file.head
            os.truncate(tape_file.path, tape_file.size)
            return True
        new_path = _free_name(tape_file.path)
        files_in_use().rename(tape_file.path, new_path)
        if tape_file.entries:
            logger.warning(
                "%s follows other replies than this run has had: it is kept as %s, and step %d is played again",
                tape_file.path,
                new_path.name,
                self.step,
            )
        return False

    def _forget(self) -> None:
        self._batches = 0
        self._question_counts: Counter[tuple[Any, ...]] = Counter()
        # phase, batch, prompt, sample → number of the take → its entries
        self._takes: dict[tuple[Any, ...], dict[int, list[Entry]]] = defaultdict(dict)
        self._rewards: dict[tuple[Any, ...], Entry] = {}  # the last one of each

    def _index(self, entry: Entry) -> None:
        if entry["kind"] == REWARD:
            # The entry is of a batch, or of one sample.
            samples = entry.get("of")
            if samples is None:
                samples = [(entry["prompt"], entry["sample"], entry["number"])]
            for sample in samples:
                self._rewards[entry["phase"], entry["source"], *sample] = entry
        elif entry["kind"] == GIVEN_UP:
            if not self.plays:
                self._forget_failures(entry["phase"])
        elif entry["kind"] != HEADER:
            episode_key = (entry["phase"], entry["batch"], entry["prompt"], entry["sample"])
            self._takes[episode_key].setdefault(entry["take"], []).append(entry)

    def _forget_failures(self, phase: Phase) -> None:
        """Forget what failed so far: the run was started again because it may succeed by now."""
        for episode_key, takes in self._takes.items():
            for entries in takes.values():
                if episode_key[0] == phase and _has_failed(entries):
                    entries.pop()  # its end: it is as if it had broken off
        for episode_key, entry in list(self._rewards.items()):
            if episode_key[0] == phase and ("failure" in entry or entry["score"] is None):
                del self._rewards[episode_key]

    # -- write -------------------------------------------------------------------------------------------------------

    def write(self, *entries: Mapping[str, Any]) -> None:
        """Add entries of the present step. They outlive this process, but not yet the machine: see :meth:`settle`.

        Raises:
            TapeError: JSON cannot hold a reply.
        """
        with self._lock:
            if self.plays or self.step is None:
                return
            position = {"phase": self.phase, "step": self.step}
            self._append([{"kind": entry["kind"], **position, **entry} for entry in entries])

    def give_up(self) -> None:
        """Note that what failed so far in this step ends the run; a run that goes on asks it again."""
        self.write({"kind": GIVEN_UP})

    def _append(self, entries: Sequence[Entry]) -> None:
        if self._file is None:
            self._open()
        try:
            lines, hashes = chained(entries, self.head.hash if self._tape_file else "")
        except (TypeError, ValueError) as error:
            raise TapeError(
                f"the tape cannot hold {described(entries[0])}: {error}; let it return plain values, or set "
                "--tape off"
            ) from error
        try:
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            self._break_off()
            raise self._unwritable(error) from error
        earlier_records = self.head.records if self._tape_file else 0
        self.head = TapeEnd(self.step, earlier_records + len(entries), hashes[-1])

    def _break_off(self) -> None:
        """Write no more: a line may be torn, and nothing follows it."""
        with suppress(OSError):  # it writes once more what could not be written
            self._file.close()
        self._file = self.step = None

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.folder}: the tape cannot be written ({error.strerror}): make room and run the same command "
            "again, or with --tape off; or choose another disk with --save_path"
        )

    def _open(self) -> None:
        file_path = self.folder / file_name(self.step, self.rank, self.ranks)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = file_path.open("ab")
        except OSError as error:
            raise self._unwritable(error) from error
        self._unsynced.add(file_path)
        if self._tape_file is not None:
            return
        header = {"kind": HEADER, "version": VERSION, "run": self.run, "step": self.step}
        header |= {"rank": self.rank, "ranks": self.ranks, "before": self._end}
        header |= {"environments": self.environments, "sources": self.sources}
        self._append([header])
        self._tape_file = TapeFile(file_path)

    @property
    def _end(self) -> str | None:
        return self.head.hash if self.head else self._before

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def settle(self) -> dict[str, Any] | None:
        """See that all that was written is on disk; return the end of the tape, for a checkpoint."""
        with self._lock:
            for file_path in (*self._unsynced, *{file_path.parent for file_path in self._unsynced}):
                descriptor = os.open(file_path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                except OSError as error:
                    raise self._unwritable(error) from error
                finally:
                    os.close(descriptor)
            self._unsynced.clear()
            if self._end is None:
                return None
            tape_end = self.head or TapeEnd(0, 0, self._end)
            return {**asdict(tape_end), "ranks": self.ranks, "rank": self.rank}

    def close(self) -> None:
        """End the tape with the run."""
        with self._lock:
            self._close()
            self.step = None

    # -- a run that goes on ------------------------------------------------------------------------------------------

    def go_on(self, saved_end: Mapping[str, Any] | None, checkpoint: str) -> None:
        """Go on from the end that a ``checkpoint`` knows.

        Raises:
            TapeError: the file of that end was altered.
        """
        if saved_end is None:
            return
        if not saved_end["records"]:  # of another number of ranks, see share_out
            self._before = saved_end["hash"]
            return
        self.head = TapeEnd.of(saved_end)
        file_path = self.folder / file_name(saved_end["step"], self.rank, self.ranks)
        if not file_path.is_file():
            logger.warning(
                "%s, which %s knows, is missing: the tape begins anew", file_path, checkpoint
            )
            return
        tape_file = read_tape_file(file_path)
        check_end(tape_file, self.head, checkpoint)
        self.head = tape_file.head

    def check_past(self, last_step: int) -> None:
        """Read all files of steps that are done, up to ``last_step``; those that are missing are named in a warning.

        Raises:
            TapeError: it names the line that was altered.
        """
        for rank_count in numbers_of_ranks(self.folder):
            # Files of another number of ranks are shared out.
            for rank in range(self.rank, rank_count, self.ranks):
                for gap in missing_files(self.folder, rank, rank_count, last_step):
                    logger.warning(
                        "%s: files of rank %d of %d are missing %s: these steps cannot be replayed",
                        self.folder,
                        rank,
                        rank_count,
                        gap,
                    )

    def share_out(self, ends: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """Return what the files of another number of ranks end with, as one hash that each new rank begins with."""
        hashes = [rank_end["hash"] if rank_end else "" for rank_end in ends]
        joined_hash = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return {"step": 0, "records": 0, "hash": joined_hash, "ranks": len(ends), "rank": -1}

    def set_aside(self, last_step: int, ranks: int) -> None:
        """Set aside files of so many ranks of steps that this number of ranks does again. For rank 0."""
        for rank in range(ranks):
            for step, file_path in files_of(self.folder, rank, ranks).items():
                if step > last_step:
                    files_in_use().rename(file_path, _free_name(file_path))

    def check(self, last_step: int, saved_ends: Sequence[CheckpointedEnd] = ()) -> None:
        """Read all files of later steps; TapeError names the line that is not as it was written."""
        previous_hash = self.head and self.head.hash
        for step, file_path in files_of(self.folder, self.rank, self.ranks).items():
            if step <= last_step:
                continue
            tape_file = read_tape_file(file_path)
            check_follows(tape_file, previous_hash)
            for saved_end in saved_ends:
                if (
                    saved_end.head.step == step
                    and tape_file.entries
                    and saved_end.run == tape_file.entries[0]["run"]
                ):
                    check_end(tape_file, saved_end.head, saved_end.where)
            if tape_file.entries:
                previous_hash = tape_file.head.hash

    # -- answer ------------------------------------------------------------------------------------------------------

    def whole_take(self, episode_key: tuple[Any, ...]) -> list[Entry] | None:
        """Return the entries of an episode, by its batch, prompt and sample. None: it broke off, or is not there.

        A tape that plays answers with what it has of an episode that broke off, too.
        """
        takes = self._takes.get((self.phase, *episode_key), {})
        whole_takes = [entries for entries in takes.values() if entries[-1]["kind"] == END]
        if self.plays and not whole_takes:
            return takes[max(takes)] if takes else []
        return whole_takes[-1] if whole_takes else None

    def next_take(self, episode_key: tuple[Any, ...]) -> int:
        """Return the number of the next take of an episode."""
        return max(self._takes.get((self.phase, *episode_key), {0: ()})) + 1

    def number_of_asking(self, source: str, prompt_index: int, stream: int) -> int:
        """Return how often a source was asked for this sample in this step before; counts."""
        with self._lock:
            self._question_counts[source, prompt_index, stream] += 1
            return self._question_counts[source, prompt_index, stream] - 1

    def reward(
        self, source: str, prompt_index: int, stream: int, question_number: int
    ) -> Entry | None:
        """Return the last answer of a source about a sample."""
        return self._rewards.get((self.phase, source, prompt_index, stream, question_number))

    def lacks(self, question: str) -> TapeError:
        """Return the error of a tape that plays, and has no answer."""
        file_path = self.folder / file_name(self.step, self.rank, self.ranks)
        return TapeError(
            f"{file_path} has no answer: {question}, in step {self.step}: the run that wrote it did not come so far, or was "
            "another one. lightppo replay --ask_again asks the environments"
        )


def _has_failed(entries: Sequence[Entry]) -> bool:
    """Tell whether an episode has ended, and its last try failed."""
    last_entry = entries[-1]
    return last_entry["kind"] == END and any(
        "failure" in entry and entry["try"] == last_entry["tries"] - 1 for entry in entries
    )


def _free_name(file_path: Path) -> Path:
    """Return a name beside a file for what is kept of it."""
    numbers = range(1, 1 + len(list(file_path.parent.iterdir())))
    candidates = (file_path.with_name(f"aside{number}_{file_path.name}") for number in numbers)
    return next(candidate for candidate in candidates if not candidate.exists())


def digest_of(ids: Sequence[int]) -> str:
    """Return a short hash of token ids, to see whether a reply belongs to them."""
    return hashlib.sha256(array.array("q", ids)).hexdigest()[:16]


def first_difference(taped_ids: Sequence[int], current_ids: Sequence[int]) -> str:
    """Return which token differs, in words."""
    for position, (taped_id, current_id) in enumerate(zip(taped_ids, current_ids)):
        if taped_id != current_id:
            return f"token {position} was {taped_id}, is {current_id}"
    return f"there were {len(taped_ids)} tokens, there are {len(current_ids)}"


def tape_callback(run: Any) -> TapeCallback | None:
    """Return the callback of a run that may be gone on with or done again."""
    tape = tape_of(run.strategy, run.config)
    if tape is None or (run.only_evaluates and not tape.plays):
        return None
    return TapeCallback(run, tape)


class TapeCallback(Callback):
    """Tell the tape which step it is, and checkpoints where the tape ends."""

    def __init__(self, run: Any, tape: Tape) -> None:
        self.run = run
        self.tape = tape
        run.register_state("tape", self, per_rank=True)

    def on_start(self, run: Any) -> None:
        self.tape.run = run.strategy.broadcast_object(run.checkpointer.run)
        if self.tape.plays:
            self.tape.check(run.state.global_step, checkpointed_ends(run, self.tape))
        self.tape.go_to(run.state.global_step, "eval")

    def around_step(self, run: Any, step: int) -> AbstractContextManager:
        return self.tape.during(step)

    def on_end(self, run: Any, error: BaseException | None) -> None:
        if self.tape.plays and error is None:
            count = run.strategy.all_reduce(self.tape.answered, "sum")
            run.strategy.print(f"the tape in {self.tape.folder} gave {int(count)} answers")
        # All ranks are in this step: no other has gone on with what failed.
        if isinstance(error, RewardError | RolloutError):
            self.tape.give_up()
        self.tape.close()

    # -- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        return self.tape.settle()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; TapeError: files of the tape are not as the checkpoint knows them. Collective."""
        self.tape.go_on(state, "the checkpoint")
        if not self.tape.plays:
            self.tape.check_past(self.run.state.global_step)
        if state is None or self.tape.plays or state["ranks"] == self.tape.ranks:
            return
        step = self.run.state.global_step
        ranks = state["ranks"]
        self.run.strategy.on_rank_0(
            lambda: self.tape.set_aside(step, ranks), f"set files of {self.tape.folder} aside"
        )

    def share_out(self, states: Sequence[Any], world_size: int) -> list[Any]:
        """Return states for another number of ranks: each begins new files behind the end of all."""
        return [self.tape.share_out(states)] * world_size


def checkpointed_ends(run: Any, tape: Tape) -> list[CheckpointedEnd]:
    """Return what each checkpoint of the run whose tape plays knows of the end of this rank's files."""
    checkpoint_folder = Path(part_folder(_checkpoints_of(tape.folder.parent)))
    saved_ends: list[CheckpointedEnd] = []
    if not checkpoint_folder.is_dir():
        return saved_ends
    for tag in list_tags(checkpoint_folder):
        state = read_client_state(checkpoint_folder / tag)
        rank_ends = state.get("tape") or []
        if len(rank_ends) == tape.ranks and rank_ends[tape.rank] is not None:
            saved_ends.append(
                CheckpointedEnd(
                    TapeEnd.of(rank_ends[tape.rank]), state["run"], str(checkpoint_folder / tag)
                )
            )
    return saved_ends


def _checkpoints_of(run_folder: Path) -> Path:
    """Return the ``--ckpt_path`` of a run, which may have been moved together with it."""
    config_file = run_folder / "run_config.resolved.yaml"
    if not config_file.is_file():
        return run_folder
    options = yaml.safe_load(config_file.read_text())
    checkpoint_path = options["ckpt_path"]
    if is_url(checkpoint_path) or is_url(options["save_path"]):
        return run_folder / Path(checkpoint_path).name
    sibling_folder = run_folder / os.path.relpath(checkpoint_path, options["save_path"])
    return sibling_folder if sibling_folder.is_dir() else local_folder(checkpoint_path)
