"""When the engine sleeps and what wakes it: the order of the calls to a vLLM that only notes them, as on a GPU."""

import os
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from lightppo.config import PPOConfig
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.vllm.colocated import (
    VLLMRolloutEngine,
    default_group_kept,
    undisturbed_process,
)


class NotingLLM:
    """Answers every request with one token."""

    def __init__(self, **arguments):
        self.calls, self.missing, self.resets, self.waiting, self.llm_engine = (
            [],
            [],
            True,
            [],
            self,
        )
        self.model_config = SimpleNamespace(hf_config=LlamaConfig())

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, function, args=()):
        self.calls.append(function)
        return [self.missing]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return self.resets

    def add_request(self, name, tokens, parameters, lora_request=None):
        self.waiting.append(name)

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        answer = SimpleNamespace(
            token_ids=[3], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="length"
        )
        return [SimpleNamespace(finished=True, request_id=self.waiting.pop(), outputs=[answer])]


@pytest.fixture
def engine(monkeypatch, llama, tokenizer):
    """``engine(**options)``: one on a GPU that is not there, over a vLLM that is not there."""
    modules = {
        "vllm": {"LLM": NotingLLM, "SamplingParams": dict, "__spec__": ModuleSpec("vllm", None)},
        "vllm.inputs": {"tokens_input": list},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=None)},
        "lightppo.rollout.vllm.worker": {"install_sampler": "sampler", "push_weights": "push"},
    }
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr("lightppo.rollout.vllm.colocated.on_cuda", lambda: True)
    # without seeds of their own torch's generator of the GPU is asked
    monkeypatch.setattr(VLLMRolloutEngine, "_seeds_each_response", True)
    attends = SimpleNamespace(has_inner_state=False)  # as vLLM would describe the model
    monkeypatch.setattr("lightppo.rollout.vllm.colocated.vllms_description", lambda _: attends)

    def build(**options):
        lengths = {"prompt_max_len": 20, "generate_max_len": 10}
        config = PPOConfig.from_flat(rollout_engine="vllm", **lengths, **options).resolved()
        made = VLLMRolloutEngine(config, None, llama, tokenizer)
        made.llm.calls.clear()
        return made

    return build


PUSH = ["push", "reset"]


def test_a_step_sleeps_once_and_wakes_in_parts(engine, llama, prompts):
    rollouts = engine()
    calls = rollouts.llm.calls
    rollouts.sleep()
    rollouts.sleep()
    assert calls == ["sleep 2"]
    rollouts.sync_weights(llama)
    assert calls == ["sleep 2", "wake weights", *PUSH]  # the cache stays away until it is needed
    rollouts.generate(prompts[:2], SamplingParams(max_new_tokens=1))
    rollouts.wake()
    assert calls == ["sleep 2", "wake weights", *PUSH, "wake kv_cache"]


def test_the_trainers_states_leave_before_vllm_wakes_and_come_back_once_it_sleeps(
    engine, monkeypatch, llama, prompts
):
    calls = []
    room = SimpleNamespace(
        leave=lambda: calls.append("leave"), come_back=lambda: calls.append("come back")
    )
    monkeypatch.setattr("lightppo.rollout.vllm.colocated.Room", lambda strategy: room)
    monkeypatch.setattr(
        NotingLLM, "calls", property(lambda self: calls, lambda self, none: None), raising=False
    )
    rollouts = engine(offload_during_rollout=True)
    rollouts.sync_weights(llama)
    rollouts.generate(prompts[:2], SamplingParams(max_new_tokens=1))
    rollouts.sleep()
    assert calls == ["wake weights", *PUSH, "leave", "wake kv_cache", "sleep 2", "come back"]


@pytest.mark.parametrize(("level", "push"), [(2, PUSH), (1, [])])
def test_dropped_weights_are_pushed_when_there_was_no_push(engine, monkeypatch, level, push):
    monkeypatch.setattr("lightppo.rollout.vllm.colocated.sleep_level", lambda config: level)
    rollouts = engine()
    rollouts.sleep()
    rollouts.wake()
    assert rollouts.llm.calls == [f"sleep {level}", "wake weights", "wake kv_cache", *push]


@pytest.mark.parametrize(("on_gpu", "options"), [(True, {"free_cache_engine": False}), (False, {})])
def test_a_cpu_and_no_free_cache_engine_never_sleep(engine, monkeypatch, on_gpu, options):
    monkeypatch.setattr("lightppo.rollout.vllm.colocated.on_cuda", lambda: on_gpu)
    rollouts = engine(**options)
    rollouts.sleep()
    rollouts.wake()
    assert rollouts.llm.calls == []


def test_a_push_that_does_not_reach_all_weights_is_an_error(engine, llama):
    rollouts = engine()
    rollouts.llm.missing = ["odd.weight"]
    with pytest.raises(RuntimeError, match=r"1 weights .*odd\.weight"):
        rollouts.sync_weights(llama)


def test_a_cache_that_stays_is_an_error(engine, llama):
    rollouts = engine()
    rollouts.llm.resets = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        rollouts.sync_weights(llama)


def test_close_keeps_the_default_group(monkeypatch, engine):
    destroyed = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", destroyed.append)
    rollouts = engine()

    def shutdown():
        torch.distributed.destroy_process_group()
        torch.distributed.destroy_process_group("its own")

    rollouts.llm.engine_core = SimpleNamespace(shutdown=shutdown)
    rollouts.close()
    rollouts.close()
    assert destroyed == ["its own"]
    with default_group_kept(), pytest.raises(KeyError):
        raise KeyError
    torch.distributed.destroy_process_group("afterwards")
    assert destroyed == ["its own", "afterwards"]


def test_what_building_changes_is_put_back(monkeypatch):
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


def test_the_trainer_keeps_its_cuda_stream(monkeypatch):
    """vLLM takes one of its own where several ranks share an engine, and puts its function in the place of torch's."""
    current, waited = ["the trainer's"], []
    stream = SimpleNamespace(wait_stream=waited.append)
    for name, value in (
        ("is_initialized", lambda: True),
        ("current_stream", lambda: stream if current else "vLLM's"),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_stream", None)
    with undisturbed_process():
        current.clear()
        told = []
        torch.cuda.set_stream = told.append
    assert (waited, told) == (["vLLM's"], [stream])
