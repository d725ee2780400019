"""What a run keeps of its samples: files of whole steps, and some samples with numbers per token."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from support.fakes import FakeStrategy, make_rollout, on_ranks
from support.tiny import read_jsonl

from lightppo.experience.experience import Experience
from lightppo.logging.samples import (
    Samples,
    TokenPieces,
    examined,
    with_overlong,
    write_step,
)


def test_one_line_per_sample_of_all_ranks_in_order(tmp_path):
    def run(strategy):
        # rank 0 has prompt 5, rank 1 has prompt 2
        index = 5 - 3 * strategy.rank
        mine = [
            make_rollout(index=index, sample_index=j, reward=index + j / 2, label="7")
            for j in (0, 1)
        ]
        mine[1].extras, mine[1].finish_reason = {"accuracy": 1.0}, "length"
        write_step(tmp_path / "data", 4, mine, strategy)

    on_ranks(2, run)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["step4.jsonl"]
    rows = read_jsonl(tmp_path / "data" / "step4.jsonl")
    assert [(row["index"], row["sample_index"], row["score"]) for row in rows] == [
        (2, 0, 2.0), (2, 1, 2.5), (5, 0, 5.0), (5, 1, 5.5)
    ]  # fmt: skip
    assert rows[1] == {
        "step": 4, "index": 2, "sample_index": 1, "data_source": "default", "input": "prompt 2", "output": "answer 1",
        "ground_truth": "7", "score": 2.5, "finish_reason": "length", "response_length": 2,
        "extras": {"accuracy": 1.0},
    }  # fmt: skip


def test_a_dump_has_the_overlong_penalty(tmp_path):
    """Of at most 10 tokens the last 4 cost up to 2: 8 tokens cost (8 - 6)/4·2 = 1, 5 tokens nothing, 10 tokens 2."""
    lengths = (8, 5, 10)
    rollouts = [
        make_rollout(response_ids=[7] * n, sample_index=i, reward=3.0)
        for i, n in enumerate(lengths)
    ]
    unscored = make_rollout(response_ids=[7] * 8, sample_index=3, reward=None)
    rollouts[0].extras = {"acc": 1.0}
    dumped = with_overlong([*rollouts, unscored], max_len=10, buffer_len=4, penalty_factor=2.0)
    write_step(tmp_path, 1, dumped, FakeStrategy())
    rows = read_jsonl(tmp_path / "step1.jsonl")
    assert [row["score"] for row in rows] == [2.0, 3.0, 1.0, None]
    assert rows[0]["extras"] == {"acc": 1.0, "overlong": 1.0, "overlong_reward": -1.0}
    assert rows[1]["extras"] == {"overlong": 0.0, "overlong_reward": 0.0}
    assert "score 2 · acc 1 · overlong 1 · overlong_reward -1" in examined(dumped[0])
    assert rollouts[0].reward == 3.0  # what trains is shaped elsewhere
    assert rollouts[0].extras == {"acc": 1.0}


def decode(ids: list[int]) -> str:
    """Bytes; 256 ends a text. The first space of a text is trimmed, as sentencepiece does."""
    parts = bytes(i for i in ids if i < 256).decode(errors="replace") + "<eos>" * (256 in ids)
    return parts.removeprefix(" ")


@pytest.mark.parametrize("text", ["a b", " a  b\n", "naïve 😀!", "😀", "\ufffd x"])
def test_pieces_of_tokens_are_the_text(text):
    pieces = TokenPieces(decode)
    pieces([97])  # has seen an ordinary token
    ids = [*text.encode(), 256]
    assert len(found := pieces(ids)) == len(ids)
    assert "".join(found) == text + "<eos>"
    assert pieces(ids) == found


def test_a_piece_of_no_whole_character_waits_for_the_others():
    assert TokenPieces(decode)([98, *"é".encode(), 99]) == ["b", "", "é", "c"]
    assert TokenPieces(decode)([98, 0xC3]) == ["b", "\ufffd"]


def record(folder, count: int, group_size: int = 2, strategy=None) -> Samples:
    return Samples(folder, count, group_size, strategy or FakeStrategy(), decode, torch.sub)


def read(folder, step: int) -> list[dict]:
    with gzip.open(folder / f"step{step}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def group(index: int, n: int = 2):
    return [
        make_rollout((index + 1,), (97, 98 + j), index=index, sample_index=j, reward=float(j))
        for j in range(n)
    ]


def names(rows: list[dict]) -> list[tuple[int, int]]:
    return [(row["index"], row["sample_index"]) for row in rows]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, {1: [(3, 0)], 2: [(0, 0)]}),  # of the ranks in turn
        (2, {1: [(3, 0), (3, 1)], 2: [(0, 0), (0, 1)]}),
        (3, {1: [(0, 0), (3, 0), (3, 1)], 2: [(0, 0), (0, 1), (3, 0)]}),  # whole groups first
        (99, {1: [(i, j) for i in (0, 1, 2, 3) for j in (0, 1)]}),  # all there are
    ],
)
def test_whole_groups_of_the_ranks_in_turn(tmp_path, count, expected):
    def run(strategy):
        samples = record(tmp_path, count, strategy=strategy)
        for step in expected:
            before = strategy.collectives
            samples.pick(
                step, [*group(0), *group(1), *group(2)] if strategy.rank == 0 else group(3), []
            )
            samples.on_step_end(None, step, {})
            assert strategy.collectives == before + 1

    on_ranks(2, run)
    assert {step: names(read(tmp_path, step)) for step in expected} == expected


def test_none_are_kept_without_a_count(tmp_path):
    samples, strategy = record(tmp_path / "none", 0), FakeStrategy()
    samples.pick(1, group(0), [])
    samples.on_step_end(None, 1, {})
    assert (strategy.collectives, (tmp_path / "none").exists()) == (0, False)


def test_numbers_per_token_come_from_the_rows_and_the_passes(tmp_path):
    rollouts = [*group(0), *group(1)]
    rollouts[0].log_probs, rollouts[0].token_rewards, rollouts[1].texts = (
        [-1.0, -2.0],
        [0.5, 0.25],
        {"why": "wrong"},
    )
    rows = Experience.from_rollouts(rollouts)
    rows.base_action_log_probs = torch.full((4, 2), -3.0)
    rows.advantages = torch.tensor([[1.0, -1 / 3], [2.0, math.nan], [0.0, 0.0], [0.0, 0.0]])
    rows.action_mask[1, 0] = False
    items = rows.split()
    samples = record(tmp_path, 2)
    samples.pick(1, rollouts, [*items, items[3]], repeated=1)
    before = items[0].advantages.clone()
    # three epochs, in an order of their own
    for log_prob, entropy in ((-1.5, 0.75), (-9.0, 9.0), (-1.25, 0.5)):
        part = Experience.collate([items[2], items[1], items[0]])
        samples.on_micro_batch(
            None, part, torch.full((3, 2), log_prob), torch.full((3, 2), entropy)
        )
    samples.on_step_end(None, 1, {})
    first, second = read(tmp_path, 1)
    assert torch.equal(items[0].advantages, before)
    assert first["tokens"] == {
        "text": ["a", "b"], "log_prob": [-1.5, -1.5], "entropy": [0.75, 0.75], "rollout_log_prob": [-1.0, -2.0],
        "reward": [0.5, 0.25], "advantage": [1.0, -0.3333], "kl": [1.5, 1.5], "new_log_prob": [-1.25, -1.25],
    }  # fmt: skip
    assert (second["tokens"]["advantage"], second["tokens"]["trained"]) == ([2.0, None], [0, 1])
    assert (second["extras"], second["score"], second["output"]) == (
        {"why": "wrong"},
        1.0,
        "answer 1",
    )
    samples.pick(2, rollouts, items)
    samples.on_step_end(None, 2, {})  # nothing of the step before is left
    assert "entropy" not in read(tmp_path, 2)[0]["tokens"]


def test_what_a_full_buffer_dropped_or_a_step_left_out_has_its_text(tmp_path):
    rollouts = [*group(0), *group(1)]
    items = Experience.from_rollouts(rollouts)
    items.advantages = torch.arange(8.0).view(4, 2)
    samples = record(tmp_path, 4)
    samples.pick(1, rollouts, items.split()[1:])  # --buffer_limit 3
    samples.on_step_end(None, 1, {})
    found = [row["tokens"].get("advantage") for row in read(tmp_path, 1)]
    assert found == [None, [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    samples.pick(2, rollouts, [])  # not finite
    samples.on_step_end(None, 2, {})
    assert [list(row["tokens"]) for row in read(tmp_path, 2)] == [["text"]] * 4
