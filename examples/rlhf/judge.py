"""What SFT, PPO and DPO came to, by the rule that training never saw: a table, ``plot.png`` and ``summary.json``.

    python examples/rlhf/judge.py --run_dir runs/rlhf

Every number is from answers to held-out prompts, sampled at temperature 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import answers
import shop
import torch
import tyro
from transformers import AutoTokenizer

from lightppo.models.critic import RewardModel

NAMES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO", "ppo_no_kl": "PPO without KL"}
PER_PROMPT = 4  # answers of each model of the table
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Verdict:
    """Means over the answers of one model."""

    model: str  # a key of NAMES
    step: int
    true_score: float
    standard_error: float  # of the true score
    right: float  # share of answers that name what was asked for, and nothing else
    reward: float  # of the reward model
    spread: float  # standard deviation of the reward model's scores
    true_spread: float
    kl: float  # to the SFT model, nats per answer
    words: float


class Judge:
    """Judges models by their answers to the same prompts."""

    def __init__(self, rows: Rows, start: Path, reward_model: Path) -> None:
        self.rows, self.start = rows, answers.load(start)
        self.reward_model = RewardModel(str(reward_model)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(reward_model, padding_side="right")

    def verdict(
        self, model: str, folder: Path, step: int = 0, per_prompt: int = PER_PROMPT, seed: int = 1
    ) -> Verdict:
        """On the model in the folder."""
        rows, policy = self.rows * per_prompt, answers.load(folder)
        kl, rewards, texts = [], [], []
        for batch in answers.sample(folder, [row["input"] for row in rows], seed):
            kl += answers.kl(policy, self.start, batch).tolist()
            rewards += self._rewards(batch.sequences, batch.mask)
            texts += batch.texts
        true = [shop.true_score(row["label"], text) for row, text in zip(rows, texts)]
        return Verdict(
            model=model,
            step=step,
            true_score=fmean(true),
            standard_error=stdev(true) / len(true) ** 0.5,
            right=fmean(shop.names_only(row["label"], text) for row, text in zip(rows, texts)),
            reward=fmean(rewards),
            spread=stdev(rewards),
            true_spread=stdev(true),
            kl=fmean(kl),
            words=fmean(len(text.split()) for text in texts),
        )

    def accuracy(self, pairs: Rows) -> float:
        """Share of pairs whose better answer has the higher reward."""
        better, worse = (
            [pair["input"] + pair[which] for pair in pairs] for which in ("chosen", "rejected")
        )
        ended = [text + self.tokenizer.eos_token for text in better + worse]
        inputs = self.tokenizer(ended, return_tensors="pt", padding=True)
        rewards = self._rewards(inputs["input_ids"], inputs["attention_mask"])
        return fmean(good > bad for good, bad in zip(rewards, rewards[len(pairs) :]))

    @torch.no_grad()
    def _rewards(self, sequences: torch.Tensor, mask: torch.Tensor) -> list[float]:
        return self.reward_model(sequences, mask).tolist()


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what a run has saved in Hugging Face format, the earliest first."""
    found = sorted(
        (int(path.name[len("global_step") : -len("_hf")]), path)
        for path in folder.glob("global_step*_hf")
    )
    if not found:
        raise SystemExit(
            f"judge.py: error: {folder} has no global_stepN_hf; `make rlhf` saves some"
        )
    return found


def table(accuracy: float, verdicts: Sequence[Verdict], trained_on: int) -> str:
    """The models beside one another."""
    lines = [f"reward model: {accuracy:.3f} of the held-out pairs in the right order", ""]
    lines += [
        f"{'held-out prompts':<16}{'trained on':>12}{'true score':>16}{'right':>8}{'reward':>8}{'KL':>7}{'words':>7}"
    ]
    for v in verdicts:
        answers_seen = "-" if v.model == "sft" else f"{trained_on:,}"
        lines.append(
            f"{NAMES[v.model]:<16}{answers_seen:>12}{v.true_score:>9.3f} ± {v.standard_error:.3f}{v.right:>9.3f}"
            f"{v.reward:>8.2f}{v.kl:>7.2f}{v.words:>7.1f}"
        )
    return "\n".join(
        [*lines, "trained on: answers; reward: of the reward model; KL: nats per answer, to SFT"]
    )


def plot(start: Verdict, curves: dict[str, list[Verdict]], path: Path) -> None:
    """True and reward model's score over KL, the latter with the mean and spread of the former on SFT's answers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (model, verdicts), colour in zip(curves.items(), ("tab:blue", "tab:green", "tab:red")):
        line = [start, *verdicts]
        kl = [v.kl for v in line]
        proxy = [
            start.true_score + (v.reward - start.reward) * start.true_spread / start.spread
            for v in line
        ]
        axes.plot(
            kl, [v.true_score for v in line], "o-", color=colour, label=f"{NAMES[model]}, true rule"
        )
        axes.plot(kl, proxy, ".--", color=colour, alpha=0.6, label=f"{NAMES[model]}, reward model")
    axes.set(xlabel="KL to the SFT model, nats per answer", ylabel="score on held-out prompts")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read(path: Path) -> Rows:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(run_dir: Path = Path("runs/rlhf"), trained_on: int = 10_240) -> None:
    """Judge the models of a run.

    Args:
        run_dir: folder of the run.
        trained_on: answers that PPO and DPO were trained on, each.
    """
    judge = Judge(
        read(run_dir / "assets" / "eval.jsonl"), run_dir / "sft", run_dir / "reward_model"
    )
    accuracy = judge.accuracy(read(run_dir / "held_out_pairs.jsonl"))
    start, curves = judge.verdict("sft", run_dir / "sft"), {}
    for model in list(NAMES)[1:]:
        found = checkpoints(run_dir / model / "checkpoints")
        curves[model] = [
            judge.verdict(model, folder, step, per_prompt=1) for step, folder in found[:-1]
        ]
        curves[model].append(judge.verdict(model, found[-1][1], found[-1][0]))
    plot(start, curves, run_dir / "plot.png")
    verdicts = [start, *(v for curve in curves.values() for v in curve)]
    summary = {"reward_model_accuracy": accuracy, "verdicts": [asdict(v) for v in verdicts]}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{table(accuracy, [start, *(curve[-1] for curve in curves.values())], trained_on)}")
    print(f"\n{run_dir / 'plot.png'}, {run_dir / 'summary.json'}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
