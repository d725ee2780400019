"""The protocol of rollout engines. Standard library only, because the config and the trainer import it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from lightppo.data.records import Prompt, Rollout


@dataclass(frozen=True)
class SamplingParams:
    """Say how to sample; every engine gives these the same meaning.

    Penalties and bans act on the raw logits, then temperature, min-p, top-k and top-p (vLLM's order).
    """

    max_new_tokens: int = 1024  # most tokens of one response, >= 1
    min_new_tokens: int = 0  # no stop id before so many tokens; stop strings count only behind them
    temperature: float = 1.0  # logits are divided by it; 0 is greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability, in (0, 1]; 1 is off
    top_k: int = -1  # the k likeliest tokens; -1 or 0 is off
    # Logits of ids seen in prompt or response are divided (if positive) or multiplied (if negative) by it
    # (Keskar et al. 2019, CTRL, arXiv:1909.05858); 1 is off.
    repetition_penalty: float = 1.0
    # Subtracted from the logits of ids in the response: once, and for each time that they are there; 0 is off.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # tokens with at least this share of the likeliest one's probability; 0 is off
    min_p: float = 0.0
    n: int = 1  # samples per prompt
    # strings that end a response; the text is cut before the string, the ids are kept
    stop: tuple[str, ...] = ()
    # ids that end a response, beside the end-of-text ids; kept in the ids
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()  # never completed
    do_sample: bool = True  # False is greedy
    ignore_eos: bool = False  # go on behind end-of-text ids
    # with Prompt.index and the sample number it fixes the random numbers of a response
    seed: int = 0
    # Replaces temperature for the first token of a response (FIRE, arXiv:2410.21236), but not in its recorded log prob.
    # Only for engines whose capabilities say heats_first_token.
    first_token_temperature: float | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            if isinstance(value := getattr(self, name), str):
                raise ValueError(
                    f"{name} must be a sequence, got the string {value!r}; write ({value!r},)"
                )
            object.__setattr__(self, name, tuple(value))
        first_temperature = self.first_token_temperature
        for name, is_valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "min_new_tokens",
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "between 0 and max_new_tokens",
            ),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 is off"),
            ("top_k", self.top_k >= -1, "at least 1, or -1 (off)"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2; 0 is off"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2; 0 is off"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1; 0 is off"),
            ("n", self.n >= 1, "at least 1"),
            ("stop", all(self.stop), "without empty strings"),
            ("bad_words", all(word.strip() for word in self.bad_words), "without empty words"),
            (
                "first_token_temperature",
                first_temperature is None or 0 < first_temperature < math.inf,
                "above 0, or None",
            ),
            ("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "ids of 0 or above"),
        ):
            if not is_valid:
                raise ValueError(f"{name} must be {expected}; got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """Tell whether the likeliest token is taken, without random numbers."""
        return not self.do_sample or self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """Return the temperature of recorded log probs."""
        return 1.0 if self.greedy else self.temperature


@dataclass(frozen=True)
class Capabilities:
    """Say what an engine can do beyond the methods of :class:`RolloutEngine`."""

    # in float32 they equal the log probs of a forward pass of the actor
    exact_log_probs: bool = False
    # generate takes on_finished, and gives it the rollouts soon after they end
    reports_finished: bool = False
    heats_first_token: bool = False  # takes SamplingParams.first_token_temperature
    # samples with a copy of the weights, which may differ from the actor's
    keeps_weights: bool = False
    # differing_weights() says which ones differ, and which could not be compared
    compares_weights: bool = False
    samples_ahead: bool = False  # has start and finish, see AsyncRolloutEngine
    records_experts: bool = False  # rollouts have experts with --router_replay rollout


def capabilities_of(engine: Any) -> Capabilities:
    """Return what an engine declares as ``capabilities``; one may declare none."""
    return getattr(engine, "capabilities", None) or _capabilities_by_attributes(engine)


def _capabilities_by_attributes(engine: Any) -> Capabilities:
    """Return the defaults, but for what the engine says by attributes of the same name, or by having the method.

    Engines were written so before there was ``capabilities``.
    """
    attributes = {
        capability.name: getattr(engine, capability.name)
        for capability in fields(Capabilities)
        if hasattr(engine, capability.name)
    }
    return Capabilities(**{"compares_weights": hasattr(engine, "differing_weights")} | attributes)


@runtime_checkable
class RolloutEngine(Protocol):
    """Sample responses with the actor's weights as of the last :meth:`sync_weights`.

    Every rank has its own engine. All ranks call every method together, because an engine may use collectives; a rank
    without prompts passes an empty list.
    """

    capabilities: Capabilities

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
    ) -> list[Rollout]:
        """Sample ``sampling.n`` responses to each prompt, and return them in the order of the prompts.

        ``log_probs``: float32 log softmax(logits / temperature) of the sampled ids before any filter, as the trainer's.
        """

    def sync_weights(self, actor: nn.Module) -> None:
        """Make the next rollouts use the present weights of ``actor``."""

    def sleep(self) -> None:
        """Free device memory while the trainer trains."""

    def wake(self) -> None:
        """Take back what :meth:`sleep` freed."""

    def close(self) -> None:
        """End the engine."""


class AsyncRolloutEngine(RolloutEngine, Protocol):
    """An engine that samples while the trainer trains. ``generate`` is ``start`` and ``finish``.

    For episodes it has ``start_turns(turns, sampling)`` too, whose tickets ``finish`` takes as well.
    """

    def start(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object],
    ) -> Any:
        """Begin to sample, and return a ticket at once. Between this and :meth:`finish` nothing is collective.

        Several tickets may be open. The weights may not be pushed meanwhile.
        """

    def finish(self, ticket: Any) -> list[Rollout]:
        """Wait for what was begun, and return it as ``generate`` does. Collective: whatever failed is raised here."""


# -- turns of episodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A request for the next tokens of a conversation."""

    prompt: Prompt  # whose sample it is; with sample_index it names the sample's random numbers
    sample_index: int
    token_ids: list[int]  # all that came before, prompt included
    max_new_tokens: int
    number: int = 0  # of the turn in its conversation
    sampled: int = 0  # tokens of the conversation that were sampled before: its random numbers go on behind them
    final: bool = False  # no turn follows it; False: one may


class TurnSource(Protocol):
    """Give an engine its turns, and take them when they have ended.

    An engine for episodes has a method ``generate_turns(turns, sampling)``: it samples the turns of a source until no
    more come, and takes new ones while others decode.
    """

    longest: int  # most tokens of a conversation, prompt included
    left: int  # conversations that have not ended: so many turns may wait or decode at a time

    def take(self, wait: bool) -> list[Turn] | None:
        """Return turns that can be sampled now; None: no more will come. ``wait``: at least one, if more will come."""

    def ended(self, turn: Turn, rollout: Rollout) -> None:
        """Take a turn and its new tokens; ``rollout.prompt`` is the turn's, its response the new tokens alone."""

    def goes_on(self, turn: Turn) -> bool:
        """Tell whether another turn may follow one that the engine has sampled."""


def progress_bar(total: int, *, shown: bool) -> Any:
    """Return the bar of a rollout, which goes when it ends. ``shown``: on this rank, in a terminal."""
    from tqdm import tqdm

    # of a terminal that has no rows, as in containers, tqdm would show nothing
    sizes = {"ncols": 80, "nrows": get_terminal_size().lines}
    return tqdm(total=total, desc="rollout", unit="seq", leave=False, disable=not shown, **sizes)
