"""Rollouts by vLLM servers, over HTTP: prompts shared out by length, weights pushed to each, lost servers replaced."""

from __future__ import annotations

import base64
import logging
import queue
import resource
import sys
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed
from torch import Tensor, nn

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RefusedError, RequestError, RolloutError, UnreachableError
from lightppo.http_client import HTTPClient, read_token
from lightppo.ranks import heartbeat
from lightppo.rollout.engine import SamplingParams, progress_bar
from lightppo.rollout.vllm.colocated import (
    OnFinished,
    Requests,
    VLLMEngine,
    longest_sequence,
    vocab_size_of,
    vocabulary_limits,
)
from lightppo.rollout.vllm.lora_adapters import ADAPTERS, pushes_adapters_alone
from lightppo.rollout.vllm.weight_routes import GENERATE, OTHER_WEIGHTS, WEIGHTS
from lightppo.rollout.vllm.weights import (
    PROTOCOL,
    Broadcasts,
    WeightFiles,
    adapter_names,
    adapter_weights,
    architecture,
    buckets,
    differing_weights,
    frozen_weights,
    full_weights,
    open_transport,
    trainer_fingerprints,
    whole_names,
)
from lightppo.user_code import in_daemon_thread
from lightppo.zero3 import find_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightppo.rollout.engine import Turn, TurnSource

logger = logging.getLogger(__name__)

Answers = queue.SimpleQueue[tuple[int, Any, Future]]  # server, the request's key, its completion

_CONNECT_SECONDS = 10.0
_QUICK_SECONDS = 30.0  # for what needs no computing
START_SECONDS = 300.0  # the longest wait for servers at the start
_START_TRY_SECONDS = 2.0  # between two looks at a server that is still starting
_START = "start it by `lightppo serve-vllm`"
_NO_LOG_PROB = -9999.0  # what vLLM sends in place of NaN
_CONNECTIONS = 1024  # requests of this process at a time, each in a thread
_OTHER_FILES = 512  # that a process has open beside them
_LOOK_SECONDS = 0.01  # between two looks for turns that came, while others are under way


def connections_at_a_time() -> int:
    """Return the limit of this process; each is an open file, whose soft limit is raised where it is too low."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft_limit == unlimited:
        return _CONNECTIONS
    needed_files = _CONNECTIONS + _OTHER_FILES
    allowed_files = needed_files if hard_limit == unlimited else min(needed_files, hard_limit)
    if soft_limit < allowed_files:
        soft_limit = allowed_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    return max(1, min(_CONNECTIONS, max(soft_limit - _OTHER_FILES, soft_limit // 2)))


class VLLMServerRolloutEngine(VLLMEngine):
    """vLLM servers that ``lightppo serve-vllm`` started; every rank asks them itself.

    A server that fails is lost: its requests go to the others, and it is used again only when a later push of weights
    has reached it. Every answer says which version of the weights sampled it; a server that answers from another one,
    which may have been started anew, is lost too. Whatever ends a call on one rank ends it on all.

    Raises:
        RolloutError: a server cannot be reached, serves another model or too short sequences, or does not take the
            weights; on every rank.
    """

    capabilities = replace(VLLMEngine.capabilities, samples_ahead=True)
    requests_per_server = 1024  # in flight, of all ranks together; each rank may have one

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        super().__init__(config, strategy, actor, tokenizer)
        requested = config.engine
        key = read_token(env=requested.vllm_server_api_key_env, option="--vllm_server_api_key_env")
        options = {
            "timeout": requested.vllm_server_timeout,
            "retries": requested.vllm_server_retries,
            "key": key,
        }
        limits = vocabulary_limits(tokenizer, actor, self.hf_model)
        if self.records_experts:
            options["records"] = self.what_to_record()
        self.servers = [VLLMServer(url, limits, **options) for url in requested.vllm_server_url]
        self._connections = connections_at_a_time()
        self.lost: dict[int, str] = {}  # server → why it is not used, the same on every rank
        self.version: str | None = None  # of the weights that were pushed last, beside adapters
        self.sync_weights(actor)
        # Only rank 0 knows the servers' answers.
        can_sleep = all(server.described.get("sleep_mode") for server in self.servers)
        self.sleeps = requested.free_cache_engine and self.strategy.broadcast_object(can_sleep)
        if requested.free_cache_engine and not self.sleeps:
            logger.info(
                "vLLM servers without --enable-sleep-mode stay awake while the trainer trains"
            )

    @property
    def live(self) -> list[int]:
        """Return the servers in use."""
        return [i for i in range(len(self.servers)) if i not in self.lost]

    def lose(self, reasons: Mapping[int, str]) -> None:
        """Use these servers no more until a push of weights reaches them."""
        for i, reason in sorted(reasons.items()):
            if i not in self.lost:
                self.lost[i] = reason
                logger.warning(
                    "%s; lost until the next push of weights, %d servers are left",
                    reason,
                    len(self.live),
                )

    def check_any_left(self) -> None:
        """Raise RolloutError if no server is in use."""
        if not self.live:
            raise RolloutError(
                f"--vllm_server_url: none of the {len(self.servers)} servers is left: "
                f"{'; '.join(self.lost[i] for i in sorted(self.lost))}; look at their output, start them again by "
                "`lightppo serve-vllm` and resume the run"
            )

    # -- generation ------------------------------------------------------------------------------------------------

    def start(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: OnFinished = lambda rollouts: None,
    ) -> Future[list[Rollout]]:
        """Have a thread ask the servers for this rank's responses; collective only where servers sleep.

        ``on_finished`` is called in that thread. What fails is raised by :meth:`finish`.
        """
        self.wake()
        return in_daemon_thread(self._ask, prompts, sampling, on_finished)

    def finish(self, ticket: Future[Any]) -> Any:
        """Wait for the responses of :meth:`start`, or the end of turns; raise as :meth:`generate`. Collective."""
        with self._together():
            return ticket.result()

    def _sample(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: OnFinished,
    ) -> list[Rollout]:
        return self.finish(self.start(prompts, sampling, on_finished))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Tell every rank what the others met: servers lost, and failures, which end the call for all. Collective."""
        failure = message = None
        try:
            yield
        except Exception as error:
            failure = error
            if isinstance(error, RolloutError):
                message = str(error)
            else:
                message = f"{type(error).__name__}: {error}"
        messages = self.strategy.all_gather_object((message, self.lost))
        for _, lost_servers in messages:
            self.lose(lost_servers)
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(messages):
            if message is not None:
                raise RolloutError(f"rank {rank}: {message}")

    def start_turns(self, turns: TurnSource, sampling: SamplingParams) -> Future[None]:
        """Have a thread ask the servers for the turns of a source; :meth:`finish` ends it.

        A conversation stays on its server, which has what came before in its prefix cache; if that is lost, it goes on
        elsewhere, from its ids.
        """
        self.wake()
        return in_daemon_thread(
            lambda: _Conversations(self, Requests(self, [], sampling)).run(turns)
        )

    def _sample_turns(self, turns: TurnSource, sampling: SamplingParams) -> None:
        self.finish(self.start_turns(turns, sampling))

    def requests_at_a_time(self) -> int:
        """Return this rank's share of one server's requests, so that the process has files enough for all."""
        world_size = self.strategy.world_size
        rank = self.strategy.get_rank()
        requests_per_rank, remainder = divmod(self.requests_per_server, world_size)
        return max(
            1,
            min(
                requests_per_rank + (rank < remainder), self._connections // max(1, len(self.live))
            ),
        )

    def begin_request(
        self,
        server: int,
        key: Any,
        request: tuple[list[int], dict[str, Any]],
        answers: Answers,
    ) -> None:
        """Ask a server in a thread of its own; ``answers`` gets (server, key, future)."""
        token_ids, parameters = request
        vocab_size = vocab_size_of(self.hf_model)
        complete = self.servers[server].complete
        arguments = (parameters, token_ids, vocab_size, self.version, self.adapter)
        answer = in_daemon_thread(complete, *arguments)
        answer.add_done_callback(lambda answer: answers.put((server, key, answer)))

    def completion_of(self, server: int, answer: Future) -> tuple[Any, ...] | None:
        """Return what a server has sampled; None: it is lost, and the request must be sent to another one."""
        try:
            return answer.result()
        except RefusedError as error:
            raise RolloutError(str(error)) from None
        except RequestError as error:
            self.lose({server: str(error)})
            self.check_any_left()
            return None

    def _ask(
        self, prompts: list[Prompt], sampling: SamplingParams, on_finished: OnFinished
    ) -> list[Rollout]:
        """Send the dearest requests first, each to the server with the least under way."""
        requests = Requests(self, prompts, sampling)
        self.check_any_left()
        rank = self.strategy.get_rank()
        costs = [
            len(prompt.token_ids) + requests.sampling.max_new_tokens
            for prompt, _ in requests.samples
        ]
        waiting = sorted(range(len(costs)), key=costs.__getitem__)
        under_way: dict[int, set[int]] = {i: set() for i in self.live}  # server → requests
        answers: Answers = queue.SimpleQueue()
        rollouts: list[Rollout | None] = [None] * len(costs)

        def has_room(server: int) -> bool:
            return len(under_way[server]) < self.requests_at_a_time()

        def load(server: int) -> tuple[int, int]:
            cost = sum(costs[request] for request in under_way[server])
            # ranks prefer different servers among equals
            return cost, (server - rank) % len(self.servers)

        shows_progress = self.strategy.is_rank_0() and sys.stderr.isatty()
        with progress_bar(len(costs), shown=shows_progress) as bar:
            while waiting or any(under_way.values()):
                while waiting and (free_servers := [i for i in self.live if has_room(i)]):
                    server = min(free_servers, key=load)
                    request = waiting.pop()
                    under_way[server].add(request)
                    self.begin_request(server, request, requests.of_sample(request), answers)
                server, request, answer = answers.get()
                under_way[server].remove(request)
                completion = self.completion_of(server, answer)
                if completion is None:
                    waiting.append(request)
                    continue
                rollout = requests.rollout_of(*requests.samples[request], *completion)
                rollouts[request] = rollout
                on_finished([rollout])
                bar.update()
        return rollouts

    # -- weights ---------------------------------------------------------------------------------------------------

    def _push(self) -> None:
        """Push to every server, lost ones too. One that does not take the weights is lost; at the first push that is a
        RolloutError, and so it is if none does."""
        name = f"{self._run}-{self._pushes}"
        is_first = self.version is None
        previous_version = self.version
        self.version = None
        failures: dict[int, str] = {}
        problem = None
        if self.strategy.is_rank_0():
            all_servers = range(len(self.servers))
            failures = self._failures(self._begin(all_servers, partial(self._admit, is_first)))
        servers_to_update = self._plan(failures, is_first, previous_version)
        version = previous_version if self.pushes_adapters and previous_version else name
        weights = frozen_weights if self.pushes_adapters else full_weights
        if servers_to_update:
            tensors = self._counted(weights(self.actor))
            try:
                if self.strategy.is_rank_0():
                    targets = [i for i in servers_to_update if i not in failures]
                    problem = self._send(
                        tensors,
                        targets,
                        failures,
                        lambda transport, server: server.open_update(transport, version),
                        lambda server: server.finish_update(version),
                    )
            finally:
                for _ in tensors:  # collective: what rank 0 did not send is gathered all the same
                    pass
        if self.pushes_adapters:
            adapter = list(self._counted(adapter_weights(self.actor)))  # on every rank
            if self.strategy.is_rank_0() and problem is None:
                # Servers go on with what they compute by the adapter before.
                description = self.exporter.description()
                problem = self._send(
                    adapter,
                    [i for i in range(len(self.servers)) if i not in failures],
                    failures,
                    lambda transport, server: transport.open(server),
                    lambda server: server.serve_adapter(name, description),
                    of_adapter=True,
                )
        outcome = (problem, failures, version, name) if self.strategy.is_rank_0() else None
        problem, failures, version, name = self.strategy.broadcast_object(outcome)
        if is_first and failures:
            problem = problem or "--vllm_server_url: " + "; ".join(dict.fromkeys(failures.values()))
        if problem is not None:
            raise RolloutError(problem)
        self._has_base = True
        self.adapter = name if self.pushes_adapters else None
        for i in self.lost.keys() - failures.keys():
            logger.info("%s is used again: it has the present weights", self.servers[i].name)
        self.version = version
        self.lost = {i: failures[i] for i in self.lost if i in failures}
        self.lose(failures)
        self.check_any_left()

    def _plan(
        self, failures: dict[int, str], is_first: bool, previous_version: str | None
    ) -> list[int]:
        """Return the servers that need whole weights; the first time also whether adapters travel alone. Collective then.

        On rank 0, ``failures`` gets the servers that cannot take an adapter.
        """
        all_servers = list(range(len(self.servers)))
        if not (self.asks_for_adapters if is_first else self.pushes_adapters):
            return all_servers
        outcome = None
        if self.strategy.is_rank_0():
            obstacles = self._obstacles([i for i in all_servers if i not in failures])
            servers_to_update = [
                i
                for i in all_servers
                if i not in failures | obstacles
                and not (
                    self._has_base and self.servers[i].described["version"] == previous_version
                )
            ]
            outcome = (obstacles, servers_to_update)
        obstacles, servers_to_update = self.strategy.broadcast_object(outcome)
        if is_first:
            obstacle, remedy = next(iter(obstacles.values()), (None, ""))
            requested = self.config.engine.vllm_lora_push
            self.pushes_adapters = pushes_adapters_alone(requested, obstacle, self.strategy, remedy)
            return all_servers
        failures |= {i: "; ".join(filter(None, reasons)) for i, reasons in obstacles.items()}
        return servers_to_update

    def _obstacles(self, indices: Iterable[int]) -> dict[int, tuple[str, str]]:
        """Return, on rank 0, servers that cannot take adapters, why, and what would help ("": who knows)."""
        lora_rank = self.exporter.config.r
        obstacles = {}
        weights = dict.fromkeys(adapter_names(self.hf_model))
        for i in indices:
            server = self.servers[i]
            names = [name for name, _ in self._named(weights.items(), [i])]
            try:
                reason = server.adapter_obstacle(names, lora_rank)
            except RequestError as error:
                obstacles[i] = str(error), ""
                continue
            if reason:
                obstacles[i] = f"{server.name}: {reason}", f"{_START} --lora_rank {lora_rank}"
        return obstacles

    def _send(
        self,
        weights: Iterable[tuple[str, Tensor]],
        targets: Sequence[int],
        failures: dict[int, str],
        open_server: Callable[[WeightFiles | Broadcasts, VLLMServer], None],
        finish: Callable[[VLLMServer], None],
        of_adapter: bool = False,
    ) -> str | None:
        """Send weights to servers in buckets, on rank 0. Return why nothing could be brought to anybody, or None.

        ``failures`` gets the servers that failed, and why.
        """

        def on_each(step: Callable[[VLLMServer], object]) -> dict[int, Future]:
            return self._begin([i for i in targets if i not in failures], step)

        problem = None
        device = next(self.hf_model.parameters()).device
        try:
            with closing(open_transport(self.config.engine, device)) as transport:
                failures |= self._failures(on_each(partial(open_server, transport)))
                under_way: dict[int, Future] = {}
                opened = [i for i in targets if i not in failures]
                for bucket in buckets(self._named(weights, opened)):
                    packed = transport.pack(bucket)  # while the one before travels
                    failures |= self._failures(under_way)
                    under_way = on_each(
                        partial(transport.send, packed=packed, of_adapter=of_adapter)
                    )
                failures |= self._failures(under_way)
                failures |= self._failures(on_each(finish))
        except RolloutError as error:
            problem = str(error)
        paused = [i for i, server in enumerate(self.servers) if server.is_paused]
        failures |= self._failures(self._begin(paused, VLLMServer.resume)) | failures
        return problem

    def _admit(self, is_first: bool, server: VLLMServer) -> None:
        """Raise RequestError where a server cannot sample for the actor."""
        seconds = 0.0
        if is_first:  # the other ranks wait meanwhile
            seconds = min(START_SECONDS, 30 * self.config.strategy.dist_timeout)
        retry_options = {
            "stop": stop_after_delay(seconds),
            "wait": wait_fixed(min(_START_TRY_SECONDS, seconds)),
        }
        try:
            Retrying(
                retry=retry_if_exception_type(UnreachableError), reraise=True, **retry_options
            )(server.admit)
        except UnreachableError as error:
            if is_first:
                advice = f"waited {seconds:g} s: {_START}, and look at its output"
                raise RequestError(f"{error}; {advice}") from None
            raise
        description = server.described
        longest = longest_sequence(self.config)
        served_architecture = description["architecture"]
        expected = architecture(self.hf_model.config)
        if differences := [
            f"{name} {served_architecture.get(name)} for {value}"
            for name, value in expected.items()
            if served_architecture.get(name) != value
        ]:
            raise RequestError(
                f"{server.name} serves {description['model']}, which is not the model of --pretrain "
                f"{self.config.model.pretrain}: {', '.join(differences)}; start it with that model"
            )
        if description["towers"] and find_whole(self.actor) is None:
            raise RequestError(
                f"{server.name} serves {description['model']}, which has an image or audio tower; the model of --pretrain "
                f"{self.config.model.pretrain} has none: start the server with that model"
            )
        if description["max_model_len"] < longest:
            raise RequestError(
                f"{server.name} takes {description['max_model_len']} tokens, prompt and response may have {longest}: "
                f"start it with --max-model-len {longest}, or lower --prompt_max_len or --generate_max_len"
            )
        if is_first:
            server.dtype = description["dtype"]
            if server.dtype != self.dtype:
                message = "%s computes in %s, the actor in %s: log probs will differ"
                logger.warning(message, server.name, server.dtype, self.dtype)
        elif description["dtype"] != server.dtype:
            raise RequestError(
                f"{server.name} computes in {description['dtype']}, in {server.dtype} when the run started: start it with "
                f"--dtype {server.dtype}"
            )

    def _named(
        self, weights: Iterable[tuple[str, Any]], opened: Sequence[int]
    ) -> Iterable[tuple[str, Any]]:
        """Name weights by what the servers serve: of the language model alone, or of a checkpoint with towers.

        A RolloutError where they do not all serve the same: each bucket is packed once.
        """
        with_towers = [i for i in opened if self.servers[i].described["towers"]]
        if with_towers and len(with_towers) < len(opened):
            names = ", ".join(self.servers[i].name for i in with_towers)
            raise RolloutError(
                f"--vllm_server_url: {names} serve a checkpoint with its towers, the others its language model alone: "
                "start all with the same folder"
            )
        if with_towers:
            return whole_names(self.actor, weights)
        return weights

    def _begin(
        self,
        indices: Iterable[int],
        step: Callable[[VLLMServer], object],
    ) -> dict[int, Future]:
        """Have several servers do something at the same time, in threads that do not keep a process from ending."""
        return {i: in_daemon_thread(step, self.servers[i]) for i in indices}

    def _failures(self, futures: Mapping[int, Future]) -> dict[int, str]:
        """Wait; return which servers failed and why."""
        failures = {}
        for i, future in futures.items():
            try:
                future.result()
            except RequestError as error:
                failures[i] = str(error)
            except (RuntimeError, TimeoutError) as error:  # of torch.distributed
                message = str(error).partition("\n")[0] or type(error).__name__
                failures[i] = f"{self.servers[i].name}: the weights did not get there: {message}"
        return failures

    def differing_weights(self) -> tuple[list[str], list[str]]:
        """Return weights of the actor that a server does not have, and those that cannot be compared. Collective."""
        expected = trainer_fingerprints(full_weights(self.actor))
        differences: list[tuple[list[str], list[str]]] = []
        problem = None
        try:
            for server in [self.servers[i] for i in self.live if self.strategy.is_rank_0()]:
                shared = len(server.gpus) > 1  # each worker has a part of every weight
                differences.append(
                    ([], list(expected))
                    if shared
                    else differing_weights(expected, *server.fingerprints())
                )
        except RequestError as error:
            problem = f"--vllm_server_url: {error}"
        problem, differences = self.strategy.broadcast_object((problem, differences))
        if problem is not None:
            raise RolloutError(problem)
        differing, unknown = (sorted(set().union(*names)) for names in zip(*differences))
        return differing, unknown

    # -- sleep and end ---------------------------------------------------------------------------------------------

    def _fall_asleep(self, level: int) -> None:
        self._tell(f"/sleep?level={level}")

    def _wake(self, tag: str) -> None:
        """Wake all of it at once."""
        if self._asleep:
            self._tell("/wake_up")
            self._asleep.clear()

    def _tell(self, route: str) -> None:
        """Have rank 0 tell every live server; those that fail are lost. Collective."""
        if self.strategy.is_rank_0():
            futures = self._begin(self.live, lambda server: server.post(route))
        else:
            futures = {}
        self.lose(self.strategy.broadcast_object(self._failures(futures)))

    def close(self) -> None:
        """End the connections; the servers go on. It may be called again."""
        for server in self.servers:
            server.close()


class _Conversations:
    """The turns of one call of ``generate_turns``, each asked by a thread of its own."""

    def __init__(self, engine: VLLMServerRolloutEngine, requests: Requests) -> None:
        self.engine = engine
        self.requests = requests
        self.server_of: dict[tuple[int, int], int] = {}  # conversation → where it is
        self.under_way: dict[int, int] = dict.fromkeys(engine.live, 0)  # server → turns
        self.answers: Answers = queue.SimpleQueue()

    def run(self, turns: TurnSource) -> None:
        """Run until no more turns come."""
        self.engine.check_any_left()
        waiting: deque[Turn] = deque()
        new_turns: list[Turn] | None = []
        while new_turns is not None or waiting or any(self.under_way.values()):
            heartbeat.beat()
            is_idle = not waiting and not any(self.under_way.values())
            if new_turns is not None:
                new_turns = turns.take(wait=is_idle)
                waiting.extend(new_turns or ())
            for _ in range(len(waiting)):
                turn = waiting.popleft()
                if not self._begin(turn):
                    waiting.append(turn)
            if any(self.under_way.values()):
                waiting.extend(self._bring(turns))

    def _begin(self, turn: Turn) -> bool:
        """Ask a server for a turn; return False where it has no room now."""
        key = (turn.prompt.index, turn.sample_index)
        server = self.server_of.get(key)
        if server not in self.engine.live:
            server = min(self.engine.live, key=lambda i: self.under_way[i])
        if self.under_way[server] >= self.engine.requests_at_a_time():
            return False
        self.server_of[key] = server
        self.under_way[server] += 1
        self.engine.begin_request(server, turn, self.requests.of_turn(turn), self.answers)
        return True

    def _bring(self, turns: TurnSource) -> list[Turn]:
        """Bring the next answer where it belongs; return turns that must be asked again, of a server that is lost."""
        try:
            server, turn, answer = self.answers.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return []
        self.under_way[server] -= 1
        completion = self.engine.completion_of(server, answer)
        if completion is None:
            return [turn]
        turns.ended(turn, self.requests.rollout_of(turn.prompt, turn.sample_index, *completion))
        return []


class VLLMServer:
    """Ask one server; threads may share it. Every call raises :class:`~lightppo.errors.RequestError`.

    A completion that fails in a way that may pass is tried again, but not after a time-out.
    """

    def __init__(
        self,
        url: str,
        limits: Sequence[int | None],
        *,
        timeout: float,
        retries: int,
        key: str | None = None,
        records: tuple[list[int], int, str] | None = None,
    ) -> None:
        self._records = records  # the experts of so many layers, numbers and type
        options = {
            "timeout": timeout,
            "connect_timeout": _CONNECT_SECONDS,
            "retries": retries,
            "token": key,
        }
        client = partial(
            HTTPClient, url.rstrip("/"), "vLLM server", retry_timeouts=False, **options
        )
        self._client = client(keep_alive=True)
        # Without kept connections, which vLLM closes after errors, so that one try is enough.
        self._control = client(retries=0)
        self.name = self._control.name
        self.described: dict[str, Any] = {}  # what it serves, by WorkerExtension.lightppo_admit
        self.dtype = ""  # in which it computed at the start of the run
        self.gpus: list[str | None] = []  # of each of its workers
        self.is_paused = False  # for a push
        self._limits = list(limits)

    def admit(self) -> None:
        """Have its workers sample as the trainer needs it."""
        workers = self._rpc("lightppo_admit", self._limits)
        self.gpus = [worker.pop("gpu", None) for worker in workers]
        self.described = workers[0]
        if any(worker.get("protocol") != PROTOCOL for worker in workers):
            raise RefusedError(
                f"{self.name} runs another version of lightppo: {_START} of this version"
            )
        if any(worker != workers[0] for worker in workers):
            raise RequestError(f"{self.name}: its workers differ: {workers}")
        if self._records is not None:
            answer = self._rpc("lightppo_record_experts", list(self._records))[0]
            if answer["problem"]:
                raise RefusedError(
                    f"--router_replay rollout: {self.name} cannot record this model's experts: {answer['problem']}; set old"
                )

    def complete(
        self,
        parameters: dict[str, Any],
        prompt_ids: list[int],
        vocab_size: int,
        version: str | None,
        adapter: str | None = None,
    ) -> tuple[Any, ...]:
        """Return a response by the weights of that version, with the adapter of that name: ids and stop id, the log prob
        of each (NaN where the server could not say), and the finish reason, stop or length; experts, if it records them."""

        def read(answer: dict[str, Any]) -> tuple[list[int], list[float], str]:
            (choice,) = answer["choices"]
            ids = choice["token_ids"]
            reason = choice["finish_reason"]
            if reason not in ("stop", "length"):  # e.g. abort, when the server is paused
                raise ValueError(f"the request ended with {reason!r}")
            if not isinstance(ids, list) or not all(
                type(i) is int and 0 <= i < vocab_size for i in ids
            ):
                raise ValueError(f"token_ids {ids} are no ids of the model")
            if not 0 < len(ids) <= parameters["max_tokens"]:
                raise ValueError(f"{len(ids)} tokens for max_tokens {parameters['max_tokens']}")
            log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            if len(log_probs) != len(ids):
                raise ValueError(f"{len(log_probs)} log probs for {len(ids)} tokens")
            log_probs = [float("nan") if value == _NO_LOG_PROB else value for value in log_probs]
            return ids, log_probs, reason

        body = {"token_ids": prompt_ids, "sampling_params": parameters}
        if self._records is not None:
            body["request_id"] = uuid.uuid4().hex
        route = f"{GENERATE}?weights={version}"
        if adapter is not None:
            body["model"] = adapter
            route += f"&adapter={adapter}"
        try:
            completion = self._ask(self._client, route, body, read=read)
        except RefusedError as error:
            knows_no_adapter = adapter is not None and error.status == 404
            if knows_no_adapter or error.status == OTHER_WEIGHTS:
                raise RequestError(
                    f"{self.name} has other weights than were pushed: was it started anew?"
                ) from None
            raise
        if self._records is not None:
            tokens = len(prompt_ids) + len(completion[0]) - 1
            completion += (self._take_experts(body["request_id"], tokens),)
        return completion

    def _take_experts(self, request: str, tokens: int) -> Tensor:
        """Return the experts of a request that has ended (T, L, k)."""
        layers, top_k, dtype_name = self._records

        def read(answer: dict[str, Any]) -> Tensor:
            first_worker = dict(answer["results"][0])
            if first_worker["problem"]:
                raise ValueError(first_worker["problem"])
            content = bytearray(zlib.decompress(base64.b64decode(first_worker["experts"])))
            experts = torch.frombuffer(content, dtype=getattr(torch, dtype_name))
            return experts.view(tokens, len(layers), top_k)

        message = {"method": "lightppo_take_experts", "args": [request, tokens]}
        return self.post("/collective_rpc", message, read=read)

    def open_update(self, transport: WeightFiles | Broadcasts, version: str) -> None:
        """Abort what it computes, empty its caches, and have it wait for weights."""
        self.post("/pause?mode=abort")
        self.is_paused = True
        transport.open(self, version=version)
        self.post("/start_weight_update")

    def push_step(self, route: str, body: dict[str, Any] | None = None) -> None:
        """Take one step of a push; its workers say what went wrong, since the route cannot."""
        self.post(route, body)
        self._check(route, self._rpc("lightppo_problem", []))

    def _check(self, step: str, answers: Iterable[Mapping[str, Any]]) -> None:
        problems = [answer["problem"] for answer in answers if answer.get("problem")]
        if problems:
            raise RequestError(f"{self.name}: {step}: {self._control.clean(problems[0])}")

    def take(self, message: dict[str, Any], of_adapter: bool) -> None:
        """Have its workers read a part of the weights, or of an adapter, by what they are told."""
        if of_adapter:
            method = "lightppo_receive_adapter"
            self._check(method, self._rpc(method, [message]))
        else:
            self.push_step("/update_weights", {"update_info": message})

    def adapter_obstacle(self, names: list[str], rank: int) -> str | None:
        """Return why it cannot take such adapters."""
        return self._rpc("lightppo_adapter_obstacle", [names, rank])[0]["obstacle"]

    def serve_adapter(self, name: str, described: dict[str, Any]) -> None:
        """Give the adapter that has come its name; those before go when no request uses them any more."""
        method = "lightppo_hold_adapter"
        self._check(method, self._rpc(method, [name, described]))
        self._check(ADAPTERS, [self.post(ADAPTERS, {"name": name})])

    def finish_update(self, version: str) -> None:
        """Have it use the weights that have come."""
        self.push_step("/finish_weight_update")
        self.post(WEIGHTS, {"version": version})

    def resume(self) -> None:
        """Have it take requests again."""
        self.post("/resume", timeout=_QUICK_SECONDS)
        self.is_paused = False

    def fingerprints(self) -> tuple[dict[str, Tensor], dict[str, list[str]], str]:
        """Return :func:`~lightppo.rollout.vllm.worker.engine_fingerprints` of its one worker."""
        (answer,) = self._rpc("lightppo_fingerprints", [])
        contents = {
            name: bytearray(base64.b64decode(encoded)) for name, encoded in answer["prints"].items()
        }
        prints = {
            name: torch.frombuffer(content, dtype=torch.float32)
            for name, content in contents.items()
        }
        return prints, answer["packed"], answer["dtype"]

    def post(
        self,
        route: str,
        body: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Try once, for what cannot be repeated or is looked at soon again."""
        return self._ask(self._control, route, body or {}, **options)

    def close(self) -> None:
        """End the connections."""
        self._client.close()
        self._control.close()

    def _rpc(self, method: str, arguments: list[Any]) -> list[dict[str, Any]]:
        """Return one answer of each worker."""

        def read(answer: dict[str, Any]) -> list[dict[str, Any]]:
            first_result, *further_results = (dict(result) for result in answer["results"])
            return [first_result, *further_results]

        return self.post("/collective_rpc", {"method": method, "args": arguments}, read=read)

    def _ask(
        self,
        client: HTTPClient,
        route: str,
        body: dict[str, Any],
        **options: Any,
    ) -> Any:
        try:
            return client.post(route, body, **options)
        except RefusedError as error:
            key = "set --vllm_server_api_key_env to the environment variable that holds the server's key"
            advice = {401: key, 403: key, 404: f"it is no vLLM server for training: {_START}"}
            if error.status in advice:
                error.args = (f"{error}; {advice[error.status]}",)
            raise
