"""Pushes over NCCL, of which here everything is real but HTTP, the GPUs and NCCL's own functions (fake_nccl.py)."""

import json
from pathlib import Path

import pytest
from support.once import once
from support.ranks import WITH_SUPPORT, run_ranks

pytestmark = pytest.mark.vllm

WORKER = Path(__file__).with_name("weights_nccl_worker.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    def see():
        path = tmp_path_factory.mktemp("nccl") / "seen.json"
        run_ranks(WORKER, path, vllm=True, world_size=1, timeout=200, env=WITH_SUPPORT)
        return json.loads(path.read_text())

    return once(tmp_path_factory, "nccl", see)


def test_every_worker_of_every_server_gets_every_push(seen):
    assert seen["pushes"] == [[[None, None], [True, True]]] * 2


def test_every_server_has_an_id_and_a_stream_of_its_own_in_every_push(seen):
    assert (seen["ids"], seen["streams"]) == (4, 4)


def test_all_types_and_shapes(seen):
    sent, came = seen["types"]
    assert came == sent
    assert len(sent) == 10


def test_a_worker_that_cannot_load_ends_its_push_alone(seen):
    (problem, of_other), other_has_all, is_soon = seen["failures"]["unloadable"]
    assert problem == "RequestError: KeyError: 'of_another_model'"
    assert (of_other, other_has_all, is_soon) == (None, True, True)


def test_a_server_that_hangs_ends_its_push_alone(seen):
    """NCCL itself would wait for ever, and on one stream for both servers."""
    (problem, of_other), other_has_all, is_soon = seen["failures"]["silent"]
    assert problem.startswith("TimeoutError")
    assert (of_other, other_has_all, is_soon) == (None, True, True)
    assert seen["failures"]["left"] == 0  # of the trainer


def test_a_switch_of_vllms_that_would_load_garbage_is_an_error(seen):
    assert "VLLM_DISABLE_PYNCCL" in seen["disabled"][0]


def test_without_nccl_the_message_says_so(seen):
    assert seen["without NCCL"].startswith("NCCL cannot be used by vLLM here: ")


def test_weights_that_vllm_computes_itself_are_not_missed(seen):
    """Scales, where a server quantises."""
    assert seen["missing"] == [[], ["first.weight"]]


def test_a_weight_with_two_names_is_not_missed(seen):
    assert seen["missing of two names"] == []


def test_experts_are_not_missed_where_vllm_leaves_out_a_part_of_their_names(seen):
    assert seen["missing of a mixture"] == [[], ["experts.routed_experts.first.weight"]]
