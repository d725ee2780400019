"""Engines that sample ahead by a copy of the weights, without a server: at once, or in a thread."""

from __future__ import annotations

import copy
import random
import threading
import time
from concurrent.futures import Future
from typing import Any

from lightppo.rollout.engine import Capabilities
from lightppo.rollout.hf import HFRolloutEngine
from lightppo.user_code import in_daemon_thread


class AtOnce:
    """Samples when it is asked, before anything trains: what a run with samples ahead has to equal."""

    capabilities = Capabilities(reports_finished=True, samples_ahead=True)

    def __init__(self, config: Any, strategy: Any, actor: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.sync_weights(actor)

    def sync_weights(self, actor):
        self.engine = HFRolloutEngine(_Copy(actor), self.tokenizer)

    def generate(self, prompts, sampling, on_finished=lambda rollouts: None):
        return self.engine.generate(prompts, sampling, on_finished)

    def start(self, prompts, sampling, on_finished=lambda rollouts: None):
        return self.generate(prompts, sampling, on_finished)

    def finish(self, ticket):
        return ticket

    def sleep(self): ...

    def wake(self): ...

    def close(self): ...


class InThread(AtOnce):
    """Samples in a thread while the trainer trains, after a random wait; the answers come one by one, in any order."""

    _one_at_a_time = threading.Lock()

    def start(self, prompts, sampling, on_finished=lambda rollouts: None) -> Future:
        engine = self.engine

        def sample():
            time.sleep(random.SystemRandom().uniform(0, 0.05))
            with self._one_at_a_time:
                rollouts = engine.generate(prompts, sampling)
            for rollout in random.SystemRandom().sample(rollouts, len(rollouts)):
                on_finished([rollout])
            return rollouts

        return in_daemon_thread(sample)

    def finish(self, ticket):
        return ticket.result(60)


class _Copy:
    """The actor's model as it is now."""

    def __init__(self, actor: Any) -> None:
        model = getattr(actor.model, "module", actor.model)
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.valid_vocab_size = getattr(actor, "valid_vocab_size", None)
