"""The options of built-in reward sources, of reward functions and of what happens when scoring fails."""

from typing import Literal

from lightppo.config.fields import option, section


@section
class VerifierConfig:
    """Verifiers: built-in reward sources, reward functions, failures."""

    reward_source: tuple[str, ...] = option(
        (),
        "Sources to add up, NAME or NAME=WEIGHT: the built-in math, format, code, and function, server, model for what "
        "--reward_fn, --remote_rm_url and --reward_pretrain name.",
    )
    reward_routes: str | None = option(
        None,
        'Sources by data source, as JSON or a JSON file: \'{"gsm8k": {"math": 1, "format": 0.1}, "*": {"model": 1}}\'.',
    )
    reward_routes_by: Literal["data_source", "label"] = option("data_source", "What the keys of --reward_routes are.")
    reward_fn_style: Literal["auto", "queries", "verl", "verl_batch", "trl", "areal"] = option(
        "auto", "Signature of --reward_fn. auto: by the names of its parameters."
    )
    reward_manager: Literal["auto", "naive", "batch", "prime"] = option(
        "auto",
        "How --reward_fn is called: naive per sample in threads, batch once, prime in processes that are killed at "
        "--reward_timeout. auto: by its signature.",
        resume_safe=True,
    )
    reward_workers: int | None = option(
        None, "Threads or processes for scoring. None: 16 threads, a process per core.", ge=1, resume_safe=True
    )
    reward_timeout: float | None = option(
        None,
        "Limit of one call of --reward_fn, or of one comparison (None: 5).",
        unit="seconds",
        gt=0,
        resume_safe=True,
    )
    reward_retries: int = option(0, "Further tries of a call that failed.", ge=0, resume_safe=True)
    on_reward_failure: Literal["error", "unscored"] | None = option(
        None,
        "What a failed call means after the retries: the end, or an unscored sample that leaves its group. None: error "
        "for functions, unscored for verifiers.",
        resume_safe=True,
    )
    check_verifier_status: bool = option(
        False, "Stop where every score of a rollout is at its minimum: more likely a broken verifier.", resume_safe=True
    )
    reward_minimum: float | None = option(
        None,
        "Lowest score that the source gives, for --check_verifier_status and --check_xml_format. None: it says so.",
    )
    async_rewards: bool = option(False, "Score finished samples while others are still generated.", resume_safe=True)
    math_unmarked: bool = option(True, "math: an answer that is not marked counts, the last number or formula.")
    reward_format: Literal["think", "think_answer"] = option("think_answer", "format: the tags that a response has.")
    check_xml_format: bool = option(
        False, "Wrong answers cost less in the form <think>…</think><answer>…</answer>: -0.8, not -1."
    )
    code_score: Literal["all", "share"] = option("all", "code: 1 if all tests pass, or the share of tests that pass.")
    code_compare: Literal["exact", "lines", "float", "set"] = option(
        "float", "code: the laxest comparison of outputs that counts."
    )
    code_float_tolerance: float = option(1e-5, "code: how far numbers may be off, relative.", ge=0, lt=1)
    code_max_tests: int | None = option(None, "code: only the first tests of a row. None: all.", ge=1)
    code_timeout: float = option(6.0, "code: limit of one test.", unit="seconds", gt=0)
    code_total_timeout: float = option(60.0, "code: limit of all tests of a program.", unit="seconds", gt=0)
    code_memory_limit_mb: int = option(1024, "code: memory of a program.", unit="MB", ge=1)
    code_file_limit_mb: int = option(16, "code: size of a file it writes.", unit="MB", ge=1)
    code_output_limit_mb: int = option(16, "code: what it may print.", unit="MB", ge=1)
    code_max_processes: int = option(16, "code: processes of a program.", ge=1)
    code_processes: int | None = option(
        None, "code: sandboxes of a rank. None: one per core of the rank.", ge=1, resume_safe=True
    )
    allow_unsafe_code_execution: bool = option(
        False,
        "code: run programs also where this machine offers no isolation. They can do all that you can.",
        resume_safe=True,
    )
    sandbox_fusion_url: str | None = option(None, "code: have programs run by SandboxFusion there.", resume_safe=True)
    sandbox_fusion_max_concurrent: int = option(64, "Requests at a time.", unit="per rank", ge=1, resume_safe=True)
    sandbox_fusion_memory_limit_mb: int = option(1024, "Memory of a program there.", unit="MB", ge=1)
    sandbox_fusion_language: str = option("python", "Language of the programs there.")
    sandbox_fusion_retries: int = option(3, "Further tries of a failed request.", ge=0, resume_safe=True)
    function_call_url: str | None = option(
        None, "code: have programs run by AReaL's function-call service there.", resume_safe=True
    )
    function_call_max_concurrent: int = option(64, "Requests at a time.", unit="per rank", ge=1, resume_safe=True)
    function_call_batch_size: int = option(1, "Tests per request.", ge=1, resume_safe=True)
    function_call_memory_limit_mb: int = option(
        0, "Memory of a program there; 0: the service's own limit.", unit="MB", ge=0
    )
    function_call_retries: int = option(3, "Further tries of a failed request.", ge=0, resume_safe=True)
