"""Reward functions of any convention: their source, how their calls run, and what a file with one shows before it runs."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import signal
import symtable
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from lightppo.config import PPOConfig
from lightppo.config.reward_options import ANY_ROUTE, is_file_alone, reward_plan, reward_sources
from lightppo.data.records import Rollout
from lightppo.errors import NonFiniteRewardError, RewardError
from lightppo.option import is_object
from lightppo.ranks import heartbeat
from lightppo.rewards.reward_source import (
    RewardOutput,
    RewardRequest,
    RewardSource,
    describe_sample,
    is_source,
    join_outputs,
)
from lightppo.rewards.reward_styles import (
    Answer,
    BoundFunction,
    NonFinite,
    Reading,
    RewardFunction,
)
from lightppo.user_code import (
    Outcome,
    UserCall,
    awaited,
    error_text,
    fails_when_run,
    importable_name,
    in_daemon_thread,
    is_coroutine_function,
    late,
    load_python_object,
    no_such_name,
    raised,
    split_python_spec,
    without_copies,
)

NO_LABELS = "rows have no label: set --label_key"
# that a file of a reward function is searched for: OpenRLHF's and verl's
FUNCTION_NAMES = ("reward_func", "compute_score")
COMBINE_NAME = "reward_fn"  # that a file is searched for which combines the scores of models


@dataclass(eq=False)
class FunctionReward:
    """Score with a Python function, sync or async, of one of the conventions in ``REWARD_STYLES``; see docs/rewards.md.

    A call that raises, runs past its limit or returns something else than scores never becomes a score. Metrics per
    sample, with retries or ``"unscored"``: ``failures`` (tries that failed), ``timeouts`` (tries past the limit).
    """

    fn: RewardFunction
    name: str | None = None  # None: the function's own
    _: KW_ONLY
    reward_fn_style: str = (
        "auto"  # a name in REWARD_STYLES; auto: told by the names of the parameters
    )
    # naive: one call per sample, in threads or, of coroutines, in one event loop; batch: one call with all samples;
    # prime: calls in processes that are killed at their limit; auto: naive or batch, as the function takes it; dapo:
    # as auto, and scores without further numbers are also logged as reward/acc
    reward_manager: RewardManager = "auto"
    reward_workers: int | None = None  # calls at a time; None: 16, or one process per core
    # Wall-clock seconds per call. A thread that takes longer is left behind.
    reward_timeout: float | None = None
    reward_retries: int = 0  # further tries of a failed call
    on_reward_failure: OnFailure = "error"
    # Where prime loads the function from (path.py:name or module:name), if its module does not tell.
    spec: str | None = None

    def __post_init__(self) -> None:
        check_failure_options(self.on_reward_failure, self.reward_retries, self.reward_timeout)
        if self.reward_manager not in get_args(RewardManager):
            names = ", ".join(get_args(RewardManager))
            raise ValueError(f"--reward_manager: {self.reward_manager!r} is none of {names}")
        if self.reward_workers is not None and self.reward_workers < 1:
            raise ValueError(f"--reward_workers must be ≥ 1, got {self.reward_workers}")
        self.name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        self._label = f"reward function {self.name}"
        self._bound = BoundFunction(self.fn, self.name, self.reward_fn_style)
        self._style = self._bound.style
        self.per_sample = self._style.per_sample
        unfit_managers = {"naive": "a whole batch"}
        if self._style.per_sample:
            unfit_managers = {"batch": "one sample"}
        if argument := unfit_managers.get(self.reward_manager):
            raise ValueError(
                f"--reward_manager {self.reward_manager}: {self._label} takes {argument} f{self._style.shape}"
            )
        self._runner = runner_of(
            self.reward_manager,
            self.fn,
            self.name,
            self.spec,
            self.reward_workers,
            self.reward_timeout,
        )

    def score(self, rollouts: list[Rollout]) -> RewardOutput:
        """Score the samples; a failed call is a :class:`RewardError` with ``on_reward_failure="error"``."""
        if not rollouts:
            return RewardOutput([])
        samples_of_calls = [rollouts]
        if self._style.per_sample:
            samples_of_calls = [[rollout] for rollout in rollouts]

        def read(i: int, value: Any) -> Reading:
            try:
                return self._style.read(value, samples_of_calls[i], self._label)
            except Exception as error:  # code of the values themselves: __len__, tolist, items, …
                return None, f"its answer cannot be read: {error_text(error)}"

        settled = settle(self._runner.run, self._bound.calls(rollouts), read, self.reward_retries)
        failed_calls = [i for i, state in enumerate(settled) if state.error is not None]
        if failed_calls and self.on_reward_failure == "error":
            # Other problems come before numbers that are not finite.
            worst_call = min(failed_calls, key=lambda i: isinstance(settled[i].error, NonFinite))
            failed = settled[worst_call]
            raise self._error(failed, rollouts, worst_call) from failed.cause
        answers: list[Answer] = [
            state.value
            or Answer(RewardOutput([None] * len(samples_of_call)), [True] * len(samples_of_call))
            for state, samples_of_call in zip(settled, samples_of_calls)
        ]
        if self.reward_manager == "dapo":
            for answer in answers:
                if not answer.output.metrics and not all(answer.bad):
                    # Before any penalty, as in verl.
                    answer.output.metrics["acc"] = list(answer.output.scores)
        output = join_outputs([answer.output for answer in answers])
        if self.on_reward_failure == "unscored" or self.reward_retries:
            self._count_failures(output, settled, answers)
        return output

    def _count_failures(
        self, output: RewardOutput, settled: Sequence[Outcome], answers: Sequence[Answer]
    ) -> None:
        """Add to each sample how often its call failed, and ran past its limit."""
        if reserved := sorted({"failures", "timeouts"} & output.metrics.keys()):
            raise RewardError(
                f"{self._label}: its metric {reserved[0]!r} has the name of a count of ours; rename it"
            )
        samples = [
            (state, is_unusable)
            for state, answer in zip(settled, answers)
            for is_unusable in answer.bad
        ]
        # a last try that failed only in part does not count for the samples that it scored
        output.metrics["failures"] = [
            float(state.failures - (state.error is not None and not is_unusable))
            for state, is_unusable in samples
        ]
        output.metrics["timeouts"] = [float(state.timeouts) for state, _ in samples]

    def _error(self, outcome: Outcome, rollouts: list[Rollout], position: int) -> RewardError:
        """Return the error of a failed call."""
        error_class = RewardError
        if isinstance(outcome.error, NonFinite):
            error_class = NonFiniteRewardError
        return error_class(self._error_text(outcome, rollouts, position))

    def _error_text(self, outcome: Outcome, rollouts: list[Rollout], position: int) -> str:
        problem = outcome.error or ""
        if problem.startswith(self._label):
            return problem
        samples = f"a batch of {len(rollouts)}"
        if self._style.per_sample:
            samples = describe_sample(rollouts, position)
        if self._bound.label_parameter and all(
            rollout.prompt.label is None for rollout in rollouts
        ):
            problem += f". {NO_LABELS}"
        event = "failed" if outcome.cause is None else "raised"
        return f"{self._label} {event} on {samples}: {problem}"


def function_source(
    function: str | Callable[..., Any] | RewardSource,
    option: str = "--reward_fn",
    options: Mapping[str, Any] | None = None,
) -> RewardSource:
    """Return the source of a function, of a file with one, or of a source itself; errors name the option.

    ``options`` are further arguments of :class:`FunctionReward`.
    """
    name = None
    python_spec = None
    if isinstance(function, str):
        file_path, default = split_python_spec(function, FUNCTION_NAMES[0], option=option)
        function = load_python_object(function, *FUNCTION_NAMES, option=option)
        python_spec = f"{file_path}:{getattr(function, '__name__', default)}"
        name = Path(python_spec).name
    if is_source(function):
        return function
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"{option}: {function!r} is neither a function nor a source (an object with name and score)"
        )
    try:
        return FunctionReward(function, name, spec=python_spec, **(options or {}))
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def function_reward(request: RewardRequest) -> RewardSource:
    """Return the source of ``--reward_fn``."""
    options = request.options_of(FunctionReward)
    return function_source(request.config.reward.reward_fn, request.flag, options)


# -- what the source of a reward file shows before anything runs it ---------------------------------------------------


class Declared(NamedTuple):
    """Hold a function as its source declares it."""

    function: Callable[..., Any]  # takes the same parameters, and does nothing
    names: frozenset[str]  # that its body reads


def declared_function(spec: str, *default_names: str, option: str = "") -> Declared | None:
    """Return the function that :func:`load_python_object` would load, without running the file; errors as there.

    None: only running it can tell, as of a function with a decorator.
    """
    file_path, name = split_python_spec(spec, default_names[0], option=option)
    try:
        module = ast.parse(source := file_path.read_bytes(), str(file_path))
        symbols = symtable.symtable(source, str(file_path), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        raise fails_when_run(file_path, error, option) from error
    bound_names = {
        symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()
    }
    if name == default_names[0]:
        name = next((default for default in default_names if default in bound_names), name)
    syntax_nodes = list(ast.walk(module))
    matches = [
        syntax_node
        for syntax_node in syntax_nodes
        if name in (getattr(syntax_node, "name", None), _assigned(syntax_node))
    ]
    if name not in bound_names:
        defined_names = [
            syntax_node.name
            for syntax_node in module.body
            if isinstance(syntax_node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        ]
        used_names = {symbol.get_name() for symbol in symbols}
        used_names |= {
            syntax_node.name for syntax_node in syntax_nodes if isinstance(syntax_node, ast.alias)
        }
        if not used_names & {"*", "exec", "globals", "setattr", "vars", "__getattr__"}:
            raise no_such_name(file_path, name, defined_names, option)
    if (
        len(matches) != 1
        or not isinstance(matches[0], ast.FunctionDef | ast.AsyncFunctionDef)
        or matches[0].decorator_list
    ):
        return None
    parameters = matches[0].args
    body = ast.Module(matches[0].body)
    for syntax_node in ast.walk(parameters):
        if isinstance(syntax_node, ast.arg):
            syntax_node.annotation = None
    parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
    parameters.kw_defaults = [default and ast.Constant(None) for default in parameters.kw_defaults]
    # This evaluates nothing of the file but names of parameters.
    function = eval(f"lambda {ast.unparse(parameters)}: None")
    return Declared(
        function,
        frozenset(
            syntax_node.id for syntax_node in ast.walk(body) if isinstance(syntax_node, ast.Name)
        ),
    )


def _assigned(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def check_reward_files(
    config: PPOConfig, flag: str = "--reward_fn"
) -> tuple[BoundFunction | None, str | None]:
    """Refuse a ``path.py`` whose source shows that it cannot be used, with a ``ValueError``; the file does not run.

    Return the function, if it gets all rows, and its parameter with the labels, if it reads them.
    """
    reward_options = config.reward
    sources = reward_sources(config)
    flag_of_file = flag
    python_spec = reward_options.reward_fn if "function" in sources else None
    if not python_spec and is_file_alone(reward_options.remote_rm_url):
        flag_of_file = "--remote_rm_url"
        python_spec = reward_options.remote_rm_url[0]
    if isinstance(reward_options.reward_fn, str) and not python_spec and "model" in sources:
        declared_function(reward_options.reward_fn, COMBINE_NAME, option=flag)
    options = RewardRequest(config, None).options_of(FunctionReward)
    gets_all = list(reward_plan(config) or (ANY_ROUTE,)) == [ANY_ROUTE]
    if is_object(python_spec):
        built_source = function_source(python_spec, flag_of_file, options)
        if built_source is python_spec or not gets_all:
            return None, None
        return BoundFunction(python_spec, built_source.name, config.verifier.reward_fn_style), None
    if python_spec is None:
        return None, None
    declaration = declared_function(python_spec, *FUNCTION_NAMES, option=flag_of_file)
    if declaration is None:
        return None, None
    file_name = Path(python_spec).name
    try:
        FunctionReward(declaration.function, file_name, spec=python_spec, **options)
    except ValueError as error:
        raise ValueError(f"{flag_of_file}: {error}") from None
    bound_function = BoundFunction(declaration.function, file_name, config.verifier.reward_fn_style)
    label_parameter = bound_function.label_parameter
    if label_parameter not in declaration.names:
        label_parameter = None
    return bound_function if gets_all else None, label_parameter


# -- how the calls of a function run: in threads, an event loop or processes, and again where they failed -------------

_CALLS_AT_A_TIME = 16
_MAX_STUCK = 64  # abandoned threads at most
_MAX_BLOCKED = 4  # abandoned event loops at most


RewardManager = Literal["auto", "naive", "batch", "dapo", "prime"]
OnFailure = Literal["error", "unscored"]


class Runner(Protocol):
    """Make the calls of a reward function; may have a ``close``."""

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in their order. What a call raises is in its outcome."""
        ...


def runner_of(
    manager: RewardManager,
    function: Callable[..., Any],
    name: str,
    spec: str | None,
    workers: int | None,
    timeout: float | None,
) -> Runner:
    """Return processes for ``prime``, otherwise threads, or one event loop for a coroutine function.

    Args:
        name: of the function, for messages.
        spec: where another process can load it from (path.py:name), if that is known.
        workers: calls at a time; None: the runner's own number.
        timeout: wall-clock seconds of a call.
    """
    if manager != "prime":
        runner_class = LoopRunner if is_coroutine_function(function) else ThreadRunner
        return runner_class(function, workers or _CALLS_AT_A_TIME, timeout)
    from lightppo.processes.killable_pool import KillablePool

    if timeout is None:
        raise ValueError("--reward_manager prime kills a call at its limit: set --reward_timeout")
    return KillablePool(spec or function_spec(function, name), workers=workers, timeout=timeout)


def function_spec(function: Callable[..., Any], name: str) -> str:
    """Say how another process finds a function: ``path.py:name`` if it has its own file, else ``module:name``."""
    spec = importable_name(function)
    if spec is None:
        raise ValueError(
            f"--reward_manager prime: worker processes cannot find reward function {name}; it must be a function at "
            "the top level of a module or of a file of its own (--reward_fn path.py:name)"
        )
    return spec


def check_failure_options(
    on_reward_failure: str, reward_retries: int = 0, reward_timeout: float | None = None
) -> None:
    """Refuse values out of range, with a ``ValueError`` that names the flag."""
    if on_reward_failure not in get_args(OnFailure):
        raise ValueError(
            f"--on_reward_failure must be {' or '.join(get_args(OnFailure))}, got {on_reward_failure!r}"
        )
    if reward_retries < 0:
        raise ValueError(f"--reward_retries must be ≥ 0, got {reward_retries}")
    if reward_timeout is not None and not reward_timeout > 0:
        raise ValueError(f"--reward_timeout must be > 0 seconds, got {reward_timeout}")


def settle(
    run_calls: Callable[[Sequence[UserCall]], list[Outcome]],
    calls: Sequence[UserCall],
    read: Callable[[int, Any], tuple[Any, str | None]],
    retries: int,
) -> list[Outcome]:
    """Run calls, and run those that failed again, up to ``retries`` times.

    ``read(position, value)`` gives the result, and why it is incomplete or ``None``.
    """
    settled = [Outcome() for _ in calls]
    pending = list(range(len(calls)))
    for _ in range(retries + 1):
        if not pending:
            break
        for i, outcome in zip(pending, run_calls([calls[i] for i in pending])):
            settled_call = settled[i]
            settled_call.error = outcome.error
            settled_call.cause = outcome.cause
            if outcome.error is None:
                result, settled_call.error = read(i, outcome.value)
                if result is not None:
                    settled_call.value = result
            settled_call.failures += settled_call.error is not None
            settled_call.timeouts += outcome.timeouts
        pending = [i for i in pending if settled[i].error is not None]
    return settled


# by the present call
_timers_set: ContextVar[list[str] | None] = ContextVar("timers_set", default=None)


def _watch(function_name: str) -> None:
    """Have a function of ``signal`` tell that a call in a thread wanted a timer, also if the call hides the error."""
    original = getattr(signal, function_name)

    @functools.wraps(original)
    def watched(*arguments: Any) -> Any:
        timers_set = _timers_set.get()
        sets_timer = timers_set is not None and (
            function_name != "signal" or arguments[0] == signal.SIGALRM
        )
        if sets_timer and threading.current_thread() is not threading.main_thread():
            timers_set.append(function_name)
            raise ValueError("signal only works in main thread of the main interpreter")
        return original(*arguments)

    setattr(signal, function_name, watched)


# Here, as a file of the user that is loaded later may have ``from signal import alarm``. Outside of calls in threads
# nothing is changed.
for _name in ("signal", "alarm", "setitimer"):
    _watch(_name)


@contextlib.contextmanager
def _without_timers() -> Iterator[None]:
    """Raise :class:`RewardError` if what runs here wants a timer in a thread, as its answer may be 0 for that reason."""
    timers_set: list[str] = []
    context_token = _timers_set.set(timers_set)
    try:
        yield
    finally:
        _timers_set.reset(context_token)
    if timers_set:
        raise RewardError(
            "the reward function, or a library that it calls (math_verify does so), sets a time limit with "
            f"signal.{timers_set[0]}, which works in the main thread only. Set --reward_manager prime and --reward_timeout,"
            " or --reward_workers 1 without --reward_timeout, --async_rewards and --max_staleness"
        )


@dataclass(eq=False)
class ThreadRunner:
    """Run calls in up to ``workers`` threads; a call that takes more than ``timeout`` seconds is left behind."""

    fn: Callable[..., Any]
    workers: int
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._stuck: list[Future[Outcome]] = []

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in order; raise :class:`RewardError` if too many calls hang."""
        if self.timeout is None and (len(calls) <= 1 or self.workers == 1):
            return [self._call(call) for call in calls]
        return self._run_in_threads(calls)

    def _run_in_threads(self, calls: Sequence[UserCall]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting_calls = deque(range(len(calls)))
        running_calls: dict[Future[Outcome], tuple[int, float]] = {}  # → position, start
        while len(outcomes) < len(calls):
            while waiting_calls and len(running_calls) < self.workers:
                i = waiting_calls.popleft()
                running_calls[in_daemon_thread(self._call, calls[i])] = (i, time.monotonic())
            seconds_left = None
            if self.timeout is not None:
                seconds_left = max(
                    next(iter(running_calls.values()))[1] + self.timeout - time.monotonic(), 0.0
                )
            wait(running_calls, seconds_left, FIRST_COMPLETED)
            for future, (i, start_time) in list(running_calls.items()):
                if future.done():
                    outcomes[i] = future.result()
                elif self.timeout is not None and time.monotonic() >= start_time + self.timeout:
                    outcomes[i] = late(self.timeout)
                    self._give_up(future)
                if i in outcomes:
                    del running_calls[future]
        return [outcomes[i] for i in range(len(calls))]

    def _call(self, call: UserCall) -> Outcome:
        with without_copies("the reward function"), _without_timers():
            try:
                return Outcome(awaited(self.fn(*call.args, **call.kwargs)))
            except (Exception, SystemExit) as error:
                return raised(error)
            finally:
                heartbeat.beat()

    def _give_up(self, future: Future[Outcome]) -> None:
        self._stuck = [stuck for stuck in self._stuck if not stuck.done()] + [future]
        if len(self._stuck) > _MAX_STUCK:
            raise RewardError(
                f"{len(self._stuck)} calls of the reward function hang, longer than --reward_timeout "
                f"{self.timeout:g}; --reward_manager prime can kill them"
            )


@dataclass(eq=False)
class LoopRunner:
    """Run coroutine functions in one event loop, which lives in its own thread as long as this object."""

    fn: Callable[..., Any]
    concurrency: int
    timeout: float | None = None  # seconds after which a call is cancelled
    # Seconds after the last call should have ended, when the loop counts as blocked.
    grace: float = 10.0

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocked = 0

    def run(self, calls: Sequence[UserCall]) -> list[Outcome]:
        """Return one outcome per call, in order. If the function blocks the loop, all calls that wait for it are late."""
        if self._blocked > _MAX_BLOCKED:
            raise RewardError(
                f"the reward function has blocked its event loop {self._blocked} times: it does something slow "
                "without await; --reward_manager prime can kill it"
            )
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            in_daemon_thread(self._loop.run_forever)
        future = asyncio.run_coroutine_threadsafe(self._gather(calls), self._loop)
        if self.timeout is None:
            return future.result()
        rounds = -(-len(calls) // self.concurrency)
        try:
            return future.result(rounds * self.timeout + self.grace)
        except TimeoutError:
            self._loop = None  # left behind with its thread
            self._blocked += 1
            return [late(self.timeout) for _ in calls]

    async def _gather(self, calls: Sequence[UserCall]) -> list[Outcome]:
        semaphore = asyncio.Semaphore(self.concurrency)

        async def limited(call: UserCall) -> Outcome:
            async with semaphore:
                task = asyncio.ensure_future(self._call(call))
                # Not wait_for, which waits until a cancelled coroutine has ended; a coroutine may refuse to.
                ended_tasks, _ = await asyncio.wait({task}, timeout=self.timeout)
                if ended_tasks or self.timeout is None:
                    return task.result()
                task.cancel()
                return late(self.timeout)

        return await asyncio.gather(*(limited(call) for call in calls))

    async def _call(self, call: UserCall) -> Outcome:
        with without_copies("the reward function"), _without_timers():
            try:
                return Outcome(await self.fn(*call.args, **call.kwargs))
            except (Exception, SystemExit) as error:
                # A SystemExit that left a task would end the loop.
                return raised(error)
            finally:
                heartbeat.beat()
