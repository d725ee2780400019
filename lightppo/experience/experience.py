"""Experience: a batch of responses for training, converted from rollouts in one place.

Layout of a row, S positions of which the last A are the action positions::

    | left padding | prompt | response | right padding |
                             <-- A action positions -->

Per-action tensors are (B, A) and line up with ``action_mask``: True marks a trained token. Padding is False; so are
tokens inside a response that the model did not choose (tool output).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from lightppo.data.records import Rollout

# (B, A) tensors that may be absent
_ACTION_TENSORS = (
    "action_log_probs",
    "base_action_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
    "advantages",
    "kl",
    "loss_weights",
    "selected",
)


@dataclass
class Experience:
    """B responses with the tensors that policy optimisation needs."""

    sequences: Tensor  # (B, S) token ids
    attention_mask: Tensor  # (B, S) 1: a real token
    action_mask: Tensor  # (B, A) True: a trained token
    action_log_probs: Tensor | None = None  # (B, A) the policy's, before this rollout's updates
    base_action_log_probs: Tensor | None = None  # (B, A) the reference model's
    rollout_log_probs: Tensor | None = None  # (B, A) the rollout engine's, as sampled
    values: Tensor | None = None  # (B, A) the critic's, before each action
    returns: Tensor | None = None  # (B, A) regression targets of the critic
    advantages: Tensor | None = None  # (B, A)
    kl: Tensor | None = None  # (B, A) KL estimate between policy and reference per token
    loss_weights: Tensor | None = None  # (B, A) constant factors of the policy loss: correction, high-entropy tokens
    selected: Tensor | None = None  # (B, A) bool: tokens that the policy loss treats differently (clip_cov, kl_cov)
    info: dict[str, Tensor] = field(default_factory=dict)  # (B,) each: reward, response_length, kl, return, ...
    part: Any = None  # batching.StepPart of a micro batch: its share of an optimizer step; else None

    def __len__(self) -> int:
        return self.sequences.size(0)

    @property
    def num_actions(self) -> int:
        """A, the number of action positions."""
        return self.action_mask.size(1)

    @property
    def response_lengths(self) -> Tensor:
        """Tokens of each response, trained or not (B,)."""
        return self.attention_mask[:, -self.num_actions :].sum(-1)

    @property
    def total_lengths(self) -> Tensor:
        """Real tokens of each row (B,)."""
        return self.attention_mask.sum(-1)

    def row_lengths(self) -> list[tuple[int, int]]:
        """Prompt and response tokens of each row."""
        responses = self.response_lengths.tolist()
        return [(total - r, r) for total, r in zip(self.total_lengths.tolist(), responses)]

    def prompts(self) -> list[bytes]:
        """The prompt of each row as bytes, equal for equal token ids."""
        split = self.sequences.size(1) - self.num_actions
        ids, real = self.sequences[:, :split].cpu(), self.attention_mask[:, :split].bool().cpu()
        return [row[mask].numpy().tobytes() for row, mask in zip(ids, real)]

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Self:
        """Token ids and masks of scored rollouts; ``info`` holds lengths and truncation."""
        if not rollouts:
            raise ValueError("no rollouts: an Experience needs at least one row")
        for rollout in rollouts:
            if not rollout.prompt.token_ids or not rollout.response_ids:
                part = "prompt" if not rollout.prompt.token_ids else "response"
                raise ValueError(f"prompt {rollout.prompt.index}: the {part} has no tokens")
            if rollout.log_probs is not None and len(rollout.log_probs) != len(rollout.response_ids):
                raise ValueError(
                    f"prompt {rollout.prompt.index}, sample {rollout.sample_index}: the rollout engine gave "
                    f"{len(rollout.log_probs)} log probs for {len(rollout.response_ids)} response tokens"
                )
        prompts = _pad([torch.tensor(r.prompt.token_ids) for r in rollouts], left=True)
        responses = _pad([torch.tensor(r.response_ids) for r in rollouts])
        prompt_mask = _pad([torch.ones(len(r.prompt.token_ids), dtype=torch.long) for r in rollouts], left=True)
        response_mask = _pad([torch.ones(len(r.response_ids), dtype=torch.long) for r in rollouts])
        experience = cls(
            sequences=torch.cat([prompts, responses], 1),  # (B, S)
            attention_mask=torch.cat([prompt_mask, response_mask], 1),  # (B, S)
            action_mask=response_mask.bool(),  # (B, A)
        )
        if all(r.log_probs is not None for r in rollouts):
            experience.rollout_log_probs = _pad([torch.tensor(r.log_probs, dtype=torch.float32) for r in rollouts])
        experience.info = {
            "response_length": experience.response_lengths.float(),
            "total_length": experience.total_lengths.float(),
            "truncated": torch.tensor([float(r.truncated) for r in rollouts]),
        }
        return experience

    @classmethod
    def placeholder(cls, device: torch.device | str = "cpu") -> Self:
        """One row of two tokens with nothing to train, for a rank that runs out of micro batches before others."""
        tensors = {name: torch.zeros(1, 1, device=device) for name in _ACTION_TENSORS}
        return cls(
            sequences=torch.zeros(1, 2, dtype=torch.long, device=device),
            attention_mask=torch.ones(1, 2, dtype=torch.long, device=device),
            action_mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            **tensors | {"selected": torch.zeros(1, 1, dtype=torch.bool, device=device)},
        )

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """These rows, without the padding on both sides that they no longer need."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.sequences.device)
        attention = self.attention_mask[rows]
        split = self.sequences.size(1) - self.num_actions  # columns before the action positions
        actions = max(1, int(attention[:, split:].sum(-1).max()))
        first = split - int(attention[:, :split].sum(-1).max())
        return type(self)(
            sequences=self.sequences[rows, first : split + actions],
            attention_mask=attention[:, first : split + actions],
            action_mask=self.action_mask[rows, :actions],
            info={name: values[rows] for name, values in self.info.items()},
            **{name: x[rows, :actions] for name in _ACTION_TENSORS if (x := getattr(self, name)) is not None},
        )

    def without_rows(self) -> Self:
        """The same tensors without rows, for a rank without samples in computations over all ranks."""
        return dataclasses.replace(self)._map(lambda x: x[:0])

    def split(self, size: int = 1) -> list[Self]:
        """Consecutive parts of at most ``size`` rows, without the padding that they no longer need."""
        if size > 1:
            return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]
        split = self.sequences.size(1) - self.num_actions
        responses = self.response_lengths.tolist()
        prompts = self.attention_mask[:, :split].sum(-1).tolist()
        present = [name for name in _ACTION_TENSORS if getattr(self, name) is not None]
        rows = []
        for i, (p, r) in enumerate(zip(prompts, responses)):
            row, actions = slice(i, i + 1), slice(0, max(1, r))
            columns = slice(split - p, split + actions.stop)
            rows.append(
                type(self)(
                    sequences=self.sequences[row, columns],
                    attention_mask=self.attention_mask[row, columns],
                    action_mask=self.action_mask[row, actions],
                    info={name: values[row] for name, values in self.info.items()},
                    **{name: getattr(self, name)[row, actions] for name in present},
                )
            )
        return rows

    @classmethod
    def collate(cls, parts: Sequence[Experience]) -> Self:
        """Joins parts into one batch, padded to the longest prompt and the longest response."""
        if not parts:
            raise ValueError("nothing to collate")
        present = {name for name in _ACTION_TENSORS if getattr(parts[0], name) is not None}
        for part in parts:
            if {name for name in _ACTION_TENSORS if getattr(part, name) is not None} != present:
                raise ValueError(f"experiences hold different tensors: all need {sorted(present)}")
            if part.info.keys() != parts[0].info.keys():
                raise ValueError(f"experiences hold different info: all need {sorted(parts[0].info)}")
        splits = [p.sequences.size(1) - p.num_actions for p in parts]  # columns before the action positions

        def sequence_shaped(name: str) -> Tensor:
            """(ΣB, S): prompts are padded on the left, responses on the right."""
            left = [row[:split] for p, split in zip(parts, splits) for row in getattr(p, name)]
            right = [row[split:] for p, split in zip(parts, splits) for row in getattr(p, name)]
            return torch.cat([_pad(left, left=True), _pad(right)], 1)

        def action_shaped(name: str) -> Tensor:
            """(ΣB, A)."""
            return _pad([row for p in parts for row in getattr(p, name)])

        return cls(
            sequences=sequence_shaped("sequences"),
            attention_mask=sequence_shaped("attention_mask"),
            action_mask=action_shaped("action_mask"),
            info={name: torch.cat([p.info[name] for p in parts]) for name in parts[0].info},
            **{name: action_shaped(name) for name in present},
        )

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                setattr(self, f.name, fn(value))
        self.info = {name: fn(values) for name, values in self.info.items()}
        return self

    def to_device(self, device: torch.device | str) -> Self:
        """Moves every tensor in place; returns itself."""
        # Not to the CPU: that copy returns before the numbers have arrived, and nothing would wait for them.
        non_blocking = torch.device(device).type != "cpu"
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Pins every tensor in place for fast copies to a GPU; returns itself."""
        return self._map(lambda x: x.pin_memory())


def _pad(rows: Sequence[Tensor], left: bool = False) -> Tensor:
    """Stacks 1-d tensors, padded with zeros to the longest (B, longest)."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left" if left else "right")
