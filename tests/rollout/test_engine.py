import subprocess
import sys

import pytest

from lightppo.rollout.engine import RolloutEngine, SamplingParams
from lightppo.rollout.hf import HFRolloutEngine


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1025),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("stop", ("",)),
        ("stop", "END"),
        ("stop_token_ids", (-1,)),
        ("bad_words", (" ",)),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "greedy", "log_prob_temperature"),
    [
        (SamplingParams(temperature=0.7), False, 0.7),
        (SamplingParams(temperature=0.0), True, 1.0),
        (SamplingParams(temperature=0.7, do_sample=False), True, 1.0),
    ],
)
def test_temperature_zero_or_no_sampling_is_greedy(params, greedy, log_prob_temperature):
    assert params.greedy is greedy
    assert params.log_prob_temperature == log_prob_temperature


def test_lists_become_tuples_so_that_parameters_stay_hashable():
    assert hash(SamplingParams(stop=["a"], stop_token_ids=[3])) == hash(
        SamplingParams(stop=("a",), stop_token_ids=(3,))
    )


def test_hf_engine_is_a_rollout_engine(llama, tokenizer, actor_of):
    assert isinstance(HFRolloutEngine(actor_of(llama), tokenizer), RolloutEngine)


def test_protocol_module_loads_neither_torch_nor_transformers():
    code = "import sys, lightppo.rollout.engine as e; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-2:] == ["False", "False"]
