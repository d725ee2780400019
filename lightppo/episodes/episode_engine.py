"""Episodes as a rollout engine: around an engine that samples turns, with environments between them."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from lightppo.config.rules import template_kwargs
from lightppo.data.records import Prompt, Rollout
from lightppo.data.rows import template_options
from lightppo.episodes.calls import (
    AnsweredEnvironments,
    Direct,
    EpisodeTape,
    description_of,
)
from lightppo.episodes.chat_format import ChatFormat, ChatFormats
from lightppo.episodes.env_failures import EnvironmentFailed
from lightppo.episodes.environments import Environments, Session
from lightppo.episodes.episode import (
    Episode,
    Format,
    Limits,
    PlainText,
    messages_of,
)
from lightppo.episodes.episode_metrics import EpisodeSums
from lightppo.episodes.hf_turns import generate_turns
from lightppo.episodes.rewards import has_failed
from lightppo.episodes.tape import Tape, tape_of
from lightppo.errors import ConfigError, RolloutError
from lightppo.ranks import Ranks, heartbeat
from lightppo.rollout.engine import (
    Capabilities,
    RolloutEngine,
    SamplingParams,
    Turn,
    TurnSource,
    capabilities_of,
)
from lightppo.rollout.hf import HFRolloutEngine, request_streams
from lightppo.rollout.sampling import joint_seed

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0  # between two signs of life while the environments are at it
_LINGER_SECONDS = 0.02  # for turns that come together: their prompts go through the model together
_MOST_NAMED = 3  # failures in a message
_GRACE_SECONDS = 10.0  # beyond the limit of a call, until what ends episodes counts as hung
CUT = " … [cut] … "


class EpisodeEngine:
    """Sample episodes, as a :class:`~lightppo.rollout.engine.RolloutEngine`.

    ``generate`` plays ``sampling.n`` episodes of each prompt; ``sampling.max_new_tokens`` is the budget of each,
    observations included. The environments run on an event loop in a thread of their own, while this one decodes.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        environments: Environments | AnsweredEnvironments,
        strategy: Ranks,
        *,
        limits: Limits,
        formats: dict[str, Format | ChatFormats],
        retries: int = 0,
        failure_limit: float = 1.0,
        keeps_rewards: bool = True,
        tape: Tape | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """``batch_invariant``: log probs do not depend on the turns that went through the model together."""
        self.engine = engine
        self._generate_turns = turn_sampler(engine)
        self.tokenizer = tokenizer
        self.environments = environments
        self.strategy = strategy
        self.limits = limits
        self.formats = formats
        self.retries = retries
        self.failure_limit = failure_limit
        self.keeps_rewards = keeps_rewards
        self.tape = tape
        self.batch_invariant = batch_invariant
        self.episode_sums = EpisodeSums()  # of episodes since it was last asked
        # Sessions whose objects reward functions may ask, of the last two calls: a greedy baseline is
        # sampled before the samples are scored.
        self._last_sessions: deque[list[Session]] = deque([[], []], maxlen=2)
        self._stages: list[_Stage] = []  # of calls that have not ended
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        """Return those of the engine within.

        Turns go through the model as they come, so the last digits of their log probs depend on the time that
        environments take: the trainer makes its own.
        """
        of_engine = capabilities_of(self.engine)
        return replace(
            of_engine,
            exact_log_probs=of_engine.exact_log_probs and self.batch_invariant,
            reports_finished=True,
            heats_first_token=False,
            samples_ahead=of_engine.samples_ahead and hasattr(self.engine, "start_turns"),
        )

    @property
    def last_stats(self) -> dict[str, float]:
        return self.engine.last_stats

    @property
    def adapter(self) -> str | None:
        return getattr(self.engine, "adapter", None)

    # -- episodes --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Play the episodes; those whose environment failed for good have no tokens and are not scored. Collective.

        Raises:
            RolloutError: on every rank, if more of the batch's episodes failed than ``failure_limit`` allows, or the
                samples of a prompt do not start alike.
        """
        pending = self._begin_episodes(prompts, sampling, on_finished)
        try:
            self._generate_turns(pending.stage, pending.sampling)
        finally:
            self._end_stage(pending.stage)
        return self._ended_rollouts(pending, ahead=False)

    def start(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> _PendingEpisodes:
        """Play the episodes while the trainer trains, with an engine that samples ahead; :meth:`finish` ends it."""
        pending = self._begin_episodes(prompts, sampling, on_finished)
        pending.ticket = self.engine.start_turns(pending.stage, pending.sampling)
        return pending

    def finish(self, pending: _PendingEpisodes) -> list[Rollout]:
        """Wait for the episodes of :meth:`start`; return and raise as :meth:`generate`. Collective."""
        try:
            self.engine.finish(pending.ticket)
        finally:
            self._end_stage(pending.stage)
        return self._ended_rollouts(pending, ahead=True)

    def _end_stage(self, stage: _Stage) -> None:
        stage.end()
        self._stages.remove(stage)

    def _begin_episodes(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object],
    ) -> _PendingEpisodes:
        """Begin all episodes, in their thread."""
        sampling = self._ending(sampling)
        self._close_oldest_sessions([])
        stage = _Stage(self._loop, self.limits.max_opening + sampling.max_new_tokens, on_finished)
        self._stages.append(stage)
        streams = request_streams(prompts, sampling)
        requests = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        batch_number = 0
        if self.tape is not None:
            batch_number = self.tape.next_batch()
        pending = _PendingEpisodes(stage, streams, sampling)
        episodes: dict[Key, Coroutine[Any, Any, Rollout]] = {}
        for number, (prompt, sample_index) in enumerate(requests):
            episode = Episode(
                prompt,
                sample_index,
                stream=streams[number][1],
                seed=joint_seed([sampling.seed, prompt.index]) % 2**31,
                format=self.formats[self.environments.route(prompt.extra)],
                environments=self.environments,
                limits=replace(self.limits, budget=sampling.max_new_tokens),
                sample=stage.sample,
                shortened=self.shortened,
                keeps_rewards=self.keeps_rewards,
                keep_open=self._last_sessions[-1].append if self._keeps_objects else None,
                calls=self._calls((batch_number, *streams[number]), sample_index),
            )
            episodes[streams[number]] = self._played(episode, pending.sums)
        stage.begin(episodes)
        return pending

    def _ended_rollouts(self, pending: _PendingEpisodes, ahead: bool) -> list[Rollout]:
        """Return the rollouts of episodes that have ended; ``ahead``: for the next step. Collective."""
        seconds = time.monotonic() - pending.start_time
        pending.sums.generated(seconds, pending.stage.waited)
        self.episode_sums.include(pending.sums, ahead)
        rollouts = [pending.stage.rollouts[episode_key] for episode_key in pending.episode_keys]
        self._check_failures(rollouts)
        _share_openings(rollouts, pending.sampling.n)
        return rollouts

    def _calls(self, episode_key: tuple[int, int, int], sample_index: int) -> Direct:
        """Return how an episode asks: by way of the tape where there is one, and the run is on its way."""
        if self.tape is None or not self.tape.is_on:
            return Direct()
        # Reward functions ask the objects of TRL's environments, and no tape has these.
        may_answer = not self._keeps_objects
        return EpisodeTape(self.tape, episode_key, sample_index, may_answer=may_answer)

    @property
    def _keeps_objects(self) -> bool:
        return self.environments.contract == "trl"

    def _close_oldest_sessions(self, next_sessions: list[Session]) -> None:
        """Close the sessions of the call before the last one."""
        oldest_sessions = self._last_sessions[0]
        self._last_sessions.append(next_sessions)
        if oldest_sessions:
            for error in self._done(_all_closed(oldest_sessions), "to close environments"):
                logger.warning("%s", error)  # its episode has been scored

    def _done(self, coroutine: Coroutine[Any, Any, Any], purpose: str) -> Any:
        """Return what a coroutine gives in the episodes' thread, as soon as one call of an environment may take.

        Raises:
            RolloutError: it takes longer; the text says where the thread is.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        seconds = self.environments.timeout + _GRACE_SECONDS
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise RolloutError(
                f"--env: it takes more than {seconds:g} s {purpose}: {_whereabouts(self._thread)}"
            ) from None

    def _ending(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling with which turns end where their templates say, too."""
        stop_ids = {
            stop_id for chat_format in self.formats.values() for stop_id in chat_format.stop_ids
        }
        return replace(
            sampling, stop_token_ids=tuple(sorted({*sampling.stop_token_ids, *stop_ids}))
        )

    async def _played(self, episode: Episode, sums: EpisodeSums) -> Rollout:
        """Return the episode; what it was told so far is written down if an error breaks it off."""
        tries: list[EnvironmentFailed] = []
        start_time = time.monotonic()
        try:
            rollout = await self._tried(episode, tries)
        finally:
            episode.calls.flush()
        rollout.extras |= _counts(tries)
        sums.add(rollout, tries, time.monotonic() - start_time)
        return rollout

    async def _tried(self, episode: Episode, tries: list[EnvironmentFailed]) -> Rollout:
        """Play an episode, again where its environment fails; without tokens if it always does."""
        calls = episode.calls
        for try_number in range(calls.tries or self.retries + 1):
            calls.begin_try(try_number)
            try:
                rollout = await episode.play()
            except EnvironmentFailed as error:
                tries.append(error)
            else:
                calls.end()
                return rollout
        calls.end()
        failed_rollout = Rollout(
            episode.prompt, episode.sample_index, [], "", "stop", [], trained=[], turns=[]
        )
        failed_rollout.texts["failure"] = str(tries[-1])
        return failed_rollout

    def _check_failures(self, rollouts: Sequence[Rollout]) -> None:
        """Raise on every rank if too many episodes failed on all of them. Collective."""
        failures = [rollout.texts["failure"] for rollout in rollouts if has_failed(rollout)]
        rank_failures = self.strategy.all_gather_object((len(rollouts), failures))
        episode_count = sum(count for count, _ in rank_failures)
        failure_counts = Counter(failure for _, failures in rank_failures for failure in failures)
        failure_count = failure_counts.total()
        if failure_count and self.strategy.is_rank_0():
            logger.warning(
                "the environments of %d of %d episodes failed, which are left out: %s",
                failure_count,
                episode_count,
                _most_common(failure_counts),
            )
        if failure_count > self.failure_limit * episode_count:
            raise RolloutError(
                f"the environments of {failure_count} of {episode_count} episodes failed (--env_failure_limit "
                f"{self.failure_limit:g}): {_most_common(failure_counts)}"
            )

    def shortened(self, text: str, limit: int) -> str:
        """Return a text of about ``limit`` tokens: its beginning and its end."""
        token_ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if len(token_ids) <= limit:
            return text
        head_ids = token_ids[: (limit + 1) // 2]
        tail_ids = token_ids[len(token_ids) - limit // 2 :]
        return CUT.join(
            self.tokenizer.decode(part_ids) for part_ids in (head_ids, tail_ids) if part_ids
        )

    # -- what the engine within does -------------------------------------------------------------------------------

    def sync_weights(self, actor: nn.Module) -> None:
        self.engine.sync_weights(actor)

    def differing_weights(self) -> tuple[list[str], list[str]]:
        return self.engine.differing_weights()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """End the environments, and the engine.

        Raises:
            RolloutError: the environments do not end in time; the engine is closed then, too.
        """
        try:
            if not self._loop.is_closed():
                self._end_episodes()
        finally:
            self.engine.close()

    def _end_episodes(self) -> None:
        for stage in self._stages:  # of a run that ends while it samples ahead
            stage.end()
        try:
            self._close_oldest_sessions([])
            self._close_oldest_sessions([])
            self._done(self.environments.close(), "to end all environments")
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
        if self._thread.is_alive():
            raise RolloutError(
                f"--env: the episodes' thread does not end: {_whereabouts(self._thread)}"
            )


def turn_sampler(engine: RolloutEngine) -> Callable[[TurnSource, SamplingParams], None]:
    """Return what samples turns with an engine. ConfigError: nothing does."""
    engine_sampler = getattr(engine, "generate_turns", None)
    if engine_sampler is not None:
        return engine_sampler
    if isinstance(engine, HFRolloutEngine):
        return partial(generate_turns, engine)
    engine_name = type(engine).__name__
    raise ConfigError(f"--env: {engine_name} samples no turns; set --rollout_engine hf or vllm")


async def _all_closed(sessions: Sequence[Session]) -> list[BaseException]:
    """Return what went wrong in closing sessions, all at once."""
    outcomes = await asyncio.gather(
        *(session.close() for session in sessions), return_exceptions=True
    )
    unexpected_errors = [
        outcome for outcome in outcomes if outcome and not isinstance(outcome, EnvironmentFailed)
    ]
    if unexpected_errors:
        raise unexpected_errors[0]
    return [outcome for outcome in outcomes if outcome]


def _whereabouts(thread: threading.Thread) -> str:
    """Return what a thread is at: the innermost lines of its stack."""
    frame = sys._current_frames().get(thread.ident)
    if frame is None:
        return "it has ended"
    stack = traceback.extract_stack(frame)[-_MOST_NAMED:]
    return f"it is at {' → '.join(f'{line.filename}:{line.lineno} {line.name}' for line in stack)}"


def _counts(tries: Sequence[EnvironmentFailed]) -> dict[str, float]:
    """Return failed tries, for the counts of failures and time-outs; none without any."""
    if not tries:
        return {}
    timeouts = sum(error.kind == "timeout" for error in tries)
    return {"failures": float(len(tries)), "timeouts": float(timeouts)}


def _most_common(counts: Counter[str]) -> str:
    examples = [f"{text} ({count})" for text, count in counts.most_common(_MOST_NAMED)]
    return "; ".join(examples)


def _share_openings(rollouts: Sequence[Rollout], group_size: int) -> None:
    """Give all samples of a prompt one Prompt; RolloutError if their openings differ."""
    for first_index in range(0, len(rollouts), group_size):
        group = [
            rollout
            for rollout in rollouts[first_index : first_index + group_size]
            if not has_failed(rollout)
        ]
        for rollout in group:
            if rollout.prompt.token_ids != group[0].prompt.token_ids:
                raise RolloutError(
                    f"prompt {rollout.prompt.index}: samples {group[0].sample_index} and {rollout.sample_index} start "
                    "with different texts: reset must give the same for the same row and seed (take seed=, or set "
                    "--env_workers, where random is seeded)"
                )
            rollout.prompt = group[0].prompt


# -- between the two threads ---------------------------------------------------------------------------------------


Key = tuple[int, int]  # of an episode: index of its prompt, number of its stream


@dataclass
class _PendingEpisodes:
    """The episodes of one call, on their way."""

    stage: _Stage
    episode_keys: Sequence[Key]  # in the order of the rollouts
    sampling: SamplingParams
    ticket: Any = None  # of the engine within, if it samples ahead
    sums: EpisodeSums = field(default_factory=EpisodeSums)
    start_time: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _TurnRequest:
    """Hold a turn that waits for the engine, and who waits for its tokens."""

    turn: Turn
    future: asyncio.Future[Rollout]


class _Stage:
    """Bring the turns of the episodes of one call, as a :class:`~lightppo.rollout.engine.TurnSource`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        longest_sequence: int,
        on_finished: Callable[[list[Rollout]], object],
    ) -> None:
        self.longest = longest_sequence
        self.rollouts: dict[Key, Rollout] = {}
        self._loop = loop
        self._on_finished = on_finished
        # What the episodes' thread sends: turns to sample, and episodes that have ended.
        self._arrivals: queue.SimpleQueue[_TurnRequest | tuple[Key, Any]] = queue.SimpleQueue()
        self._futures: dict[int, asyncio.Future[Rollout]] = {}  # by id of the turn
        # What goes to the episodes' thread, and whether the thread has been woken: one call wakes it for all that has
        # come.
        self._sampled: deque[tuple[asyncio.Future[Rollout], Rollout]] = deque()
        self._is_woken = False
        # The episodes that have not ended. None: not begun yet.
        self._tasks: dict[Key, asyncio.Task[Rollout] | None] = {}
        self._decoding = 0  # turns that the engine has
        self.waited = 0.0  # seconds in which it had none, and waited for one

    def begin(self, episodes: Mapping[Key, Coroutine[Any, Any, Rollout]]) -> None:
        """Start episodes in their thread."""
        self._tasks |= dict.fromkeys(episodes)
        self._loop.call_soon_threadsafe(self._create_tasks, episodes)

    def _create_tasks(self, episodes: Mapping[Key, Coroutine[Any, Any, Rollout]]) -> None:
        for episode_key, episode in episodes.items():
            task = self._tasks[episode_key] = self._loop.create_task(episode)
            task.add_done_callback(partial(self._send_end, episode_key))

    def _send_end(self, episode_key: Key, task: asyncio.Task[Rollout]) -> None:
        if not task.cancelled():
            task.exception()  # is raised where the episode's end is read, if it still is
        self._arrivals.put((episode_key, task))

    async def sample(self, turn: Turn) -> Rollout:
        """Return what the engine samples. In the episodes' thread."""
        future = self._loop.create_future()
        self._arrivals.put(_TurnRequest(turn, future))
        return await future

    @property
    def left(self) -> int:
        return len(self._tasks)

    def take(self, wait: bool) -> list[Turn] | None:
        start_time = time.monotonic()
        turns = self._taken(wait)
        if wait and not self._decoding:
            self.waited += time.monotonic() - start_time
        self._decoding += len(turns)
        if not turns and not self._tasks:
            return None
        # Longest first, equal prompts together; not in the order in which threads bring them.
        return sorted(
            turns, key=lambda turn: (-len(turn.token_ids), turn.prompt.index, turn.sample_index)
        )

    def _taken(self, wait: bool) -> list[Turn]:
        turns: list[Turn] = []
        while self._may_come(turns):
            item = self._next(wait, turns)
            if item is None:
                break
            if isinstance(item, _TurnRequest):
                self._futures[id(item.turn)] = item.future
                turns.append(item.turn)
            else:
                self._finish(*item)
        return turns

    def _may_come(self, turns: list[Turn]) -> bool:
        """Tell whether an episode is at its environment, or has brought something since."""
        at_environments = len(self._tasks) - self._decoding - len(turns)
        return at_environments > 0 or not self._arrivals.empty()

    def _next(self, wait: bool, turns: list[Turn]) -> _TurnRequest | tuple[Key, Any] | None:
        """Return what episodes bring; None: nothing now, and no need to wait for it."""
        while True:
            try:
                if not wait:
                    return self._arrivals.get_nowait()
                return self._arrivals.get(timeout=_LINGER_SECONDS if turns else _BEAT_SECONDS)
            except queue.Empty:
                heartbeat.beat()
                if not wait or turns:
                    return None

    def ended(self, turn: Turn, rollout: Rollout) -> None:
        self._decoding -= 1
        self._sampled.append((self._futures.pop(id(turn)), rollout))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        """Hand over what the engine sampled; in the episodes' thread."""
        self._is_woken = False
        while self._sampled:
            future, rollout = self._sampled.popleft()
            if not future.done():
                future.set_result(rollout)

    def goes_on(self, turn: Turn) -> bool:
        task = self._tasks.get((turn.prompt.index, turn.sample_index))
        return not turn.final and task is not None and not task.done()

    def end(self) -> None:
        """End all episodes, also after an error."""
        self._loop.call_soon_threadsafe(self._cancel_tasks)

    def _cancel_tasks(self) -> None:
        for task in filter(None, list(self._tasks.values())):
            task.cancel()

    def _finish(self, episode_key: Key, task: Any) -> None:
        """End an episode; raise what it raised."""
        del self._tasks[episode_key]
        self.rollouts[episode_key] = task.result()
        self._on_finished([self.rollouts[episode_key]])


def with_episodes(
    engine: RolloutEngine, config: Any, strategy: Any, tokenizer: Any
) -> RolloutEngine:
    """Return the engine of episodes around another one, for ``--env`` and ``--tools``."""
    options = config.episodes
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
            environment_name: format_of(environment_name, environments, tokenizer, config)
            for environment_name in environments.names
        },
        retries=options.env_retries,
        failure_limit=options.env_failure_limit,
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
    engine = building.rollout_engine
    for rows in (
        building.rows.get(environment_name) for environment_name in ("prompt_data", "eval_data")
    ):
        if not rows or not isinstance(getattr(engine, "environments", None), Environments):
            continue
        prompt = rows[0]
        environment_name = engine.environments.route(prompt.extra)
        chat_format = engine.formats[environment_name]
        if not isinstance(chat_format, ChatFormat) or engine.environments.has_reset(
            environment_name
        ):
            continue
        try:
            chat_format.of_row(template_options(prompt.extra)).opening(messages_of(prompt))
        except ConfigError as error:
            raise ConfigError(f"{rows.origin(0)}: {error}") from error


def format_of(
    environment_name: str, environments: Environments, tokenizer: Any, config: Any
) -> Format | ChatFormats:
    """Return how the conversations of an environment are written; ConfigError if the template cannot write them."""
    options = {
        "tool_format": config.episodes.tool_format,
        "template_options": template_kwargs(
            config.data.chat_template_kwargs, "--chat_template_kwargs"
        ),
    }
    if environments.is_agent(environment_name):
        if not config.data.apply_chat_template:
            raise ConfigError(
                f"--env {environment_name}: an agent program sends chat messages; set --apply_chat_template"
            )
        if config.data.system_prompt is not None:
            raise ConfigError(
                f"--env {environment_name}: an agent program writes its own messages; leave out --system_prompt"
            )
        return ChatFormats(tokenizer, **options)
    tools = environments.tools(environment_name)
    if not tools and not config.data.apply_chat_template:
        return PlainText(tokenizer)
    chat_format = ChatFormat(tokenizer, tools, **options, system_prompt=config.data.system_prompt)
    chat_format.check()
    return chat_format
