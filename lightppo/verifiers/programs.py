"""What runs the programs of ``--reward_source code``: a service, or this machine's sandboxes."""

from __future__ import annotations

from lightppo.rewards.registry import RewardRequest
from lightppo.verifiers.code import CodeReward, CodeVerifier, Comparison, SandboxVerifier
from lightppo.verifiers.sandbox import SandboxLimits, SandboxPool
from lightppo.verifiers.services import FunctionCallVerifier, SandboxFusionVerifier
from lightppo.verifiers.thinking import Thinking


def code_reward(request: RewardRequest) -> CodeReward:
    """``--reward_source code``."""
    return CodeReward(
        verifier=_verifier(request),
        thinking=Thinking(request.tokenizer),
        **request.options_of(CodeReward),
    )


def _verifier(request: RewardRequest) -> CodeVerifier:
    options = request.config.verifier
    if options.function_call_url is not None:
        return FunctionCallVerifier(**request.options_of(FunctionCallVerifier))
    comparison = Comparison(**request.options_of(Comparison))
    if options.sandbox_fusion_url is not None:
        return SandboxFusionVerifier(
            comparison=comparison, **request.options_of(SandboxFusionVerifier)
        )
    limits = SandboxLimits(**request.options_of(SandboxLimits))
    pool = SandboxPool(limits=limits, **request.options_of(SandboxPool))
    return SandboxVerifier(pool=pool, comparison=comparison, **request.options_of(SandboxVerifier))
