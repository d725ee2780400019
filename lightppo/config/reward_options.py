"""Options of rewards, and which sources they name, with what weights and needs; docs/rewards.md."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightppo.config.rules import NORM_WORDS, estimator_entry, norm_problem
from lightppo.errors import ConfigError
from lightppo.http_client import check_url
from lightppo.option import Section, is_object, option
from lightppo.plugin import REWARD_STYLES, REWARDS
from lightppo.redaction import shown_value
from lightppo.suggestions import nearest

ANY_ROUTE = "*"  # of the samples without a route of their own
Plan = dict[str, dict[str, float]]  # route → source → weight

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
    """Refuse addresses of services that nobody can be reached at."""
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
        False,
        "Score the answers to a prompt while those to others are still being generated.",
        resume_safe=True,
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


# -- which sources --reward_source and --reward_routes name ----------------------------------------------------------


def built_in() -> list[str]:
    """Return the sources that their names alone stand for."""
    return [name for name, entry in REWARDS.items() if not entry.flag]


def given_sources(config: Any) -> list[str]:
    """Return the sources whose flags are set. The last one scores: ``--reward_fn`` combines the scores of models."""
    flat = config.flat()
    return [name for name, entry in REWARDS.items() if entry.flag and flat[entry.flag]]


def reward_sources(config: Any) -> list[str]:
    """Return names in ``REWARDS`` of what scores training: those that options name, else the one that a flag gives.

    Raises:
        ConfigError: what options name is no source.
    """
    if (plan := reward_plan(config)) is not None:
        return names_in(plan)
    if is_file_alone(
        config.reward.remote_rm_url
    ):  # a file in place of servers has a reward function
        return ["function"]
    return given_sources(config)[-1:]


def further_sources(config: Any) -> set[str]:
    """Return names of the sources that sections ask for, beside those that score training."""
    return {name for section in config.parts() for name in section.sources(config)}


def reward_plan(config: Any) -> Plan | None:
    """Return the sources of ``--reward_source`` or ``--reward_routes``; ``None`` where another flag is the source.

    Raises:
        ConfigError: not of the form, an unknown source, or a weight that is no number.
    """
    verifier = config.verifier
    if verifier.reward_routes is not None:
        return _read_routes(verifier.reward_routes)
    if verifier.reward_source:
        return {ANY_ROUTE: named_weights("--reward_source", verifier.reward_source)}
    return None


def names_in(plan: Plan) -> list[str]:
    """Return all sources of a plan, in the order in which they are called."""
    return list(dict.fromkeys(name for weights in plan.values() for name in weights))


def is_file_alone(urls: Sequence[str]) -> bool:
    """Tell whether ``--remote_rm_url`` names a Python file instead of servers."""
    return len(urls) == 1 and "://" not in urls[0]


def sources_by_flag() -> dict[str, str]:
    """Return the sources that another flag gives, and the flag."""
    return {name: entry.flag for name, entry in REWARDS.items() if entry.flag}


def names_rewards(options: Any) -> bool:
    """Tell whether an option asks for a source, be it right or wrong; ``options`` as of ``Section.problems``."""
    return bool(
        given_sources(options.config) or options.reward_source or options.reward_routes is not None
    )


def named_weights(flag: str, sources: Iterable[str]) -> dict[str, float]:
    """Read source → weight out of texts ``NAME[=WEIGHT]``; errors as of :func:`reward_plan`, which name the flag."""
    parts = (text.partition("=") for text in sources)
    return _read_weights(
        flag, {name.strip(): weight if sign else 1.0 for name, sign, weight in parts}
    )


def _read_routes(text: str) -> Plan:
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ConfigError(f"--reward_routes {text!r} is neither a JSON object nor a file")
        text = path.read_text()
    try:
        routes = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--reward_routes is not JSON: {error}") from None
    if (
        not isinstance(routes, dict)
        or not routes
        or not all(
            isinstance(source_weights, dict) and source_weights
            for source_weights in routes.values()
        )
    ):
        raise ConfigError(
            '--reward_routes must be an object of objects: {"gsm8k": {"math": 1}, "*": {"model": 1}}'
        )
    return {
        route: _read_weights(f"--reward_routes {route!r}", weights)
        for route, weights in routes.items()
    }


def _read_weights(flag: str, weights: Mapping[str, Any]) -> dict[str, float]:
    weight_of_source: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in REWARDS:
            source_names = ", ".join((*built_in(), *sources_by_flag()))
            raise ConfigError(
                f"{flag}: unknown source {name!r}{nearest(name, REWARDS)}; known are {source_names}"
            )
        try:
            weight_of_source[name] = float(weight)
        except (TypeError, ValueError):
            weight_of_source[name] = math.nan
        if not math.isfinite(weight_of_source[name]):
            raise ConfigError(f"{flag}: the weight of {name} must be a number, got {weight!r}")
    return weight_of_source


# -- what cannot work ------------------------------------------------------------------------------------------------


def source_problems(options: Any) -> Iterator[str]:
    """Refuse a run whose sources lack what they need, or do not fit together."""
    if options.by_hand:
        return
    yield from wrong_reward("reward_fn", options.reward_fn)
    try:
        plan = reward_plan(options.config)
        further = further_sources(options.config)
    except ConfigError:  # which is told by itself
        return
    if plan is None:
        yield from _flag_problems(options)
    else:
        yield from _plan_problems(options, set(names_in(plan)), further)
    models = len(options.reward_pretrain)
    if models > 1 and not options.reward_fn:
        yield f"--reward_pretrain has {models} models: --reward_fn path.py:name must combine their scores"


def _flag_problems(options: Any) -> Iterator[str]:
    """Refuse several sources by flags; beside models, a function combines their scores."""
    flags = sources_by_flag()
    flagged_sources = given_sources(options.config)
    scoring = [
        name for name in flagged_sources if name != "function" or "model" not in flagged_sources
    ]
    for name in scoring[:-1]:
        pair = f"--{flags[scoring[-1]]} and --{flags[name]}"
        yield f"{pair}: leave one out, or add them up by --reward_source"


def _plan_problems(options: Any, planned_sources: set[str], further: set[str]) -> Iterator[str]:
    """Refuse a source that is named without its flag, and a flag whose source is not named."""
    flag_of_plan = "--reward_source" if options.reward_routes is None else "--reward_routes"
    combines = {"function"} if len(options.reward_pretrain) > 1 else set()
    flagged_sources = given_sources(options.config)
    for name, flag in sources_by_flag().items():
        if name in planned_sources and name not in flagged_sources:
            yield f"{flag_of_plan} names {name!r}, which is what --{flag} gives: set --{flag}"
        if name in flagged_sources and name not in planned_sources | combines | further:
            yield f"--{flag} is set, but {flag_of_plan} does not name {name!r}: add it, or leave --{flag} out"
    if planned_sources & combines:
        yield "--reward_fn combines the scores of several --reward_pretrain: it cannot be a source itself too"


def wrong_reward(name: str, reward_object: Any) -> Iterator[str]:
    """Say why an object of the user's own, the value of this option, scores nothing."""
    is_usable = callable(reward_object) or callable(getattr(reward_object, "score", None))
    if is_object(reward_object) and (isinstance(reward_object, type) or not is_usable):
        yield f"--{name}: {reward_object!r} scores nothing: give a function, or an object with name and score(rollouts)"
