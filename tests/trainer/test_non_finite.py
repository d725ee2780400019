"""A loss that is not finite: the optimizer step is skipped and counted, and the run goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.tiny import read_jsonl, sums, write_jsonl

from lightppo import PPOTrainer
from lightppo.data.records import Rollout
from lightppo.errors import TrainingError
from lightppo.logging.skipped_batches import load_batch

pytestmark = pytest.mark.usefixtures("world")


def snapshot(trainer: PPOTrainer, name: str) -> list[torch.Tensor]:
    return [
        p.detach().clone()
        for p in trainer.strategy.unwrap_model(getattr(trainer, name)).parameters()
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("zero_stage", "part"), [(0, "advantages"), (2, "returns")])
def test_a_step_with_a_loss_that_is_not_finite_is_skipped(make_config, tmp_path, zero_stage, part):
    config = make_config(
        zero_stage=zero_stage, adv_norm=False, enable_ema=True, lr_warmup_steps=0, save_steps=3
    )
    trainer = PPOTrainer.from_config(config)
    before: list[dict[str, list[torch.Tensor]]] = []  # weights at the start of each step's training
    make = trainer.experience_maker.make_experience_list

    def poisoned(rollouts: Sequence[Rollout]) -> list:
        experiences = make(rollouts)
        before.append({name: snapshot(trainer, name) for name in ("actor", "critic", "ema_model")})
        if len(before) == 2:
            getattr(experiences[0], part)[0, 0] = float("inf")  # one token of one sample
        return experiences

    trainer.experience_maker.make_experience_list = poisoned
    trainer.fit()

    hit, other = ("actor", "critic") if part == "advantages" else ("critic", "actor")
    before.append({name: snapshot(trainer, name) for name in ("actor", "critic", "ema_model")})
    moves = [not same(a["ema_model"], b["ema_model"]) for a, b in pairwise(before)]
    assert moves == [True, hit == "critic", True]  # the average moves with steps that are taken
    assert [same(a[hit], b[hit]) for a, b in pairwise(before)] == [False, True, False]
    assert [same(a[other], b[other]) for a, b in pairwise(before)] == [False, False, False]
    assert all(torch.isfinite(weight).all() for weight in before[-1][hit])

    rows = read_jsonl(Path(config.checkpoint.save_path, "metrics.jsonl"))
    # not the row with what saving took
    rows = [row for row in rows if f"train/{hit}_skipped" in row]
    assert [row[f"train/{hit}_skipped"] for row in rows] == [0, 1, 0]
    assert [row[f"train/{other}_skipped"] for row in rows] == [0, 0, 0]
    assert rows[1][f"train/{hit}_grad_norm"] is None
    assert rows[2][f"train/{hit}_grad_norm"] > 0
    # the schedule waits for the step that was skipped
    rates, others = ([row[f"train/{name}_lr"] for row in rows] for name in (hit, other))
    assert rates[0] > rates[1] == rates[2]
    assert others[0] > others[1] > others[2]

    assert trainer.state.skipped_optimizer_steps == 1
    # a resumed run goes on counting
    assert PPOTrainer.from_config(config).state.skipped_optimizer_steps == 1


def test_fp16_counts_an_overflow_apart_and_goes_on(make_config, monkeypatch, tmp_path):
    """Huge advantages of one step; at ``max_skipped_steps`` 1 any other skipped step would end the run."""
    monkeypatch.setattr(
        "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda _: True
    )
    more = {
        "fp16": True,
        "zero_stage": 2,
        "adv_norm": False,
        "lr_warmup_steps": 0,
        "max_skipped_steps": 1,
    }
    config = make_config(**more, save_steps=2, num_episodes=2)
    trainer = PPOTrainer.from_config(config.with_options(benchmark_steps=2))
    kinds = {
        m: next(getattr(trainer, m).parameters()).dtype
        for m in ("actor", "critic", "initial_model")
    }
    assert kinds == dict.fromkeys(kinds, torch.float16)
    make, before = trainer.experience_maker.make_experience_list, []

    def large(rollouts: Sequence[Rollout]) -> list:
        experiences = make(rollouts)
        before.append(snapshot(trainer, "actor"))
        if len(before) == 2:
            experiences[0].advantages *= 1e9
        return experiences

    trainer.experience_maker.make_experience_list = large
    trainer.fit()
    assert [same(a, b) for a, b in pairwise([*before, snapshot(trainer, "actor")])] == [False, True]
    # goes on with half of the scale
    PPOTrainer.from_config(config.with_options(benchmark_steps=4)).fit()
    rows = read_jsonl(Path(config.checkpoint.save_path, "metrics.jsonl"))
    rows = [row for row in rows if "train/actor_overflow" in row]
    assert [row["train/actor_overflow"] for row in rows] == [0, 1, 0, 0]
    assert [row["train/actor_loss_scale"] for row in rows] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    scale = 2.0**16
    for row in rows:  # the critic's is its own
        scale /= 2 ** row["train/critic_overflow"]
        assert row["train/critic_loss_scale"] == scale
    assert [(row["train/actor_skipped"], row["train/critic_skipped"]) for row in rows] == [
        (0, 0)
    ] * 4
    assert not any(
        x for row in rows for name, x in row.items() if re.match(r"alarm/.*(finite|flow)", name)
    )
    saved = load_file(Path(config.checkpoint.save_path, "model.safetensors"))
    assert {weight.dtype for weight in saved.values()} == {torch.float16}


def test_where_all_steps_overflow_a_dry_run_ends_well_and_a_run_does_not(
    make_config, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(
        "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda _: True
    )
    # too large for any gradient
    monkeypatch.setattr("lightppo.distributed.deepspeed.LOSS_SCALE_POWER", 40)
    options = {
        "fp16": True,
        "zero_stage": 2,
        "total_training_steps": 1,
        "advantage_estimator": "reinforce",
    }
    PPOTrainer.from_config(
        make_config(**options, dry_run=True, save_path=str(tmp_path / "dry"))
    ).fit()
    assert "dry run: one step" in capsys.readouterr().out
    with pytest.raises(
        TrainingError, match=r"taken in 1 steps.*: 1 overflowed at --fp16's loss scale.*--bf16"
    ):
        PPOTrainer.from_config(make_config(**options)).fit()


@pytest.fixture(scope="module")
def on_two_ranks(assets, tmp_path_factory):
    """``on_two_ranks(case)``: what both ranks saw while rank 1 had NaN; and the folder of the runs."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parent / "ranks" / "non_finite.py"
    run_ranks(script, *(assets[name] for name in ("pretrain", "prompt_data", "reward_fn")), folder)
    return folder, lambda case: [
        json.loads((folder / f"{case}.rank{rank}.json").read_text()) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("case", "skipped", "actor", "critic"),
    [
        ("engine", 2, [False, True, True], [False, True, True]),
        # in training: the engine's log probs are the old ones
        ("actor", 1, [False, True, True], [True, True, True]),
        ("values", 2, [False, True, True], [False, True, True]),
        ("score_of_a_stream", 1, [False, True, True], None),
        ("loss", 1, [False, True, True], [True, True, True]),  # of the actor alone
        ("actor_in_training", 1, [False, True, True], None),
    ],
)
def test_nan_on_one_of_two_ranks_is_skipped_on_both(on_two_ranks, case, skipped, actor, critic):
    ranks = on_two_ranks[1](case)
    for seen in ranks:
        assert seen["moved"] == {"actor": actor} | ({} if critic is None else {"critic": critic})
        assert (seen["skipped"], seen["finite"], seen["error"]) == (skipped, True, None)
    assert ranks[0]["sums"] == ranks[1]["sums"]
    assert ranks[0]["kl_coef"] == ranks[1]["kl_coef"]


def test_scores_that_are_not_finite_for_good_end_the_run_and_name_sample_and_source(on_two_ranks):
    folder, of_case = on_two_ranks
    for rank, seen in enumerate(of_case("scores_for_good")):
        assert (seen["moved"], seen["skipped"]) == (
            {"actor": [False, False], "critic": [False, False]},
            4,
        )
        assert (
            "of the actor and critic in 2 steps in a row (--max_skipped_steps). rank 1: reward"
            in seen["error"]
        )
        assert "reward.py:reward_func: the score of sample 0 (prompt row" in seen["error"]
        path = f"{folder}/scores_for_good/nonfinite/step2_rank1.pt"
        assert f"lightppo replay {folder}/scores_for_good --step 2 --batch {path}" in seen["error"]
        batch, texts, _ = load_batch(Path(path.replace("rank1", f"rank{rank}")))
        assert [part.non_finite() for part in batch.micro_batches] == [{"score": 2}] * rank or [{}]
        assert len(texts) == 2


def test_after_so_many_in_a_row_the_run_ends_and_keeps_the_batch_of_both_ranks(on_two_ranks):
    folder, of_case = on_two_ranks
    for rank, seen in enumerate(of_case("for_good")):
        assert seen["moved"]["actor"] == [False, False]
        assert seen["skipped"] == 4  # two optimizer steps in each of two PPO steps
        assert (
            "no finite gradient of the actor in 2 steps in a row (--max_skipped_steps)"
            in seen["error"]
        )
        path = f"{folder}/for_good/nonfinite/step2_rank0.pt"
        assert f"lightppo replay {folder}/for_good --step 2 --batch {path}" in seen["error"]
        batch, texts, facts = load_batch(Path(path.replace("rank0", f"rank{rank}")))
        assert facts == {"step": 2, "rank": rank, "models": "actor"}
        assert all(prompt and response for prompt, response in texts)
        assert len(texts) == sum(len(part) for part in batch.micro_batches) == 2
        assert batch.micro_batches[0].part.normalizer.tokens > 0


NAN_SCORES = """
def reward_func(queries, prompts, labels):
    return [float(query.count("1")) if query.startswith(prompts[1]) else NAN for query in queries]
"""


def test_a_run_whose_scores_are_not_finite_from_the_first_step_on(make_config, tmp_path, caplog):
    """Neither an evaluation nor a dry run takes such scores for anything."""
    (tmp_path / "nan.py").write_text('NAN = float("nan")\n' + NAN_SCORES)
    prompts = write_jsonl(tmp_path / "held_out.jsonl", sums(2))
    options = {
        "reward_fn": str(tmp_path / "nan.py"),
        "eval_data": prompts,
        "eval_steps": 1,
        "num_episodes": 2,
    }
    with pytest.raises(
        TrainingError, match=r"in 3 steps in a row .* the score of sample 0 \(prompt row"
    ) as caught:
        PPOTrainer.from_config(make_config(**options)).fit()
    assert "nan.py:reward_func" in str(caught.value)
    assert (
        "step 1 is left out: rank 0: reward function nan.py:reward_func: the score of sample 0"
        in caplog.text
    )
    assert (
        "the evaluation after step 1 is left out: reward function nan.py:reward_func" in caplog.text
    )
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["train/actor_skipped"]) for row in rows if "train/actor_skipped" in row] == [
        (1, 1), (2, 1), (3, 1)
    ]  # fmt: skip
    assert not any(name.startswith("eval/") for row in rows for name in row)
    with pytest.raises(TrainingError, match="no optimizer step was taken in 1 steps"):
        PPOTrainer.from_config(
            make_config(**options, dry_run=True, save_path=str(tmp_path / "dry"))
        ).fit()
