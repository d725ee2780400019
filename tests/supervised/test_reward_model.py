"""What a run learns from pairs: a reward model, against formulas by hand, in PPO's hands, on one rank and two."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import REPO, run_ranks
from support.tiny import read_jsonl, write_jsonl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightppo.__main__ import main
from lightppo.checkpoint.export import save_model
from lightppo.config import PPOConfig
from lightppo.config.supervised_options import RMConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.models.critic import Critic, RewardModel
from lightppo.models.loading import get_tokenizer
from lightppo.ranks import Alone
from lightppo.rewards import RewardModelSource

SCRIPT = REPO / "examples" / "train_reward_model.py"
TRAIN, HELD_OUT = 160, 48


def worth(answer: str) -> int:
    """The rule that the pairs follow and the model never sees: small digits are better."""
    return sum(digit in "12345" for digit in answer)


def made_pairs(number: int, seed: int) -> list[dict[str, Any]]:
    """Answers of different lengths, whose worth differs."""
    draw, found = random.Random(seed), []
    while len(found) < number:
        answers = ["".join(draw.choices("0123456789", k=draw.randint(3, 5))) for _ in range(2)]
        worse, better = sorted(answers, key=worth)
        if worth(better) > worth(worse):
            lead = float(worth(better) - worth(worse))
            found.append(
                {
                    "prompt": f"{draw.randrange(99)}+",
                    "chosen": better,
                    "rejected": worse,
                    "lead": lead,
                }
            )
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "dataset": write_jsonl(folder / "train.jsonl", made_pairs(TRAIN, 0)),
        "eval_dataset": write_jsonl(folder / "held_out.jsonl", made_pairs(HELD_OUT, 1)),
    }


@pytest.fixture(scope="module")
def run(world, tiny_model, data, tmp_path_factory):
    """``run(**options)``: a finished run in this process, its trainer."""
    from lightppo.supervised.trainer import SupervisedTrainer

    def fit(**more: Any):
        folder = more.pop("folder", None) or tmp_path_factory.mktemp("run")
        small = {
            "pretrain": tiny_model,
            "eval_split": "train",
            "max_len": 16,
            "zero_stage": 0,
            "save_path": folder,
        }
        small |= {
            "train_batch_size": 16,
            "learning_rate": 5e-3,
            "lr_warmup_ratio": 0,
            "num_epochs": 4,
        }
        trainer = SupervisedTrainer.from_config(RMConfig.from_flat(data | small | more))
        trainer.fit()
        return trainer

    return fit


@pytest.fixture(scope="module")
def trained(run):
    return run(margin_key="lead")


def logged(trainer: Any, prefix: str = "train/") -> list[dict[str, float]]:
    return rows_of(Path(trainer.config.checkpoint.save_path), prefix)


def rows_of(folder: Path, prefix: str = "train/") -> list[dict[str, float]]:
    rows = read_jsonl(folder / "metrics.jsonl")
    rows = [{n: x for n, x in row.items() if n == "step" or n.startswith(prefix)} for row in rows]
    return [row for row in rows if len(row) > 1]


def scores(trainer: Any, rows: Any) -> torch.Tensor:
    """(2, N) of the chosen and the rejected answers, each alone and unpadded."""
    trainer.model.eval()
    parts = [
        [torch.cat([row["prompt"], row[name]]) for row in rows] for name in ("chosen", "rejected")
    ]
    with torch.no_grad():
        return torch.stack(
            [torch.cat([trainer.model(ids[None]) for ids in part]) for part in parts]
        )


@pytest.fixture(params=["own", "eos", "none"])
def padded_by(request, tiny_model, tmp_path):
    """A model whose tokenizer pads with a token of its own, with the end-of-text, or has no pad token."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if request.param != "own":
        tokenizer.pad_token = tokenizer.eos_token if request.param == "eos" else None
        tokenizer.save_pretrained(folder)
    return str(folder)


def assert_plain_transformers_reads(folder: Path, ours: Any, monkeypatch) -> None:
    """One by one, in batches padded on either side, and by the code of the README: the score of the last token."""
    texts = ["1+", "12+34", "7"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    with torch.no_grad():
        expected = [ours(torch.tensor([row])).flatten()[-1].item() for row in rows]
        alone = [plain(torch.tensor([row])).logits.item() for row in rows]
        assert alone == pytest.approx(expected, abs=1e-5)
        for side in ("left", "right"):
            batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
            assert plain(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    code = Path(folder, "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    monkeypatch.chdir(Path(folder).parent)
    exec(code, names)
    with torch.no_grad():
        score = ours(torch.tensor([names["ids"]])).flatten()[-1].item()
    assert names["score"] == pytest.approx(score, abs=1e-5)


def test_plain_transformers_reads_what_is_exported(run, padded_by, tmp_path, monkeypatch):
    trainer = run(
        pretrain=padded_by, folder=tmp_path / "rm", num_epochs=None, max_steps=2, save_steps=2
    )
    reward_model = RewardModel(str(tmp_path / "rm"))
    assert_plain_transformers_reads(tmp_path / "rm", reward_model, monkeypatch)

    critic = Critic(padded_by, draws_head=True)
    tokenizer = get_tokenizer(padded_by, critic)
    save_model(Alone(), critic, tokenizer, tmp_path / "critic")
    assert_plain_transformers_reads(tmp_path / "critic", critic, monkeypatch)
    assert tokenizer.pad_token_id == critic.hf_model.config.pad_token_id  # as before

    main(["convert", trainer.config.checkpoint.ckpt_path, str(tmp_path / "converted")])
    assert_plain_transformers_reads(tmp_path / "converted", reward_model, monkeypatch)


def test_without_a_token_that_could_pad_batches_are_refused(tiny_model, tmp_path):
    """As GPT-2's tokenizer is: its one special token ends texts."""
    critic, tokenizer = Critic(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    for name in ("pad", "bos", "unk"):
        setattr(tokenizer, f"{name}_token", tokenizer.eos_token)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["added_tokens"] = [one for one in backend["added_tokens"] if one["id"] == 2]
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(backend))
    save_model(Alone(), critic, tokenizer, tmp_path / "critic")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    assert plain.config.pad_token_id is None
    assert "Score texts one by one" in (tmp_path / "critic" / "README.md").read_text()
    row = torch.tensor([[5, 6, 2]])
    with torch.no_grad():
        expected = critic(row)[0, -1].item()
        assert plain(row).logits.item() == pytest.approx(expected, abs=1e-5)
        with pytest.raises(ValueError, match="no padding token"):
            plain(row.repeat(2, 1))


class TestRewardModel:
    def test_learns_the_rule_of_the_pairs(self, trained):
        before, *_, after = logged(trained, "eval/")
        assert before["step"] == 0
        assert before["eval/accuracy"] < 0.85
        assert after["eval/accuracy"] >= 0.95
        assert after["eval/margin"] > before["eval/margin"]
        assert after["eval/pairs"] == HELD_OUT

    def test_loss_accuracy_and_margin_by_hand(self, trained):
        """-log σ(r_c - r_l - m), the mean over all held-out pairs; accuracy and margin leave m out."""
        rows = trained.evaluator.dataset
        chosen, rejected = scores(trained, rows)
        margins = torch.tensor([row["margin"] for row in rows])
        expected = {
            "eval/loss": -torch.sigmoid(chosen - rejected - margins).log().mean().item(),
            "eval/accuracy": (chosen > rejected).float().mean().item(),
            "eval/margin": (chosen - rejected).mean().item(),
        }
        last = logged(trained, "eval/")[-1]
        assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-4)

    def test_scores_critic_and_statistics_of_the_saved_model_are_those_of_training(
        self, trained, tiny_model, data
    ):
        """As PPO loads it: --reward_pretrain with --normalize_reward, and --critic_pretrain."""
        from lightppo.trainer import build

        path, rows = trained.config.checkpoint.save_path, trained.train_dataloader.dataset
        found = scores(trained, rows)
        saved = json.loads(Path(path, "config.json").read_text())
        assert saved["mean"] == pytest.approx(found.mean().item(), rel=1e-4, abs=1e-5)
        assert saved["std"] == pytest.approx(found.std(unbiased=False).item(), rel=1e-4)

        config = PPOConfig.from_flat(
            pretrain=tiny_model,
            reward_pretrain=(path,),
            critic_pretrain=path,
            normalize_reward=True,
            zero_stage=0,
        )
        models = build.build_models(config.resolved(), trained.strategy)
        ids = torch.cat([rows[3]["prompt"], rows[3]["chosen"]])[None]
        with torch.no_grad():
            reward, values = models.reward_models[0](ids), models.critic(ids)
        assert reward.item() == pytest.approx(
            (found[0, 3].item() - saved["mean"]) / saved["std"], rel=1e-4, abs=1e-5
        )
        assert values[0, -1].item() == pytest.approx(found[0, 3].item(), rel=1e-4, abs=1e-5)
        # answers that a stop string has ended, without the end-of-text that training scored
        rollouts = [
            Rollout(Prompt("", row["prompt"].tolist()), 0, row[name].tolist()[:-1], "", "stop")
            for name in ("chosen", "rejected")
            for row in rows
        ]
        scored = torch.tensor(
            RewardModelSource(models.reward_models, pad_token_id=0).score(rollouts).scores
        )
        assert scored.mean().item() == pytest.approx(0, abs=1e-3)
        assert scored.std(unbiased=False).item() == pytest.approx(1, rel=1e-3)

    def test_goes_on_from_a_reward_model_with_its_head(self, trained, run):
        path = trained.config.checkpoint.save_path
        assert (
            logged(run(pretrain=path, max_steps=1, num_epochs=None), "eval/")[0]["eval/accuracy"]
            >= 0.95
        )

    def test_packed_with_shared_prompts_is_padded_but_for_rounding(self, run):
        small = {"num_epochs": None, "max_steps": 3, "max_norm": 0}
        packed, padded = run(**small), run(**small, packing_samples=False)
        assert packed.model.module.layout.shares_prompts
        for ours, theirs in zip(logged(packed), logged(padded), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4 if ours["step"] == 1 else 5e-3, abs=1e-5)

    def test_a_resumed_run_is_the_uninterrupted_run(self, run, tmp_path):
        """With adapters, whose dropout draws random numbers; the best model is kept with statistics of its own."""
        more = {
            "lora_rank": 4,
            "lora_dropout": 0.2,
            "num_epochs": None,
            "max_steps": 4,
            "save_steps": 1,
            "eval_steps": 2,
        }
        more |= {"best_metric": "eval/accuracy", "max_samples": 48}
        straight = run(**more, folder=tmp_path / "straight")
        for stop in (1, None):
            torch.rand(7)
            resumed = run(**more, folder=tmp_path / "resumed", benchmark_steps=stop)
        assert logged(resumed) == logged(straight)
        from safetensors.torch import load_file

        ours, theirs = (
            load_file(tmp_path / name / "model.safetensors") for name in ("resumed", "straight")
        )
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
        assert not [name for name in ours if "lora" in name]
        best = json.loads((tmp_path / "straight/checkpoints/best_hf/config.json").read_text())
        assert best["std"] > 0

    @pytest.mark.parametrize(
        "more", [["--zero_stage=3"], ["--zero_stage=2", "--bf16", "--lora_rank=4"]], ids=str
    )
    def test_two_ranks(self, run, tiny_model, data, tmp_path, more):
        """The same steps as on one rank; the share of a rank in the last step of an epoch differs."""
        flags = {
            **data,
            "pretrain": tiny_model,
            "eval_split": "train",
            "max_len": 16,
            "max_samples": 23,
        }
        flags |= {
            "train_batch_size": 8,
            "micro_train_batch_size": 2,
            "learning_rate": 3e-3,
            "num_epochs": 1,
        }
        flags |= {
            "lr_warmup_ratio": 0,
            "margin_key": "lead",
            "eval_max_samples": 7,
            "save_path": tmp_path / "two",
        }
        run_ranks(SCRIPT, *(f"--{name}={value}" for name, value in flags.items()), *more)
        one = run(**flags | {"save_path": tmp_path / "one"}, folder=tmp_path / "one", zero_stage=0,
                  lora_rank=4 * ("--lora_rank=4" in more))  # fmt: skip
        close = {"rel": 0.2, "abs": 0.1} if "--bf16" in more else {"rel": 5e-3, "abs": 1e-4}
        found, expected = rows_of(tmp_path / "two", "eval/")[0], logged(one, "eval/")[0]
        assert found == pytest.approx(expected, **close)
        assert found["eval/pairs"] == 7
        first, expected = rows_of(tmp_path / "two")[0], logged(one)[0]
        # one pair of 8
        assert first.pop("train/accuracy") == pytest.approx(
            expected.pop("train/accuracy"), abs=0.13
        )
        assert first == pytest.approx(expected, **close)
        # 23 on two ranks are 24
        assert [row["train/pairs"] for row in rows_of(tmp_path / "two")] == [8, 8, 8]
        assert json.loads((tmp_path / "two/config.json").read_text())["std"] > 0


@pytest.mark.parametrize(
    "lora_rank",
    [0, pytest.param(4, marks=pytest.mark.long)],  # the same, with adapters
)
def test_fp16(run, monkeypatch, tmp_path, lora_rank):
    """Near fp32; records hold the loss scale, and the export is in 16 bits."""
    from safetensors.torch import load_file

    monkeypatch.setattr(
        "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda _: True
    )
    more = {"zero_stage": 2, "num_epochs": 1, "lora_rank": lora_rank}
    plain, half = (run(folder=tmp_path / str(fp16), fp16=fp16, **more) for fp16 in (False, True))
    rows, scale = logged(half), 2.0**16
    for row in rows:  # the first gradient of a new head may be too large for the first scale
        scale /= 2 ** row["train/overflow"]
        assert (row["train/skipped"], row["train/loss_scale"]) == (0, scale)
    assert scale > 2.0**10
    assert rows[0]["train/loss"] == pytest.approx(logged(plain)[0]["train/loss"], abs=1e-3)
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "True" / "model.safetensors").values()
    } == {torch.float16}
