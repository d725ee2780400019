"""Whether a padded batch gives what its rows give alone, and training what evaluation gives: tried with tiny rows.

Not all of transformers' models do. Recurrent ones may run over the padding (RecurrentGemma), and experts may be chosen
by the place in the batch (Doge).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightppo.models.attention.attention_choice import caps_scores
from lightppo.models.packing.trials import alike, is_models_own, one_line
from lightppo.models.wrapper import Batch, PretrainedWrapper

LONG, SHORT, RIGHT = 20, 4, 3  # tokens of the two rows, and the padding behind the short one


@torch.no_grad()
def padding_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """What is wrong with a padded batch of two rows; None: each is as alone. Under ZeRO-3 on all ranks together."""
    long, short = tiny_rows(wrapper.hf_model, device)
    end = long.shape[1] - RIGHT
    real = slice(end - SHORT, end)
    padded = torch.full_like(long, pad_id(wrapper.hf_model))
    padded[:, real] = short
    ids = torch.cat([long, padded])  # (2, LONG)
    mask = torch.ones_like(ids)
    mask[1, : real.start] = mask[1, real.stop :] = 0
    try:
        with evaluating(wrapper.hf_model):
            together = wrapper.run_rows(Batch(ids, mask))
            alone = [wrapper.run_rows(Batch(row, torch.ones_like(row))) for row in (long, short)]
    except Exception as error:
        if not is_models_own(error):
            raise
        return f"its code fails on a padded batch: {one_line(error)}"
    in_batch = [together[:1], together[1:, real]]
    # Numbers that are not finite come from broken weights, which other checks report.
    if all(alike(one, other) or not other.isfinite().all() for one, other in zip(in_batch, alone)):
        return None
    return f"{distance(wrapper, in_batch, alone)} between a padded batch and its rows alone"


@torch.no_grad()
def training_problem(wrapper: PretrainedWrapper, device: torch.device) -> str | None:
    """What is wrong with a row in training; None: it is as in evaluation, or dropout was asked for. As above.

    PhiMoE draws its experts at random there, so that no ratio of a policy loss would mean anything.
    """
    model = wrapper.hf_model
    if has_dropout(model):
        return None
    row, _ = tiny_rows(model, device)
    was_training = model.training
    generators = [device] if device.type == "cuda" else []
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(generators):
            model.eval()
            expected = wrapper.run_rows(Batch(row, torch.ones_like(row)))
            model.train()
            found = wrapper.run_rows(Batch(row, torch.ones_like(row)))
    finally:
        model.train(was_training)
    if alike(found, expected) or not expected.isfinite().all():
        return None
    return (
        f"{distance(wrapper, [found], [expected])} between training and evaluation, without dropout"
    )


def has_dropout(model: PreTrainedModel) -> bool:
    """Whether anything is left out at random, by an option or by a caller's own model."""
    return any(
        (isinstance(module, torch.nn.Dropout) and module.p > 0)
        or any(
            isinstance(x, float) and x > 0 and "drop" in name for name, x in vars(module).items()
        )
        for module in model.modules()
    )


def other_attentions(model: PreTrainedModel) -> list[str]:
    """Values of ``--attn_implementation`` that run on any device, beside the present one."""
    if not model._can_set_attn_implementation():
        return []
    names = ["eager"] + ["sdpa"] * (model._supports_sdpa and not caps_scores(model.config))
    return [name for name in names if name != model.config._attn_implementation]


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout and compiled layers, which would be compiled again for each tiny shape."""
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


def tiny_rows(model: PreTrainedModel, device: torch.device) -> tuple[Tensor, Tensor]:
    """(1, LONG) and (1, SHORT) token ids; the first is shorter if the model has fewer positions."""
    text = model.config.get_text_config()
    length = min(LONG, getattr(text, "max_position_embeddings", None) or LONG)
    vocabulary = text.vocab_size
    places = torch.arange(length, device=device)[None]
    return (7 * places + 3) % vocabulary, (5 * places[:, :SHORT] + 2) % vocabulary


def pad_id(model: PreTrainedModel) -> int:
    """The pad token if the config names one, else id 0."""
    configured = getattr(model.config.get_text_config(), "pad_token_id", None)
    return configured if isinstance(configured, int) and configured >= 0 else 0


def distance(
    wrapper: PretrainedWrapper,
    outputs: list[Tensor],
    expected: list[Tensor],
) -> str:
    """How far outputs are apart: a causal LM's in nats, others in parts of their size."""
    pairs = [(output.float(), other.float()) for output, other in zip(outputs, expected)]
    if wrapper.hf_model.can_generate():
        nats = max(
            (output.log_softmax(-1) - other.log_softmax(-1)).abs().max().item()
            for output, other in pairs
        )
        return f"log probs differ by up to {nats:.2g} nats"
    share = max(
        ((output - other).abs().mean() / other.abs().mean()).item() for output, other in pairs
    )
    return f"hidden states differ by {100 * share:.2g}%"
