"""Answers of a model, sampled at temperature 1, and what models think of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MAX_NEW_TOKENS = 48
BATCH = 512


@dataclass(frozen=True)
class Answers:
    """One answer to each prompt."""

    sequences: Tensor  # (B, S), padding | prompt | answer | padding
    mask: Tensor  # (B, S), 1: a real token
    num_prompt: int  # columns before the answer
    texts: list[str]


def load(folder: Path) -> torch.nn.Module:
    """A causal LM for inference."""
    disable_progress_bar()  # a model of a moment
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def sample(folder: Path, prompts: list[str], seed: int) -> Iterator[Answers]:
    """Answers of the model in the folder, in the order of the prompts, a batch at a time."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(seed)
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        sequences = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        answer = sequences[:, ids.shape[1] :]
        ended = (answer == tokenizer.eos_token_id).cumsum(-1) - (
            answer == tokenizer.eos_token_id
        ).long()
        mask = torch.cat([mask, (ended == 0).long()], dim=1)  # up to and with the first EOS
        yield Answers(
            sequences, mask, ids.shape[1], tokenizer.batch_decode(answer, skip_special_tokens=True)
        )


@torch.no_grad()
def kl(policy: torch.nn.Module, start: torch.nn.Module, answers: Answers) -> Tensor:
    """(B,), nats per answer: the KL of the next token, over the whole vocabulary, summed over an answer's tokens.

    Its mean over answers of the policy is an unbiased estimate of KL(policy ‖ start), with less noise than that of the
    log probs of the sampled tokens alone.
    """
    positions = (answers.mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {
        "input_ids": answers.sequences,
        "attention_mask": answers.mask,
        "position_ids": positions,
    }
    columns = slice(answers.num_prompt - 1, -1)
    # (B, A, V)
    new, old = (model(**inputs).logits[:, columns].log_softmax(-1) for model in (policy, start))
    return ((new.exp() * (new - old)).sum(-1) * answers.mask[:, answers.num_prompt :]).sum(-1)
