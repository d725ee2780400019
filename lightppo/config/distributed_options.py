"""Options of ranks: DeepSpeed ZeRO and the machine."""

from functools import partial
from typing import Literal

from lightppo.option import Section, option

safe = partial(option, resume_safe=True)
FROZEN_MODELS = "own_reference or reward_pretrain or teacher_pretrain or enable_ema"


class StrategyConfig(Section):
    """Distribution: DeepSpeed ZeRO and the machine."""

    zero_stage: Literal[0, 1, 2, 3] = safe(
        2,
        "ZeRO stage of actor and critic; 3 also shards the frozen models. Changing it on resume needs --reshape_ckpt.",
    )
    critic_zero_stage: Literal[0, 1, 2, 3] | None = safe(
        None, "ZeRO stage of the critic. None: --zero_stage.", needs="critic"
    )
    ref_zero_stage: Literal[0, 3] | None = safe(
        None,
        "ZeRO stage of the frozen models, the reference and all others. None: 3 at --zero_stage 3, else 0.",
    )
    adam_offload: bool = safe(
        False, "Keep the optimizer states in CPU memory.", needs="zero_stage=1|2|3"
    )
    param_offload: bool = safe(
        False, "Keep the parameter shards in CPU memory.", needs="zero_stage=3"
    )
    ref_offload: bool = safe(
        False,
        "Keep the shards of the frozen models in CPU memory.",
        needs=f"ref_zero_stage=3 and {FROZEN_MODELS}",
    )
    zpg: int = safe(
        1, "ZeRO-3 hpZ: ranks per secondary partition; 1: off.", "ranks", ge=1, needs="zero_stage=3"
    )
    grad_accum_dtype: Literal["fp32", "bf16"] | None = option(
        None, "Type in which gradients are accumulated.", needs="bf16", off=("fp32",)
    )
    overlap_comm: bool | None = safe(
        None,
        "Send gradients, and at ZeRO 3 weights, while the GPU computes. None: on at ZeRO 3 on a GPU.",
        needs="zero_stage=2|3",
        off=(False,),
    )
    seed: int = option(42, "Seed of sampling, shuffling and initialisation.", ge=0, lt=2**63)
    full_determinism: bool = option(False, "Use deterministic kernels, which are slower.")
    local_rank: int = safe(-1, "Set by the launcher.")
    dist_timeout: float = safe(
        30.0, "Maximum wait for another rank or for a sign of life.", "minutes", gt=0
    )
