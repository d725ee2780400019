"""The calculator of `lightppo memory` against numbers by hand; what it advises, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_config, write_jsonl
from support.towers import qwen3_5
from transformers import LlamaConfig, MambaConfig, MixtralConfig, Qwen2Config

from lightppo.__main__ import main
from lightppo.cli.memory_command import parse_size
from lightppo.config import PPOConfig
from lightppo.errors import ConfigError
from lightppo.models.attention.recurrent import RECURRENT_LAYERS
from lightppo.preflight.budget import (
    ACTOR,
    LOADING,
    ROLLOUT,
    SAVE,
    Machine,
    estimate,
    host_bytes,
)
from lightppo.preflight.fitting import advice

QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
# Embedding and head; per layer queries and output, keys and values (and biases), the MLP, two norms; the last norm.
QWEN = (
    2 * 152064 * 3584
    + 28 * (2 * 3584**2 + 2 * 3584 * 512 + 4608 + 3 * 3584 * 18944 + 2 * 3584)
    + 3584
)
LLAMA = (
    2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096
)
CRITIC = QWEN - 152064 * 3584 + 3584  # a head of one output
GRPO = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 4, "train_batch_size": 2048}


def config(**options: Any) -> PPOConfig:
    needed = {"pretrain": "model", "prompt_data": "prompts", "reward_fn": "reward.py", "bf16": True}
    return PPOConfig.from_flat(needed | options).resolved()


def parts(model: Any, gpus: int, **options: Any) -> dict[tuple[str, str], Any]:
    found = estimate(config(**options), Machine(gpus, device_bytes=80 * 10**9), {"model": model})
    return {(part.owner, part.what): part for part in found.parts}


def test_7b_with_critic_by_hand() -> None:
    found = parts(QWEN_7B, 8, zero_stage=2, gradient_checkpointing=True)
    assert QWEN == 7_615_616_512
    for owner, count in (("actor", QWEN), ("critic", CRITIC)):
        by_hand = {
            "weights": 2 * count,
            "fp32 masters": 4 * count / 8,
            "Adam": 8 * count / 8,
            "gradients": 4 * count / 8,
        }
        assert {what: found[owner, what].gpu for what in by_hand} == {
            k: pytest.approx(v) for k, v in by_hand.items()
        }
    assert found["reference", "weights"].gpu == 2 * QWEN
    # 4 samples of 2048 tokens: the input of each layer, in bf16, waits for the backward pass; what else is live is of a
    # layer at a time, the head's three chunks of 2^26 float32 numbers, and a bucket of 5e8 bf16 numbers.
    activations, inputs = found["actor", "activations, buckets"].gpu, 28 * 8192 * 3584 * 2
    assert (
        inputs + 1e9 < activations < inputs + 1e9 + 8192 * (10 * 18944 + 20 * 3584) * 2 + 3 * 2**28
    )
    # 28 layers, keys and values of 4 heads of 128 numbers in bf16; 8 slots of 2048 columns and 128 to spare
    assert found["HF engine", "KV cache"].gpu == 8 * 2176 * 28 * 2 * 4 * 128 * 2


def test_an_8b_model_without_critic_by_hand() -> None:
    found = parts(LLAMA_8B, 8, zero_stage=3, init_kl_coef=0, **GRPO, micro_train_batch_size=1)
    assert LLAMA == 8_030_261_248
    assert found["actor", "weights"].gpu == LLAMA * 2 / 8
    assert found["actor", "gathered for generation"].gpu == 2 * LLAMA
    # DeepSpeed's stage3_max_live_parameters
    assert found["actor", "gathered weights"].gpu == 2 * 10**9


@pytest.mark.parametrize(
    ("stage", "of_parameter", "published"), [(2, 2 + 14 / 64, 16.6e9), (3, 16 / 64, 1.9e9)]
)
def test_the_figures_of_the_zero_paper(stage: int, of_parameter: float, published: float) -> None:
    """arXiv:1910.02054, figure 1: 7.5B parameters on 64 GPUs, 16-bit gradients."""
    model = tiny_config(hidden_size=1024, num_attention_heads=16)
    count = (
        2 * model.vocab_size * 1024
        + 2 * (2 * 1024**2 + 2 * 1024 * 128 + 3 * 1024 * 64 + 2 * 1024)
        + 1024
    )
    found = parts(model, 64, zero_stage=stage, grad_accum_dtype="bf16", init_kl_coef=0, **GRPO)
    states = ("weights", "fp32 masters", "Adam", "gradients", "gradients of the shard")
    held = sum(
        part.gpu for (owner, what), part in found.items() if owner == "actor" and what in states
    )
    assert held / count == pytest.approx(of_parameter, rel=1e-3)
    assert held / count * 7.5e9 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("options", "less"),
    [
        ({"gradient_checkpointing": True}, ACTOR),
        ({"micro_train_batch_size": 1}, ACTOR),
        ({"adam_offload": True}, ACTOR),
        ({"lora_rank": 8}, ACTOR),
        ({"micro_rollout_batch_size": 1}, ROLLOUT),
        ({"rollout_engine": "vllm_server", "vllm_server_url": ("http://127.0.0.1:1",)}, ROLLOUT),
    ],
)
def test_options_save_where_they_should(options: dict[str, Any], less: str) -> None:
    model, machine = {"model": tiny_config(hidden_size=512)}, Machine(2)
    sizes = [estimate(config(**more), machine, model).of_phase(less)[0] for more in (options, {})]
    assert sizes[0] < sizes[1]


def test_ranks_that_hold_a_row_together_have_a_piece_of_its_activations_each() -> None:
    model = {"model": tiny_config(hidden_size=64, num_hidden_layers=1)}
    options = {"generate_max_len": 1 << 20, "zero_stage": 3, "train_batch_size": 4}
    options |= {"rollout_batch_size": 4, "micro_rollout_batch_size": 1}
    options |= {"micro_train_batch_size": 1, "rollout_engine": "vllm_server"}
    options |= {"vllm_server_url": ("http://127.0.0.1:1",)}
    peaks = [
        parts(model["model"], 4, **options, sequence_parallel_size=size)[
            "actor", "activations, buckets"
        ].gpu
        for size in (1, 2, 4)
    ]
    assert peaks[1] / peaks[0] == pytest.approx(0.5, abs=0.02)
    assert peaks[2] / peaks[0] == pytest.approx(0.25, abs=0.02)
    lines = advice(config(**options), Machine(4, device_bytes=10**8), model)
    assert any(line.startswith("  --sequence_parallel_size 2: ") for line in lines)
    with pytest.raises(ConfigError, match="--sequence_parallel_size 8 does not divide the 4 heads"):
        estimate(config(**options, sequence_parallel_size=8), Machine(8), model)


def test_what_leaves_the_gpu_while_vllm_samples() -> None:
    model, machine, vllm = (
        {"model": tiny_config(hidden_size=512)},
        Machine(2, device_bytes=80 * 10**9),
        {"rollout_engine": "vllm"},
    )
    there, gone = (
        estimate(config(**vllm, **more), machine, model)
        for more in ({}, {"offload_during_rollout": True})
    )
    owners = ("actor", "critic")
    held = {p.what: p.gpu for p in there.parts if p.owner == "actor"}
    moved = sum(
        p.gpu for p in there.parts if p.owner in owners and p.what in ("fp32 masters", "Adam")
    )
    assert held["Adam"] == 2 * held["fp32 masters"] > 0
    assert there.of_phase(ROLLOUT)[0] - gone.of_phase(ROLLOUT)[0] == moved
    # of two ranks
    assert there.of_phase(ACTOR) == (gone.of_phase(ACTOR)[0], gone.of_phase(ACTOR)[1] - 2 * moved)


def test_a_checkpoint_of_the_same_type_is_in_a_hosts_memory_once() -> None:
    """transformers maps safetensors: seen as 11 MB of the file and 1 MB of its own, for 272 MB of bf16 weights."""
    size = parts(tiny_config(), 4)["actor", "weights"].gpu
    for dtype, what, by_hand in (
        ("float32", "whole on the host", size),
        ("bfloat16", "mapped from the file", -(-size // 4)),
    ):
        found = parts(tiny_config(dtype=dtype), 4)
        assert found["actor", what].host == by_hand
        # each model goes to its GPU before the next one loads
        assert ("reference", what) not in found
    averaged = parts(tiny_config(dtype="bfloat16"), 4, enable_ema=True)  # in fp32, so copied
    assert averaged["moving average", "whole on the host"].host == 2 * size
    assert not any(
        owner == "actor"
        for owner, what in averaged
        if what in ("whole on the host", "mapped from the file")
    )
    sharded = parts(tiny_config(dtype="float32"), 4, zero_stage=3)
    assert not any(what in ("whole on the host", "mapped from the file") for _, what in sharded)


def test_experts_are_counted_by_how_many_a_token_goes_through() -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    models = [
        MixtralConfig(**shape, vocab_size=64, num_local_experts=4, num_experts_per_tok=k)
        for k in (1, 2)
    ]
    one, two = (
        parts(model, 2, zero_stage=2)["actor", "activations, buckets"].gpu for model in models
    )
    # 4 samples of 2048 tokens, bf16: of one more expert at least gate and value (256) and their product (128) are kept
    # in the first layer; the last one runs at the read half of the positions
    assert 384 * 8192 * 2 < two - one < 1536 * 8192 * 2


def test_replayed_experts_are_part_of_the_rows() -> None:
    """Two layers choose two of 300 experts for each of 2048 tokens: 8 bytes a token, of 1024 samples on one GPU."""
    model = MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, num_local_experts=300, num_experts_per_tok=2,
    )  # fmt: skip
    lengths = {"prompt_max_len": 1024, "generate_max_len": 1024, "rollout_batch_size": 1024}
    key = ("experience", "on the device")
    without, replayed = (
        parts(model, 1, router_replay=value, **lengths)[key].gpu for value in ("off", "old")
    )
    assert replayed - without == 8 * 2048 * 1024


@pytest.mark.skipif(not RECURRENT_LAYERS, reason="in batches states are not counted")
def test_layers_with_a_state_hold_it_whatever_the_length() -> None:
    """Qwen3.5: one of two layers has a state of 4 heads of 8 by 8 numbers, and the last 3 of 64 before a convolution."""
    text = qwen3_5().config.get_text_config()
    alone = {"advantage_estimator": "reinforce", "init_kl_coef": 0, "prompt_max_len": 128}
    found = {
        length: parts(text, 1, generate_max_len=length, **alone)["HF engine", "KV cache"].gpu
        for length in (128, 256)
    }
    more = found[256] - found[128]
    keys_and_values = 8 * 128 * 2 * text.num_key_value_heads * text.head_dim * 2
    assert more == keys_and_values
    states = found[128] - keys_and_values * (128 + 128 + 128) / 128
    assert 8 * 4 * 8 * 8 * 2 <= states <= 8 * (4 * 8 * 8 * 4 + 4 * 64 * 4)


def test_a_teacher_is_one_more_model() -> None:
    options = {"advantage_estimator": "on_policy_distill", "teacher_pretrain": "model"}
    assert (
        parts(tiny_config(), 2, **options)["teacher", "weights"].gpu
        == parts(tiny_config(), 2)["actor", "weights"].gpu
    )


def run_options(tmp_path: Path) -> list[str]:
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels): return [0.0] * len(queries)\n"
    )
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "1+1="}])
    return f"--pretrain {tmp_path} --prompt_data {prompts} --reward_fn {tmp_path}/reward.py --bf16".split()


def test_the_command_prints_parts_and_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--gpus", "4", "--nodes", "2", "--gpu_memory", "24GiB", "--json"]
    # of 8 ranks, not of this process
    engine = ["--rollout_engine", "vllm", "--tensor_parallel_size", "4"]
    with pytest.raises(SystemExit) as done:
        main(["memory", *run_options(tmp_path), *machine, *engine])
    found = json.loads(capsys.readouterr().out)
    assert done.value.code == 0
    libraries = found["machine"].pop("library_bytes")
    assert libraries > 10**8  # of this process
    assert found["machine"] == {
        "world_size": 8,
        "gpus": True,
        "per_node": 4,
        "device_bytes": 24 * 2**30,
        "host_bytes": None,
    }
    held = [part for part in found["parts"] if part["owner"] == "process"]
    assert [(part["host"], len(part["phases"])) for part in held] == [(libraries, 9)]
    assert found["peak"][1] == max(phase["gpu"] for phase in found["phases"].values())
    with pytest.raises(SystemExit) as done:
        main(["memory", *run_options(tmp_path), "--gpus", "1", "--gpu_memory", "1GB"])
    shown = capsys.readouterr().out
    assert done.value.code == 1
    assert "this does not fit into 1.00 GB" in shown
    assert "does not fit either: more GPUs, or a smaller model" in shown


def test_ranks_on_a_cpu_are_compared_with_the_memory_of_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as done:
            main(["memory", *run_options(tmp_path), "--gpus", "0", *more])
        return done.value.code, capsys.readouterr().out

    code, shown = told("--host_memory", "1000GB")
    assert code == 0
    assert shown.splitlines()[-1].endswith("; it has 1000.00 GB, so the run fits")
    code, shown = told("--host_memory", "50MB")
    assert code == 1
    assert "this does not fit into 0.05 GB:" in shown
    assert shown.endswith("which does not fit either: more memory, or a smaller model\n")
    assert f"; it has {host_bytes() / 1e9:.2f} GB, so the run fits" in told()[1]
    with pytest.raises(SystemExit, match="2"):
        main(["memory", *run_options(tmp_path), "--gpus", "1", "--host_memory", "1GB"])
    assert "--host_memory is for ranks on the CPU: add --gpus 0" in capsys.readouterr().err


def test_a_model_that_cannot_be_counted_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mamba's code reads numbers, which a device without data has not."""
    MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["memory", "--pretrain", str(tmp_path), "--gpus", "1", "--init_kl_coef", "0"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the memory of this run cannot be computed (NotImplementedError: " in said
    assert said.endswith("lightppo ppo --dry_run measures it")


def test_a_process_on_a_cpu_has_libraries_and_keeps_small_blocks_that_it_freed() -> None:
    """A Llama of SmolLM2-135M's shape. Runs of GRPO reached 4.40 to 4.82 GB, with micro batches of 16 5.14 to 5.58."""
    model = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    machine = Machine(1, gpus=False, library_bytes=690_000_000)
    sizes = {"prompt_max_len": 64, "generate_max_len": 32, "rollout_batch_size": 4}
    options = GRPO | sizes | {"init_kl_coef": 0, "train_batch_size": 16}
    for rows, seen in ((4, (4.40e9, 4.82e9)), (16, (5.14e9, 5.58e9))):
        batches = {"micro_train_batch_size": rows, "micro_rollout_batch_size": 16}
        found = estimate(config(bf16=False, **options, **batches), machine, {"model": model})
        assert [found.peak()[1]] * 2 == pytest.approx(seen, rel=0.1)
        kept = {frozenset(part.phases): part.host for part in found.parts if "keeps" in part.what}
        # Behind a pass: its activations, its gradients, and their copies or the sum with those of earlier passes.
        activations = next(part.small for part in found.parts if "activations" in part.what)
        # All but the embedding, whose block is not small.
        gradients = 4 * (134_515_008 - 49152 * 576)
        phases = max(kept, key=len)
        assert kept[phases] == activations + 2 * gradients
        assert SAVE in phases  # copies of weights do not fit into its gaps
        assert not {ACTOR, LOADING} & phases
    on_gpu = estimate(config(**options), Machine(1), {"model": model})
    assert not any("keeps" in part.what for part in on_gpu.parts)


def test_adapters_are_merged_in_a_copy_beside_the_one_for_files() -> None:
    plain, adapted = (parts(tiny_config(), 1, **more) for more in ({}, {"lora_rank": 4}))
    assert ("actor", "merged weights") not in plain
    assert plain["actor", "copy for files"].host == plain["actor", "weights"].gpu
    # all linear layers of two: queries and output, keys and values, the MLP; bf16
    by_hand = 2 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert adapted["actor", "merged weights"].host == by_hand


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("much", "--gpu_memory much: write 80GB, or 24GiB"),
        ("80", "--gpu_memory 80: write 80GB, or 80GiB: a number alone has no unit"),
        ("80.5", "--gpu_memory 80.5: write 80.5GB, or 80.5GiB"),
        ("0GB", "--gpu_memory 0GB: write 80GB"),
        ("", "--gpu_memory : write 80GB"),
    ],
)
def test_a_size_that_is_no_size_is_refused(
    size: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["memory", "--pretrain", "model", "--gpu_memory", size])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "expected"),
    [("80GB", 80 * 10**9), ("80 gb", 80 * 10**9), ("1.5GiB", 3 * 2**29), ("900MB", 900 * 10**6)],
)
def test_sizes(size: str, expected: int) -> None:
    assert parse_size(size) == expected


def test_neither_prompts_nor_a_reward_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where options are tried that would make it fit; an address of rows in a run's file may be cut."""
    LlamaConfig(**tiny_config().to_dict() | {"vocab_size": 500_000}).save_pretrained(tmp_path)
    (tmp_path / "run.yaml").write_text("prompt_data: https://host/rows.jsonl?…\n")
    for more in ([], ["--config", str(tmp_path / "run.yaml")]):
        with pytest.raises(SystemExit) as done:
            main(
                [
                    "memory",
                    "--pretrain",
                    str(tmp_path),
                    "--bf16",
                    "--gpus",
                    "2",
                    "--gpu_memory",
                    "2.2GB",
                    *more,
                ]
            )
        told = capsys.readouterr()
        assert (done.value.code, told.err) == (1, "")
        assert "\n  --lora_rank 16: 0." in told.out
    with pytest.raises(SystemExit, match="2"):
        main(["memory"])
    assert "error: --pretrain is required" in capsys.readouterr().err
