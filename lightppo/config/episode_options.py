"""Options of episodes, environments and tools over several turns, and of the tape; docs/environments.md."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from lightppo.config.reward_options import reward_sources
from lightppo.errors import ConfigError
from lightppo.option import Section, option

played = partial(option, needs="env or tools")
world = partial(option, needs="env or tools", resume_safe=True)
outside = partial(option, needs="env or tools or server or function", resume_safe=True)


class EpisodesConfig(Section):
    """Episodes: environments and tools over several turns."""

    env: tuple[str, ...] = option(
        (),
        "Classes of environments or agent programs, path.py:Name or name=path.py:Name. Of several, the row's column "
        "environment names one.",
        takes_object=True,
    )
    tools: tuple[str, ...] = option(
        (),
        "Functions that the model may call, path.py:f,g; or python, which runs programs in the sandbox.",
        takes_object=True,
    )
    env_contract: Literal["lightppo", "trl"] = option(
        "lightppo",
        "lightppo: ToolError is text for the model, any other exception a failure. trl: TRL's environment classes; any "
        "exception of a tool is text for the model.",
        needs="env",
    )
    tool_format: str = played(
        "auto",
        "How the model writes calls: response_template, hermes, qwen_xml, llama3, mistral, or a name of vLLM's "
        "tool parsers. auto: by the chat template.",
    )
    max_turns: int | None = played(None, "Most turns of the model in an episode. None: any.", ge=1)
    max_turn_tokens: int | None = played(
        None, "Most tokens of a turn. None: what is left of --generate_max_len.", "tokens", ge=1
    )
    max_tool_calls: int | None = played(None, "Most calls in an episode. None: any.", ge=1)
    max_observation_len: int | None = played(
        None,
        "Most tokens of an observation; a longer one keeps its beginning and its end. None: any.",
        "tokens",
        ge=2,
    )
    env_reward: Literal["sum", "turns", "none"] = played(
        "sum",
        "Rewards of environments, for --reward_source environment. sum: one score, of all turns and get_reward. turns: "
        "each on its turn's last token. none: they are not asked for.",
    )
    env_timeout: float = world(60.0, "Most seconds of a call of an environment.", "seconds", gt=0)
    episode_timeout: float | None = world(
        None, "Most seconds of all calls of an episode. None: any.", "seconds", gt=0
    )
    env_workers: int = world(
        0,
        "Processes per rank that environments run in, each of which can be killed. 0: threads of the rank.",
        ge=0,
    )
    env_retries: int = world(1, "Times that a failed episode is played again.", ge=0)
    env_failure_limit: float = world(
        0.5,
        "An episode whose environment failed for good is left out and counted. If more than this share of a batch's "
        "episodes fail, the run ends.",
        ge=0,
        le=1,
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        sources: set[str] = set()
        with suppress(ConfigError):  # of a name that is unknown, which is told by itself
            sources = reward_sources(options.config)
        if "environment" in sources and not options.env:
            yield "--reward_source environment: there is none; set --env, or another reward"
        if not options.env and not options.tools:
            return
        if "environment" in sources and options.env_reward == "none":
            yield "--reward_source environment needs --env_reward sum or turns"
        if options.env_reward == "turns" and not options.use_dense_reward:
            yield "--env_reward turns puts rewards on tokens: set --use_dense_reward"
        if getattr(options, "tensor_parallel_size", 1) > 1:
            yield "--env and --tools need --tensor_parallel_size 1: ranks play different episodes"
        if options.fire_sampling:
            yield "--fire_sampling has another temperature for the first token: leave it out with --env or --tools"


class TapeConfig(Section):
    """The tape: replies from outside, written down."""

    tape: Literal["auto", "all", "off"] = outside(
        "auto",
        "Replies that --save_path/tape keeps. auto: of environments, tools and reward servers; all: of reward "
        "functions, too.",
    )
    tape_from: str | None = outside(
        None,
        "Folder of a run whose tape answers in place of environments, tools, reward servers and functions. None of "
        "them is loaded or asked.",
    )

    @staticmethod
    def problems(options: Any) -> Iterator[str]:
        if options.tape_from is None:
            return
        if options.tape != "auto":
            yield f"--tape_from plays a tape and writes none: leave --tape {options.tape} out"
        if options.dry_run:
            yield "--dry_run samples other prompts than --tape_from has: leave one of them out"
