"""Decoding steps that are captured: the same responses, nothing of a step is left on the host."""

from __future__ import annotations

import copy
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from support.decoders import SIZES, build
from support.fake_graph import FakeGraphs
from support.far_device import FarDevice
from torch._dynamo.exc import Unsupported
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from lightppo.models.attention.recurrent import RECURRENT_LAYERS
from lightppo.models.batches import cache_argument
from lightppo.rollout.decoding import SlotCache
from lightppo.rollout.decoding_runners import LOOK_EVERY, CUDAGraphs, rounded
from lightppo.rollout.engine import SamplingParams
from lightppo.rollout.hf import HFRolloutEngine

SAMPLED = {"n": 2, "seed": 4, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "temperature": 0.7}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "filters": SAMPLED,
    "minimum, stop strings": {"n": 2, "seed": 2, "min_new_tokens": 5, "stop": ("a", "7")},
    "penalties": {
        "n": 4,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
}


class Uncaptured(CUDAGraphs):
    """The same steps, as they are."""

    def warm_up(self, step):
        step()

    def capture(self, step):
        return step


@pytest.fixture
def generate(tokenizer, actor_of, prompts):
    def run(model, runner, slots: int = 4, most: int = 40, **sampling):
        engine = HFRolloutEngine(
            actor_of(model), tokenizer, micro_rollout_batch_size=slots, runner=runner
        )
        return engine.generate(
            prompts[:6], SamplingParams(max_new_tokens=most, **sampling)
        ), engine.last_stats

    return run


def assert_same(rollouts, expected, exactly: bool = False) -> None:
    for one, other in zip(rollouts, expected, strict=True):
        assert (one.response_ids, one.finish_reason) == (other.response_ids, other.finish_reason)
        tolerance = {"atol": 0, "rtol": 0} if exactly else {"atol": 1e-5, "rtol": 0}
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), **tolerance
        )


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("llama", "filters"),
        ("qwen2", "minimum, stop strings"),
        ("gpt_neox", "greedy"),
        ("gpt2", "penalties"),
    ],
)
def test_replayed_steps_give_the_same_responses(name, sampling, generate, monkeypatch):
    moved, make_room, model, sampling = [], SlotCache.make_room, build(name), SAMPLINGS[sampling]

    def watched(cache, slots, at_least):
        places = [buffer.data_ptr() for layer in cache.layers for buffer in layer.buffers]
        shift = make_room(cache, slots, at_least)
        moved.append(
            places == [buffer.data_ptr() for layer in cache.layers for buffer in layer.buffers]
        )
        return shift

    eager, _ = generate(model, None, **sampling)
    monkeypatch.setattr(SlotCache, "make_room", watched)
    monkeypatch.setattr("lightppo.rollout.decoding.FIXED_SPARE", 8)
    runner = FakeGraphs()
    rollouts, stats = generate(model, runner, **sampling)
    assert_same(rollouts, eager)
    assert_same(rollouts, generate(model, Uncaptured(), **sampling)[0], exactly=True)
    assert moved  # all columns were used, more than once
    assert all(moved)  # and the buffers stay where a graph knows them
    assert stats["decode_steps"] > runner.replays > 0.7 * stats["decode_steps"]
    assert not runner.failed


def test_a_step_waits_for_nothing_and_the_host_looks_every_few_tokens(generate):
    """Without stop strings."""

    class Counted(Uncaptured):
        inside = 0

        def __call__(self, key, step):
            before = far.waits.total()
            step()
            self.inside += far.waits.total() - before

    waits = []
    for most in (5, 21):
        with FarDevice() as far:
            runner, model = Counted(), far.move(build("llama"))
            sampling = (
                SAMPLED | SAMPLINGS["penalties"] | {"n": 1, "ignore_eos": True, "min_new_tokens": 3}
            )
            generate(model, runner, 6, most, **sampling)
        assert runner.inside == 0
        waits.append(far.waits.total())
    assert waits[1] - waits[0] == 16 / LOOK_EVERY


def test_a_step_reads_no_number_on_the_host_that_changes(generate):
    """The compiler would compile it again."""

    class Traced(CUDAGraphs):
        def warm_up(self, step):
            with torch.compiler.set_stance("default"):
                self.traced = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
                self.traced()

        def capture(self, step):
            return torch.compiler.set_stance("fail_on_recompile")(self.traced)

    runner, model = Traced(), build("llama")
    try:
        torch.compile(model, backend="eager", fullgraph=True)(torch.tensor([[5]]))
    except Unsupported as error:
        pytest.skip(
            f"this torch does not compile this transformers' models: {str(error).splitlines()[0]}"
        )
    rollouts, _ = generate(model, runner, 1, **SAMPLED)  # one row, one width
    assert not runner.failed
    assert_same(rollouts, generate(model, None, 1, **SAMPLED)[0])


def test_graphs_are_captured_again_for_each_call(generate):
    """Weights may have moved: gathered at ZeRO-3, merged adapters."""
    model, runner = build("llama"), FakeGraphs()
    first, _ = generate(model, runner, temperature=0.0)
    other = build("llama")
    for weight, new in zip(model.parameters(), copy.deepcopy(other).parameters()):
        weight.data = new.data.flip(-1)
    second, _ = generate(model, runner, temperature=0.0)
    assert_same(second, generate(model, None, temperature=0.0)[0])
    assert [r.response_ids for r in second] != [r.response_ids for r in first]


def asks_for_its_length(model):
    def ask(module, args, kwargs):
        kwargs[cache_argument(model)].get_seq_length()

    model.register_forward_pre_hook(ask, with_kwargs=True)
    return model


MISTRAL = {**SIZES, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("make", "sampling", "why"),
    [
        (lambda: asks_for_its_length(build("llama")), {}, "asks for the length of its cache"),
        (lambda: build("llama", "eager"), {}, "attends in its own way"),
        (lambda: build("mistral"), {}, "in a window that is shorter"),
        (
            lambda: Lfm2ForCausalLM(
                Lfm2Config(**SIZES, num_key_value_heads=2, layer_types=["conv", "full_attention"])
            ),
            {},
            "recurrent states" if RECURRENT_LAYERS else "more than keys and values",
        ),
    ],
    ids=["asks", "eager attention", "window", "recurrent"],
)
def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(
    make, sampling, why, generate, caplog
):
    torch.manual_seed(0)
    model, runner, sampling = (
        make().eval(),
        FakeGraphs(),
        {"n": 2, "seed": 4, "most": 12} | sampling,
    )
    eager, _ = generate(model, None, **sampling)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(generate(model, runner, **sampling)[0], eager)
    assert runner.replays == 0
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "--hf_cuda_graphs" in record.getMessage()
    ]
    assert why in said


def test_bad_words_are_captured_where_transformers_does_not_wait_for_them(generate, caplog):
    """It does before 5.24."""
    torch.manual_seed(0)
    model, runner = build("llama").eval(), FakeGraphs()
    sampling = {"n": 2, "seed": 4, "most": 12, "bad_words": ("ab", "c")}
    with caplog.at_level(logging.WARNING):
        assert_same(generate(model, runner, **sampling)[0], generate(model, None, **sampling)[0])
    said = [record.getMessage() for record in caplog.records]
    refused = any("not permitted when stream is capturing" in text for text in said)
    assert refused == (runner.replays == 0)


def test_a_window_as_long_as_the_rows_is_captured(generate):
    torch.manual_seed(0)
    model, runner = (
        MistralForCausalLM(MistralConfig(**MISTRAL, sliding_window=52)).eval(),
        FakeGraphs(),
    )
    assert_same(
        generate(model, runner, temperature=0.0)[0], generate(model, None, temperature=0.0)[0]
    )
    assert runner.replays > 0


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [(1, 1, 1), (2, 1, 2), (5, 1, 8), (64, 1, 64), (128, 4, 128), (129, 4, 160)],
)
def test_few_sizes_are_captured(count, parts, expected):
    assert rounded(count, parts) == expected


def test_no_memory_is_no_reason_to_go_on(generate):
    class Full(FakeGraphs):
        def warm_up(self, step):
            fails(torch.OutOfMemoryError("no memory"))

    with pytest.raises(torch.OutOfMemoryError):
        generate(build("llama"), Full(), temperature=0.0)


def fails(error):
    raise error


def test_what_is_asked_of_cuda(monkeypatch):
    """One stream and one pool for all; a wait in the first step is an error, and the mode comes back."""
    asked, mode = [], ["default"]

    @contextmanager
    def within(name, *values, **options):
        asked.append((name, *values, *options.items()))
        yield

    def stream(name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: asked.append((name, "waits for", other.name))
        )

    side, here = stream("side"), stream("here")
    graphs = (
        SimpleNamespace(pool=lambda: "pool", replay=lambda n=n: asked.append(("replay", n)))
        for n in range(1, 9)
    )
    for name, fake in {
        "Stream": lambda: side, "current_stream": lambda: here, "CUDAGraph": lambda: next(graphs),
        "stream": lambda s: within("on", s.name),
        "graph": lambda graph, **options: within("graph", options["pool"], options["stream"].name),
        "get_sync_debug_mode": lambda: mode[-1], "set_sync_debug_mode": mode.append,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    runner, ran = CUDAGraphs(), []

    def step():
        ran.append(mode[-1])

    with runner:
        for key in (8, 8, 8, 4, 4):
            runner(key, step)
    first = [("side", "waits for", "here"), ("on", "side"), ("here", "waits for", "side")]
    assert asked == [*first, ("graph", None, "side"), ("replay", 1), ("replay", 1),
                     *first, ("graph", "pool", "side"), ("replay", 2)]  # fmt: skip
    assert ran == ["error", "default"] * 2  # run, and captured, once for each key

    def waits():
        ran.append("again")
        if not runner.failed:
            raise RuntimeError("called a synchronizing CUDA operation")

    with runner:
        runner(8, waits)
    assert runner.failed
    assert ran[-2:] == ["again", "again"]
    assert mode[-1] == "default"
    with pytest.raises(RuntimeError, match="--hf_cuda_graphs: leave it out"):
        runner.capture(
            lambda: fails(RuntimeError("operation not permitted when stream is capturing"))
        )
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        runner.capture(lambda: fails(torch.OutOfMemoryError("no memory")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_on_a_gpu(dtype, generate):
    """To the bit the same steps, replayed; their memory is free again."""
    sizes = SIZES | {"hidden_size": 128, "num_key_value_heads": 2, "initializer_range": 0.05}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().to("cuda", dtype)
    for sampling in SAMPLINGS.values():
        runner = CUDAGraphs()
        rollouts, _ = generate(model, runner, **sampling)
        assert not runner.failed
        assert_same(rollouts, generate(model, Uncaptured(), **sampling)[0], exactly=True)
    if dtype == torch.float32:
        greedy = generate(model, CUDAGraphs(), temperature=0.0)[0]
        eager = generate(model, None, temperature=0.0)[0]
        assert [r.response_ids for r in greedy] == [r.response_ids for r in eager]
    runner, waits = CUDAGraphs(), {"bad_words": ("ab", "cd"), "temperature": 0.0}
    assert_same(
        generate(model, runner, **waits)[0], generate(model, Uncaptured(), **waits)[0], exactly=True
    )
    assert runner.failed
    runner = CUDAGraphs()  # whose stream has a workspace of cuBLAS from its first step on
    generate(model, runner, temperature=0.0)
    held = torch.cuda.memory_allocated()
    generate(model, runner, temperature=0.0)
    assert torch.cuda.memory_allocated() <= held
