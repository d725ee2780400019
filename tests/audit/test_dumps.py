"""Dumps: those that trainers' own functions made raise no alarm, each one's layout; files that cannot be read."""

from __future__ import annotations

import gzip
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.dumps import RIGHT, RIGHT_DUMPS
from support.tiny import write_jsonl

JUDGED = {  # what each form's columns allow
    "verl": "token rewards, importance weights, policy loss, dual clip ratio",
    "slime": "lengths of rows, scores in their groups",
    "openrlhf": "finite numbers, mask",
    "prime": "log ratio, ratio, mismatch kl, probability change, clipped tokens, clipped tokens (A > 0)",
    "trl": "finite numbers",
}


@pytest.mark.parametrize("name", RIGHT_DUMPS)
def test_no_alarm_for_what_the_trainers_functions_made(name, audit):
    code, out = audit(RIGHT / name, RIGHT_DUMPS[name])
    assert code == 0
    (agreeing,) = [line for line in out.splitlines() if line.startswith("all agrees: ")]
    expected = JUDGED[name.partition("_")[0]].split(", ")
    expected += [] if name.startswith("prime") else ["advantages"]
    expected += ["returns", "value loss"] if name == "verl_gae.pt" else []
    assert set(expected) <= set(agreeing.removeprefix("all agrees: ").split(", "))


@pytest.mark.parametrize(
    ("name", "flags", "quantity", "hint"),
    [
        ("verl_gae.pt", "--no_adv_std_unbiased", "advantages", "--adv_std_unbiased"),
        ("verl_grpo.pt", "--no_group_std_norm", "advantages", "--group_std_norm"),
        ("verl_rloo.pt", "--use_kl_loss", "token rewards", "--no_use_kl_loss"),
        ("slime_ppo.pt", "--no_adv_norm", "advantages", "--adv_norm"),
        ("slime_grpo.pt", "--grpo_std_eps 0.1", "scores in their groups", "--grpo_std_eps 1e-06"),
        ("openrlhf_gae.pt", "--kl_estimator k2", "advantages", "--kl_estimator k1"),
        ("trl_batch.parquet", "--grpo_std_scope group", "advantages", "--grpo_std_scope batch"),
        ("verl_gae.pt", "--loss_agg_mode seq-mean-token-mean", "policy loss", "--loss_agg_mode token-mean"),
    ],
)  # fmt: skip
def test_another_formula_departs_and_the_right_one_is_proposed(
    name, flags, quantity, hint, departures
):
    found = departures(RIGHT / name, f"{RIGHT_DUMPS[name]} {flags}")
    assert hint in found[quantity]["hints"]


@pytest.mark.parametrize("name", ["verl_grpo.pt", "trl_group.parquet"])
def test_a_size_of_groups_that_would_do_nothing_is_refused(name, audit):
    code, out = audit(RIGHT / name, f"{RIGHT_DUMPS[name]} --n_samples_per_prompt 3")
    assert code == 2
    assert "--n_samples_per_prompt 3: " in out
    assert out.endswith(f"{name} says which samples share a prompt: leave it out\n")
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "is_read"), [("openrlhf_gae.pt", False), ("openrlhf_group_norm.pt", True)]
)
def test_the_formula_has_the_size_of_groups_where_the_estimator_reads_it(name, is_read, audit):
    _, out = audit(RIGHT / name, RIGHT_DUMPS[name])
    assert ("--n_samples_per_prompt 4" in " ".join(out.split())) == is_read


def test_prime_rl_needs_scores(audit):
    _, out = audit(RIGHT / "prime_rl.jsonl")
    assert "not judged: advantages: needs scores\n" in out


def test_samples_of_openrlhf_stand_in_their_order(departures):
    """Micro batches are balanced: row 1 of the file is sample 2. Without the index, groups would be others."""
    batches = torch.load(RIGHT / "openrlhf_group_norm.pt", weights_only=True)
    assert batches[0]["index"] == [0, 2, 4]


def test_verl_rows_of_text(tmp_path, audit):
    rows = [{"input": f"p{n // 2}", "output": "x", "gts": "", "score": n % 2, "step": 1} for n in range(4)]  # fmt: skip
    code, out = audit(write_jsonl(tmp_path / "1.jsonl", rows))
    assert code == 0
    assert "verl, 4 samples, 2 prompts of 2 samples, 0 of them with equal scores" in out
    assert "advantages" in next(line for line in out.splitlines() if "not in the dump" in line)


def test_slime_does_not_name_prompts(audit):
    code, out = audit(RIGHT / "slime_grpo.pt")
    assert code == 0
    assert "not judged: advantages: needs the prompt of each sample: --n_samples_per_prompt" in out


def test_a_zipped_file(tmp_path, audit):
    packed = tmp_path / "rank_0.jsonl.gz"
    packed.write_bytes(gzip.compress((RIGHT / "prime_rl.jsonl").read_bytes()))
    assert audit(packed)[0] == 0


def test_trl_leaves_out_what_no_function_scored(tmp_path, audit):
    """Its reward is NaN, the group's mean and deviation are of the others, its advantage is 0."""
    advantages = [0.7070068, -0.7070068, 0.0]  # ±0.5 / (0.70711 + 1e-4)
    columns = {
        "prompt": ["a"] * 3, "completion": ["x"] * 3, "first": [1.0, None, None], "second": [None, 0.0, None],
        "is_long": [True, False, True], "advantage": advantages,
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "c.parquet")
    assert audit(tmp_path / "c.parquet")[0] == 0
    message = one_line(audit(tmp_path / "c.parquet", "--reward_columns third"))
    assert "c.parquet: --reward_columns third: the columns of numbers are first, second" in message
    assert "--reward_columns 'first=x'" in one_line(
        audit(tmp_path / "c.parquet", "--reward_columns first=x")
    )


def test_a_loss_of_prime_rl_without_a_trust_region(tmp_path, audit):
    rows = [json.loads(line) for line in (RIGHT / "prime_rl.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("is_masked", "is_masked_high", "is_masked_low"):
            row[name] = [None] * len(row[name])
    code, out = audit(write_jsonl(tmp_path / "rank_0.jsonl", rows))
    assert code == 0
    assert "probability change, importance weights, clipped tokens" not in out
    assert "clipped tokens, clipped tokens (A > 0)" in out.partition("not in the dump")[2].replace(
        "\n    ", " "
    )


def test_a_batch_that_lightppo_kept(tmp_path, audit):
    """``nonfinite/stepN_rankR.pt`` (logging/skipped_batches.py): a rank's part of a step."""
    verl = torch.load(RIGHT / "verl_gae.pt", weights_only=True)
    tensors = {"action_mask": verl["response_mask"].bool(), "values": verl["values"], "advantages": verl["advantages"],
               "returns": verl["returns"], "action_log_probs": verl["old_log_probs"],
               "base_action_log_probs": verl["ref_log_prob"], "kl": None}  # fmt: skip
    scores = verl["token_level_scores"].sum(1)
    parts = [
        {"tensors": {name: each if each is None else each[rows] for name, each in tensors.items()},
         "info": {"reward": scores[rows]}, "part": None}
        for rows in (slice(0, 3), slice(3, 8))
    ]  # fmt: skip
    torch.save(
        {"micro_batches": parts, "texts": [], "facts": {"step": 1}}, tmp_path / "step1_rank0.pt"
    )
    code, out = audit(tmp_path / "step1_rank0.pt", "--lambd 0.95 --init_kl_coef 0.1")
    assert code == 0
    assert "all agrees: finite numbers, mask, lengths of rows, returns\n" in out
    assert "not judged: advantages: needs all samples of the step" in out


# -- files that cannot be judged -------------------------------------------------------------------------------------


def one_line(result: tuple[int, str]) -> str:
    code, out = result
    assert code == 2
    assert out.count("\n") == 1
    return out


def test_a_missing_file_a_folder_an_empty_file(tmp_path, audit):
    assert "there is no such file: name the file" in one_line(audit(tmp_path / "x.pt"))
    assert "is a folder: name one file of it, such as openrlhf_gae.pt" in one_line(audit(RIGHT))
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    assert "run is a folder: no file is in it" in one_line(audit(tmp_path / "run"))
    for name in ("run/.lock", "run/metrics.jsonl", "run/rollouts/step1.jsonl.gz"):
        (tmp_path / name).touch()
    of_run = one_line(audit(tmp_path / "run"))
    assert of_run.endswith("name one file of it, such as rollouts/step1.jsonl.gz\n")
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl is empty: the trainer wrote nothing" in one_line(
        audit(tmp_path / "empty.jsonl")
    )


@pytest.mark.parametrize("name", ["slime_grpo.pt", "trl_group.parquet", "prime_rl.jsonl"])
def test_a_torn_file(name, tmp_path, audit):
    content = (RIGHT / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    message = one_line(audit(tmp_path / name))
    assert f"{name}" in message
    assert "cannot be read" in message
    if name.endswith("jsonl"):
        assert "line 6: " in message


def test_an_unknown_file_names_what_it_has(tmp_path, audit):
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "a", "answer": "b"}])
    message = one_line(audit(path))
    assert "is no dump that is known (it has question, answer): name its form by --form" in message
    assert "slime, verl, prime-rl, trl, openrlhf, lightppo" in message
    torch.save(torch.ones(3), tmp_path / "x.pt")
    assert "it holds Tensor" in one_line(audit(tmp_path / "x.pt"))


def test_another_form_than_the_file_has(audit):
    message = one_line(audit(RIGHT / "verl_gae.pt", "--form slime"))
    assert "is no dump of slime (KeyError: 'samples')" in message


def test_a_dump_of_no_samples(tmp_path, audit):
    """All of nothing would agree."""
    torch.save({"response_mask": torch.ones(0, 3)}, tmp_path / "x.pt")
    assert "x.pt has no samples: dump a step with samples" in one_line(audit(tmp_path / "x.pt"))
    torch.save({}, tmp_path / "x.pt")
    assert "(it holds dict)" in one_line(audit(tmp_path / "x.pt"))
    message = one_line(audit(write_jsonl(tmp_path / "x.jsonl", [{"a": 1}]), "--form prime-rl"))
    assert "KeyError: 'inference_logprobs'" in message


def test_a_file_that_would_run_code(tmp_path, audit):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"response_mask": Evil()}, tmp_path / "batch.pt")
    assert "could run code" in one_line(audit(tmp_path / "batch.pt"))
    (tmp_path / "proto.pkl").write_bytes(pickle.dumps(Evil()))
    with warnings.catch_warnings(action="error"):
        one_line(audit(tmp_path / "proto.pkl"))
    assert not (tmp_path / "touched").exists()


def test_a_row_that_is_no_object(tmp_path, audit):
    (tmp_path / "x.jsonl").write_text("[1, 2]\n")
    assert "must hold a JSON object in each line" in one_line(audit(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: {"advantages": batch["advantages"][:5]}, "the column advantages has the shape (5, 7), and (8, 7)"),
        (lambda batch: {"returns": batch["returns"][:, :5]}, "the column returns has the shape (8, 5), and (8, 7)"),
        (lambda batch: {"advantages": batch["advantages"][:, 0]}, "the column advantages has the shape (8,), and (8, 7)"),
        (lambda batch: {"reward_baselines": torch.ones(8, 7)}, "the column reward_baselines has the shape (8, 7), and (8,)"),
        (lambda batch: {"uid": ["a"]}, "there are 8 samples, but (1,) numbers of groups"),
        (lambda batch: {"micro_batches": torch.arange(3)}, "there are 8 samples, but (3,) numbers of groups"),
    ],
)  # fmt: skip
def test_columns_of_another_batch(change, message, tmp_path, audit):
    batch = torch.load(RIGHT / "verl_grpo.pt", weights_only=True)
    torch.save(batch | change(batch), tmp_path / "x.pt")
    assert f"x.pt: {message}" in one_line(audit(tmp_path / "x.pt"))


def recorded(**changes: Any) -> list[dict[str, Any]]:
    """Return two lines of lightppo's recorded samples; the second with changes."""
    tokens = {"text": ["x"], "log_prob": [-0.5], "advantage": [1.0]}
    row = {
        "step": 1,
        "index": 0,
        "input": "a",
        "output": "b",
        "score": 1.0,
        "response_length": 1,
        "tokens": tokens,
    }
    second = row | {"sample_index": 1} | changes
    return [row | {"sample_index": 0}, {name: each for name, each in second.items() if each != "gone"}]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "0.5"}, "score of sample 1 has the text '0.5', where a number should be"),
        ({"score": 10**400}, "int too large to convert to float"),
        ({"score": "gone"}, "line 2 has no score"),
        ({"tokens": "gone"}, "line 2 has no tokens, which other lines have"),
    ],
)
def test_a_line_unlike_the_others(changes, message, tmp_path, audit):
    lines = recorded(**changes)
    assert message in one_line(audit(write_jsonl(tmp_path / "x.jsonl", lines)))
    if changes == {"tokens": "gone"}:
        assert "line 1 has no tokens" in one_line(audit(write_jsonl(tmp_path / "y.jsonl", lines[::-1])))  # fmt: skip


def test_a_column_that_some_rows_lack_is_named(tmp_path, audit):
    rows = recorded(tokens={"text": ["x"], "log_prob": [-0.5]})
    code, out = audit(write_jsonl(tmp_path / "x.jsonl", rows))
    assert code == 0
    assert "not judged: advantages: line 2 has no advantage, which other rows have\n" in out
    batches = torch.load(RIGHT / "openrlhf_gae.pt", weights_only=True)
    batches[1]["advantages"] = None
    torch.save(batches, tmp_path / "x.pt")
    _, out = audit(tmp_path / "x.pt", RIGHT_DUMPS["openrlhf_gae.pt"])
    assert "not judged: advantages: [1] has no advantages, which other rows have\n" in out
    rows = [json.loads(line) for line in (RIGHT / "prime_rl.jsonl").read_text().splitlines()]
    del rows[2]["importance_ratio"]
    _, out = audit(write_jsonl(tmp_path / "rank_0.jsonl", rows))
    assert "not judged: ratio: line 3 has no importance_ratio, which other rows have\n" in out


def test_columns_that_hold_no_numbers(tmp_path, audit):
    columns = {"prompt": ["a"] * 2, "completion": ["x"] * 2, "advantage": ["0.7", "-0.7"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "no column between completion and advantage has numbers" in one_line(
        audit(tmp_path / "a.parquet")
    )
    columns = {"prompt": ["a"] * 2, "completion": ["x"] * 2, "r": [1.0, 0.0], "advantage": ["0.7", "-0.7"]}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    assert "advantage of sample 0 has the text '0.7'" in one_line(audit(tmp_path / "b.parquet"))
    torch.save({"action_mask": torch.ones(2, 3, dtype=torch.complex64)}, tmp_path / "c.pt")
    assert "is complex, where real numbers should be" in one_line(audit(tmp_path / "c.pt"))


def test_a_row_with_too_few_numbers(tmp_path, departures):
    rows = [json.loads(line) for line in (RIGHT / "prime_rl.jsonl").read_text().splitlines()]
    rows[1]["advantages"] = rows[1]["advantages"][:2]
    found = departures(write_jsonl(tmp_path / "y.jsonl", rows))
    first = found["lengths of rows"]["first"]
    assert first == {
        "column": "advantages (numbers)",
        "row": "line 2",
        "position": None,
        "found": 2,
        "expected": 3,
    }
