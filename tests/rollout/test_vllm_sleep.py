"""When the engine sleeps and what wakes it: the order of the calls to a vLLM that only notes them, as on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from lightppo.config import PPOConfig
from lightppo.rollout.vllm import VLLMRolloutEngine, default_group_kept, undisturbed_process


class NotingLLM:
    def __init__(self, missing=(), resets=True):
        self.calls, self.missing, self.resets = [], list(missing), resets

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, function, args=()):
        self.calls.append(function.__name__)
        return [self.missing]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return self.resets


def engine(llm, sleeps=True, **options):
    made = VLLMRolloutEngine.__new__(VLLMRolloutEngine)
    made.config = PPOConfig.from_flat(rollout_engine="vllm", **options)
    made.llm, made.strategy, made.actor, made.hf_model = llm, None, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    made._sleeps, made._asleep, made.last_stats = sleeps, set(), {}
    return made


PUSH = ["push_weights", "reset"]


def test_a_step_sleeps_once_and_wakes_in_parts():
    llm = NotingLLM()
    rollouts = engine(llm)
    rollouts.sleep()
    rollouts.sleep()
    assert llm.calls == ["sleep 2"]
    rollouts.sync_weights(rollouts.actor)
    assert llm.calls == ["sleep 2", "wake weights", *PUSH]  # the cache stays away until it is needed
    rollouts.wake()
    rollouts.wake()
    assert llm.calls == ["sleep 2", "wake weights", *PUSH, "wake kv_cache"]


def test_dropped_weights_are_pushed_when_there_was_no_push():
    llm = NotingLLM()
    rollouts = engine(llm)
    rollouts.sleep()
    rollouts.wake()
    assert llm.calls == ["sleep 2", "wake weights", "wake kv_cache", *PUSH]


def test_kept_weights_come_back_by_themselves():
    llm = NotingLLM()
    rollouts = engine(llm, sleep_level=1)
    rollouts.sleep()
    rollouts.wake()
    assert llm.calls == ["sleep 1", "wake weights", "wake kv_cache"]


def test_a_cpu_and_no_free_cache_engine_never_sleep():
    llm = NotingLLM()
    rollouts = engine(llm, sleeps=False, free_cache_engine=False)
    rollouts.sleep()
    rollouts.wake()
    assert llm.calls == []


def test_a_push_that_does_not_reach_all_weights_is_an_error():
    with pytest.raises(RuntimeError, match=r"1 weights of the vLLM engine got no value.*odd\.weight"):
        engine(NotingLLM(missing=["odd.weight"])).sync_weights(torch.nn.Linear(1, 1))


def test_a_cache_that_stays_is_an_error():
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine(NotingLLM(resets=False)).sync_weights(torch.nn.Linear(1, 1))


def test_close_keeps_the_default_group(monkeypatch):
    destroyed = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroyed.append)
    rollouts = engine(SimpleNamespace())

    def shutdown():
        torch.distributed.destroy_process_group()
        torch.distributed.destroy_process_group("its own")

    rollouts.llm.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=shutdown))
    rollouts.close()
    rollouts.close()
    assert destroyed == ["its own"]
    with default_group_kept(), pytest.raises(KeyError):
        raise KeyError
    torch.distributed.destroy_process_group("afterwards")
    assert destroyed == ["its own", "afterwards"]


def test_what_building_changes_is_put_back(monkeypatch):
    import os
    import random

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = random.getstate(), torch.get_rng_state(), torch.set_num_threads
    with undisturbed_process():
        random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads = print
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.set_num_threads is before[2]
    assert os.environ["LOCAL_WORLD_SIZE"] == "7"
    assert "LOCAL_RANK" not in os.environ
