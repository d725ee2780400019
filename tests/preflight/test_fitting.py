"""What fits into a GPU: rows of decoding, tokens of a pass, the advice for a run that does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preflight.test_budget import QWEN_7B, config, parts
from support.fakes import FakeStrategy
from support.tiny import tiny_config
from transformers import LlamaConfig

from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.preflight.budget import ROLLOUT, Machine, estimate
from lightppo.preflight.fitting import (
    advice,
    check_memory,
    decoding_rows,
    with_fitting_passes,
)
from lightppo.preflight.run_checks import fit_memory
from lightppo.trainer.building import Building


def given(**options: Any) -> PPOConfig:
    needed = {"pretrain": "model", "prompt_data": "prompts", "reward_fn": "reward.py", "bf16": True}
    return PPOConfig.from_flat(needed | options)


def test_a_pass_takes_the_tokens_that_a_gpu_holds() -> None:
    """A token of a 7B policy takes 3.4 MB in training: 28 layers keep what their backward pass needs."""
    options = given(zero_stage=3)
    model = {"model": QWEN_7B}

    def tokens_on(gigabytes: int, **changes: Any) -> int | None:
        machine = Machine(8, device_bytes=gigabytes * 10**9)
        fitting = with_fitting_passes(options.with_options(**changes), machine, model)
        return fitting.training.max_tokens_per_micro_batch

    # 40.8 GB of weights, Adam and gradients; 8192 tokens take 27.4 GB, CUDA 2 GB: within four fifths of the other 39.2
    sizes = {48: 1024, 60: 2048, 76: 4096, 80: 8192, 141: 16384}
    assert {size: tokens_on(size) for size in sizes} == sizes
    assert tokens_on(80, gradient_checkpointing=True) == 16384
    assert tokens_on(10) == 1024  # whatever else does not fit
    assert tokens_on(80, micro_train_batch_size=8) is None
    assert tokens_on(80, micro_rollout_batch_size=8) is None  # scoring goes by it
    assert tokens_on(80, pretrain_data="text.jsonl") is None  # a batch of it for each micro batch
    assert tokens_on(80, max_tokens_per_micro_batch=3000) == 3000
    on_cpu = with_fitting_passes(options, Machine(8, gpus=False, host_bytes=10**12), model)
    assert on_cpu == options.resolved()
    assert on_cpu.training.micro_train_batch_size == 4


def test_shorter_rows_fill_what_the_longest_leave_of_a_pass() -> None:
    """One row of 9000 tokens is within 16384; so are two of 8192, which a pass takes, too."""
    fields = {"zero_stage": 3, "max_tokens_per_micro_batch": 16384, "prompt_max_len": 1000}
    model = {"model": tiny_config(max_position_embeddings=16384)}

    def activations(**options: Any) -> int:
        asked = given(**fields, **options).resolved()
        found = estimate(asked, Machine(8), model).parts
        return next(one.gpu for one in found if one.what == "activations, buckets")

    whole = activations(generate_max_len=7192)  # two rows of 8192
    assert activations(generate_max_len=8000) == pytest.approx(whole, rel=0.02)
    # one row is all that a rank has
    assert activations(generate_max_len=8000, rollout_batch_size=8) < 0.7 * whole


def test_ranks_agree_on_the_tokens_of_a_pass_and_the_log_says_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config().save_pretrained(tmp_path)
    options = given(pretrain=str(tmp_path))
    strategy = FakeStrategy()
    strategy.device = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9)
    )
    building = Building(options, options.resolved(), options.resolved(), strategy)
    fit_memory(building)
    assert building.config == options.resolved().with_options(max_tokens_per_micro_batch=16384)
    assert building.resolved_options.training.max_tokens_per_micro_batch is None
    assert strategy.printed[-1] == (
        "training and scoring: up to 16384 tokens at a time, by the GPU's memory (--max_tokens_per_micro_batch sets it)"
    )


def test_decoding_takes_the_rows_that_the_rest_of_a_gpu_holds() -> None:
    """8 of 7B's rows of 2048 columns are 1 GB of keys and values, and their prompts go through the model."""
    asked, model = config(zero_stage=3, gradient_checkpointing=True), {"model": QWEN_7B}
    sizes = (60, 80, 141)  # 54 GB are weights, gathered ones, Adam and gradients
    found = {
        size: decoding_rows(asked, Machine(8, device_bytes=size * 10**9), model) for size in sizes
    }
    # 0.8 · 80 - 54.2 GB, and 0.33 GB and 24 · 152064 bytes for a row; 512 prompts on 8 ranks are 64 rows at most
    assert found == {60: 8, 80: 24, 141: 64}
    wide, machine = (
        asked.with_options(micro_rollout_batch_size=24),
        Machine(8, device_bytes=80 * 10**9),
    )
    assert 0.7 * 80e9 < estimate(wide, machine, model).of_phase(ROLLOUT)[0] < 0.85 * 80e9
    # graphs hold what a step needs for a moment: 24 · 152064 bytes for a row once more
    held = parts(QWEN_7B, 8, zero_stage=3, gradient_checkpointing=True, hf_cuda_graphs=True)[
        "HF engine", "CUDA graphs"
    ]
    assert held.gpu == 8 * 24 * 152064
    tiny = decoding_rows(asked, Machine(1, device_bytes=80 * 10**9), {"model": tiny_config()})
    assert tiny == 512  # more would not be faster


@pytest.mark.long
def test_7b_with_critic_at_zero_2_does_not_fit_and_the_advice_does() -> None:
    asked, machine = config(zero_stage=2), Machine(8, device_bytes=80 * 10**9)
    model = {
        "model": tiny_config(hidden_size=4096, intermediate_size=16384, num_attention_heads=32)
    }
    small = Machine(8, device_bytes=10 * 10**9)
    assert not estimate(
        config(zero_stage=2, gradient_checkpointing=True), machine, {"model": QWEN_7B}
    ).fits
    lines = advice(asked, small, model)
    assert any(line.startswith("  --gradient_checkpointing: ") for line in lines)
    assert lines[-1].endswith("which fits")
    taken = lines[-1].split("together ")[1].split(":")[0].split(" --")
    changed = {word.strip("-").partition(" ")[0]: word.partition(" ")[2] or True for word in taken}
    assert estimate(asked.with_options(**changed).resolved(), small, model).fits


def test_what_certainly_does_not_fit_is_refused_before_anything_loads(tmp_path: Path) -> None:
    LlamaConfig(**tiny_config().to_dict() | {"vocab_size": 500_000}).save_pretrained(tmp_path)
    asked = config(pretrain=str(tmp_path), prompt_max_len=16, generate_max_len=16)
    assert check_memory(asked, Machine(2, gpus=False))[-1].startswith("peak: ")
    with pytest.raises(ConfigError, match="of a GPU are needed at least"):
        check_memory(asked, Machine(2, device_bytes=10**8))
    with pytest.raises(ConfigError, match=r"of a host are needed at least .*, it has 0.10 GB"):
        check_memory(asked, Machine(2, gpus=False, host_bytes=10**8))


def test_a_model_that_cannot_be_counted_is_told_and_trains_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def estimate(*_: Any) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr("lightppo.preflight.fitting.estimate", estimate)
    strategy = FakeStrategy()
    options = given(dry_run=True)
    building = Building(options, options.resolved(), options.resolved(), strategy)
    fit_memory(building)
    assert building.config == options.resolved()
    assert strategy.printed == [
        "note: the memory of this run cannot be computed: NotImplementedError: Cannot copy out of meta tensor; no data!"
    ]
