"""A run while it is built: what its checks look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightppo.zero3 import find_adapters, parameter_count

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lightppo.config.options import OptionSet
    from lightppo.distributed.deepspeed import DeepspeedStrategy
    from lightppo.rewards.reward_source import RewardSource
    from lightppo.rollout.engine import RolloutEngine
    from lightppo.trainer.training_losses import LossTerm


@dataclass
class Building:
    """A run that is being built, as far as it is: what checks look at.

    A check of ``folders`` may put another config in place, and say that nothing is kept of the run.
    """

    options: OptionSet  # the options as they were given
    resolved_options: OptionSet  # with what None means
    config: OptionSet  # as it runs
    strategy: DeepspeedStrategy
    tokenizer: Any = None
    # Data sets, by the option that names their files.
    rows: dict[str, Any] = field(default_factory=dict)
    prompts_dataloader: DataLoader | None = None  # None: the run does not train
    held_out: Any = None  # data to evaluate on
    loss_terms: dict[str, LossTerm] = field(default_factory=dict)
    reward_source: RewardSource | None = None
    judge: RewardSource | None = None  # scores answers to them
    reward_models: Sequence[Any] = ()  # of --reward_pretrain
    # Further models by name, which are elsewhere.
    frozen: dict[str, Any] = field(default_factory=dict)
    # By the flag that names each.
    models: dict[str, Any] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)  # models by their part of a checkpoint
    rollout_engine: RolloutEngine | None = None
    evaluator: Any = None  # of the run, see :class:`lightppo.trainer.loop.TrainingLoop`
    content: dict[str, str] = field(default_factory=dict)  # marks of what options name
    keeps_files: bool = True

    @property
    def actor(self) -> Any:
        """Return the model that trains."""
        return self.saved["actor"]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the numbers of parameters by part of a checkpoint; ``export``: of an export."""
        parameter_counts = {
            name: parameter_count(model, trained_only=find_adapters(model) is not None)
            for name, model in self.saved.items()
        }
        return parameter_counts | {"export": parameter_count(self.actor)}

    def tell(self, lines: Iterable[str]) -> None:
        """Print lines on rank 0."""
        for line in lines:
            self.strategy.print(line)
