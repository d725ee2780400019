"""Rollouts by vLLM servers, over HTTP: prompts shared out by length, weights pushed to each, lost servers replaced."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch import nn
from tqdm import tqdm

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt, Rollout
from lightppo.errors import RolloutError
from lightppo.http import read_token
from lightppo.rollout.dispatch import Dispatch, NoServerLeftError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import request_streams
from lightppo.rollout.sampling import request_seed
from lightppo.rollout.server_client import Completion, ServerRefusedError, VLLMServer
from lightppo.rollout.server_delivery import Delivery, Source
from lightppo.rollout.server_pool import ServerPool
from lightppo.rollout.server_worker import architecture
from lightppo.rollout.vllm_options import (
    ResponseReader,
    check_request_lengths,
    longest_sequence,
    vllm_sampling,
    vocabulary_limits,
)
from lightppo.rollout.weight_sync import full_weights
from lightppo.strategy.zero3 import find_hf_model, full_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class VLLMServerRolloutEngine:
    """A :class:`~lightppo.rollout.engine.RolloutEngine` over vLLM servers that ``examples/serve_vllm.py`` started.

    Every rank asks the servers itself. Every response is a request of its own with its own seed, so that in float32 it
    does not matter which server answers. A server that fails is lost: its requests go to the others, and it is used
    again only when a later push of weights has reached it. Weights have a version; a server with another one, which
    may have been started anew, is lost too, and what it answered is asked again.

    All ranks build it together, after the process group exists. Whatever ends a call on one rank ends it on all.

    Args:
        config: resolved; read are engine, data, rollout and model.
        strategy: of the run.
        actor: whose weights to sample with; prepared. They are pushed once here.
        tokenizer: decodes responses; ids beyond it are never sampled.

    Attributes:
        pool: the servers, and which of them are lost; the same on every rank.
        last_stats: of the last ``generate``: ``generated_tokens``, ``prompt_tokens``, ``seconds``; of the last push:
            ``sync_seconds``.

    Raises:
        RolloutError: a server cannot be reached, serves another model or too short sequences, or does not take the
            weights; on every rank.
    """

    reports_finished = True  # takes generate's on_finished

    def __init__(
        self,
        config: PPOConfig,
        strategy: Any,
        actor: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        e = config.engine
        key = read_token(env=e.vllm_server_api_key_env, option="--vllm_server_api_key_env")
        self.config, self.strategy, self.actor, self.tokenizer = config, strategy, actor, tokenizer
        servers = [
            VLLMServer(url, timeout=e.vllm_server_timeout, retries=e.vllm_server_retries, key=key)
            for url in e.vllm_server_url
        ]
        self.pool = ServerPool(servers, self._misfit)
        self.hf_model, _ = find_hf_model(actor)
        self._deliver = Delivery(e, self.pool, next(self.hf_model.parameters()).device)
        self.vocab_size = self.hf_model.config.get_text_config(decoder=True).vocab_size
        self.max_model_len = longest_sequence(config)
        self.version: str | None = None
        self.last_stats: dict[str, float] = {}
        self._pushes = 0
        self._run = uuid.uuid4().hex
        self._asleep = False
        self._sleeps = self._connect()
        self.sync_weights(actor)

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingParams,
        on_finished: Callable[[list[Rollout]], object] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Samples ``sampling.n`` responses to each prompt; see ``RolloutEngine.generate``.

        Args:
            prompts: of this rank.
            sampling: how to sample.
            on_finished: gets each rollout when it is done. Those of a server that turns out to have other weights come
                twice, the first ones to be forgotten.

        Raises:
            ValueError: an empty prompt, one that with ``max_new_tokens`` is longer than the servers take, a stop id or
                bad word unknown to the model, or a temperature for the first token.
            FloatingPointError: no token could be drawn (NaN weights, or every token banned).
            RolloutError: no server is left, or one refuses the requests; or another rank had any of these.
        """
        start = time.perf_counter()
        self.wake()
        self._check_versions()
        rollouts: list[Rollout] = []
        failure = None
        try:
            rollouts = self._sample(prompts, sampling, on_finished)
        except Exception as error:
            failure = error
        self._agree(failure)
        self.last_stats |= {
            "generated_tokens": sum(len(rollout.response_ids) for rollout in rollouts),
            "prompt_tokens": sum(len(rollout.prompt.token_ids) for rollout in rollouts),
            "seconds": time.perf_counter() - start,
        }
        return rollouts

    def _sample(
        self, prompts: list[Prompt], sampling: SamplingParams, on_finished: Callable[[list[Rollout]], object]
    ) -> list[Rollout]:
        if sampling.first_token_temperature is not None:
            raise ValueError("vLLM has one temperature for all tokens: first_token_temperature must be None")
        check_request_lengths(prompts, sampling, self.max_model_len)
        reader = ResponseReader(
            self.tokenizer,
            sampling,
            generation_config=getattr(self.hf_model, "generation_config", None),
            vocab_size=self.vocab_size,
        )
        requests = [(prompt, i) for prompt in prompts for i in range(sampling.n)]
        seeds = [request_seed(sampling.seed, *stream) for stream in request_streams(prompts, sampling)]
        rollouts: list[Rollout | None] = [None] * len(requests)

        def ask(server: int, r: int) -> Completion:
            parameters = vllm_sampling(sampling, reader.stop.ids, seeds[r])
            return self.pool.servers[server].complete(parameters, requests[r][0].token_ids, self.vocab_size)

        left = list(range(len(requests)))
        with tqdm(total=len(left), desc="generate", leave=False, disable=not self._shows_progress()) as bar:
            while left:
                costs = [len(requests[r][0].token_ids) + sampling.max_new_tokens for r in left]
                answered: dict[int, list[int]] = {}
                # closing: an error here must end the requests that are under way
                with closing(self._dispatch(lambda server, i: ask(server, left[i]), costs)) as answers:  # noqa: B023
                    for server, i, completion in answers:
                        r = left[i]
                        prompt, sample_index = requests[r]
                        ids, log_probs, reason = completion.token_ids, completion.log_probs, completion.finish_reason
                        rollouts[r] = reader.rollout(prompt, sample_index, ids, log_probs, reason)
                        on_finished([rollouts[r]])
                        answered.setdefault(server, []).append(r)
                        bar.update()
                left = [r for server in self._started_anew(answered) for r in answered[server]]
                bar.update(-len(left))
        return rollouts

    def _dispatch(self, ask: Callable[[int, int], Completion], costs: list[int]) -> Iterator[tuple[int, int, Any]]:
        """Answers as they come; servers that are lost on the way are noted.

        Raises:
            RolloutError: no server is left, or one refuses.
        """
        live = self.pool.live
        if not live:
            raise RolloutError(self.pool.none_left())
        dispatch: Dispatch[int, Completion] = Dispatch(
            ask,
            live,
            costs,
            concurrency=self.config.engine.vllm_server_concurrency,
            first=self.strategy.get_rank() % len(live),
        )
        try:
            yield from dispatch.run()
        except NoServerLeftError as error:
            self.pool.lose(error.reasons)
            raise RolloutError(self.pool.none_left()) from None
        except ServerRefusedError as error:
            raise RolloutError(str(error)) from None
        self.pool.lose(dispatch.lost)

    def _started_anew(self, servers: Iterable[int]) -> list[int]:
        """Which servers have other weights than those pushed last. One that died meanwhile answered with the right
        ones: starting again takes longer than that."""
        found = self.pool.not_at(self.version, servers, tries=1)
        odd = {i: reason for i, (reason, answered) in found.items() if answered}
        self.pool.lose(odd)
        return list(odd)

    # -- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self, actor: nn.Module) -> None:
        """Pushes the present weights of ``actor`` to every server, lost ones too. Collective.

        A server that does not take them is lost; at the first push that is an error.

        Raises:
            RolloutError: no server has them, or they cannot be brought there; on every rank.
        """
        start = time.perf_counter()
        self.actor = actor
        self._wake()
        self._pushes += 1
        version, weights = f"{self._run}-{self._pushes}", full_weights(actor, self.strategy)
        problem, lost = None, {}
        if self.strategy.is_rank_0():
            limits = vocabulary_limits(self.tokenizer, actor, self.vocab_size)
            problem, lost = self._deliver(
                weights,
                weight_bytes(self.hf_model),
                lambda server, source: self.pool.load(server, source, version, limits),
            )
        else:
            for _ in weights:
                pass
        problem, version, lost = self.strategy.broadcast_object((problem, version, lost))
        if problem is None and lost and self.version is None:
            problem = "; ".join(lost.values())
        if problem is not None:
            raise RolloutError(f"--rollout_engine vllm_server: {problem}")
        for i in self.pool.lost.keys() - lost.keys():
            logger.info("%s is used again: it has the present weights", self.pool.servers[i].name)
        self.version = version
        self.pool.lost = {i: reason for i, reason in self.pool.lost.items() if i in lost}
        self.pool.lose(lost)
        if not self.pool.live:
            raise RolloutError(self.pool.none_left())
        self.last_stats["sync_seconds"] = time.perf_counter() - start

    def differing_weights(self, tolerance: float = 1e-2) -> tuple[list[str], list[str]]:
        """Weights of the actor that a server does not have, and those that cannot be compared. Collective.

        Args:
            tolerance: largest difference, relative to the weight's size.

        Raises:
            RolloutError: a server could not compare; on every rank.
        """
        from lightppo.rollout.vllm_weights import fingerprints_as_tensors, trainer_fingerprints

        problem = None
        differing: set[str] = set()
        unknown: set[str] = set()

        def compare(server: VLLMServer, source: Source) -> None:
            found = server.differing_weights(source(), tolerance)
            differing.update(found[0])
            unknown.update(found[1])

        prints = fingerprints_as_tensors(trainer_fingerprints(full_weights(self.actor, self.strategy)))
        if self.strategy.is_rank_0():
            n_bytes = sum(p.nbytes for p in prints.values())
            problem, failures = self._deliver(prints.items(), n_bytes, compare, self.pool.live)
            problem = problem or "; ".join(failures.values()) or None
        problem, differing, unknown = self.strategy.broadcast_object((problem, differing, unknown))
        if problem is not None:
            raise RolloutError(f"--rollout_engine vllm_server: {problem}")
        return sorted(differing), sorted(unknown)

    def _check_versions(self) -> None:
        """Every server that will be asked has the weights that were pushed last. Collective."""
        odd = {}
        if self.strategy.is_rank_0():
            odd = {i: reason for i, (reason, _) in self.pool.not_at(self.version, self.pool.live).items()}
        self.pool.lose(self.strategy.broadcast_object(odd))
        if not self.pool.live:
            raise RolloutError(self.pool.none_left())

    # -- start, sleep, end -----------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        """Waits for the servers, and sees that they serve the actor's model. Collective.

        Returns:
            Whether they sleep while the trainer trains.
        """
        found = None
        if self.strategy.is_rank_0():
            found = self.pool.wait_for_all(self.config.engine.vllm_server_start_timeout)
        problems, can_sleep = self.strategy.broadcast_object(found)
        if problems:
            raise RolloutError("--vllm_server_url: " + "; ".join(problems))
        if self.config.engine.free_cache_engine and not can_sleep:
            logger.info("vLLM servers without --enable-sleep-mode stay awake while the trainer trains")
        return self.config.engine.free_cache_engine and can_sleep

    def _misfit(self, server: VLLMServer, described: dict[str, Any]) -> str | None:
        """Why a server cannot sample for the actor, or ``None``."""
        name, served = server.name, described["architecture"]
        wanted = architecture(self.hf_model.config)
        odd = [f"{k} {served.get(k)} for {value}" for k, value in wanted.items() if served.get(k) != value]
        if odd:
            return (
                f"{name} serves {described['model']}, which is not the model of --pretrain "
                f"{self.config.model.pretrain}: {', '.join(odd)}; start it with that model"
            )
        if described["max_model_len"] < self.max_model_len:
            return (
                f"{name} takes {described['max_model_len']} tokens, prompt and response may have {self.max_model_len}: "
                f"start it with --max-model-len {self.max_model_len}, or lower --prompt_max_len or --generate_max_len"
            )
        dtype = str(next(self.hf_model.parameters()).dtype).removeprefix("torch.")
        if described["dtype"] != dtype:
            logger.warning("%s computes in %s, the actor in %s: log probs will differ", name, described["dtype"], dtype)
        return None

    def sleep(self) -> None:
        """Frees the servers' GPU memory, by ``--sleep_level``, where they were started with ``--enable-sleep-mode``.
        Collective."""
        if self._sleeps and not self._asleep:
            level = self.config.engine.sleep_level
            self._tell(lambda server: server.sleep(level))
            self._asleep = True

    def wake(self) -> None:
        """Takes back what :meth:`sleep` freed; weights that were dropped are pushed anew. Collective."""
        dropped = self._asleep and self.config.engine.sleep_level == 2
        self._wake()
        if dropped:
            self.sync_weights(self.actor)

    def _wake(self) -> None:
        if self._asleep:
            self._tell(VLLMServer.wake)
            self._asleep = False

    def _tell(self, what: Callable[[VLLMServer], None]) -> None:
        """Has rank 0 call every live server; those that fail are lost. Collective."""
        failures = self.pool.each(what, self.pool.live) if self.strategy.is_rank_0() else {}
        self.pool.lose(self.strategy.broadcast_object(failures))

    def close(self) -> None:
        """Ends the connections; the servers go on. It may be called again."""
        self.pool.close()

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _agree(self, failure: Exception | None) -> None:
        """Every rank learns what the others met: servers lost, and failures, which end the call for all. Collective.

        Raises:
            Exception: ``failure`` on its own rank.
            RolloutError: with the first failure of another rank.
        """
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        if isinstance(failure, RolloutError):
            text = str(failure)
        everything = self.strategy.all_gather_object((text, self.pool.lost))
        for _, lost in everything:
            self.pool.lose(lost)
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(everything):
            if text is not None:
                raise RolloutError(f"rank {rank}: {text}")

    def _shows_progress(self) -> bool:
        return self.strategy.is_rank_0() and sys.stderr.isatty()


def weight_bytes(model: nn.Module) -> int:
    """Size of all weights, whole also where they are sharded; tied ones under each of their names."""
    held = sum(
        full_shape(tensor).numel() * tensor.element_size() for tensor in model.state_dict(keep_vars=True).values()
    )
    packed = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]  # in 4 bits, and sent unpacked
    return held + sum(state.shape.numel() * state.dtype.itemsize for state in packed)
