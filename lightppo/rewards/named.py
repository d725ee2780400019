"""Built-in reward sources by name, and the weighted sum of sources that a run asks for.

To add one: a class with ``name`` and ``score`` in a file of its own, a line in ``BUILT_IN_SOURCES`` and in
``config.reward_rules.BUILT_IN``, its options in ``config.verifier_section``, a test, a section in docs/verifiers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightppo.config import VerifierConfig
from lightppo.config.reward_rules import ANY_ROUTE, Plan
from lightppo.rewards.code import CodeReward, CodeVerifier, Comparison, SandboxVerifier
from lightppo.rewards.formats import FormatReward, XmlFormatCheck
from lightppo.rewards.math import MathReward
from lightppo.rewards.source import CombinedReward, RewardSource, RoutedReward


def math_source(config: VerifierConfig) -> MathReward:
    """``math``: the final answer equals the label."""
    return MathReward(
        reward_timeout=config.reward_timeout,
        reward_workers=config.reward_workers,
        on_reward_failure=config.on_reward_failure or "unscored",
        reward_retries=config.reward_retries,
        math_unmarked=config.math_unmarked,
    )


def format_source(config: VerifierConfig) -> FormatReward:
    """``format``: the response has the tags."""
    return FormatReward(config.reward_format)


def code_source(config: VerifierConfig) -> CodeReward:
    """``code``: the program passes its tests."""
    return CodeReward(
        _verifier(config),
        code_score=config.code_score,
        code_max_tests=config.code_max_tests,
        on_reward_failure=config.on_reward_failure or "unscored",
    )


def _verifier(config: VerifierConfig) -> CodeVerifier:
    """Who runs the programs: a service, or this machine's sandboxes."""
    from lightppo.rewards.services import FunctionCallVerifier, SandboxFusionVerifier
    from lightppo.sandbox import SandboxLimits, SandboxPool

    comparison = Comparison(config.code_compare, config.code_float_tolerance)
    if config.sandbox_fusion_url is not None:
        return SandboxFusionVerifier(
            config.sandbox_fusion_url,
            comparison,
            sandbox_fusion_max_concurrent=config.sandbox_fusion_max_concurrent,
            sandbox_fusion_memory_limit_mb=config.sandbox_fusion_memory_limit_mb,
            sandbox_fusion_language=config.sandbox_fusion_language,
            sandbox_fusion_retries=config.sandbox_fusion_retries,
            code_timeout=config.code_timeout,
        )
    if config.function_call_url is not None:
        return FunctionCallVerifier(
            config.function_call_url,
            function_call_max_concurrent=config.function_call_max_concurrent,
            function_call_batch_size=config.function_call_batch_size,
            function_call_memory_limit_mb=config.function_call_memory_limit_mb,
            function_call_retries=config.function_call_retries,
            code_timeout=config.code_timeout,
        )
    limits = SandboxLimits(
        code_timeout=config.code_timeout,
        code_memory_limit_mb=config.code_memory_limit_mb,
        code_file_limit_mb=config.code_file_limit_mb,
        code_output_limit_mb=config.code_output_limit_mb,
        code_max_processes=config.code_max_processes,
    )
    pool = SandboxPool(
        limits,
        code_processes=config.code_processes,
        allow_unsafe_code_execution=config.allow_unsafe_code_execution,
    )
    return SandboxVerifier(pool, comparison, code_total_timeout=config.code_total_timeout)


BUILT_IN_SOURCES: dict[str, Callable[[VerifierConfig], RewardSource]] = {
    "math": math_source,
    "format": format_source,
    "code": code_source,
}


def planned_source(plan: Plan, config: VerifierConfig, own: Mapping[str, Callable[[], RewardSource]]) -> RewardSource:
    """The source that ``--reward_source`` or ``--reward_routes`` describes.

    Args:
        plan: route → source → weight, as of :func:`lightppo.config.reward_rules.reward_plan`.
        config: options of the built-in sources.
        own: what makes the run's ``function``, ``server`` and ``model``.

    Returns:
        one source with weight 1 itself; else their weighted sum, by route where there are several.

    Raises:
        ValueError: a source cannot be made; the text names the flag.
    """
    made: dict[str, RewardSource] = {}
    for weights in plan.values():
        for name in weights:
            if name not in made:
                made[name] = BUILT_IN_SOURCES[name](config) if name in BUILT_IN_SOURCES else own[name]()
    routes = {route: [(made[name], weight) for name, weight in weights.items()] for route, weights in plan.items()}
    if list(routes) != [ANY_ROUTE]:
        return RoutedReward(routes, by=config.reward_routes_by)
    pairs = routes[ANY_ROUTE]
    return pairs[0][0] if len(pairs) == 1 and pairs[0][1] == 1.0 else CombinedReward(dict(pairs))


def function_options(config: VerifierConfig) -> dict[str, Any]:
    """How ``--reward_fn`` is called: further arguments of ``FunctionReward``."""
    return {
        "reward_fn_style": config.reward_fn_style,
        "reward_manager": config.reward_manager,
        "reward_workers": config.reward_workers,
        "reward_timeout": config.reward_timeout,
        "reward_retries": config.reward_retries,
        "on_reward_failure": config.on_reward_failure or "error",
    }


def with_format_check(source: RewardSource, config: VerifierConfig) -> RewardSource:
    """``--check_xml_format`` around a source."""
    return XmlFormatCheck(source, minimum=config.reward_minimum) if config.check_xml_format else source
