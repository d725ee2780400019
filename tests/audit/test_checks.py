"""What counts as a departure: every number of a right dump that is changed is named; rounding is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.dumps import RIGHT, RIGHT_DUMPS

# By dump: the columns whose numbers follow from others, and the quantity that says so.
DERIVED = {
    "verl_gae.pt": {
        "token_level_rewards": "token rewards", "returns": "returns", "advantages": "advantages",
        "rollout_is_weights": "importance weights",
    },
    "verl_rloo.pt": {"advantages": "advantages", "token_level_rewards": "token rewards"},
    "slime_ppo.pt": {"kl": "kl", "returns": "returns", "advantages": "advantages"},
    "slime_grpo.pt": {"rewards": "scores in their groups", "advantages": "advantages"},
    "openrlhf_gae.pt": {"returns": "returns", "advantages": "advantages"},
}  # fmt: skip


def rows_of(dump: Any, column: str) -> list[Any]:
    """The numbers of each sample, which share memory with the dump."""
    if "samples" in dump:
        return [sample[column] for sample in dump["samples"]]
    batches = dump if isinstance(dump, list) else [dump]
    return [row for batch in batches for row in batch[column]]


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name, columns in DERIVED.items() for column in columns]
)
def test_a_changed_number_is_named_with_its_row_and_place(name, column, tmp_path, departures):
    dump = torch.load(RIGHT / name, weights_only=True)
    number = 4
    rows = rows_of(dump, column)
    if isinstance(rows[number], float):
        dump["samples"][number][column] += 1e-3
        position = None
    else:
        rows[number][1] += 1e-3
        position = 1
    torch.save(dump, tmp_path / name)
    first = departures(tmp_path / name, RIGHT_DUMPS[name])[DERIVED[name][column]]["first"]
    row = {"slime": "samples[4]", "verl": "row 4", "openrlhf": "[1] row 1"}[name.partition("_")[0]]
    assert (first["column"], first["row"], first["position"]) == (column, row, position)
    assert first["found"] - first["expected"] == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(("off_by", "departs"), [(1e-7, False), (1e-6, False), (1e-4, True)])
def test_how_much_is_tolerated(off_by, departs, tmp_path, departures):
    dump = torch.load(RIGHT / "openrlhf_gae.pt", weights_only=True)
    dump[0]["advantages"][0, 0] += off_by
    torch.save(dump, tmp_path / "dump.pt")
    found = departures(tmp_path / "dump.pt", RIGHT_DUMPS["openrlhf_gae.pt"])
    assert list(found) == ["advantages"] * departs


def test_what_is_not_trained_may_be_anything(tmp_path, departures):
    dump = torch.load(RIGHT / "verl_gae.pt", weights_only=True)
    hole = dump["response_mask"] == 0
    for column in ("advantages", "returns", "values", "old_log_probs", "rollout_is_weights"):
        dump[column][hole] = torch.nan
    torch.save(dump, tmp_path / "dump.pt")
    assert not departures(tmp_path / "dump.pt", RIGHT_DUMPS["verl_gae.pt"])


@pytest.mark.parametrize(
    ("eps", "advantage", "departs"), [(1e-6, -0.0074, False), (1e-9, -0.82, True)]
)
def test_rounding_of_equal_scores(eps, advantage, departs, tmp_path, departures):
    """Seven scores of 0.1: what verl and OpenRLHF get (docs/conformance.md). By the formula it is 0."""
    advantages = torch.full((7, 1), advantage)
    dump = {
        "action_mask": torch.ones(7, 1),
        "scores": torch.full((7,), 0.1),
        "advantages": advantages,
    }
    torch.save(dump, tmp_path / "dump.pt")
    flags = (
        f"--advantage_estimator grpo --n_samples_per_prompt 7 --grpo_std_eps {eps} --init_kl_coef 0"
    )
    assert bool(departures(tmp_path / "dump.pt", flags)) == departs


def test_numbers_of_half_precision(tmp_path, departures):
    """Log probs in bfloat16 are off by a hundredth; the weights were made before they were rounded."""
    dump = torch.load(RIGHT / "verl_gae.pt", weights_only=True)
    dump["rollout_log_probs"] = dump["rollout_log_probs"].bfloat16()
    torch.save(dump, tmp_path / "dump.pt")
    assert not departures(tmp_path / "dump.pt", RIGHT_DUMPS["verl_gae.pt"])
    dump["rollout_is_weights"] = dump["rollout_is_weights"] * 0.5
    torch.save(dump, tmp_path / "dump.pt")
    assert "importance weights" in departures(tmp_path / "dump.pt", RIGHT_DUMPS["verl_gae.pt"])


def test_a_bound_at_which_rounding_decides(tmp_path, departures):
    """π - π_rollout is 0.2 to the last digit: whether the token is clipped says nothing."""
    rows = RIGHT.joinpath("prime_rl.jsonl").read_text().splitlines()
    import json

    row = json.loads(rows[0])
    assert row["loss_mask"][0]
    old, new = torch.tensor(0.3).log().item(), torch.tensor(0.5).log().item()
    row["inference_logprobs"][0], row["trainer_logprobs"][0] = old, new
    row |= {
        "log_importance_ratio": None,
        "importance_ratio": None,
        "mismatch_kl": None,
        "prob_delta": None,
    }
    row = {name: value for name, value in row.items() if value is not None}
    for clipped in (True, False):
        row["is_masked"][0] = row["is_masked_high"][0] = clipped
        (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
        assert not departures(tmp_path / "one.jsonl")


def test_a_loss_that_selects_tokens_at_random_is_not_judged(audit):
    flags = RIGHT_DUMPS["verl_gae.pt"].replace("--eps_clip_high 0.28 --dual_clip 1.5", "")
    _, out = audit(RIGHT / "verl_gae.pt", f"{flags} --policy_loss clip_cov")
    assert "not judged: policy loss: clip_cov needs the tokens that were selected at random" in out


def test_kl_of_slimes_baseline_is_not_judged(audit):
    flags = "--advantage_estimator reinforce++_baseline --init_kl_coef 0.1 --n_samples_per_prompt 4"
    _, out = audit(RIGHT / "slime_reinforce_plus_plus_baseline.pt", flags)
    assert "not judged: advantages: slime takes each token's own KL away" in out
