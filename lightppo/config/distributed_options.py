"""Options of ranks: DeepSpeed ZeRO and the machine."""

from functools import partial
from typing import Literal

from lightppo.option import Section, option

safe = partial(option, resume_safe=True)


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
        None, "ZeRO stage of reference and EMA. None: 3 at --zero_stage 3, else 0."
    )
    reward_zero_stage: Literal[0, 3] | None = safe(
        None, "ZeRO stage of reward models. None: as the reference."
    )
    adam_offload: bool = safe(
        False, "Keep the actor's optimizer state in CPU memory.", needs="zero_stage=1|2|3"
    )
    critic_adam_offload: bool | None = safe(
        None, "The critic's. None: --adam_offload, at ZeRO 1 to 3.", needs="critic"
    )
    param_offload: bool = safe(
        False, "Keep the actor's parameter shards in CPU memory.", needs="zero_stage=3"
    )
    critic_param_offload: bool | None = safe(
        None, "The critic's. None: --param_offload, at ZeRO 3.", needs="critic"
    )
    ref_offload: bool = safe(
        False,
        "Keep the reference's shards in CPU memory.",
        needs="ref_zero_stage=3 and own_reference",
    )
    reward_offload: bool = safe(
        False, "Keep the reward models' shards in CPU memory.", needs="reward_zero_stage=3"
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
