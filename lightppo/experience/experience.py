"""Experience: a batch of responses as training sees it, and its one conversion from rollouts.

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
    """B responses with what policy optimisation needs of them.

    Attributes:
        sequences: token ids (B, S).
        attention_mask: 1 where a token is real (B, S).
        action_mask: True where a token is trained (B, A).
        action_log_probs: of the policy before this rollout's updates (B, A).
        base_action_log_probs: of the reference model (B, A).
        rollout_log_probs: as the rollout engine sampled them (B, A).
        values: critic's values before each action (B, A).
        returns: regression targets of the critic (B, A).
        advantages: (B, A).
        kl: per-token KL estimate between policy and reference (B, A).
        loss_weights: constant factor of each token's policy loss (B, A): off-policy correction, high-entropy tokens.
        selected: tokens that the policy loss treats differently (B, A) bool: clip_cov, kl_cov.
        info: one number per sample (B,): reward, response_length, total_length, kl, return, ...
        part: of which optimizer step it is a micro batch (``batching.StepPart``); ``None`` elsewhere.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor | None = None
    base_action_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None
    kl: Tensor | None = None
    loss_weights: Tensor | None = None
    selected: Tensor | None = None
    info: dict[str, Tensor] = field(default_factory=dict)
    part: Any = None

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
        """The prompt of each row: the same bytes for the same token ids."""
        split = self.sequences.size(1) - self.num_actions
        ids, real = self.sequences[:, :split].cpu(), self.attention_mask[:, :split].bool().cpu()
        return [row[mask].numpy().tobytes() for row, mask in zip(ids, real)]

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Self:
        """Token ids and masks of scored rollouts; ``info`` holds the reward where there is one, and the lengths.

        Raises:
            ValueError: no rollouts, or one has an empty prompt, an empty response or log probs of another length.
        """
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
        """One row of two tokens with nothing to train: what a rank runs while other ranks still have micro batches."""
        tensors = {name: torch.zeros(1, 1, device=device) for name in _ACTION_TENSORS}
        return cls(
            sequences=torch.zeros(1, 2, dtype=torch.long, device=device),
            attention_mask=torch.ones(1, 2, dtype=torch.long, device=device),
            action_mask=torch.zeros(1, 1, dtype=torch.bool, device=device),
            **tensors | {"selected": torch.zeros(1, 1, dtype=torch.bool, device=device)},
        )

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """These rows, with the padding that they no longer need cut off on both sides."""
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
        """The same tensors with no row: what a rank without samples brings to computations over all ranks."""
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
        """One batch from several, padded to the longest prompt and the longest response.

        Raises:
            ValueError: if there are no parts, or they hold different tensors.
        """
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
            """(ΣB, S): prompts to the right, responses to the left of where they meet."""
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
        """Move every tensor, in place; returns itself."""
        # Not to the CPU: that copy returns before the numbers are there, and nothing would wait for them.
        non_blocking = torch.device(device).type != "cpu"
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Pin every tensor for fast copies to a GPU, in place; returns itself."""
        return self._map(lambda x: x.pin_memory())


def _pad(rows: Sequence[Tensor], left: bool = False) -> Tensor:
    """Stack 1-d tensors to the longest, zeros elsewhere (B, longest)."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left" if left else "right")
