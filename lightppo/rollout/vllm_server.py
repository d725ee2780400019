"""Rollouts by vLLM servers, over HTTP: prompts shared out by length, weights pushed to each, lost servers replaced."""

from __future__ import annotations

import base64
import logging
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RefusedError, RequestError, RolloutError, UnreachableError
from lightppo.http import HTTPClient, read_token
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import request_streams
from lightppo.rollout.vllm import (
    OnFinished,
    ResponseReader,
    longest_sequence,
    rollout_stats,
    vocab_size_of,
    vocabulary_limits,
)
from lightppo.rollout.weights import (
    PROTOCOL,
    Transport,
    architecture,
    buckets,
    differing_weights,
    full_weights,
    open_transport,
    trainer_fingerprints,
)
from lightppo.strategy.zero3 import find_hf_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_QUICK_SECONDS = 30.0  # for what needs no computing
_START_TRY_SECONDS = 2.0  # between two looks at a server that is still starting
_START = "start it by examples/serve_vllm.py"
_NO_LOG_PROB = -9999.0  # what vLLM sends in place of NaN


class VLLMServerRolloutEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` over vLLM servers that ``examples/serve_vllm.py`` started.

    Every rank asks the servers itself. Every response is a request of its own with its own seed, so that in float32 it
    does not matter which server answers. A server that fails is lost: its requests go to the others, and it is used
    again only when a later push of weights has reached it. Every answer says which version of the weights sampled it; a
    server that answers from another one, which may have been started anew, is lost too.

    All ranks build it together, after the process group exists. Whatever ends a call on one rank ends it on all.

    Attributes:
        lost: servers that are not used, by their place in ``--vllm_server_url``, and why; the same on every rank.
        last_stats: of the last ``generate``: ``generated_tokens``, ``prompt_tokens``, ``seconds``; of the last push:
            ``sync_seconds``.

    Raises:
        RolloutError: a server cannot be reached, serves another model or too short sequences, or does not take the
            weights; on every rank.
    """

    reports_finished = True  # takes generate's on_finished
    keeps_weights = True  # the servers' copies, which may differ from the actor's

    def __init__(self, config: PPOConfig, strategy: Any, actor: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        e = config.engine
        key = read_token(env=e.vllm_server_api_key_env, option="--vllm_server_api_key_env")
        self.config, self.strategy, self.actor, self.tokenizer = config, strategy, actor, tokenizer
        self.hf_model, _ = find_hf_model(actor)
        self.max_model_len = longest_sequence(config)
        limits = vocabulary_limits(tokenizer, actor, self.hf_model)
        self.servers = [
            VLLMServer(url, limits, timeout=e.vllm_server_timeout, retries=e.vllm_server_retries, key=key)
            for url in e.vllm_server_url
        ]
        self.lost: dict[int, str] = {}
        self.version: str | None = None  # of the weights that were pushed last
        self.last_stats: dict[str, float] = {}
        self._pushes = 0
        self._run = uuid.uuid4().hex
        self._asleep = False
        self._sleeps = self._connect()
        self.sync_weights(actor)

    @property
    def live(self) -> list[int]:
        """Servers in use."""
        return [i for i in range(len(self.servers)) if i not in self.lost]

    def _lose(self, reasons: Mapping[int, str]) -> None:
        for i, reason in sorted(reasons.items()):
            if i not in self.lost:
                self.lost[i] = reason
                logger.warning("%s; lost until the next push of weights, %d servers are left", reason, len(self.live))

    def _check_any_left(self) -> None:
        if not self.live:
            raise RolloutError(
                f"--vllm_server_url: none of the {len(self.servers)} servers is left: "
                f"{'; '.join(self.lost[i] for i in sorted(self.lost))}; look at their output, start them again by "
                "examples/serve_vllm.py and resume the run"
            )

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: list[Prompt], sampling: SamplingParams, on_finished: OnFinished = lambda rollouts: None
    ) -> list[Rollout]:
        """Samples ``sampling.n`` responses to each prompt; ``on_finished`` gets each rollout when it is done.

        Raises:
            ValueError: as the engine in process.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
            RolloutError: no server is left, or one refuses the requests; or another rank had any of these.
        """
        start = time.perf_counter()
        self.wake()
        rollouts: list[Rollout] = []
        failure = None
        try:
            rollouts = self._sample(prompts, sampling, on_finished)
        except Exception as error:
            failure = error
        self._agree(failure)
        self.last_stats |= rollout_stats(rollouts, start)
        return rollouts

    def _sample(self, prompts: list[Prompt], sampling: SamplingParams, on_finished: OnFinished) -> list[Rollout]:
        reader = ResponseReader(self.tokenizer, self.hf_model, prompts, sampling, self.max_model_len)
        streams, vocab_size = request_streams(prompts, sampling), vocab_size_of(self.hf_model)
        costs = [len(prompts[r // sampling.n].token_ids) + sampling.max_new_tokens for r in range(len(streams))]

        def ask(i: int, r: int) -> Completion:
            prompt_ids = prompts[r // sampling.n].token_ids
            return self.servers[i].complete(reader.parameters(streams[r]), prompt_ids, vocab_size, self.version)

        rollouts: list[Rollout | None] = [None] * len(streams)
        shows = self.strategy.is_rank_0() and sys.stderr.isatty()
        # closing: an error here must end the requests that are under way
        with (
            tqdm(total=len(streams), desc="generate", leave=False, disable=not shows) as bar,
            closing(self._answers(ask, costs)) as answers,
        ):
            for r, completion in answers:
                rollouts[r] = reader.rollout(prompts[r // sampling.n], r % sampling.n, *completion)
                on_finished([rollouts[r]])
                bar.update()
        return rollouts

    def _answers(self, ask: Callable[[int, int], Completion], costs: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        """(request, answer) as they come: the dearest requests first, each to the server with the least under way."""
        self._check_any_left()
        concurrency, rank = self.config.engine.vllm_server_concurrency, self.strategy.get_rank()
        waiting = sorted(range(len(costs)), key=lambda r: costs[r])
        under_way: dict[int, set[int]] = {i: set() for i in self.live}  # server → requests
        threads = Threads(ask, min(len(costs), concurrency * len(under_way)))
        try:
            while waiting or any(under_way.values()):
                while waiting and (free := [i for i in self.live if len(under_way[i]) < concurrency]):
                    # ranks prefer different servers among equals
                    i = min(free, key=lambda i: (sum(costs[r] for r in under_way[i]), (i - rank) % len(self.servers)))
                    under_way[i].add(waiting[-1])
                    threads.begin(i, waiting.pop())
                (i, r), answer = threads.next()
                under_way[i].remove(r)
                if isinstance(answer, RefusedError):
                    raise RolloutError(str(answer)) from None
                if isinstance(answer, RequestError):
                    self._lose({i: str(answer)})
                    self._check_any_left()
                    waiting.append(r)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    yield r, answer
        finally:
            threads.end()

    # -- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self, actor: nn.Module) -> None:
        """Pushes the present weights of ``actor`` to every server, lost ones too. Collective.

        A server that does not take them is lost; at the first push that is a RolloutError, and so it is if none does.
        """
        start = time.perf_counter()
        self.actor = actor
        self._wake()
        self._pushes += 1
        version, weights = f"{self._run}-{self._pushes}", full_weights(actor, self.strategy)
        first, self.version = self.version is None, None
        problem, lost = None, {}
        if self.strategy.is_rank_0():
            problem, lost = self._push(weights, version)
        else:
            for _ in weights:
                pass
        problem, version, lost = self.strategy.broadcast_object((problem, version, lost))
        if first and lost:
            problem = problem or "; ".join(dict.fromkeys(lost.values()))
        if problem is not None:
            raise RolloutError(f"--rollout_engine vllm_server: {problem}")
        for i in self.lost.keys() - lost.keys():
            logger.info("%s is used again: it has the present weights", self.servers[i].name)
        self.version = version
        self.lost = {i: lost[i] for i in self.lost if i in lost}
        self._lose(lost)
        self._check_any_left()
        self.last_stats["sync_seconds"] = time.perf_counter() - start

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: str) -> tuple[str | None, dict[int, str]]:
        """On rank 0: why nothing could be brought to anybody, or None; and which servers failed, and why."""
        lost: dict[int, str] = {}
        way: Transport | None = None

        def each(step: Callable[[VLLMServer], object]) -> Callable[[], dict[int, str]]:
            return self._begin([i for i in range(len(self.servers)) if i not in lost], step)

        problem = None
        try:
            way = open_transport(self.config.engine, next(self.hf_model.parameters()).device)
            lost |= each(partial(self._open, way))()
            arrived: Callable[[], dict[int, str]] = dict
            for bucket in buckets(weights):  # gathered while the one before travels
                packed = way.pack(bucket)
                lost |= arrived()
                arrived = each(partial(way.send, packed=packed))
            lost |= arrived()
            lost |= each(lambda server: server.finish_update(version))()
        except RolloutError as error:
            problem = str(error)
        finally:
            if way is not None:
                way.close()
            for _ in weights:  # collective: whatever is left must be gathered by this rank too
                pass
        paused = [i for i, server in enumerate(self.servers) if server.is_paused]
        return problem, self._begin(paused, VLLMServer.resume)() | lost

    def _open(self, way: Transport, server: VLLMServer) -> None:
        self._admit(server)
        server.pause()
        way.open(server)
        server.post("/start_weight_update")

    def _begin(self, among: Iterable[int], step: Callable[[VLLMServer], object]) -> Callable[[], dict[int, str]]:
        """Has several servers do something at the same time; what is returned waits, and says which failed and why."""
        among = list(among)
        threads = Threads(lambda i: step(self.servers[i]), len(among))
        for i in among:
            threads.begin(i)

        def wait() -> dict[int, str]:
            failures = {}
            for (i,), answer in (threads.next() for _ in among):
                if isinstance(answer, RequestError):
                    failures[i] = str(answer)
                elif isinstance(answer, (RuntimeError, TimeoutError)):  # of torch.distributed
                    failures[i] = f"{self.servers[i].name}: the weights did not get there: {_line(answer)}"
                elif isinstance(answer, BaseException):
                    raise answer
            threads.end()
            return failures

        return wait

    def differing_weights(self, tolerance: float = 1e-2) -> tuple[list[str], list[str]]:
        """Weights of the actor that a server does not have, and those that cannot be compared. Collective.

        Args:
            tolerance: largest difference, relative to the weight's size.
        """
        differing: set[str] = set()
        unknown: set[str] = set()

        def compare(server: VLLMServer) -> None:
            if len(server.gpus) > 1:  # each worker has a part of every weight
                unknown.update(expected)
                return
            found = differing_weights(expected, *server.fingerprints(), tolerance)
            differing.update(found[0])
            unknown.update(found[1])

        expected = trainer_fingerprints(full_weights(self.actor, self.strategy))
        failures = self._begin(self.live, compare)() if self.strategy.is_rank_0() else {}
        problem, differing, unknown = self.strategy.broadcast_object(("; ".join(failures.values()), differing, unknown))
        if problem:
            raise RolloutError(f"--rollout_engine vllm_server: {problem}")
        return sorted(differing), sorted(unknown)

    # -- start, sleep, end -----------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        """Waits for the servers, and sees that they serve the actor's model. Collective.

        Returns:
            Whether they sleep while the trainer trains.
        """
        problems: dict[int, str] = {}
        can_sleep: list[bool] = []
        if self.strategy.is_rank_0():
            problems = self._begin(range(len(self.servers)), lambda server: can_sleep.append(self._await(server)))()
        problems, can_sleep = self.strategy.broadcast_object((problems, can_sleep))
        if problems:
            raise RolloutError("--vllm_server_url: " + "; ".join(problems.values()))
        if self.config.engine.free_cache_engine and not all(can_sleep):
            logger.info("vLLM servers without --enable-sleep-mode stay awake while the trainer trains")
        return self.config.engine.free_cache_engine and all(can_sleep)

    def _await(self, server: VLLMServer) -> bool:
        """Whether a server can sleep, when it can be reached."""
        seconds = self.config.engine.vllm_server_start_timeout
        deadline = time.monotonic() + seconds
        while True:
            try:
                described = self._admit(server)
                break
            except UnreachableError as error:
                if time.monotonic() >= deadline:
                    advice = f"waited {seconds:g} s (--vllm_server_start_timeout): {_START}, and look at its output"
                    raise RequestError(f"{error}; {advice}") from None
                time.sleep(min(_START_TRY_SECONDS, seconds))
        dtype = str(next(self.hf_model.parameters()).dtype).removeprefix("torch.")
        if described["dtype"] != dtype:
            message = "%s computes in %s, the actor in %s: log probs will differ"
            logger.warning(message, server.name, described["dtype"], dtype)
        return described["sleep_mode"]

    def _admit(self, server: VLLMServer) -> dict[str, Any]:
        """What a server says of itself; a RequestError where it cannot sample for the actor."""
        described, wanted, longest = server.admit(), architecture(self.hf_model.config), self.max_model_len
        served = described["architecture"]
        odd = [f"{k} {served.get(k)} for {value}" for k, value in wanted.items() if served.get(k) != value]
        if odd:
            raise RequestError(
                f"{server.name} serves {described['model']}, which is not the model of --pretrain "
                f"{self.config.model.pretrain}: {', '.join(odd)}; start it with that model"
            )
        if described["max_model_len"] < longest:
            raise RequestError(
                f"{server.name} takes {described['max_model_len']} tokens, prompt and response may have {longest}: "
                f"start it with --max-model-len {longest}, or lower --prompt_max_len or --generate_max_len"
            )
        return described

    def sleep(self) -> None:
        """Frees the servers' GPU memory, by ``--sleep_level``, where they were started with ``--enable-sleep-mode``.
        Collective."""
        if self._sleeps and not self._asleep:
            level = self.config.engine.sleep_level
            self._tell(lambda server: server.post(f"/sleep?level={level}"))
            self._asleep = True

    def wake(self) -> None:
        """Takes back what :meth:`sleep` freed; weights that were dropped are pushed anew. Collective."""
        dropped = self._asleep and self.config.engine.sleep_level == 2
        self._wake()
        if dropped:
            self.sync_weights(self.actor)

    def _wake(self) -> None:
        if self._asleep:
            self._tell(lambda server: server.post("/wake_up"))
            self._asleep = False

    def _tell(self, what: Callable[[VLLMServer], None]) -> None:
        """Has rank 0 call every live server; those that fail are lost. Collective."""
        failures = self._begin(self.live, what)() if self.strategy.is_rank_0() else {}
        self._lose(self.strategy.broadcast_object(failures))

    def close(self) -> None:
        """Ends the connections; the servers go on. It may be called again."""
        for server in self.servers:
            server.close()

    def _agree(self, failure: Exception | None) -> None:
        """Every rank learns what the others met: servers lost, and failures, which end the call for all. Collective."""
        text = str(failure) if isinstance(failure, RolloutError) else f"{type(failure).__name__}: {failure}"
        everything = self.strategy.all_gather_object((None if failure is None else text, self.lost))
        for _, lost in everything:
            self._lose(lost)
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(everything):
            if text is not None:
                raise RolloutError(f"rank {rank}: {text}")


class Completion(NamedTuple):
    """One sampled response: ids with the stop id, the log prob of each (NaN where the server could not say)."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" or "length"


class VLLMServer:
    """What one server is asked; threads may share it. Every call raises :class:`~lightppo.errors.RequestError`.

    A completion that fails in a way that may pass is tried again, but not after a time-out.

    Attributes:
        name: what logs and errors call it.
        gpus: of each of its workers, ``None`` for one without; known after :meth:`admit`.
        is_paused: for a push.
    """

    def __init__(
        self, url: str, limits: Sequence[int | None], *, timeout: float, retries: int, key: str | None = None
    ) -> None:
        options = {"timeout": timeout, "connect_timeout": _CONNECT_SECONDS, "retries": retries, "token": key}
        client = partial(HTTPClient, url.rstrip("/"), "vLLM server", retry_timeouts=False, **options)
        self._client = client(keep_alive=True)
        # Without kept connections, which vLLM closes after errors, so that one try is enough.
        self._control = client()
        self.name = self._control.name
        self.gpus: list[str | None] = []
        self.is_paused = False
        self._limits = list(limits)

    def admit(self) -> dict[str, Any]:
        """Has its workers sample as the trainer needs it. What it serves: ``WorkerExtension.lightppo_admit``."""
        described = self._rpc("lightppo_admit", self._limits)
        self.gpus = [one.pop("gpu", None) for one in described]
        if any(one.get("protocol") != PROTOCOL for one in described):
            raise RefusedError(f"{self.name} runs another version of lightppo: {_START} of this version")
        if any(one != described[0] for one in described):
            raise RequestError(f"{self.name}: its workers differ: {described}")
        return described[0]

    def complete(
        self, parameters: dict[str, Any], prompt_ids: list[int], vocab_size: int, version: str | None
    ) -> Completion:
        """One response to a prompt of token ids, sampled by the weights of that version."""

        def read(answer: dict[str, Any]) -> tuple[Completion, set[str]]:
            (choice,) = answer["choices"]
            ids, reason = choice["token_ids"], choice["finish_reason"]
            if reason not in ("stop", "length"):  # e.g. abort, when the server is paused
                raise ValueError(f"the request ended with {reason!r}")
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise ValueError(f"token_ids {ids} are no ids of the model")
            if not 0 < len(ids) <= parameters["max_tokens"]:
                raise ValueError(f"{len(ids)} tokens for max_tokens {parameters['max_tokens']}")
            log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            if len(log_probs) != len(ids):
                raise ValueError(f"{len(log_probs)} log probs for {len(ids)} tokens")
            log_probs = [float("nan") if value == _NO_LOG_PROB else value for value in log_probs]
            return Completion(ids, log_probs, reason), {span["version"] for span in choice["weight_versions"]}

        body = {"token_ids": prompt_ids, "sampling_params": parameters}
        completion, versions = self._ask(self._client, "/inference/v1/generate", body, read=read)
        if versions != {version}:
            raise RequestError(f"{self.name} has other weights than were pushed: was it started anew?")
        return completion

    def pause(self) -> None:
        """Aborts what it computes and empties its caches."""
        self.post("/pause?mode=abort")
        self.is_paused = True

    def push_step(self, route: str, body: dict[str, Any] | None = None) -> None:
        """One step of a push; its workers say what went wrong, since the route cannot."""
        self.post(route, body)
        problems = [one["problem"] for one in self._rpc("lightppo_problem", []) if one.get("problem")]
        if problems:
            raise RequestError(f"{self.name}: {route}: {self._control.clean(problems[0])}")

    def finish_update(self, version: str) -> None:
        self.push_step("/finish_weight_update")
        self.post("/update_weight_version", {"new_version": version})

    def resume(self) -> None:
        self.post("/resume", timeout=_QUICK_SECONDS)
        self.is_paused = False

    def fingerprints(self) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
        """:func:`~lightppo.rollout.vllm_worker.engine_fingerprints` of its one worker."""
        (found,) = self._rpc("lightppo_fingerprints", [])
        contents = {name: bytearray(base64.b64decode(text)) for name, text in found["prints"].items()}
        return {name: torch.frombuffer(c, dtype=torch.float32) for name, c in contents.items()}, found["packed"]

    def post(self, route: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """One try, for what cannot be repeated or is looked at soon again."""
        return self._ask(self._control, route, body or {}, tries=1, **options)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()
        self._control.close()

    def _rpc(self, method: str, arguments: list[Any]) -> list[dict[str, Any]]:
        """One answer of each worker."""

        def read(answer: dict[str, Any]) -> list[dict[str, Any]]:
            first, *others = (dict(one) for one in answer["results"])
            return [first, *others]

        return self.post("/collective_rpc", {"method": method, "args": arguments}, read=read)

    def _ask(self, client: HTTPClient, route: str, body: dict[str, Any], **options: Any) -> Any:
        try:
            return client.post(route, body, **options)
        except RefusedError as error:
            key = "set --vllm_server_api_key_env to the environment variable that holds the server's key"
            advice = {401: key, 403: key, 404: f"it is no vLLM server for training: {_START}"}
            if error.status in advice:
                error.args = (f"{error}; {advice[error.status]}",)
            raise


class Threads:
    """Daemon threads that call a function: what they wait for must not keep a process alive that was told to end."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self._function, self._count = function, count
        self._begun: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[tuple[Any, ...], Any]] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, name="vllm-server", daemon=True).start()

    def begin(self, *arguments: Any) -> None:
        self._begun.put(arguments)

    def next(self) -> tuple[tuple[Any, ...], Any]:
        """The arguments and result of the next call that has ended; an exception is a result."""
        return self._done.get()

    def end(self) -> None:
        """Takes no more calls; those under way go on, unheard."""
        with suppress(queue.Empty):
            while True:
                self._begun.get_nowait()
        for _ in range(self._count):
            self._begun.put(None)

    def _work(self) -> None:
        while (arguments := self._begun.get()) is not None:
            try:
                self._done.put((arguments, self._function(*arguments)))
            except BaseException as error:
                self._done.put((arguments, error))


def _line(error: BaseException) -> str:
    """The first line of an error, without the name of a source file that gloo puts before it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2] if text.startswith("[/") else text
