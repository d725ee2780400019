"""Options of the built-in verifiers: mathematics, formats, programs; docs/rewards.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

from lightppo.config.reward_plan import names_in, reward_plan
from lightppo.errors import ConfigError
from lightppo.option import Section, option

judged = partial(option, resume_safe=True, needs="function or math")
code = partial(option, needs="code")
fusion = partial(option, needs="sandbox_fusion_url")
remote_code = partial(option, needs="function_call_url")


class BuiltInConfig(Section, adds_to="verifier"):
    """Verifiers that come with lightppo."""

    reward_workers: int | None = judged(
        None, "Threads or processes. None: 16 threads, or one process per core.", ge=1
    )
    reward_timeout: float | None = judged(
        None,
        "Limit of a call, or of a comparison's CPU time. None: 5 for comparisons, no limit for calls.",
        "seconds",
        gt=0,
    )
    check_verifier_status: bool = option(
        False,
        "Stop if all scores of a rollout are minimal: the verifier may be broken.",
        needs="reward_minimum or one_source",
        resume_safe=True,
    )
    reward_minimum: float | None = option(
        None,
        "Lowest score of the source. None: declared by the source.",
        needs="check_verifier_status or check_xml_format",
    )
    async_rewards: bool = option(
        False, "Score finished samples while others are still being generated.", resume_safe=True
    )
    math_unmarked: bool = option(
        True, "If no answer is marked, take the last number or formula.", needs="math"
    )
    reward_format: Literal["think", "think_answer"] = option(
        "think_answer", "Required tags in a response.", needs="format"
    )
    check_xml_format: bool = option(
        False,
        "Wrong answers with <think> and <answer> score -0.8, others -1.",
        needs="reward_minimum or one_source",
    )
    code_score: Literal["all", "share"] = code(
        "all", "1 if all tests pass, or the share of passed tests."
    )
    code_compare: Literal["exact", "lines", "float", "set"] = code(
        "float",
        "How loosely outputs are compared: exact, lines, float, set, each looser than the one before.",
    )
    code_float_tolerance: float = code(1e-05, "Relative tolerance for numbers.", ge=0, lt=1)
    code_max_tests: int | None = code(
        None, "Maximum number of tests per row; the first ones are run. None: all.", ge=1
    )
    code_timeout: float = code(6.0, "Time limit per test.", "seconds", gt=0)
    code_total_timeout: float = code(
        60.0, "Time limit for all tests of a program.", "seconds", gt=0
    )
    code_memory_limit_mb: int = code(1024, "Memory limit of a program.", "MB", ge=1)
    code_file_limit_mb: int = code(16, "Maximum size of a file that a program writes.", "MB", ge=1)
    code_output_limit_mb: int = code(16, "Maximum output of a program.", "MB", ge=1)
    code_max_processes: int = code(16, "Maximum number of processes of a program.", ge=1)
    code_processes: int | None = code(
        None, "Sandboxes per rank. None: one per core of the rank.", ge=1, resume_safe=True
    )
    allow_unsafe_code_execution: bool = code(
        False,
        "Run programs even if they cannot be isolated. They can do everything that you can.",
        resume_safe=True,
    )
    sandbox_fusion_url: str | None = code(
        None, "Run programs on this SandboxFusion server.", resume_safe=True
    )
    sandbox_fusion_max_concurrent: int = fusion(
        64, "Concurrent requests.", "per rank", ge=1, resume_safe=True
    )
    sandbox_fusion_memory_limit_mb: int = fusion(
        1024, "Memory limit of a program there.", "MB", ge=1
    )
    sandbox_fusion_language: str = fusion("python", "Language of the programs.")
    sandbox_fusion_retries: int = fusion(3, "Retries of a failed request.", ge=0, resume_safe=True)
    function_call_url: str | None = code(
        None, "Run programs on AReaL's function-call service at this URL.", resume_safe=True
    )
    function_call_max_concurrent: int = remote_code(
        64, "Concurrent requests.", "per rank", ge=1, resume_safe=True
    )
    function_call_batch_size: int = remote_code(1, "Tests per request.", ge=1, resume_safe=True)
    function_call_memory_limit_mb: int = remote_code(
        0, "Memory limit of a program; 0: the service's.", "MB", ge=0
    )
    function_call_retries: int = remote_code(
        3, "Retries of a failed request.", ge=0, resume_safe=True
    )

    conditions: ClassVar[Mapping[str, str]] = {"one_source": "a single source of rewards"}
    exclusive = (
        ("sandbox_fusion_url", "function_call_url", "both run the programs"),
        ("async_rewards", "skip_rollout", "cannot go together: replayed samples are not generated"),
        (
            "async_rewards",
            "reward_pretrain",
            "cannot go together: a reward model does not run beside generation",
        ),
    )

    @staticmethod
    def facts(config: Any) -> Mapping[str, bool]:
        try:
            plan = reward_plan(config)
        except ConfigError:  # which is told by itself
            return {}
        return {"one_source": plan is None or len(plan) == len(names_in(plan)) == 1}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.reward_manager == "prime" and options.reward_timeout is None:
            yield "--reward_manager prime kills a call at its limit: set --reward_timeout"
