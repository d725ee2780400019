"""What a run keeps of its samples: all of a step in a file, some with numbers per token, one as text for people."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightppo.callbacks import Callback
from lightppo.data.records import Rollout, group_by_prompt
from lightppo.experience.experience import Experience
from lightppo.experience.normalisation import overlong_penalty
from lightppo.files import explained, local_folder, write_text
from lightppo.logging.run_paths import SAMPLES
from lightppo.models.batches import on_cpu
from lightppo.ranks import Ranks
from lightppo.redaction import plain
from lightppo.user_code import finite

if TYPE_CHECKING:
    from lightppo.rollout.sampler import CollectedStep

SHOWN_PROMPT = 200  # characters
DIGITS = 4  # after the point, of numbers per token
_LONGEST_CHARACTER = 4  # tokens of one byte each


def with_overlong(
    rollouts: Sequence[Rollout], max_len: int, buffer_len: int | None, penalty_factor: float | None
) -> list[Rollout]:
    """Return copies whose score has the overlong penalty, and extras its numbers, as in verl, if there is a buffer."""
    if buffer_len is None:
        return list(rollouts)
    lengths = torch.tensor([r.trained_length for r in rollouts], dtype=torch.float32)
    penalties = overlong_penalty(lengths, max_len, buffer_len, penalty_factor).tolist()
    return [
        replace(
            rollout,
            reward=None if rollout.reward is None else rollout.reward + penalty,
            extras=rollout.extras | {"overlong": float(penalty < 0), "overlong_reward": penalty},
        )
        for rollout, penalty in zip(rollouts, penalties)
    ]


def row_of(step: int, rollout: Rollout) -> dict[str, Any]:
    """Return a sample as a row of a file; an episode has its messages and turns, too."""
    if rollout.turns is None:
        episode = {}
    else:
        episode = {"messages": rollout.messages, "turns": rollout.turns}
    texts = {
        name: text
        for name, text in rollout.texts.items()
        if not (episode and name == "conversation")
    }
    return {
        "step": step,
        "index": rollout.prompt.index,
        "sample_index": rollout.sample_index,
        "data_source": rollout.prompt.data_source,
        "input": rollout.prompt.text,
        "output": rollout.response_text,
        "ground_truth": rollout.prompt.label,
        "score": None if rollout.reward is None else finite(rollout.reward),
        "finish_reason": rollout.finish_reason,
        "response_length": len(rollout.response_ids),
        "extras": rollout.extras | texts,
        **episode,
    }


def write_step(folder: str | Path, step: int, rollouts: Sequence[Rollout], strategy: Ranks) -> None:
    """Write ``stepN.jsonl``: one line per sample of all ranks, by prompt and sample number. Collective."""
    own = [
        (r.prompt.index, r.sample_index, json.dumps(row_of(step, r), default=str) + "\n")
        for r in rollouts
    ]
    lines = _in_order(own, strategy)
    path = Path(folder) / f"step{step}.jsonl"
    strategy.on_rank_0(lambda: write_whole(path, "".join(lines)), f"{path}")


def _in_order(own: Sequence[tuple[int, int, str]], strategy: Ranks) -> list[str]:
    """On rank 0 the lines of all ranks by their two numbers; none on the others. Collective."""
    # Not a gather, which pads to the longest: perhaps only few ranks have lines.
    of_ranks = strategy.exchange_objects({0: own} if own else {})
    return [line for *_, line in sorted(chain(*of_ranks), key=itemgetter(0, 1))]


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def examined(rollout: Rollout) -> str:
    """Return a sample for people: the end of its prompt, the answer, label, score and other numbers."""
    prompt = rollout.prompt
    facts = {"score": rollout.reward} | rollout.extras | rollout.texts
    label = "" if prompt.label is None else f"label {prompt.label} · "
    end = prompt.text if len(prompt.text) <= SHOWN_PROMPT else f"…{prompt.text[-SHOWN_PROMPT:]}"
    numbers = " · ".join(
        f"{k} {v:.4g}" if isinstance(v, (int, float)) else f"{k} {v}" for k, v in facts.items()
    )
    cut = " (cut by --generate_max_len)" if rollout.truncated else ""
    return plain(f"prompt: {end}\n  answer: {rollout.response_text}{cut}\n  {label}{numbers}")


class Samples(Callback):
    """The samples of each step, for files and people."""

    def __init__(self, run: Any) -> None:
        config = run.config
        self.collected: CollectedStep | None = None
        self.record = SampleRecord(
            local_folder(config.checkpoint.save_path) / SAMPLES,
            config.sampling.record_samples,
            config.rollout.n_samples_per_prompt,
            run.strategy,
            run.tokenizer.decode,
            run.experience_maker.sampled_kl,
        )

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        self.collected = collected

    def on_experience(self, run: Any, step: int, experience: Sequence[Experience]) -> None:
        """Write the samples of the step that are to be kept. Collective."""
        collected = self.collected
        config = run.config
        reward = config.reward
        max_len = config.rollout.generate_max_len
        buffer_len = reward.overlong_buffer_len
        penalty = reward.overlong_penalty_factor
        rollouts = with_overlong(collected.rollouts, max_len, buffer_len, penalty)
        self.record.pick(step, rollouts, experience, len(collected.repeated))
        if (folder := config.sampling.rollout_data_dir) is not None:
            write_step(folder, step, rollouts, run.strategy)
        shown: Counter[str] = Counter()
        for rollout in rollouts:
            shown[source := rollout.prompt.data_source] += 1
            if shown[source] <= config.logging.num_examine:
                run.strategy.print(f"[step {step}] {examined(rollout)}")

    def on_micro_batch(
        self, run: Any, experience: Experience, log_probs: Tensor, entropy: Tensor
    ) -> None:
        self.record.observe(experience, log_probs, entropy)

    def entropy_rows(self, run: Any, experience: Experience) -> list[int]:
        return [row for row, _ in self.record.rows_of(experience)]

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.record.write(step)
        self.collected = None


# -- samples with numbers per token ------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """What a training pass made for one sample, each (A,)."""

    log_probs: Tensor
    entropy: Tensor


class SampleRecord:
    """Writes ``folder/stepN.jsonl.gz``: some samples of a step, with what training knows of each of their tokens.

    Whole groups first, of the ranks in turn. Nothing is computed for it but KL from log probs that are there: the
    training passes tell what they make (:meth:`observe`). A row is that of :func:`write_step` with ``tokens``, lists of
    one entry per response token: ``text``; ``rollout_log_prob``, the engine's; ``log_prob``, the trainer's before the
    update; ``new_log_prob``, at the last training pass, if there were several; ``kl`` to the reference; ``entropy``,
    ``advantage``, ``value``, ``reward``, ``loss_weight``; ``trained``, where it is not 1 for all.

    Args:
        count: samples per step over all ranks.
        group_size: samples of a prompt.
        decode: token ids → text.
        sampled_kl: log probs of policy and reference → KL per token.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        group_size: int,
        strategy: Ranks,
        decode: Callable[[list[int]], str],
        sampled_kl: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.folder = folder
        self.count = count
        self.group_size = group_size
        self.strategy = strategy
        self.pieces = TokenPieces(decode)
        self.sampled_kl = sampled_kl
        self.picked: list[tuple[Rollout, Experience | None]] = []
        self.passes: dict[bytes, list[_Pass]] = {}  # by token ids: the first and the last one

    def pick(
        self, step: int, rollouts: Sequence[Rollout], items: Sequence[Experience], repeated: int = 0
    ) -> None:
        """Choose this rank's share of its rollouts of a step.

        Args:
            items: the rows for training, in this order, as far as they are there; then ``repeated`` others.
        """
        sizes = [
            min(self.group_size, self.count - i) for i in range(0, self.count, self.group_size)
        ]
        rank = self.strategy.get_rank()
        ranks = self.strategy.world_size
        own = [size for i, size in enumerate(sizes) if (i + step) % ranks == rank]
        # From the end, because a full buffer drops its first rows.
        rows = dict(zip(map(id, rollouts[::-1]), items[: len(items) - repeated][::-1]))
        chosen = [r for size, group in zip(own, group_by_prompt(rollouts)) for r in group[:size]]
        self.picked = [(r, rows.get(id(r))) for r in chosen]
        self.passes = {_key(r.prompt.token_ids + r.response_ids): [] for r in chosen}

    def observe(self, experience: Experience, log_probs: Tensor, entropy: Tensor) -> None:
        """Take what a training pass has made, each (B, A), of the current policy."""
        for i, passes in self.rows_of(experience):
            passes[1:] = [_Pass(log_probs[i].detach().clone(), entropy[i].detach().clone())]
            passes[:1] = passes[:1] or passes[1:]

    def rows_of(self, experience: Experience) -> Iterator[tuple[int, list[_Pass]]]:
        """Yield the rows of a micro batch that are picked, each with its passes."""
        if not self.passes:
            return
        rows = zip(
            on_cpu(experience.sequences).numpy(), on_cpu(experience.attention_mask).bool().numpy()
        )
        for i, (ids, real) in enumerate(rows):
            if (passes := self.passes.get(ids[real].tobytes())) is not None:
                yield i, passes

    def write(self, step: int) -> None:
        """Write the step. Collective, as :meth:`pick` is not."""
        if self.count == 0:
            return
        own = [
            (r.prompt.index, r.sample_index, self._line(step, r, item)) for r, item in self.picked
        ]
        self.picked = []
        self.passes = {}
        if not (lines := _in_order(own, self.strategy)):
            return
        path = self.folder / f"step{step}.jsonl.gz"
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(gzip.compress("".join(lines).encode(), 1, mtime=0))
            os.replace(temporary, path)

    def _line(self, step: int, rollout: Rollout, item: Experience | None) -> str:
        tokens = {"text": self.pieces(rollout.response_ids)}
        tokens |= {
            name: _plain(values, len(rollout.response_ids))
            for name, values in self._numbers(rollout, item)
        }
        return (
            json.dumps(row_of(step, rollout) | {"tokens": tokens}, default=str, ensure_ascii=False)
            + "\n"
        )

    def _numbers(self, rollout: Rollout, item: Experience | None) -> Iterable[tuple[str, Tensor]]:
        """Return name and values (A,) of each known quantity."""
        passes = self.passes[_key(rollout.prompt.token_ids + rollout.response_ids)]
        found = {"rollout_log_prob": rollout.log_probs, "reward": rollout.token_rewards}
        found = {name: torch.tensor(values) for name, values in found.items() if values is not None}
        if rollout.trained is not None and not all(rollout.trained):
            found["trained"] = torch.tensor(rollout.trained)
        if item is not None:
            names = {
                "kl": "kl",
                "advantage": "advantages",
                "value": "values",
                "loss_weight": "loss_weights",
            }
            names |= {"log_prob": "action_log_probs", "reference": "base_action_log_probs"}
            found |= {
                n: getattr(item, of)[0] for n, of in names.items() if getattr(item, of) is not None
            }
            if not item.action_mask.all():
                found["trained"] = item.action_mask[0]
        if passes:
            found = {"log_prob": passes[0].log_probs, "entropy": passes[0].entropy} | found
            if passes[-1] is not passes[0]:
                found["new_log_prob"] = passes[-1].log_probs
        reference = found.pop("reference", None)
        if reference is not None and "log_prob" in found and "kl" not in found:
            count = len(reference)
            found["kl"] = self.sampled_kl(
                found["log_prob"][:count], reference.to(found["log_prob"].device)
            )
        return found.items()


def _key(ids: Sequence[int]) -> bytes:
    return torch.tensor(ids).numpy().tobytes()


def _plain(values: Tensor, length: int) -> list[float | int | None]:
    """Return a number as JSON has it: few digits, None where a number is not finite."""
    if not values.is_floating_point():
        return values[:length].int().tolist()
    rounded = values[:length].double().cpu().round(decimals=DIGITS) + 0.0  # no -0
    if rounded.isfinite().all():
        return rounded.tolist()
    return [x if math.isfinite(x) else None for x in rounded.tolist()]


class TokenPieces:
    """Token ids → the text that each brings; "" for one that only begins a character, which the next ones end."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.known: dict[int, str] = {}  # a tokenizer takes 20 µs and more for each
        self.before: list[int] = []  # an ordinary token: some tokenizers trim the start of a text

    def __call__(self, ids: Sequence[int]) -> list[str]:
        if not self.before:
            self.before = [
                i for i in ids if (text := self.decode([i])).strip() and not text.endswith("\ufffd")
            ][:1]
        pieces = []
        run = []
        for token in ids:
            if not run and token not in self.known:
                self.known[token] = self._text([token])
            run.append(token)
            text = self.known[token] if len(run) == 1 else self._text(run)
            ends = not text.endswith("\ufffd") or len(run) == _LONGEST_CHARACTER
            pieces.append(text if ends else "")
            run = [] if ends else run
        if run:
            pieces[-1] = self._text(run)
        return pieces

    def _text(self, ids: list[int]) -> str:
        return self.decode(self.before + ids)[len(self.decode(self.before)) if self.before else 0 :]
