"""Index arithmetic between padded batches (B, S) and one packed row (1, T), and the check that a model can be packed.

A packed row is the real tokens of all sequences, one after the other, without padding. The model gets it with an
attention mask of None and position ids that start again at 0 for each sequence, from which flash attention takes
lengths for its varlen kernels; where the model attends by sdpa, ``packed_attention`` gets lengths and attends inside
each sequence. Nothing here knows about actors, critics or rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightppo.errors import PackingNotSupportedError

# Layers that attend inside the packed row by position ids. Recurrent and linear-attention layers carry state across
# sequence borders; chunked attention cuts at multiples of the row index, not of the position.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PackedRow:
    """The real tokens of a batch in one row.

    Attributes:
        input_ids: (1, T).
        position_ids: (1, T), starting again at 0 for each sequence.
        slots: (B, S), the place of each token in the row; only meaningful where the attention mask is 1.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Position of each real token among the real tokens of its row, (B, S) -> (B, S); left padding gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def pack(sequences: Tensor, attention_mask: Tensor) -> PackedRow:
    """Drop the padding: (B, S) -> (1, T).

    Args:
        sequences: (B, S) token ids.
        attention_mask: (B, S), 1 for real tokens; padding may be on both sides.

    Raises:
        ValueError: no real token at all.
    """
    real = attention_mask.bool()
    if not bool(real.any()):
        raise ValueError("cannot pack a batch whose attention_mask is 0 everywhere")
    return PackedRow(
        input_ids=sequences[real].unsqueeze(0),  # (1, T)
        position_ids=position_ids_from_mask(attention_mask)[real].unsqueeze(0),  # (1, T)
        slots=(real.flatten().long().cumsum(0) - 1).view_as(sequences),  # (B, S)
    )


def lengths_from_position_ids(position_ids: Tensor) -> Tensor:
    """Position ids (1, T) of a packed row -> lengths (N,) of its sequences."""
    starts = (position_ids[0] == 0).nonzero()[:, 0]  # (N,)
    return starts.diff(append=starts.new_tensor([position_ids.shape[1]]))


def position_ids_from_lengths(lengths: list[int], row: Tensor) -> Tensor:
    """Position ids (1, T) of a row (1, T) that was packed by the caller.

    Raises:
        ValueError: the lengths do not add up to T, or the row is not one row.
    """
    if row.dim() != 2 or row.shape[0] != 1:
        raise ValueError(f"packed_seq_lens needs sequences of shape (1, T), got {tuple(row.shape)}")
    if any(n < 1 for n in lengths) or sum(lengths) != row.shape[1]:
        raise ValueError(f"packed_seq_lens {lengths} must be positive and add up to the {row.shape[1]} packed tokens")
    return torch.cat([torch.arange(n, device=row.device) for n in lengths]).unsqueeze(0)


def action_predictors(
    lengths: list[int], num_actions: list[int], device: torch.device, include_last: bool = False
) -> Tensor:
    """Places (K,) in a packed row whose hidden states predict the last ``num_actions[i]`` tokens of sequence i.

    Args:
        lengths: length of each packed sequence.
        num_actions: one number per sequence, less than its length.
        device: of the result.
        include_last: also the last place of each sequence.

    Raises:
        ValueError: another number of entries than sequences, or no token left to predict the first action from.
    """
    if not isinstance(num_actions, list) or len(num_actions) != len(lengths):
        raise ValueError(f"num_actions must be a list with one entry for each of {len(lengths)} packed sequences")
    places, start = [], 0
    for i, (length, actions) in enumerate(zip(lengths, num_actions)):
        if not 0 <= actions < length:
            raise ValueError(f"num_actions[{i}] = {actions} must be between 0 and {length - 1} (length {length})")
        end = start + length
        places.append(torch.arange(end - actions - 1, end if include_last else end - 1, device=device))
        start = end
    return torch.cat(places)


def check_num_actions(num_actions: int, sequence_length: int) -> None:
    """Raises ValueError unless every action has a position before it to be predicted from."""
    if not isinstance(num_actions, int) or not 0 < num_actions < sequence_length:
        raise ValueError(f"num_actions = {num_actions} must be between 1 and {sequence_length - 1} (S - 1)")


def real_actions(attention_mask: Tensor, num_actions: int) -> Tensor:
    """(B, S) -> (B, A) bool: the action token and the token it is predicted from are both real."""
    real = attention_mask.bool()
    return real[:, -num_actions:] & real[:, -num_actions - 1 : -1]


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Put ``values`` (K,) on the True places of ``mask`` (B, A), row by row; 0 elsewhere. Differentiable."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def check_packing_layers(model: nn.Module) -> None:
    """Refuse, from the model's class and config alone, the families that cannot be packed.

    Raises:
        PackingNotSupportedError: no position ids, or layers that look across sequence borders.
    """
    config = model.config.get_text_config()
    base = model.base_model
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise _not_supported(config.model_type, f"{type(base).__name__}.forward takes no position_ids")
    # DeepSeek-like configs leave layer_types out; then all layers are of one kind and the probe below decides.
    foreign = set(getattr(config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if foreign:
        raise _not_supported(config.model_type, f"it has layers of type {', '.join(sorted(foreign))}")


@torch.no_grad()
def probe_packing(model: nn.Module, run: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
    """Compare a sequence alone with the same sequence at the end of a packed row; they must agree.

    One pass of 4 and one of 9 tokens, at the first packed forward (so that it also runs sharded, on the real device
    and with the real attention kernel). Every rank of a sharded model runs it at the same moment.

    Args:
        model: the Hugging Face model, for its config and its mode (put in eval mode for the probe).
        run: (input_ids (1, T), position_ids (1, T)) -> outputs (1, T, ·).
        device: where the inputs go.

    Raises:
        PackingNotSupportedError: the outputs differ by more than rounding.
    """
    config = model.config.get_text_config()
    other = torch.tensor([[7, 3, 5, 2, 6]], device=device) % config.vocab_size
    ids = torch.tensor([[1, 4, 2, 3]], device=device) % config.vocab_size
    positions = torch.arange(4, device=device).unsqueeze(0)
    was_training = model.training
    model.eval()
    try:
        alone = run(ids, positions).float()
        packed = run(torch.cat([other, ids], 1), torch.cat([torch.arange(5, device=device)[None], positions], 1))
    finally:
        model.train(was_training)
    difference = ((packed[:, -4:].float() - alone).abs().mean() / alone.abs().mean()).item()
    # Rounding alone gives 1e-6 in fp32 (1e-3 with TF32) and 1e-2 in bf16; a neighbour in sight gives 0.1 and more.
    tolerance = 3e-3 if packed.dtype == torch.float32 else 1e-1
    if not difference <= tolerance:  # NaN fails too
        raise _not_supported(
            config.model_type, f"a packed sequence sees its neighbour (relative difference {difference:.1e})"
        )


def _not_supported(model_type: str, reason: str) -> PackingNotSupportedError:
    return PackingNotSupportedError(
        f"--packing_samples does not work with model type {model_type!r}: {reason}. Leave --packing_samples out."
    )
