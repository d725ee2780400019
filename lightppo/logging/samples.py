"""What a run keeps of its samples: all of a step in a file, some with numbers per token, one as text for people.

And ``--skip_rollout``: rollouts in files, which a later run takes in place of sampling.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightppo.callbacks import Callback
from lightppo.data.records import Prompt, Rollout, from_plain, group_by_prompt, to_plain
from lightppo.errors import ConfigError
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
_OPEN = "\ufffd"  # at the end of a text that ends within a character


def with_overlong(
    rollouts: Sequence[Rollout], max_len: int, buffer_len: int, penalty_factor: float
) -> list[Rollout]:
    """Return copies whose score has the overlong penalty, and extras its numbers, as in verl."""
    lengths = torch.tensor([rollout.trained_length for rollout in rollouts], dtype=torch.float32)
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
    episode: dict[str, Any] = {}
    texts = dict(rollout.texts)
    if rollout.turns is not None:
        episode = {"messages": rollout.messages, "turns": rollout.turns}
        texts.pop("conversation", None)
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
    sample_lines = [json.dumps(row_of(step, rollout), default=str) + "\n" for rollout in rollouts]
    sample_path = Path(folder) / f"step{step}.jsonl"
    sample_lines = _of_all_ranks(rollouts, sample_lines, strategy)
    strategy.on_rank_0(
        lambda: write_or_explain(sample_path, "".join(sample_lines)), f"{sample_path}"
    )


def _of_all_ranks(rollouts: Sequence[Rollout], lines: Sequence[str], strategy: Ranks) -> list[str]:
    """Return on rank 0 the lines of all ranks by prompt and sample number; none on the others. Collective."""
    numbered_lines = [
        (rollout.prompt.index, rollout.sample_index, sample_line)
        for rollout, sample_line in zip(rollouts, lines)
    ]
    # Not a gather, which pads to the longest: perhaps only few ranks have lines.
    per_rank = strategy.exchange_objects({0: numbered_lines} if numbered_lines else {})
    return [sample_line for *_, sample_line in sorted(chain(*per_rank), key=itemgetter(0, 1))]


def write_or_explain(file_path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    with explained(file_path):
        file_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(file_path, text)


def examined(rollout: Rollout) -> str:
    """Return a sample for people: the end of its prompt, the answer, label, score and other numbers."""
    prompt = rollout.prompt.text
    if len(prompt) > SHOWN_PROMPT:
        prompt = f"…{prompt[-SHOWN_PROMPT:]}"
    truncation_note = " (cut by --generate_max_len)" if rollout.truncated else ""
    sample_facts = {"score": rollout.reward} | rollout.extras | rollout.texts
    fact_texts = [
        f"{fact_name} {fact:.4g}" if isinstance(fact, (int, float)) else f"{fact_name} {fact}"
        for fact_name, fact in sample_facts.items()
    ]
    if rollout.prompt.label is not None:
        fact_texts.insert(0, f"label {rollout.prompt.label}")
    return plain(
        f"prompt: {prompt}\n  answer: {rollout.response_text}{truncation_note}\n  {' · '.join(fact_texts)}"
    )


# -- samples with numbers per token ------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """What a training pass made for one sample, each (A,)."""

    log_probs: Tensor
    entropy: Tensor


def keep_samples(run: Any) -> Samples:
    """Return the samples of a run, for its folder."""
    config = run.config
    return Samples(
        local_folder(config.checkpoint.save_path) / SAMPLES,
        config.sampling.record_samples,
        config.rollout.n_samples_per_prompt,
        run.strategy,
        run.tokenizer.decode,
        run.experience_maker.sampled_kl,
    )


class Samples(Callback):
    """The samples of each step: some for people, all for ``--rollout_data_dir``, some in ``folder/stepN.jsonl.gz``.

    The last have what training knows of each of their tokens. Whole groups first, of the ranks in turn. Nothing is
    computed for it but KL from log probs that are there: the training passes tell what they make. A row is that of
    :func:`write_step` with ``tokens``, lists of one entry per response token: ``text``; ``rollout_log_prob``, the
    engine's; ``log_prob``, the trainer's before the update; ``new_log_prob``, at the last training pass, if there were
    several; ``kl`` to the reference; ``entropy``, ``advantage``, ``value``, ``reward``, ``loss_weight``; ``trained``,
    where it is not 1 for all.

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
        # Each with its row for training, if there is one, and its training passes.
        self.picked: list[tuple[Rollout, Experience | None, list[_Pass]]] = []
        self.passes: dict[bytes, list[_Pass]] = {}  # by token ids: the first and the last one
        self.collected: CollectedStep | None = None

    def on_rollouts(self, run: Any, step: int, collected: CollectedStep) -> None:
        self.collected = collected

    def on_experience(self, run: Any, step: int, experience: Sequence[Experience]) -> None:
        """Pick the samples of the step that are to be kept, and show some. Collective."""
        config = run.config
        rollouts = self.collected.rollouts
        if (buffer_len := config.reward.overlong_buffer_len) is not None:
            max_len = config.rollout.generate_max_len
            rollouts = with_overlong(
                rollouts, max_len, buffer_len, config.reward.overlong_penalty_factor
            )
        self.pick(step, rollouts, experience, len(self.collected.repeated))
        self.collected = None
        if (folder := config.sampling.rollout_data_dir) is not None:
            write_step(folder, step, rollouts, self.strategy)
        counts: Counter[str] = Counter()
        for rollout in rollouts:
            counts[source := rollout.prompt.data_source] += 1
            if counts[source] <= config.logging.num_examine:
                self.strategy.print(f"[step {step}] {examined(rollout)}")

    def pick(
        self, step: int, rollouts: Sequence[Rollout], items: Sequence[Experience], repeated: int = 0
    ) -> None:
        """Choose this rank's share of its rollouts of a step.

        Args:
            items: the rows for training, in this order, as far as they are there; then ``repeated`` others.
        """
        # Groups go to the ranks in turn, with each step from another one on.
        rank = self.strategy.get_rank()
        ranks = self.strategy.world_size
        first_start = (rank - step) % ranks * self.group_size
        group_starts = range(first_start, self.count, ranks * self.group_size)
        # From the end, because a full buffer drops its first rows.
        experience_rows = dict(zip(map(id, rollouts[::-1]), items[: len(items) - repeated][::-1]))
        self.picked = []
        self.passes = {}
        for group_start, group in zip(group_starts, group_by_prompt(rollouts)):
            for rollout in group[: min(self.group_size, self.count - group_start)]:
                ids = torch.tensor(rollout.prompt.token_ids + rollout.response_ids)
                passes = self.passes.setdefault(ids.numpy().tobytes(), [])
                self.picked.append((rollout, experience_rows.get(id(rollout)), passes))

    def on_micro_batch(
        self, run: Any, experience: Experience, log_probs: Tensor, entropy: Tensor
    ) -> None:
        for row, passes in self.rows_of(experience):
            passes[1:] = [_Pass(log_probs[row].detach().clone(), entropy[row].detach().clone())]
            passes[:1] = passes[:1] or passes[1:]

    def entropy_rows(self, run: Any, experience: Experience) -> list[int]:
        return [row for row, _ in self.rows_of(experience)]

    def rows_of(self, experience: Experience) -> Iterator[tuple[int, list[_Pass]]]:
        """Yield the rows of a micro batch that are picked, each with its passes."""
        if not self.passes:
            return
        masks = on_cpu(experience.attention_mask).bool().numpy()
        rows = zip(on_cpu(experience.sequences).numpy(), masks)
        for row, (ids, mask) in enumerate(rows):
            if (passes := self.passes.get(ids[mask].tobytes())) is not None:
                yield row, passes

    def on_step_end(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step. Collective, as :meth:`pick` is not."""
        if self.count == 0:
            return
        sample_rows = [
            row_of(step, rollout) | {"tokens": self._tokens(rollout, item, passes)}
            for rollout, item, passes in self.picked
        ]
        sample_lines = [
            json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in sample_rows
        ]
        rollouts = [rollout for rollout, *_ in self.picked]
        sample_lines = _of_all_ranks(rollouts, sample_lines, self.strategy)
        self.picked = []
        self.passes = {}
        if not sample_lines:
            return
        sample_path = self.folder / f"step{step}.jsonl.gz"
        with explained(sample_path):
            sample_path.parent.mkdir(parents=True, exist_ok=True)
            temporary = sample_path.with_name(f".{sample_path.name}.tmp")
            temporary.write_bytes(gzip.compress("".join(sample_lines).encode(), 1, mtime=0))
            os.replace(temporary, sample_path)

    def _tokens(
        self, rollout: Rollout, item: Experience | None, passes: Sequence[_Pass]
    ) -> dict[str, list]:
        """Return the lists of one entry per response token."""
        columns: dict[str, Tensor] = {}  # (A,) each
        if passes:
            columns = {"log_prob": passes[0].log_probs, "entropy": passes[0].entropy}
        if rollout.log_probs is not None:
            columns["rollout_log_prob"] = torch.tensor(rollout.log_probs)
        if rollout.token_rewards is not None:
            columns["reward"] = torch.tensor(rollout.token_rewards)
        if rollout.trained is not None and not all(rollout.trained):
            columns["trained"] = torch.tensor(rollout.trained)
        if item is not None:
            batch_columns = {
                "kl": item.kl,
                "advantage": item.advantages,
                "value": item.values,
                "loss_weight": item.loss_weights,
                "log_prob": item.action_log_probs,
            }
            for column, values in batch_columns.items():
                if values is not None:
                    columns[column] = values[0]
            if not item.action_mask.all():
                columns["trained"] = item.action_mask[0]
        if passes and passes[-1] is not passes[0]:
            columns["new_log_prob"] = passes[-1].log_probs
        reference = None if item is None else item.base_action_log_probs
        if reference is not None and "log_prob" in columns and "kl" not in columns:
            log_probs = columns["log_prob"]
            reference = reference[0].to(log_probs.device)
            columns["kl"] = self.sampled_kl(log_probs[: len(reference)], reference)
        length = len(rollout.response_ids)
        numbers = {column: _plain(values, length) for column, values in columns.items()}
        return {"text": self.pieces(rollout.response_ids)} | numbers


def _plain(values: Tensor, length: int) -> list[float | int | None]:
    """Return a number as JSON has it: few digits, None where a number is not finite."""
    values = values[:length]
    if not values.is_floating_point():
        return values.int().tolist()
    rounded = values.double().cpu().round(decimals=DIGITS) + 0.0  # no -0
    return [number if math.isfinite(number) else None for number in rounded.tolist()]


class TokenPieces:
    """Token ids → the text that each brings; "" for one that only begins a character, which the next ones end."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.texts: dict[
            int, str
        ] = {}  # of tokens alone: a tokenizer takes 20 µs and more for each
        self.prefix: list[int] = []  # an ordinary token: some tokenizers trim the start of a text

    def __call__(self, ids: Sequence[int]) -> list[str]:
        if not self.prefix:
            for token in ids:
                token_text = self.decode([token])
                if token_text.strip() and not token_text.endswith(_OPEN):
                    self.prefix = [token]
                    break
        pieces = []
        character_tokens = []  # tokens of one character
        for token in ids:
            if not character_tokens and token not in self.texts:
                self.texts[token] = self._text([token])
            character_tokens.append(token)
            token_text = (
                self.texts[token] if len(character_tokens) == 1 else self._text(character_tokens)
            )
            if token_text.endswith(_OPEN) and len(character_tokens) < _LONGEST_CHARACTER:
                pieces.append("")
            else:
                pieces.append(token_text)
                character_tokens = []
        if character_tokens:
            pieces[-1] = self._text(character_tokens)
        return pieces

    def _text(self, ids: list[int]) -> str:
        if not self.prefix:
            return self.decode(ids)
        return self.decode(self.prefix + ids)[len(self.decode(self.prefix)) :]


# -- rollouts in place of sampling -----------------------------------------------------------------------------------


@dataclass
class RolloutReplay:
    """Saves what the engine samples, and returns it in a later run instead of sampling; for debugging.

    A file holds a generation batch of one rank, without rewards. If any rank lacks its file, all ranks sample and save.
    """

    folder: str | Path
    strategy: Ranks

    def rollouts(
        self, prompts: Sequence[Prompt], step: int, batch: int, sample: Callable[[], list[Rollout]]
    ) -> list[Rollout]:
        """Return the saved rollouts of this generation batch, or else the rollouts from ``sample``. Collective."""
        rank = self.strategy.get_rank()
        file_name = f"step{step}_batch{batch}_rank{rank}of{self.strategy.world_size}.json"
        rollout_path = Path(self.folder) / file_name
        if not self.strategy.all_reduce(int(rollout_path.is_file()), "min"):
            rollouts = sample()
            try:
                rollouts_text = json.dumps([to_plain(group) for group in group_by_prompt(rollouts)])
            except TypeError as error:
                raise ConfigError(
                    f"--skip_rollout {self.folder}: the prompts of step {step} cannot be written as JSON: {error}"
                ) from error
            write_or_explain(rollout_path, rollouts_text)
            return rollouts
        groups = [from_plain(values) for values in json.loads(rollout_path.read_text())]
        saved_ids = [group[0].prompt.token_ids for group in groups]
        if saved_ids != [prompt.token_ids for prompt in prompts]:
            raise ConfigError(
                f"--skip_rollout {self.folder}: {rollout_path.name} holds other prompts than step {step} has; run with "
                "the data, --seed and batch sizes it was saved with, or name another folder"
            )
        return list(chain(*groups))
