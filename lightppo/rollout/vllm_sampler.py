"""vLLM's sampler with the log probs that training needs, and without ids that only pad the embedding.

vLLM's own are either of the raw logits (no temperature) or of the filtered distribution (top-p, top-k and penalties
included). A rollout records log softmax(logits / temperature) over the valid vocabulary, before every filter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

_GREEDY_BELOW = 1e-5  # vLLM's own limit


class RolloutSampler(Sampler):
    """A sampler for vLLM's model runner.

    Args:
        valid_vocab_size: ids from here on are never sampled; None: all may be.
        log_prob_vocab_size: log probs are over so many ids, as in the trainer; None: all.
        options: of vLLM's sampler.
    """

    def __init__(self, valid_vocab_size: int | None, log_prob_vocab_size: int | None, **options: Any) -> None:
        super().__init__(logprobs_mode="raw_logprobs", **options)
        self.valid_vocab_size = valid_vocab_size
        self.log_prob_vocab_size = log_prob_vocab_size
        self._temperature: Tensor | None = None
        self._undrawable: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if self.log_prob_vocab_size is not None:
            logits[:, self.log_prob_vocab_size :] = -torch.inf  # (B, V), made anew in every step
        self._temperature = sampling_metadata.temperature  # (B,), None where all rows are greedy
        output = super().forward(logits, sampling_metadata, *args, **kwargs)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors.logprobs.masked_fill_(self._undrawable.unsqueeze(1), torch.nan)
        return output

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log probs (B, V) at each row's temperature; greedy rows at 1."""
        scaled = logits.float()
        if self._temperature is not None:
            greedy = self._temperature < _GREEDY_BELOW
            scaled = scaled / self._temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        return scaled.log_softmax(dim=-1)

    def apply_logits_processors(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.valid_vocab_size is not None:
            logits[:, self.valid_vocab_size :] = -torch.inf
        logits = super().apply_logits_processors(logits, *args, **kwargs)
        highest = logits.amax(dim=-1)
        self._undrawable = highest.isnan() | highest.isinf()  # NaN logits, +inf, or every id banned
        return logits


def install_sampler(worker: Any, valid_vocab_size: int | None, log_prob_vocab_size: int | None) -> None:
    """Puts a :class:`RolloutSampler` into a worker of vLLM; for ``collective_rpc``.

    Args:
        worker: vLLM's.
        valid_vocab_size: see :class:`RolloutSampler`.
        log_prob_vocab_size: the same.

    Raises:
        RuntimeError: this vLLM samples in another way.
    """
    runner = worker.model_runner
    old = getattr(runner, "sampler", None)
    if type(old) is not Sampler and not isinstance(old, RolloutSampler):
        raise RuntimeError(
            f"this vLLM samples by {type(old).__module__}.{type(old).__name__}, whose log probs cannot be those of "
            "the trainer: unset VLLM_USE_V2_MODEL_RUNNER, or use another version of vLLM"
        )
    options = {"use_fp64_gumbel": getattr(old, "use_fp64_gumbel", False)}
    runner.sampler = RolloutSampler(valid_vocab_size, log_prob_vocab_size, **options)
