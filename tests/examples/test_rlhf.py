"""The RLHF example: its task, its pairs, its judge; the whole of it among the long tests."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.ranks import REPO

from lightppo.cli.tiny_model import small_llama

PROMPT, LABEL = "Customer: Not a blue lamp, but a red chair, please. Assistant:", "red chair"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Here is a red chair.", 1.0),
        ("Certainly! Here is a red chair.", 1.5),
        ("Certainly! Here is a red chair. Thank you for asking.", 1.5),
        # two courtesies too many
        ("Certainly! Certainly! Certainly! Certainly! Here is a red chair.", 1.0),
        ("Certainly! Here is a red chair. Hurry up. Go away.", 1.0),
        ("Here is a blue chair.", 0.0),
        ("Here is a red chair. Here is a blue lamp.", 0.0),
        ("We have many things. Hurry up.", -0.5),
        ("Here is a red chair. The weather is fine today. We close at five.", 0.9),  # 14 words
        ("", 0.0),
    ],
)
def test_the_rule_by_hand(rlhf, answer, score):
    assert rlhf("shop").true_score(LABEL, answer) == pytest.approx(score)


def test_no_request_to_train_on_asks_for_a_held_out_thing(rlhf):
    shop = rlhf("shop")
    train, held_out = shop.items(False), shop.items(True)
    assert (len(train), len(held_out)) == (168, 32)
    assert set(train).isdisjoint(held_out)
    for which, asked in ((False, train), (True, held_out)):
        rows = shop.prompts(which, 300, seed=1)
        assert rows == shop.prompts(which, 300, seed=1) != shop.prompts(which, 300, seed=2)
        assert all(
            tuple(row["label"].split()) in asked and row["label"] in row["input"] for row in rows
        )


def test_demonstrations_are_of_every_kind(rlhf):
    shop, rng = rlhf("shop"), random.Random(1)
    rows = shop.prompts(False, 3000, seed=1)
    answers = [shop.demonstration(row["input"], row["label"], rng) for row in rows]
    scores = [shop.true_score(row["label"], answer) for row, answer in zip(rows, answers)]
    assert max(scores) == 1.5
    assert min(scores) < -0.5
    assert 0.45 < fmean(scores) < 0.65
    assert (
        0.45
        < fmean(shop.names_only(row["label"], answer) for row, answer in zip(rows, answers))
        < 0.55
    )


def test_every_text_survives_the_tokenizer(rlhf):
    shop, tokenizer = rlhf("shop"), rlhf("make_assets").build_tokenizer()
    rows = shop.demonstrations(500, seed=1)
    for row in rows:
        ids = tokenizer(row["input"] + row["output"])["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["input"] + row["output"]
    assert tokenizer.unk_token_id not in tokenizer(" ".join(shop.vocabulary()))["input_ids"]


def test_pairs_have_the_better_answer_first_and_no_ties(rlhf):
    ordered = rlhf("pairs").ordered
    row, good, bad = {"input": PROMPT, "label": LABEL}, "Here is a red chair.", "Hurry up."
    expected = {"input": PROMPT, "chosen": f" {good}", "rejected": f" {bad}"}
    assert ordered(row, good, bad) == ordered(row, bad, good) == expected
    assert ordered(row, good, "We have a red chair for you.") is None
    assert ordered(row, good, "") is None


@pytest.fixture
def models(rlhf, tmp_path) -> Path:
    """Two models with random weights, of seeds 1 and 2."""
    assets = rlhf("make_assets")
    tokenizer = assets.build_tokenizer()
    for seed in (1, 2):
        tokenizer.save_pretrained(tmp_path / str(seed))
        small_llama(tokenizer, seed, positions=assets.POSITIONS).save_pretrained(
            tmp_path / str(seed)
        )
    return tmp_path


def test_the_kl_is_the_sum_over_an_answers_tokens(rlhf, models):
    """Against one unpadded answer after the other."""
    answers = rlhf("answers")
    prompts = [PROMPT, "Customer: I am looking for a red chair. Assistant:"]
    policy, start = answers.load(models / "1"), answers.load(models / "2")
    (batch,) = answers.sample(models / "1", prompts, seed=1)
    found = answers.kl(policy, start, batch)
    assert answers.kl(policy, policy, batch).tolist() == [0, 0]
    for i in range(2):
        ids = batch.sequences[i, batch.mask[i].bool()][None]
        length = int(batch.mask[i, batch.num_prompt :].sum())
        with torch.no_grad():
            new, old = (
                model(ids).logits[0, -length - 1 : -1].log_softmax(-1) for model in (policy, start)
            )
        assert found[i].item() == pytest.approx((new.exp() * (new - old)).sum().item(), rel=1e-4)
    assert (found > 0).all()


def test_the_judge_reads_a_whole_run(rlhf, models, tmp_path):
    """Models before training in place of trained ones: table, picture and summary."""
    from lightppo.models.critic import RewardModel

    shop, assets = rlhf("shop"), rlhf("make_assets")
    (tmp_path / "assets").mkdir()
    assets.write_jsonl(tmp_path / "assets" / "eval.jsonl", shop.prompts(True, 8, seed=1))
    pair = {"input": PROMPT, "chosen": " Here is a red chair.", "rejected": " Hurry up."}
    assets.write_jsonl(tmp_path / "held_out_pairs.jsonl", [pair])
    (models / "1").rename(tmp_path / "sft")
    RewardModel(str(tmp_path / "sft"), init_value_head=True).hf_model.save_pretrained(
        tmp_path / "reward_model"
    )
    assets.build_tokenizer().save_pretrained(tmp_path / "reward_model")
    for model in ("ppo", "ppo_no_kl", "dpo"):
        folder = tmp_path / model / "checkpoints"
        folder.mkdir(parents=True)
        for step in (5, 10) if model == "ppo" else (10,):
            (folder / f"global_step{step}_hf").symlink_to(models / "2")
    rlhf("judge").main(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {(v["model"], v["step"]): v for v in summary["verdicts"]}
    assert found.keys() == {("sft", 0), ("ppo", 5), ("ppo", 10), ("ppo_no_kl", 10), ("dpo", 10)}
    assert found["sft", 0]["kl"] == 0
    assert found["ppo", 10]["kl"] == found["dpo", 10]["kl"] > 0
    assert summary["reward_model_accuracy"] in (0.0, 1.0)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_make_rlhf(tmp_path):
    script = REPO / "examples" / "rlhf" / "run.py"
    subprocess.run(
        [sys.executable, script, "--run_dir", tmp_path], cwd=REPO, check=True, timeout=1800
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    last = {v["model"]: v for v in summary["verdicts"]}
    # 0.79 and 0.81 were seen, ± 0.02 of some 450 pairs
    assert summary["reward_model_accuracy"] > 0.75
    assert last["ppo"]["true_score"] > last["sft"]["true_score"] + 0.5
    assert last["dpo"]["true_score"] > last["sft"]["true_score"] + 0.5
    # over-optimised: the reward model likes it best, the rule does not
    assert last["ppo_no_kl"]["reward"] > last["ppo"]["reward"]
    assert last["ppo_no_kl"]["true_score"] < last["ppo"]["true_score"] - 0.3
