"""Makes the engine of episodes of a run's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightppo.config.rules import template_kwargs
from lightppo.errors import ConfigError
from lightppo.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from lightppo.episodes.environments import Environments
    from lightppo.episodes.episode import Format, FormatsByTools


def with_episodes(
    engine: RolloutEngine, config: Any, strategy: Any, tokenizer: Any
) -> RolloutEngine:
    """Return the engine itself, or the one of episodes around it if ``--env`` or ``--tools`` asks for them."""
    options = config.episodes
    if not options.env and not options.tools:
        return engine
    # Imported here, because most runs play no episodes.
    from lightppo.episodes.calls import AnsweredEnvironments, description_of
    from lightppo.episodes.environments import Environments
    from lightppo.episodes.episode import Limits
    from lightppo.episodes.episode_engine import EpisodeEngine
    from lightppo.episodes.tape import tape_of

    tape = tape_of(strategy, config)
    if tape is not None and tape.plays:
        environments = AnsweredEnvironments(tape.environments)
    else:
        environments = Environments(
            options.env,
            tools=options.tools,
            contract=options.env_contract,
            timeout=options.env_timeout,
            workers=options.env_workers,
        )
        if tape is not None:
            tape.environments = description_of(environments)
    return EpisodeEngine(
        engine,
        tokenizer,
        environments,
        strategy,
        limits=Limits(
            budget=config.rollout.generate_max_len,
            max_opening=config.data.prompt_max_len,
            max_turns=options.max_turns,
            max_turn_tokens=options.max_turn_tokens,
            max_tool_calls=options.max_tool_calls,
            max_observation_len=options.max_observation_len,
            seconds=options.episode_timeout,
        ),
        formats={
            name: format_of(name, environments, tokenizer, config) for name in environments.names
        },
        retries=options.env_retries,
        failure_limit=0.0 if options.on_env_failure == "error" else options.env_failure_limit,
        keeps_rewards=options.env_reward != "none",
        tape=tape,
        batch_invariant=config.flat().get("batch_invariant", False),
    )


def check_openings(building: Any) -> None:
    """Raise ConfigError where a first row cannot open an episode.

    What a ``reset`` adds to the row is seen in the episode alone.
    """
    options = building.config.flat()
    if not options.get("env") and not options.get("tools"):
        return
    from lightppo.data.rows import template_options
    from lightppo.episodes.chat_format import ChatFormat
    from lightppo.episodes.environments import Environments
    from lightppo.episodes.episode import messages_of

    engine = building.rollout_engine
    for rows in (building.rows.get(name) for name in ("prompt_data", "eval_data")):
        if not rows or not isinstance(getattr(engine, "environments", None), Environments):
            continue
        prompt = rows[0]
        name = engine.environments.route(prompt.extra)
        chat = engine.formats[name]
        if not isinstance(chat, ChatFormat) or engine.environments.has_reset(name):
            continue
        try:
            chat.of_row(template_options(prompt.extra)).opening(messages_of(prompt))
        except ConfigError as error:
            raise ConfigError(f"{rows.origin(0)}: {error}") from error


def format_of(
    name: str, environments: Environments, tokenizer: Any, config: Any
) -> Format | FormatsByTools:
    """Return how the conversations of an environment are written; ConfigError if the template cannot write them."""
    from lightppo.episodes.chat_format import ChatFormat, ChatFormats
    from lightppo.episodes.episode import PlainText

    options = {
        "tool_format": config.episodes.tool_format,
        "template_options": template_kwargs(
            config.data.chat_template_kwargs, "--chat_template_kwargs"
        ),
    }
    if environments.is_agent(name):
        if not config.data.apply_chat_template:
            raise ConfigError(
                f"--env {name}: an agent program sends chat messages; set --apply_chat_template"
            )
        if config.data.system_prompt is not None:
            raise ConfigError(
                f"--env {name}: an agent program writes its own messages; leave out --system_prompt"
            )
        return ChatFormats(tokenizer, **options)
    tools = environments.tools(name)
    if not tools and not config.data.apply_chat_template:
        return PlainText(tokenizer)
    chat = ChatFormat(tokenizer, tools, **options, system_prompt=config.data.system_prompt)
    chat.check()
    return chat
