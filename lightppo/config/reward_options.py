"""Options of rewards: sources, the shaping of scores, verifiers; docs/rewards.md."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from lightppo.config.reward_plan import names_in, reward_plan
from lightppo.config.rules import NORM_WORDS, estimator_entry, norm_problem
from lightppo.errors import ConfigError
from lightppo.http_client import check_url
from lightppo.option import Section, option
from lightppo.plugin import REWARD_STYLES
from lightppo.redaction import shown_value

safe = partial(option, resume_safe=True)
shaping = partial(option, needs="trained_scores")
reward_model = partial(option, needs="reward_pretrain")
_CUT = "both say what becomes of a response cut by the limit"


class RewardConfig(Section, of="trainer"):
    """Rewards: sources and the shaping of scores."""

    remote_rm_url: tuple[str, ...] = safe(
        (), "Reward servers, or path.py with reward_func(queries, prompts, labels)."
    )
    reward_fn: str | None = option(
        None,
        "Reward function path.py[:name]. With several --reward_pretrain: the function that combines their scores.",
        takes_object=True,
    )
    normalize_reward: bool = option(
        False,
        "Normalise reward model scores by mean and std from the model's config.",
        needs="reward_pretrain",
    )
    mask_too_long: bool = option(
        False, "Exclude truncated responses from training and advantage statistics."
    )
    reward_clip_range: tuple[float, float] | None = shaping(
        (-10.0, 10.0), "Clip shaped scores to this range. None: off."
    )
    reward_bias: float = shaping(0.0, "Subtracted from every score, before --reward_scaling.")
    reward_scaling: float = shaping(1.0, "Factor on every score; a negative factor flips the sign.")
    max_reward_clip: float | None = shaping(None, "Clip scaled scores to ± this.", gt=0)
    reward_running_norm: bool = shaping(
        False, "Normalise scaled scores by the running mean and deviation over all ranks."
    )
    stop_properly_penalty: float | None = shaping(
        None,
        "Truncated responses score at most this share of their score (0 to 1), or at most this (below 0).",
        le=1,
    )
    overlong_buffer_len: int | None = shaping(
        None,
        "DAPO's soft length limit: responses that reach the last N tokens before --generate_max_len get a penalty.",
        "tokens",
        ge=1,
    )
    overlong_penalty_factor: float | None = option(
        None, "Maximum penalty. None: 1.", gt=0, needs="overlong_buffer_len", off=(1,)
    )
    mask_no_eos_with_zero: bool = shaping(
        False, "Truncated responses score 0; their KL still counts."
    )
    use_dense_reward: bool = shaping(
        False, "Train on one score per response token; the reward source must provide them."
    )
    reward_delta: bool = option(
        False, "Use differences of successive dense scores as rewards.", needs="use_dense_reward"
    )
    reward_norm_by: tuple[str, ...] = option(
        (),
        f"Normalise shaped scores by mean and deviation of all scores or of each group: {NORM_WORDS}",
        needs="trained_scores",
    )
    reward_input_tokenizer: tuple[str, ...] = reward_model(
        (),
        "Tokenizers of the reward models, one for all or one each; they render the chat again. None: the actor's "
        "token ids.",
    )
    reward_max_length: int | None = reward_model(
        None, "Maximum input length of a reward model. None: no limit.", "tokens", ge=2
    )
    reward_truncation: Literal["error", "left"] = reward_model(
        "error", "If an input is longer: stop, or cut its left side. Counted."
    )
    remote_rm_timeout: float = safe(60.0, "Timeout of a request.", "seconds", gt=0)
    remote_rm_retries: int = safe(3, "Retries after a failed request.", ge=0)
    remote_rm_token_env: str | None = safe(
        None, "Environment variable with the servers' bearer token.", needs="server"
    )

    exclusive = (
        ("mask_too_long", "stop_properly_penalty", _CUT),
        ("stop_properly_penalty", "mask_no_eos_with_zero", _CUT),
        (
            "use_dense_reward",
            "reward_running_norm mask_no_eos_with_zero stop_properly_penalty",
            "are of token scores, and of the one score of a response",
        ),
    )

    @staticmethod
    def meant(config: Any) -> Mapping[str, Any]:
        if config.reward.overlong_buffer_len is None:
            return {}
        return {"overlong_penalty_factor": 1.0}

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        yield from _shaping(options)
        yield from _score_norm(options)
        yield from _reward_inputs(options)
        yield from _server_addresses(options)


def _shaping(options: Any) -> Iterator[str]:
    if (options.overlong_buffer_len or 0) > options.generate_max_len:
        yield (
            f"--overlong_buffer_len {options.overlong_buffer_len} exceeds "
            f"--generate_max_len {options.generate_max_len}"
        )
    if options.use_dense_reward and estimator_entry(options.config).needs_greedy_baseline:
        name = f"--advantage_estimator {shown_value(options.advantage_estimator)}"
        yield f"{name} acts on the one score of a response, --use_dense_reward on token scores: leave one out"
    if options.reward_scaling == 0:
        yield "--reward_scaling 0 makes all scores the same: set another factor"


def _score_norm(options: Any) -> Iterator[str]:
    if not options.reward_norm_by:
        return
    yield from norm_problem("reward_norm_by", options.reward_norm_by)
    if options.use_dense_reward:
        yield "--reward_norm_by is of the one score of a response, --use_dense_reward of its tokens: leave one out"
    if estimator_entry(options.config).needs_greedy_baseline:
        yield f"--reward_norm_by: {options.advantage_estimator} compares with scores as they are: leave it out"


def _reward_inputs(options: Any) -> Iterator[str]:
    models = len(options.reward_pretrain)
    tokenizers = len(options.reward_input_tokenizer)
    if models and tokenizers not in (0, 1, models):
        yield f"--reward_input_tokenizer has {tokenizers} for {models} --reward_pretrain: give one for all, or one each"


def _server_addresses(options: Any) -> Iterator[str]:
    """Addresses of services that nobody can be reached at."""
    if options.by_hand:
        return  # a script has made its rewards by hand
    # A tape answers instead of the servers, which may be gone.
    urls = () if getattr(options, "tape_from", None) else options.remote_rm_url
    for url in urls:
        if (
            len(options.remote_rm_url) == 1
            and "://" not in url
            and url.split(":")[0].endswith(".py")
        ):
            continue
        try:
            check_url(url)
        except ValueError as error:
            yield str(error)


# -- verifiers ---------------------------------------------------------------------------------------------------------

judged = partial(option, resume_safe=True, needs="function or math")
code = partial(option, needs="code")
fusion = partial(option, needs="sandbox_fusion_url")
remote_code = partial(option, needs="function_call_url")


class VerifierConfig(Section):
    """Verifiers: built-in reward sources, reward functions, failures."""

    reward_source: tuple[str, ...] = option(
        (),
        "Built-in sources, NAME[=WEIGHT]: math, format, code; scores are added. Also those set by flags: "
        "function, server, model.",
    )
    reward_routes: str | None = option(
        None,
        'Reward sources per data source, as JSON or a JSON file: {"gsm8k": {"math": 1, "format": 0.1}, "*": '
        '{"model": 1}}.',
    )
    reward_routes_by: str = option(
        "data_source",
        "Column with the keys of --reward_routes: data_source, label, or another such as task.",
        needs="reward_routes",
    )
    reward_fn_style: str = option(
        "auto",
        "Signature of --reward_fn. auto: from its parameter names.",
        needs="function",
        names=REWARD_STYLES,
    )
    reward_manager: Literal["auto", "naive", "batch", "dapo", "prime"] = safe(
        "auto",
        "How --reward_fn is called. naive: in threads; batch: one call; prime: processes killed at "
        "--reward_timeout; auto: by signature; dapo: auto, and a bare score is its acc, too.",
        needs="function",
    )
    reward_retries: int = safe(0, "Retries of a failed call.", ge=0, needs="function or math")
    on_reward_failure: Literal["error", "unscored"] | None = safe(
        None,
        "If all tries of a call fail: stop, or leave the sample out. None: error for functions, unscored for "
        "verifiers.",
        needs="function or server or math or code",
    )
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
    code_max_tests: int | None = code(
        None, "Maximum number of tests per row; the first ones are run. None: all.", ge=1
    )
    code_timeout: float = code(6.0, "Time limit per test.", "seconds", gt=0)
    code_memory_limit_mb: int = code(1024, "Memory limit of a program.", "MB", ge=1)
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
    function_call_url: str | None = code(
        None, "Run programs on AReaL's function-call service at this URL.", resume_safe=True
    )

    exclusive = (
        ("reward_source", "reward_routes", "both name the sources"),
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
