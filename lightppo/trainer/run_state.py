"""What a checkpoint holds of a run beside models and optimizers, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightppo.algorithms.value_norm import ValueNorm
from lightppo.experience.dynamic_sampling import GroupCollector
from lightppo.experience.score_shaping import ScoreShaper
from lightppo.trainer.state import TrainerState


@dataclass
class RunState:
    """The parts of a trainer that remember something.

    Attributes:
        kl_ctl: the KL coefficient.
        shaper: running statistics of scores.
        value_norm: running statistics of returns, or ``None``.
        groups: accepted groups that wait for training; other ones on each rank.
        strategy: gathers these.
    """

    kl_ctl: Any
    shaper: ScoreShaper
    value_norm: ValueNorm | None
    groups: GroupCollector
    strategy: Any

    def of_all_ranks(self, state: TrainerState) -> dict[str, Any]:
        """What is the same on every rank."""
        return {
            "trainer": state.state_dict(),
            "kl_ctl": self.kl_ctl.state_dict(),
            "score_statistics": self.shaper.state_dict(),
            "value_statistics": self.value_norm.state_dict() if self.value_norm is not None else None,
        }

    def with_ranks(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with what is of each rank. Collective."""
        return {**values, "surplus": self.strategy.all_gather_object(self.groups.state_dict())}

    def restore(self, saved: Mapping[str, Any]) -> TrainerState:
        """Take over what was saved; the trainer's own part is returned."""
        self.kl_ctl.load_state_dict(saved["kl_ctl"])
        self.shaper.load_state_dict(saved["score_statistics"])
        if self.value_norm is not None:
            self.value_norm.load_state_dict(saved["value_statistics"])
        self.groups.load_state_dict(saved["surplus"][self.strategy.get_rank()])
        return TrainerState.from_dict(saved["trainer"])
