"""Experience: a batch of responses for training. A row has S positions, of which the last A are action positions::

    | left padding | prompt | response | right padding |
                             <-- A action positions -->

Per-action tensors are (B, A) and line up with ``action_mask``: True marks a trained token. Padding is False; so are
tokens inside a response that the model did not choose (tool output).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor

from lightppo.data.records import Rollout
from lightppo.models.batches import on_cpu, to_device
from lightppo.models.router_replay import unknown


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
    # (B, A) constant factors of the policy loss: correction, high-entropy tokens
    loss_weights: Tensor | None = None
    # (B, A) bool: tokens that the policy loss treats differently (clip_cov, kl_cov)
    selected: Tensor | None = None
    # (B, A) or (B, A, K) each: what further passes over the rollout have made, under names of their own. A placeholder
    # has none.
    extra: dict[str, Tensor] = field(default_factory=dict)
    # (B, S, L, k) small integers: the experts that each token goes to, see models/router_replay.py. A placeholder has
    # none.
    experts: Tensor | None = None
    # (B,) each: reward, response_length, kl, return, ...
    info: dict[str, Tensor] = field(default_factory=dict)
    # batching.StepPart of a micro batch: its share of an optimizer step; else None
    part: Any = None

    def __len__(self) -> int:
        return self.sequences.size(0)

    @property
    def num_actions(self) -> int:
        """Return A, the number of action positions."""
        return self.action_mask.size(1)

    @property
    def _prompt_columns(self) -> int:
        """Return S - A, the columns before the action positions."""
        return self.sequences.size(1) - self.num_actions

    @property
    def response_lengths(self) -> Tensor:
        """Count the tokens of each response, trained or not (B,)."""
        return self.attention_mask[:, -self.num_actions :].sum(-1)

    @property
    def total_lengths(self) -> Tensor:
        """Count the real tokens of each row (B,)."""
        return self.attention_mask.sum(-1)

    def row_lengths(self) -> list[tuple[int, int]]:
        """Count the prompt and response tokens of each row."""
        attention_mask = on_cpu(self.attention_mask)
        totals = attention_mask.sum(-1).tolist()
        responses = attention_mask[:, -self.num_actions :].sum(-1).tolist()
        return [(total - response, response) for total, response in zip(totals, responses)]

    def non_finite(self) -> dict[str, int]:
        """Count the rows with a NaN or an infinite number at a trained token, by the name of the tensor."""
        row_counts = {}
        tensors = {name: getattr(self, name) for name in self._present()} | self.extra
        for name, tensor in tensors.items():
            is_broken = ~tensor.isfinite()
            if is_broken.dim() == 3:
                is_broken = is_broken.any(-1)
            is_broken = is_broken & self.action_mask  # (B, A)
            row_counts[name] = is_broken.any(1).sum()
        if "reward" in self.info:
            row_counts["score"] = (~self.info["reward"].isfinite()).sum()
        counts = torch.stack([*row_counts.values(), self.action_mask.sum()]).tolist()  # one copy
        return {name: count for name, count in zip(row_counts, counts) if count}

    def prompts(self) -> list[bytes]:
        """Return the prompt of each row as bytes, equal for equal token ids."""
        ids = on_cpu(self.sequences)[:, : self._prompt_columns]
        attention_mask = on_cpu(self.attention_mask)[:, : self._prompt_columns].bool()
        return [row[row_mask].numpy().tobytes() for row, row_mask in zip(ids, attention_mask)]

    def texts(self, decode: Callable[[Tensor], str]) -> list[tuple[str, str]]:
        """Return prompt and response of each row."""
        prompt = slice(self._prompt_columns)
        response = slice(self._prompt_columns, None)
        rows = zip(on_cpu(self.sequences), on_cpu(self.attention_mask).bool())
        return [
            (decode(ids[prompt][mask[prompt]]), decode(ids[response][mask[response]]))
            for ids, mask in rows
        ]

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Self:
        """Make token ids and masks of scored rollouts; ``info`` holds lengths and truncation."""
        if not rollouts:
            raise ValueError("no rollouts: an Experience needs at least one row")
        for rollout in rollouts:
            _check_tokens(rollout)
        prompts = [torch.tensor(rollout.prompt.token_ids) for rollout in rollouts]
        responses = [torch.tensor(rollout.response_ids) for rollout in rollouts]
        prompt_mask = _pad([torch.ones_like(ids) for ids in prompts], left=True)
        response_mask = _pad([torch.ones_like(ids) for ids in responses])
        trained = [rollout.trained or [True] * len(rollout.response_ids) for rollout in rollouts]
        experience = cls(
            sequences=torch.cat([_pad(prompts, left=True), _pad(responses)], 1),  # (B, S)
            attention_mask=torch.cat([prompt_mask, response_mask], 1),  # (B, S)
            action_mask=_pad([torch.tensor(mask) for mask in trained]),  # (B, A)
        )
        if all(rollout.log_probs is not None for rollout in rollouts):
            experience.rollout_log_probs = _pad(
                [torch.tensor(rollout.log_probs, dtype=torch.float32) for rollout in rollouts]
            )
        if all(rollout.experts is not None for rollout in rollouts):
            experience.experts = _experts_of(rollouts, len(prompt_mask[0]))
        experience.info = {
            "response_length": experience.action_mask.sum(-1).float(),
            "total_length": experience.total_lengths.float(),
            "truncated": torch.tensor([float(rollout.truncated) for rollout in rollouts]),
        }
        return experience

    @classmethod
    def placeholder(cls, device: torch.device | str = "cpu") -> Self:
        """Make one row of two tokens with nothing to train, for a rank that runs out of micro batches before others."""
        mask = torch.zeros(1, 1, dtype=torch.bool, device=device)
        sequences = torch.zeros(1, 2, dtype=torch.long, device=device)
        tensors: dict[str, Any] = {name: mask.float() for name in ACTION_TENSORS}
        tensors["selected"] = mask
        return cls(sequences, torch.ones_like(sequences), mask, **tensors)

    def select(self, rows: Sequence[int]) -> Self:
        """Return these rows, without the padding on both sides that they no longer need."""
        lengths = self.row_lengths()
        return self._cut([(i, *lengths[i]) for i in rows])

    def split(self, size: int = 1) -> list[Self]:
        """Return consecutive parts of at most ``size`` rows, without the padding that they no longer need."""
        rows = [(i, *lengths) for i, lengths in enumerate(self.row_lengths())]
        return [self._cut(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _cut(self, rows: Sequence[tuple[int, int, int]]) -> Self:
        """Cut out rows by number, length of the prompt, and length of the response."""
        row_numbers, prompts, responses = zip(*rows)
        first_column = self._prompt_columns - max(prompts)
        last_column = self._prompt_columns + max(responses)
        columns = slice(first_column, last_column)
        actions = slice(0, max(responses))
        index = to_device(torch.tensor(row_numbers), self.sequences.device)
        return type(self)(
            self.sequences[index, columns],
            self.attention_mask[index, columns],
            self.action_mask[index, actions],
            experts=None if self.experts is None else self.experts[index, columns],
            extra={name: values[index, actions] for name, values in self.extra.items()},
            info={name: values[index] for name, values in self.info.items()},
            **{name: getattr(self, name)[index, actions] for name in self._present()},
        )

    def put_experts(self, rows: Sequence[int], part: Experience) -> None:
        """Take the experts of some rows from a :meth:`select` of them."""
        part_experts = cast(Tensor, part.experts)
        if self.experts is None:
            blank = part_experts.new_full((), unknown(part_experts.dtype))
            shape = (*self.sequences.shape, *part_experts.shape[2:])
            self.experts = blank.to(self.sequences.device).expand(shape).clone()
        first_column = self._prompt_columns - part._prompt_columns
        last_column = first_column + part.sequences.size(1)
        index = to_device(torch.tensor(rows), self.sequences.device)
        self.experts[index, first_column:last_column] = part_experts

    def without_rows(self) -> Self:
        """Return the same tensors without rows, for a rank without samples in computations over all ranks."""
        return dataclasses.replace(self)._map(lambda tensor: tensor[:0])

    @classmethod
    def collate(cls, parts: Sequence[Experience]) -> Self:
        """Join parts into one batch, padded to the longest prompt and the longest response."""
        if not parts:
            raise ValueError("nothing to collate")
        names = parts[0]._present()
        extra = parts[0].extra.keys()
        info = parts[0].info.keys()
        if any(
            part._present() != names
            or part.extra.keys() != extra
            or part.info.keys() != info
            or (part.experts is None) != (parts[0].experts is None)
            for part in parts
        ):
            required = [*names, *extra]
            raise ValueError(
                f"experiences hold different tensors or info: all need {required} and {sorted(info)}"
            )

        def sequence_shaped(name: str, padding: int = 0) -> Tensor:
            """Join (ΣB, S): prompts are padded on the left, responses on the right."""
            prompts = []
            responses = []
            for experience in parts:
                prompts += getattr(experience, name)[:, : experience._prompt_columns]
                responses += getattr(experience, name)[:, experience._prompt_columns :]
            padded_prompts = _pad(prompts, left=True, padding=padding)
            return torch.cat([padded_prompts, _pad(responses, padding=padding)], 1)

        def action_shaped(name: str) -> Tensor:
            """Join (ΣB, A)."""
            return _pad([row for experience in parts for row in getattr(experience, name)])

        experts = None
        if (first := parts[0].experts) is not None:
            experts = sequence_shaped("experts", unknown(first.dtype))
        return cls(
            sequence_shaped("sequences"),
            sequence_shaped("attention_mask"),
            action_shaped("action_mask"),
            experts=experts,
            extra={
                name: _pad([row for part in parts for row in part.extra[name]]) for name in extra
            },
            info={name: torch.cat([part.info[name] for part in parts]) for name in info},
            **{name: action_shaped(name) for name in names},
        )

    def _present(self) -> list[str]:
        return [name for name in ACTION_TENSORS if getattr(self, name) is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        for name in ("sequences", "attention_mask", "action_mask", *self._present()):
            setattr(self, name, change(getattr(self, name)))
        if self.experts is not None:
            self.experts = change(self.experts)
        self.extra = {name: change(values) for name, values in self.extra.items()}
        self.info = {name: change(values) for name, values in self.info.items()}
        return self

    def to_device(self, device: torch.device | str) -> Self:
        """Move every tensor in place; return itself."""
        if torch.device(device).type == "cpu":
            # to_device returns before the numbers have arrived here, and nothing would wait for them
            return self._map(Tensor.cpu)
        return self._map(partial(to_device, device=device))

    def pin_memory(self) -> Self:
        """Pin every tensor on the CPU in place for fast copies to a GPU; return itself."""
        return self._map(
            lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        )


def _check_tokens(rollout: Rollout) -> None:
    prompt_name = f"prompt {rollout.prompt.index}"
    response_length = len(rollout.response_ids)
    if not rollout.prompt.token_ids:
        raise ValueError(f"{prompt_name}: the prompt has no tokens")
    if response_length == 0:
        raise ValueError(f"{prompt_name}: the response has no tokens")
    if rollout.log_probs is not None and len(rollout.log_probs) != response_length:
        raise ValueError(
            f"{prompt_name}, sample {rollout.sample_index}: the rollout engine gave {len(rollout.log_probs)} log "
            f"probs for {response_length} response tokens"
        )
    trained = rollout.trained
    if trained is not None and (len(trained) != response_length or not any(trained)):
        raise ValueError(
            f"{prompt_name}, sample {rollout.sample_index}: trained names {sum(trained)} of {len(trained)} "
            f"tokens; the response has {response_length}, of which at least one is trained"
        )


def non_finite_text(counts_of_ranks: Sequence[Mapping[str, int]]) -> str:
    """Write ``rank 1: values in 2 rows``, from :meth:`Experience.non_finite` of each rank; "" without any."""
    texts = (
        "; ".join(f"{name} in {rows} row{'s' * (rows > 1)}" for name, rows in counts.items())
        for counts in counts_of_ranks
    )
    return ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


# (B, A), may be absent
ACTION_TENSORS = [
    field.name
    for field in dataclasses.fields(Experience)
    if field.type == "Tensor | None" and field.name != "experts"
]


def _pad(rows: Sequence[Tensor], left: bool = False, padding: int = 0) -> Tensor:
    """Stack tensors (length, ·), padded to the longest (B, longest, ·)."""
    return torch.nn.utils.rnn.pad_sequence(
        list(rows),
        batch_first=True,
        padding_value=padding,
        padding_side="left" if left else "right",
    )


def _experts_of(rollouts: Sequence[Rollout], prompt_columns: int) -> Tensor:
    """Return the experts of rollouts (B, S, L, k), unknown for padding and for the last tokens, which nothing read."""
    prompts = []
    responses = []
    for rollout in rollouts:
        prompt_length = len(rollout.prompt.token_ids)
        expected = prompt_length + len(rollout.response_ids) - 1
        if len(rollout.experts) != expected:
            raise ValueError(
                f"prompt {rollout.prompt.index}, sample {rollout.sample_index}: the rollout engine gave the experts of "
                f"{len(rollout.experts)} tokens, not of {expected}"
            )
        prompts.append(rollout.experts[:prompt_length])
        last_token = rollout.experts.new_full((1, *rollout.experts.shape[1:]), 0)
        last_token.fill_(unknown(last_token.dtype))
        responses.append(torch.cat([rollout.experts[prompt_length:], last_token]))
    padding = unknown(rollouts[0].experts.dtype)
    return torch.cat(
        [_pad(prompts, left=True, padding=padding), _pad(responses, padding=padding)], 1
    )
