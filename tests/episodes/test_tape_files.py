"""Files of the tape: what is altered is named, what a crash tore is left out."""

from __future__ import annotations

import json
import re

import pytest

from lightppo.episodes.tape_files import (
    HEADER,
    VERSION,
    TapeEnd,
    TapeError,
    chained,
    check_end,
    check_follows,
    file_name,
    files_of,
    numbers_of_ranks,
    read_tape_file,
)

TOOL = {"kind": "call", "phase": "train", "step": 3, "prompt": 5, "sample": 1, "try": 0, "turn": 2}
TOOL |= {"place": "tool", "tool": "search", "reply": {"text": "é\u2028\n 17", "reward": 0.1}}
TURN = {"kind": "turn", "phase": "train", "step": 3, "prompt": 6, "sample": 0, "try": 1, "turn": 1}
TURN |= {"tokens": [4, 17, 2]}
END = {"kind": "end", "phase": "train", "step": 3, "prompt": 6, "sample": 0, "tries": 2}


@pytest.fixture
def path(tmp_path):
    header = {"kind": HEADER, "version": VERSION, "step": 3, "before": None}
    lines, _ = chained([header, TOOL, TURN, END], "")
    path = tmp_path / file_name(3, 0, 2)
    path.write_bytes(lines)
    return path


def test_what_was_written_is_read(path):
    strip = read_tape_file(path)
    assert strip.entries[1:] == [TOOL, TURN, END]
    assert (strip.size, strip.torn) == (path.stat().st_size, 0)
    assert strip.head == TapeEnd(3, 4, strip.hashes[-1])
    assert all(json.loads(line)["hash"] for line in path.read_text().splitlines())


NAMES_TOOL = (
    "call of phase train, step 3, prompt 5, sample 1, try 0, turn 2, place tool, tool search"
)
NAMES_TURN = "turn of phase train, step 3, prompt 6, sample 0, try 1, turn 1"


@pytest.mark.parametrize(
    ("old", "new", "line", "named"),
    [
        ("17", "18", 2, NAMES_TOOL),  # a reply
        ('"reward":0.1', '"reward":0.2', 2, NAMES_TOOL),
        ("[4,17,2]", "[4,18,2]", 3, NAMES_TURN),
        ('"tries":2', '"tries":3', 4, "end of phase train, step 3, prompt 6, sample 0"),
        ('"tokens":', '"tokens" :', 3, NAMES_TURN),
        ('"tokens":[', '"tokens":', 3, "it is no JSON; the line before: call of phase train"),
    ],
)
def test_a_line_that_was_altered_is_named(path, old, new, line, named):
    lines = path.read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_text("\n".join(lines))
    with pytest.raises(TapeError, match=re.escape(f"{path}:{line} was altered")) as error:
        read_tape_file(path)
    assert named in str(error.value)


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_line_that_is_missing_shows_at_the_next_one(path, line):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: line - 1] + lines[line:]))
    with pytest.raises(TapeError, match=rf":{line} was altered, or a line before it is missing"):
        read_tape_file(path)


def test_lines_in_another_order(path):
    first, second, third, fourth = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + third + second + fourth)
    with pytest.raises(TapeError, match=":2 was altered"):
        read_tape_file(path)


def test_a_line_with_a_hash_of_its_own_making(path):
    """It fits the line before, so the next line shows it."""
    lines = path.read_bytes().splitlines(keepends=True)
    before = read_tape_file(path).hashes[0]
    forged, _ = chained([TOOL | {"reply": "mine"}], before)
    path.write_bytes(lines[0] + forged + b"".join(lines[2:]))
    with pytest.raises(TapeError, match=r":3 was altered, or a line before it is missing: turn"):
        read_tape_file(path)


def test_a_chain_that_was_made_anew_does_not_fit_the_checkpoint(path):
    head = read_tape_file(path).head
    header = json.loads(path.read_text().splitlines()[0])
    header.pop("hash")
    path.write_bytes(chained([header, TOOL, TURN | {"tokens": [1]}, END], "")[0])
    with pytest.raises(TapeError, match="one of its first 4 lines is not as global_step3 knows it"):
        check_end(read_tape_file(path), head, "global_step3")


def test_lines_that_are_missing_at_the_end(path):
    head = read_tape_file(path).head
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(TapeError, match="has 3 lines, and global_step3 knows 4: restore the file"):
        check_end(read_tape_file(path), head, "global_step3")


def test_more_lines_than_the_checkpoint_knows(path):
    check_end(read_tape_file(path), TapeEnd(3, 2, read_tape_file(path).hashes[1]), "global_step3")


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_torn_last_line_is_left_out(path, left):
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:left])
    strip = read_tape_file(path)
    assert strip.entries[1:] == [TOOL, TURN]
    assert (strip.size, strip.torn) == (len(b"".join(whole)), len(last[:left]))


def test_zeros_that_a_crash_of_the_machine_left(path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(100))
    assert (read_tape_file(path).size, read_tape_file(path).torn) == (size, 100)


def test_files_follow_each_other(path):
    strip = read_tape_file(path)
    check_follows(strip, None)
    check_follows(strip, "any")  # it is the first file that knows none before it
    strip.entries[0]["before"] = "ab"
    check_follows(strip, "ab")
    with pytest.raises(TapeError, match=":1 does not follow the end of the file before"):
        check_follows(strip, "cd")


def test_another_version(path):
    path.write_bytes(chained([{"kind": HEADER, "version": VERSION + 1}], "")[0])
    with pytest.raises(TapeError, match=f":1 is not the beginning of a tape of version {VERSION}"):
        read_tape_file(path)


def test_files_by_rank(tmp_path):
    for step, rank, ranks in ((10, 0, 2), (2, 0, 2), (2, 1, 2), (3, 0, 1)):
        (tmp_path / file_name(step, rank, ranks)).touch()
    (tmp_path / "aside1_step4_rank0of2.jsonl").touch()
    assert list(files_of(tmp_path, 0, 2)) == [2, 10]
    assert numbers_of_ranks(tmp_path) == {1, 2}
