"""Parts of gpu_check.py that run in one process: attention kernels, the head, passes in training, decoding."""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from workloads import SCALES, WORKLOADS, Scale, Workload, prompt_texts, training_flops

if TYPE_CHECKING:
    from gpu_check import Rows


# a PPO run
RUN = (
    "deepspeed",
    "datasets",
    "dill",
    "hjson",
    "msgpack",
    "psutil",
    "pydantic",
    "tyro",
    "yaml",
)


def lacks(*packages: str) -> str:
    """Why something is skipped, or nothing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not there" if missing else ""


def seconds_of(action: Callable[[], Any], device: str, most: int = 10, warm_up: int = 2) -> float:
    """Median of a few calls, each waited for."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken: list[float] = []
    for i in range(warm_up + most):
        wait()
        start = time.perf_counter()
        action()
        wait()
        if i >= warm_up:
            taken.append(time.perf_counter() - start)
        if sum(taken) > 2:
            break
    return statistics.median(taken)


@contextmanager
def watched(device: str, seen: dict[str, Any]) -> Iterator[None]:
    """The most memory inside beyond what was there, and what makes the host wait for the GPU."""
    import torch

    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, mode = torch.cuda.memory_allocated(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    seen |= {"gb": (torch.cuda.max_memory_allocated() - before) / 1e9}
    seen |= {"host_waits": sum("called a synchronizing" in str(one.message) for one in told)}


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels(rows: Rows) -> None:
    """What this torch's attention takes, by signature and by trying, and packed rows of 24k tokens in each way."""
    import torch

    rows("signatures", signatures)
    for dtype in (torch.bfloat16, torch.float32):
        rows(f"sdpa {str(dtype)[6:]} new lengths", partial(new_lengths, dtype, rows.device))
    for dtype in (torch.float32, torch.bfloat16):
        for mask in ("causal", "masked"):
            for gqa in ("enable_gqa", "expanded"):
                rows(
                    f"sdpa {str(dtype)[6:]} {mask} {gqa}",
                    partial(sdpa_backends, dtype, mask, gqa, rows.device),
                )
    torch.backends.cuda.enable_cudnn_sdp(False)  # as every model of lightppo does
    for dtype in (torch.bfloat16, torch.float32):
        for how in ("as chosen", "by sequence", "shared prompts"):
            rows(
                f"packed {str(dtype)[6:]} {how}", partial(packed_attention, dtype, how, rows.device)
            )
    rows("packed bfloat16 flash-attn", partial(flash_attn, rows.device), lacks("flash_attn"))


def signatures() -> dict[str, Any]:
    import inspect

    import torch

    found: dict[str, Any] = {"torch": torch.__version__}
    try:
        from torch.nn.attention.varlen import varlen_attn

        found["varlen_attn"] = " ".join(inspect.signature(varlen_attn).parameters)
    except ImportError:
        found["varlen_attn"] = "not there"
    return found | {name: lacks(name) or "there" for name in ("flash_attn", "liger_kernel", "vllm")}


def qkv(dtype: Any, device: str, tokens: int, keys: int = 2) -> list[Any]:
    """Queries of 14 heads, keys and values: (1, H, T, 64) each, as of a model of 0.5B."""
    import torch

    return [
        torch.randn(1, h, tokens, 64, dtype=dtype, device=device, requires_grad=True)
        for h in (14, keys, keys)
    ]


def sdpa_backends(dtype: Any, mask: str, gqa: str, device: str) -> dict[str, Any]:
    """Milliseconds of each backend, forward and backward, and of what torch chooses."""
    import torch

    tokens = 64 if device == "cpu" else 4096
    q, k, v = qkv(dtype, device, tokens, 2 if gqa == "enable_gqa" else 14)
    options: dict[str, Any] = {"enable_gqa": gqa == "enable_gqa", "is_causal": mask == "causal"}
    if mask == "masked":
        options["attn_mask"] = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()

    def once() -> None:
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        torch.autograd.grad(output.sum(), (q, k, v))

    found: dict[str, Any] = {}
    with watched(device, found):
        once()
    return found | by_backend(lambda: 1e3 * seconds_of(once, device))


def by_backend(measure: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds with what torch chooses, and with each backend alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found: dict[str, Any] = {}
    for backend in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                    SDPBackend.MATH):  # fmt: skip
        name = "chosen" if backend is None else backend.name.removesuffix("_ATTENTION").lower()
        try:
            with (
                warnings.catch_warnings(),
                sdpa_kernel(backend) if backend else warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                found[f"{name}_ms"] = measure()
        except RuntimeError as error:
            found[f"{name}_ms"] = "out of memory" if "memory" in str(error) else "refused"
    return found


def new_lengths(dtype: Any, device: str) -> dict[str, Any]:
    """Milliseconds of a causal call, forward and backward, at a length that was not seen before."""
    import torch

    lengths = iter(range(65 if device == "cpu" else 1025, 10**9, 8))

    def once() -> None:
        q, k, v = qkv(dtype, device, next(lengths), 14)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(output.sum(), (q, k, v))

    return by_backend(lambda: 1e3 * seconds_of(once, device, most=4))


def lengths_of(tokens: int) -> list[int]:
    """Of sequences in a packed row."""
    draw, found = random.Random(0), []
    while sum(found) < tokens:
        found.append(min(draw.randint(tokens // 64 + 1, tokens // 8), tokens - sum(found)))
    return found


@contextmanager
def by_sequence() -> Iterator[None]:
    """Without the kernel for packed rows."""
    from lightppo.models.attention import row_attention

    before, row_attention.varlen_options = row_attention.varlen_options, lambda *_: None
    try:
        yield
    finally:
        row_attention.varlen_options = before


def packed_attention(dtype: Any, how: str, device: str) -> dict[str, Any]:
    """A packed row in lightppo's attention; of shared prompts 8 responses each."""
    import torch

    from lightppo.models.attention.row_attention import packed_attention as attend
    from lightppo.models.batches import pack

    longest, groups = (16, 2) if device == "cpu" else (1024, 2)  # GPU: 16 of about 1.5k
    ids = torch.randint(9, (groups, 2 * longest)).repeat_interleave(8, 0)
    mask, draw = torch.ones_like(ids), random.Random(0)
    for row in mask:
        row[draw.randint(longest + 1, 2 * longest) :] = 0
    ids = ids.to(device)
    row = pack(ids, mask, longest if how == "shared prompts" else None)
    q, k, v = qkv(dtype, device, row.input_ids.shape[1])
    module = SimpleNamespace(config=SimpleNamespace(layer_types=None))
    found: dict[str, Any] = {"sequences": len(ids), "tokens": row.input_ids.shape[1]}

    def once() -> None:
        output = attend(module, q, k, v, row.segments, sliding_window=None)[0]
        torch.autograd.grad(output.sum(), (q, k, v))

    with by_sequence() if how == "by sequence" else nullcontext():
        once()
        with watched(device, found):
            once()
        return found | {"ms": 1e3 * seconds_of(once, device)}


def flash_attn(device: str) -> dict[str, Any]:
    import torch
    from flash_attn import flash_attn_varlen_func

    lengths = lengths_of(16_384)
    q, k, v = (x[0].transpose(0, 1) for x in qkv(torch.bfloat16, device, sum(lengths)))
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    longest = max(lengths)

    def once() -> None:
        output = flash_attn_varlen_func(q, k, v, borders, borders, longest, longest, causal=True)
        torch.autograd.grad(output.sum(), (q, k, v))

    return {"sequences": len(lengths), "ms": 1e3 * seconds_of(once, device)}


# -- the head, and training --------------------------------------------------------------------------------------------


def head(rows: Rows) -> None:
    """Log probs of 8k tokens, forward and backward, by rows of the head; and its bare matrix products.

    With the entropy of one of eight tokens, as a training step has it; ``all_entropy_ms``: a forward with that of all.
    """
    tokens, tail_rows = (64, 128) if rows.small else (8192, 151_936)
    odd = tail_rows - (151_936 - 151_665) if not rows.small else 101
    for hidden in (64,) if rows.small else (896, 1536, 3584):
        for count, valid in ((odd, None), (tail_rows, odd), (tail_rows, None)):
            name = f"{hidden} wide, {count:,} rows" + (f", {valid:,} valid" if valid else "")
            rows(name, partial(head_once, tokens, hidden, count, valid, rows.device))
        for count in (odd, -(-odd // 128) * 128, tail_rows):
            rows(
                f"{hidden} wide, {count:,} rows, products",
                partial(products, tokens, hidden, count, rows.device),
            )


def head_once(
    tokens: int, hidden: int, count: int, valid: int | None, device: str
) -> dict[str, Any]:
    import torch

    from lightppo.models.kernels.linear_log_probs import TokenPlaces, linear_log_probs

    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(count, hidden, device=device)).bfloat16().requires_grad_()
    labels = torch.randint(valid or count, (tokens,), device=device)

    index = torch.arange(0, tokens, 8)
    places = TokenPlaces(index.to(device), index)

    def forward(entropy: Any = places) -> Any:
        return linear_log_probs(x, weight, labels, valid_vocab_size=valid, entropy=entropy)[0]

    def both() -> None:
        torch.autograd.grad(forward().sum(), (x, weight))

    found: dict[str, Any] = {}
    both()
    with watched(device, found):
        both()
    with torch.no_grad():
        found["forward_ms"] = 1e3 * seconds_of(forward, device)
        found["all_entropy_ms"] = 1e3 * seconds_of(partial(forward, entropy=True), device)
    found["both_ms"] = 1e3 * seconds_of(both, device)
    return found | {"useful_tflops": 6e-9 * tokens * hidden * (valid or count) / found["both_ms"]}


def products(tokens: int, hidden: int, count: int, device: str) -> dict[str, Any]:
    """The three products of a head with so many rows."""
    import torch

    make = partial(torch.randn, dtype=torch.bfloat16, device=device)
    x, weight, grad = make(tokens, hidden), make(count, hidden), make(tokens, count)
    each = {
        "logits": lambda: x @ weight.t(),
        "to_hidden": lambda: grad @ weight,
        "to_weight": lambda: grad.t() @ x,
    }
    return {f"{name}_ms": 1e3 * seconds_of(action, device) for name, action in each.items()}


# of training; "varlen" is what runs unasked where there is no flash-attn
VARIANTS: dict[str, dict[str, Any]] = {
    "varlen": {},
    "by sequence": {"apart": True},
    "padded": {"packed": False},
    "flash_attention_2": {"attention": "flash_attention_2"},
    "checkpointing": {"checkpoints": True},
    "checkpointing, activations offloaded": {"checkpoints": True, "offload": True},
    "Liger": {"liger": True},
    "checkpointing, Liger": {"checkpoints": True, "liger": True},
    "torch.compile": {"compiled": True},  # takes a minute before it is measured
    "checkpointing, torch.compile": {"checkpoints": True, "compiled": True},
}


def train(rows: Rows) -> None:
    """The actor's pass over a packed row of 16k tokens, forward and backward, in bf16."""
    sizes = {"0.6B": SCALES["gpu"], "1.5B": SCALES["1.5B"], "7B": SCALES["7B"]}
    sizes = {"tiny": SCALES["tiny"]} if rows.small else sizes
    for name, how in VARIANTS.items():
        missing = "liger_kernel" if how.get("liger") else ""
        missing = "flash_attn" if name == "flash_attention_2" else missing
        reason = lacks(missing) if missing else ""
        if rows.small and (how.get("liger") or how.get("offload")):
            reason = reason or "for a GPU"
        for size, scale in sizes.items():
            if size == "7B" and "checkpoints" not in how:
                continue
            rows(
                f"{size} {name}",
                partial(train_if_it_fits, scale, rows.peak, rows.device, **how),
                reason,
            )


def train_if_it_fits(*how: Any, **more: Any) -> dict[str, Any]:
    """Padding, and models without checkpointing, may ask for more memory than there is."""
    import torch

    try:
        return train_once(*how, **more)
    except torch.OutOfMemoryError as error:
        return {"ms": "out of memory", "said": str(error)[:120]}


def batches_of(scale: Scale, device: str, count: int = 3) -> list[tuple[Any, Any, int, int]]:
    """Micro batches filled up to ``micro_batch_tokens``: sequences, mask, tokens of prompts and of responses."""
    import torch

    from lightppo.models.batches import to_device

    draw, found = random.Random(0), []
    for _ in range(count):
        pairs: list[tuple[int, int]] = []
        while sum(map(sum, pairs)) < scale.micro_batch_tokens:
            pairs.append((draw.randint(*scale.prompt_tokens), draw.randint(1, scale.new_tokens)))
        mask = torch.zeros(len(pairs), scale.prompt_tokens[1] + scale.new_tokens, dtype=torch.long)
        for row, (prompt, response) in zip(mask, pairs):
            row[scale.prompt_tokens[1] - prompt : scale.prompt_tokens[1] + response] = 1
        ids = torch.randint(3, scale.vocabulary, mask.shape)
        prompt_tokens, response_tokens = map(sum, zip(*pairs))
        found.append(
            (to_device(ids, device), to_device(mask, device), prompt_tokens, response_tokens)
        )
    return found


def train_once(
    scale: Scale,
    peak: float,
    device: str,
    attention: str = "sdpa",
    packed: bool = True,
    apart: bool = False,
    liger: bool = False,
    compiled: bool = False,
    checkpoints: bool = False,
    offload: bool = False,
) -> dict[str, Any]:
    import torch
    from make_assets import llama_config
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    from lightppo.models.actor import Actor
    from lightppo.models.batches import on_cpu
    from lightppo.models.kernels.liger import use_liger_kernels
    from lightppo.models.kernels.offload import offloading
    from lightppo.models.wrapper import compile_layers
    from lightppo.trainer.training_losses import systematic_sample

    counters.clear()
    config = llama_config(scale)
    config.max_position_embeddings = 2 * config.max_position_embeddings
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    actor = Actor(model, packing_samples=packed).train()
    if checkpoints:
        actor.gradient_checkpointing_enable()
    actor.around_pass = offloading if offload else None
    if liger:
        use_liger_kernels(model)
    if compiled:
        compile_layers(model, "eager" if device == "cpu" else "inductor")
    given, turn = batches_of(scale, device), iter(range(10**9))

    def step() -> None:
        ids, mask, *_ = given[next(turn) % len(given)]
        sample = systematic_sample(
            on_cpu(mask)[:, -scale.new_tokens :], torch.zeros(len(mask), dtype=torch.long), 8
        )
        log_probs = actor.score_actions(ids, scale.new_tokens, mask, entropy=sample).log_probs
        (-(log_probs * mask[:, -scale.new_tokens :]).sum() / mask.sum()).backward()

    def first_step() -> None:
        actor.zero_grad(set_to_none=True)
        step()

    found: dict[str, Any] = {}
    with by_sequence() if apart else nullcontext():
        for _ in given:
            step()
        graphs = counters["stats"]["unique_graphs"]
        with watched(device, found):  # gradients are there already: what is seen is activations
            step()
        seconds = seconds_of(first_step, device, most=12, warm_up=0)
    prompt, response = (statistics.mean(batch[i] for batch in given) for i in (2, 3))
    work = Workload("train", "", prompts=len(given[0][0]), samples_per_prompt=1, epochs=1)
    found |= {"tokens_per_second": (prompt + response) / seconds, "ms": 1e3 * seconds}
    found["mfu"] = training_flops(work, scale, prompt, response) / seconds / peak
    if compiled:
        breaks = sum(counters["graph_break"].values())
        found |= {
            "graphs": graphs,
            "graph_breaks": breaks,
            "compiled_later": counters["stats"]["unique_graphs"] - graphs,
        }
    return found


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode(rows: Rows) -> None:
    """HF decoding at 8, 64 and 256 rows: as it is, by CUDA graphs, and compiled."""
    for count in (2, 8) if rows.small else (8, 64, 256):
        rows(f"{count} rows", partial(decode_once, rows, count))
        rows(f"{count} rows, CUDA graphs", partial(decode_once, rows, count, "graphs"))
    # compiled for one width of the cache, which takes a minute, beside graphs of the same width
    if not rows.small:
        rows(
            "64 rows, CUDA graphs, one width",
            partial(decode_once, rows, 64, "graphs", one_width=True),
        )
        rows(
            "64 rows, compiled, one width",
            partial(decode_once, rows, 64, "compiled", one_width=True),
        )


@cache
def decoding_model(folder: str, device: str, bf16: bool) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from lightppo.models.actor import Actor

    return Actor(folder, bf16=bf16).to(device), AutoTokenizer.from_pretrained(folder)


def step_runner(way: str, device: str) -> Any:
    """What runs decoding steps; None: nothing, they change their shapes. On a CPU nothing is captured."""
    import torch

    from lightppo.rollout.decoding_runners import CUDAGraphs

    class AsTheyAre(CUDAGraphs):
        def warm_up(self, step: Callable[[], None]) -> None:
            step()

        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            return step

    class Compiled(CUDAGraphs):
        def warm_up(self, step: Callable[[], None]) -> None:
            with torch.compiler.set_stance("default"):  # generation's own is to compile nothing
                self.step = torch.compile(step, fullgraph=True, dynamic=False)
                self.step()
            self._stream = torch.cuda.Stream()

        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            with torch.compiler.set_stance("default"):
                return super().capture(self.step)

    ways = {
        "graphs": AsTheyAre if device == "cpu" else CUDAGraphs,
        "as they are": AsTheyAre,
        "compiled": Compiled,
    }
    return ways[way]() if way in ways else None


def decode_once(rows: Rows, count: int, way: str = "", one_width: bool = False) -> dict[str, Any]:
    from lightppo.data.records import Prompt
    from lightppo.rollout import decoding_runners as graphs
    from lightppo.rollout.engine import SamplingParams
    from lightppo.rollout.hf import HFRolloutEngine

    scale, folder = SCALES[rows.scale], str(rows.assets() / "model")
    actor, tokenizer = decoding_model(folder, rows.device, scale.bf16)
    texts = prompt_texts(replace(WORKLOADS["W1"], prompts=count), scale)
    prompts = [Prompt(text, tokenizer.encode(text), index=i) for i, text in enumerate(texts)]

    def responses(way: str, **sampling: Any) -> tuple[list[Any], dict[str, float]]:
        runner = step_runner(way, rows.device)
        engine = HFRolloutEngine(actor, tokenizer, micro_rollout_batch_size=count, runner=runner)
        found = engine.generate(prompts, SamplingParams(n=1, **sampling))
        if getattr(runner, "failed", False):
            raise ValueError("the steps cannot be captured: see the log")
        return found, engine.last_stats

    least, graphs.LEAST_WIDTH = graphs.LEAST_WIDTH, 1 << 20 if one_width else graphs.LEAST_WIDTH
    try:
        greedy = {
            # end-of-text is the likeliest token of all
            kind: responses(kind, max_new_tokens=16, temperature=0.0, ignore_eos=True)[0]
            for kind in {way, "as they are", ""}
        }
        most = scale.new_tokens // (2 if one_width else 1)
        _, stats = responses(way, max_new_tokens=most, ignore_eos=one_width)
    finally:
        graphs.LEAST_WIDTH = least
    if way == "graphs" and [r.log_probs for r in greedy[way]] != [
        r.log_probs for r in greedy["as they are"]
    ]:
        raise ValueError("replayed steps give other log probs than the same steps as they are")
    pairs = [
        (a, b)
        for r, e in zip(greedy[way], greedy[""])
        for a, b in zip(r.response_ids, e.response_ids)
    ]
    found = {"tokens_per_second": stats["generated_tokens"] / stats["seconds"]}
    found |= {
        "ms_per_step": 1e3 * stats["seconds"] / stats["decode_steps"],
        "steps": stats["decode_steps"],
    }
    return found | (
        {"greedy_as_without": sum(a == b for a, b in pairs) / len(pairs)} if way else {}
    )
