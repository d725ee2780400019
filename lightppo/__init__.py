"""lightppo: PPO and RLHF training, one process per GPU, on the DeepSpeed launcher.

Public names are resolved on first use, so that ``import lightppo`` loads neither torch nor transformers nor deepspeed.
"""

import logging
from typing import TYPE_CHECKING, Any

from lightppo.plugin import PUBLIC, load_plugins, public
from lightppo.version import __version__

# Where bitsandbytes is installed, peft imports it, and transformers' schedules import peft: on a CPU each run would
# begin with its warning of a package of kernels that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

load_plugins()

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(
            f"module 'lightppo' has no attribute {name!r}; public names: {', '.join(sorted(PUBLIC))}"
        )
    globals()[name] = public(name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from lightppo.algorithms.entries import estimator as estimator
    from lightppo.algorithms.entries import policy_loss as policy_loss
    from lightppo.config import PPOConfig as PPOConfig
    from lightppo.trainer.ppo_trainer import PPOTrainer as PPOTrainer
