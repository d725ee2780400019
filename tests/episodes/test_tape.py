"""The tape of one rank: what answers, what is asked again, what a checkpoint knows."""

from __future__ import annotations

import logging
import math

import pytest

from lightppo.episodes.calls import EpisodeTape, packed, unpacked
from lightppo.episodes.tape import REWARD, CheckpointedEnd, Tape, first_difference
from lightppo.episodes.tape_files import TapeEnd, TapeError, file_name, read_tape_file
from lightppo.errors import StorageError

KEY = (0, 5, 1)  # batch, prompt, sample


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tape"


def tape_at(folder, step=1, **options) -> Tape:
    tape = Tape(folder, 0, 1, **options)
    tape.run = "a"
    tape.go_to(step, "train")
    return tape


def play(tape: Tape, key=KEY, word="hi", ends=True) -> EpisodeTape:
    episode_tape = EpisodeTape(tape, key, key[2])
    episode_tape.begin_try(0)
    episode_tape.write("call", 0, place="reset", reply="go")
    episode_tape.write("turn", 1, tokens=[4], word=word)
    if ends:
        episode_tape.end()
    episode_tape.flush()
    return episode_tape


def test_a_whole_episode_answers_after_a_restart(folder):
    play(tape_at(folder))
    again = EpisodeTape(tape_at(folder), KEY, 1)
    assert again.answers
    assert again.tries == 1
    assert again.read("call", 0, place="reset")["reply"] == "go"
    assert again.read("turn", 1)["word"] == "hi"


def test_one_that_broke_off_is_another_take(folder):
    play(tape_at(folder), ends=False)
    tape = tape_at(folder)
    assert not EpisodeTape(tape, KEY, 1).answers
    play(tape, word="ho")
    again = EpisodeTape(tape_at(folder), KEY, 1)
    assert again.read("call", 0)["take"] == 2
    assert again.read("turn", 1)["word"] == "ho"


def test_a_batch_that_got_no_rewards_is_known_after_a_restart(folder):
    """As where a reward server dies and ends the run."""
    failure = {"kind": "RewardError", "text": "no answer", "goes_on": False}
    of = [[5, 0, 0], [5, 1, 0]]
    tape_at(folder).write({"kind": REWARD, "source": "server", "of": of, "failure": failure})
    again = tape_at(folder)
    assert [again.reward("server", *sample)["failure"] for sample in of] == [failure, failure]
    assert again.reward("server", 5, 2, 0) is None


def fail(tape: Tape, key: tuple[int, int, int], tries: int = 2) -> None:
    episode_tape = EpisodeTape(tape, key, key[2])
    for number in range(tries):
        episode_tape.begin_try(number)
        failure = {"kind": "EnvFailure", "place": "reset", "text": "no world today"}
        episode_tape.write("call", 0, place="reset", failure=failure)
    episode_tape.end()


def score(tape: Tape, sample: int, score: float | None) -> None:
    place = {"source": "server", "prompt": 5, "sample": sample, "number": 0}
    tape.write({"kind": REWARD, **place, "score": score})


def test_failures_answer_after_a_restart_unless_they_ended_the_run(folder):
    better, worse, other = KEY, (0, 5, 2), (0, 6, 1)
    tape = tape_at(folder)
    play(tape, better)
    fail(tape, worse)
    score(tape, 1, 0.5)
    score(tape, 2, None)
    tape = tape_at(folder)  # after a crash
    assert all(EpisodeTape(tape, key, 1).answers for key in (better, worse))
    assert tape.reward("server", 5, 2, 0)["score"] is None
    tape.go_to(1, "eval")
    fail(tape, other)
    tape.go_to(1, "train")
    tape.give_up()
    tape = tape_at(folder)
    assert [EpisodeTape(tape, key, 1).answers for key in (better, worse)] == [True, False]
    assert tape.reward("server", 5, 1, 0)["score"] == 0.5
    assert tape.reward("server", 5, 2, 0) is None
    tape.go_to(1, "eval")
    assert EpisodeTape(tape, other, 1).answers  # the step went on with that
    tape.go_to(1, "train")
    play(tape, worse)
    assert EpisodeTape(tape_at(folder), worse, 2).read("call", 0)["take"] == 2
    assert EpisodeTape(tape_at(folder, plays=True), worse, 2).read("call", 0)["take"] == 2


def test_a_step_that_was_given_up_is_played_with_its_failures(folder):
    tape = tape_at(folder)
    fail(tape, KEY)
    tape.give_up()
    assert "failure" in EpisodeTape(tape_at(folder, plays=True), KEY, 1).read("call", 0)


def test_what_took_long_is_written_at_once_and_the_rest_at_the_end(folder):
    episode_tape = EpisodeTape(tape_at(folder), KEY, 1)
    episode_tape.write("turn", 1, tokens=[4])
    assert not folder.exists()
    episode_tape.write("call", 1, place="step", seconds=0.5)
    path = folder / file_name(1, 0, 1)
    assert [entry["kind"] for entry in read_tape_file(path).entries[1:]] == ["turn", "call"]
    episode_tape.write("call", 1, place="get_reward", seconds=0.001)
    assert len(read_tape_file(path).entries) == 3
    episode_tape.end()
    assert [entry["kind"] for entry in read_tape_file(path).entries[3:]] == ["call", "end"]


def test_nothing_is_read_of_what_this_process_wrote(folder):
    tape = tape_at(folder)
    play(tape)
    assert not EpisodeTape(tape, KEY, 1).answers


def test_evaluations_and_other_batches_are_apart(folder):
    tape = tape_at(folder)
    play(tape)
    tape.go_to(1, "eval")
    play(tape, word="eval")
    tape = tape_at(folder)
    assert not EpisodeTape(tape, (1, 5, 1), 1).answers
    tape.go_to(1, "eval")
    episode_tape = EpisodeTape(tape, KEY, 1)
    episode_tape.read("call", 0)
    assert episode_tape.read("turn", 1)["word"] == "eval"


@pytest.mark.parametrize("asked", [("turn", 1), ("call", 2)])
def test_another_call_than_was_recorded_is_named(folder, asked):
    play(tape_at(folder))
    episode_tape = EpisodeTape(tape_at(folder), KEY, 1)
    episode_tape.begin_try(0)
    with pytest.raises(
        TapeError, match=r"goes another way than the run: it has call of .* prompt 5, sample 1"
    ):
        episode_tape.read(*asked)


def test_a_tape_that_plays_answers_to_its_end_and_no_further(folder):
    play(tape_at(folder), ends=False)
    episode_tape = EpisodeTape(tape_at(folder, plays=True), KEY, 1)
    assert episode_tape.answers
    assert episode_tape.tries is None
    episode_tape.read("call", 0)
    episode_tape.read("turn", 1)
    with pytest.raises(
        TapeError,
        match="has no answer: call of prompt 5, sample 1, try 0, turn 1, place step, in step 1",
    ):
        episode_tape.read("call", 1, place="step")


def test_a_tape_that_plays_has_no_answer_for_another_prompt(folder):
    play(tape_at(folder))
    episode_tape = EpisodeTape(tape_at(folder, plays=True), (0, 6, 0), 0)
    with pytest.raises(TapeError, match=r"step1_rank0of1\.jsonl has no answer: call of prompt 6"):
        episode_tape.read("call", 0)


def test_a_tape_that_plays_writes_nothing(folder):
    play(tape_at(folder))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    tape = tape_at(folder, plays=True)
    tape.write({"kind": "call"})
    tape.go_to(2, "train")
    tape.write({"kind": "call"})
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_nothing_is_written_before_the_run_begins(folder):
    Tape(folder, 0, 1).write({"kind": "call"})
    assert not folder.exists()


def test_a_torn_line_is_told_and_cut(folder, caplog):
    play(tape_at(folder))
    path = folder / file_name(1, 0, 1)
    path.write_bytes(path.read_bytes()[:-9])  # the end of the episode
    with caplog.at_level(logging.WARNING):
        tape = tape_at(folder)
    assert "ends in the middle of a line, as after a crash" in caplog.text
    assert not EpisodeTape(tape, KEY, 1).answers
    play(tape, word="ho")
    assert [entry.get("take") for entry in read_tape_file(path).entries] == [None, 1, 1, 2, 2, 2]


def ended(folder, last: int, rank: int = 0, ranks: int = 1, before: str | None = None) -> dict:
    """What a checkpoint keeps of a rank that was told something in each step to this one."""
    tape = Tape(folder, rank, ranks)
    tape._before = before
    for step in range(1, last + 1):
        tape.go_to(step, "train")
        play(tape)
    return tape.settle()


def gone_on(folder, end: dict, step: int, rank: int = 0, ranks: int = 1) -> Tape:
    tape = Tape(folder, rank, ranks)
    tape.go_on(end, "the checkpoint")
    tape.check_past(step)
    return tape


def test_a_line_of_a_step_that_is_done_is_read_on_resume(folder):
    end = ended(folder, 4)
    gone_on(folder, end, 4)
    path = folder / file_name(2, 0, 1)
    path.write_bytes(path.read_bytes().replace(b'"hi"', b'"ho"'))
    with pytest.raises(TapeError, match=r"step2_rank0of1.jsonl:3 was altered.*turn of .*step 2"):
        gone_on(folder, end, 4)


def test_lines_that_are_missing_at_the_end_of_a_step_that_is_done(folder):
    end = ended(folder, 3)
    path = folder / file_name(1, 0, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(TapeError, match=r"step2_rank0of1.jsonl:1 does not follow the end"):
        gone_on(folder, end, 3)


@pytest.mark.parametrize(
    ("gone", "where"),
    [
        ((2, 3), "of rank 0 of 1 are missing behind step 1 and before step 4"),
        ((1,), "of rank 0 of 1 are missing before step 2"),
    ],
)
def test_files_that_are_missing_are_named(folder, caplog, gone, where):
    end = ended(folder, 4)
    for step in gone:
        (folder / file_name(step, 0, 1)).unlink()
    gone_on(folder, end, 4)
    assert [record.getMessage() for record in caplog.records if where in record.getMessage()]


def test_with_another_number_of_ranks_nothing_is_missing(folder, caplog):
    ends = [ended(folder, 2, rank, 2) for rank in (0, 1)]
    tape = Tape(folder, 0, 1)
    tape.go_on(tape.share_out(ends), "the checkpoint")
    tape.check_past(2)
    for step in (3, 4):
        tape.go_to(step, "train")
        play(tape)
    gone_on(folder, tape.settle(), 4)
    assert caplog.records == []
    path = folder / file_name(1, 1, 2)
    path.write_bytes(path.read_bytes().replace(b'"hi"', b'"ho"'))
    with pytest.raises(TapeError, match=r"step1_rank1of2.jsonl:3 was altered"):
        gone_on(folder, tape.settle(), 4)


def test_a_full_disk_is_one_error_and_nothing_follows_a_torn_line(folder):
    tape = tape_at(folder)
    play(tape)
    tape._file.close()
    tape._file = open("/dev/full", "ab")  # noqa: SIM115
    with pytest.raises(
        StorageError, match=r"tape cannot be written \(No space.*--tape off"
    ) as full:
        play(tape, (0, 5, 2))
    assert "ckpt" not in str(full.value)
    tape.give_up()
    tape.close()  # no second error
    assert len(read_tape_file(folder / file_name(1, 0, 1)).entries) == 4


def test_what_json_cannot_hold_is_named(folder):
    with pytest.raises(TapeError, match=r"cannot hold call of .*step 1.*set\s+--tape off"):
        tape_at(folder).write({"kind": "call", "reply": object()})


class TestCheckpoint:
    def test_a_resume_goes_on_where_the_files_end(self, folder):
        tape = tape_at(folder)
        play(tape)
        end = tape.settle()
        assert (end["step"], end["records"]) == (1, 4)
        tape.go_to(1, "eval")
        play(tape)  # behind the checkpoint
        resumed = Tape(folder, 0, 1)
        resumed.go_on(end, "global_step1")
        resumed.go_to(1, "eval")
        assert EpisodeTape(resumed, KEY, 1).answers
        resumed.go_to(2, "train")
        play(resumed)
        last = read_tape_file(folder / file_name(1, 0, 1)).hashes[-1]
        assert read_tape_file(folder / file_name(2, 0, 1)).before == last

    def test_a_file_that_was_altered_since(self, folder):
        tape = tape_at(folder)
        play(tape)
        end = tape.settle()
        path = folder / file_name(1, 0, 1)
        path.write_bytes(path.read_bytes().replace(b'"hi"', b'"ho"'))
        with pytest.raises(TapeError, match=":3 was altered"):
            Tape(folder, 0, 1).go_on(end, "global_step1")

    def test_files_that_are_gone_are_told(self, folder, caplog):
        tape = tape_at(folder)
        play(tape)
        end = tape.settle()
        (folder / file_name(1, 0, 1)).unlink()
        resumed = Tape(folder, 0, 1)
        resumed.go_on(end, "global_step1")
        assert "step1_rank0of1.jsonl, which global_step1 knows, is missing" in caplog.text
        resumed.go_to(2, "train")
        play(resumed)
        assert read_tape_file(folder / file_name(2, 0, 1)).before == end["hash"]

    def test_a_later_step_that_followed_other_replies_is_set_aside(self, folder, caplog):
        tape = tape_at(folder)
        play(tape)
        end = tape.settle()
        for step in (2, 3):
            tape.go_to(step, "train")
            play(tape)
        resumed = Tape(folder, 0, 1)
        resumed.go_on(end, "global_step1")
        resumed.go_to(2, "train")
        assert EpisodeTape(resumed, KEY, 1).answers
        play(resumed, key=(0, 6, 0))  # not as before
        resumed.go_to(3, "train")
        assert not EpisodeTape(resumed, KEY, 1).answers
        assert "is kept as aside1_step3_rank0of1.jsonl, and step 3 is played again" in caplog.text
        play(resumed)
        Tape(folder, 0, 1).check(0)

    def test_steps_that_are_missing_show_between_files(self, folder):
        tape = tape_at(folder)
        for step in (1, 2, 3):
            tape.go_to(step, "train")
            play(tape)
        Tape(folder, 0, 1).check(0)
        (folder / file_name(2, 0, 1)).unlink()
        with pytest.raises(TapeError, match=r"step3_rank0of1.jsonl:1 does not follow"):
            Tape(folder, 0, 1).check(0)

    def test_a_file_that_was_made_anew_is_found_by_a_checkpoint_of_its_run(self, folder):
        tape = tape_at(folder)
        play(tape)

        head = TapeEnd.of(tape.settle())
        path = folder / file_name(1, 0, 1)
        path.unlink()
        play(tape_at(folder), word="ho")
        Tape(folder, 0, 1).check(0, [CheckpointedEnd(head, "another run", "global_step1")])
        with pytest.raises(TapeError, match="is not as global_step1 knows it"):
            Tape(folder, 0, 1).check(0, [CheckpointedEnd(head, "a", "global_step1")])

    def test_another_number_of_ranks_begins_behind_the_ends_of_all(self, folder):
        tapes = [Tape(folder, rank, 2) for rank in (0, 1)]
        ends = []
        for tape in tapes:
            for step in (1, 2):
                tape.go_to(step, "train")
                play(tape)
                if step == 1:
                    ends.append(tape.settle())
        alone = Tape(folder, 0, 1)
        alone.go_on(alone.share_out(ends), "global_step1")
        alone.set_aside(1, 2)
        again = Tape(folder, 0, 1)
        again.go_on(alone.settle(), "saved before anything was asked")
        assert again.settle() == alone.settle()
        alone.go_to(2, "train")
        play(alone)
        own = read_tape_file(folder / file_name(2, 0, 1))
        assert own.before == alone.share_out(ends)["hash"]
        assert sorted(path.name for path in folder.iterdir() if "step2" in path.name) == [
            "aside1_step2_rank0of2.jsonl",
            "aside1_step2_rank1of2.jsonl",
            "step2_rank0of1.jsonl",
        ]


@pytest.mark.parametrize("numbers", [[], [-0.5, -3.25], [0.1, 1e300], [-math.inf]])
def test_numbers_are_kept_exactly(numbers):
    assert unpacked(packed(numbers)) == numbers


def test_few_bytes_where_that_is_exact():
    assert list(packed([0.5])) == ["float32"]
    assert list(packed([0.1])) == ["float64"]


def test_the_token_that_differs():
    assert first_difference([1, 2, 3], [1, 5, 3]) == "token 1 was 2, is 5"
    assert first_difference([1, 2, 3], [1, 2]) == "there were 3 tokens, there are 2"
