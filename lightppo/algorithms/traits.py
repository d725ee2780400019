"""What each advantage estimator asks of a run. Free of torch, so that the command line can check it at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorTraits:
    """Attributes:
    needs_critic: it reads values, so a critic must be trained.
    min_group_size: smallest number of samples per prompt it is defined for.
    whiten: its advantages are whitened over all ranks unless ``--adv_norm`` says otherwise.
    """

    needs_critic: bool
    min_group_size: int
    whiten: bool


ESTIMATOR_TRAITS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(needs_critic=True, min_group_size=1, whiten=True),
    "rloo": EstimatorTraits(needs_critic=False, min_group_size=2, whiten=False),
    "grpo": EstimatorTraits(needs_critic=False, min_group_size=2, whiten=False),
    "group_norm": EstimatorTraits(needs_critic=False, min_group_size=2, whiten=False),
}
