"""ZeRO configurations, and DeepspeedStrategy on real ranks: one launch per test, of checks in ranks/."""

from __future__ import annotations

import pytest
from support.ranks import run_ranks

from lightppo.distributed.deepspeed import DeepspeedStrategy


def train_config(zero_stage: int = 3, **options) -> dict:
    return DeepspeedStrategy(zero_stage=zero_stage, **options).get_ds_train_config()


@pytest.fixture(params=[True, False])
def gpu(request, monkeypatch) -> bool:
    monkeypatch.setattr("lightppo.distributed.deepspeed.on_cuda", lambda: request.param)
    return request.param


def test_training_leaves_accumulation_to_the_caller_and_nothing_to_auto(monkeypatch):
    monkeypatch.setattr("lightppo.distributed.deepspeed.on_cuda", lambda: True)
    config = train_config(2, max_norm=0.7, micro_train_batch_size=3)
    assert config["managed_gradient_accumulation"] is False
    assert config["gradient_accumulation_steps"] == 1
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_clipping"] == 0.7
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert "auto" not in str(config)


def test_every_option_changes_the_configuration(monkeypatch):
    base = {"zero_stage": 3, "bf16": True}
    plain = train_config(**base)
    for option in (
        {"zero_stage": 2},
        {"bf16": False},
        {"bf16": False, "fp16": True},
        {"max_norm": 2.0},
        {"micro_train_batch_size": 2},
        {"adam_offload": True},
        {"param_offload": True},
        {"zpg": 4},
        {"grad_accum_dtype": "bf16"},
        {"overlap_comm": True},
    ):
        assert train_config(**(base | option)) != plain, option
    # the default adds micro batches up in fp32
    assert train_config(**base, grad_accum_dtype="fp32") == plain
    monkeypatch.setattr("lightppo.distributed.deepspeed.on_cuda", lambda: True)
    assert train_config(**base) != plain


@pytest.mark.parametrize(
    ("asked", "stage", "on"), [(None, 3, "cuda"), (None, 2, ""), (True, 2, "both"), (False, 3, "")]
)
def test_zero_3_overlaps_on_a_gpu_and_nothing_else_unasked(gpu, asked, stage, on):
    """DeepSpeed's own default; without it ZeRO-3 gathers weights on the stream that computes: nothing is prefetched."""
    zero = train_config(stage, overlap_comm=asked)["zero_optimization"]
    assert zero["overlap_comm"] is (on == "both" or (on == "cuda" and gpu))


def test_small_buckets_are_for_cpus_alone(gpu):
    """A bucket is a copy in main memory there; a GPU keeps DeepSpeed's sizes, in training and in evaluation."""
    strategy = DeepspeedStrategy(zero_stage=3)
    sizes = {"reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"}
    for config, small in (
        (strategy.get_ds_train_config(), sizes),
        (strategy.get_ds_eval_config(), {"stage3_prefetch_bucket_size"}),
    ):
        assert sizes & config["zero_optimization"].keys() == (set() if gpu else small)


@pytest.mark.parametrize(
    ("options", "collects"),
    [
        ({"bf16": True}, False),
        ({"fp16": True}, False),
        ({}, True),  # no other type than its sum has
        ({"bf16": True, "grad_accum_dtype": "bf16"}, True),
        ({"bf16": True, "adam_offload": True}, True),
        ({"bf16": True, "zero_stage": 1}, True),
    ],
)
def test_one_rank_needs_no_bucket_for_gradients_that_are_added_at_once(
    monkeypatch, options, collects
):
    """It would take 1 GB of the GPU."""
    monkeypatch.setattr("lightppo.distributed.deepspeed.on_cuda", lambda: True)
    zero = train_config(**{"zero_stage": 2} | options)["zero_optimization"]
    assert ("reduce_bucket_size" not in zero) is collects


def test_offload_pins_memory_only_where_there_is_a_gpu(gpu):
    config = train_config(adam_offload=True, param_offload=True)
    zero = config["zero_optimization"]
    assert (
        zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": gpu}
    )
    assert config["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"zero_stage": 4}, "--zero_stage .*4"),
        ({"zero_stage": 2, "max_norm": -1.0}, "--max_norm"),
        ({"zero_stage": 0, "adam_offload": True}, "--adam_offload .*--zero_stage"),
        ({"zero_stage": 2, "param_offload": True}, "--param_offload .*--zero_stage 3"),
        ({"zero_stage": 2, "zpg": 2}, "--zpg 2 .*--zero_stage 3"),
        ({"zero_stage": 1, "overlap_comm": True}, "--overlap_comm .*--zero_stage"),
        ({"zero_stage": 0, "bf16": True}, "--bf16 .*--zero_stage"),
        ({"zero_stage": 0, "fp16": True}, "--fp16 .*--zero_stage"),
        ({"zero_stage": 2, "fp16": True, "bf16": True}, "--bf16 .*--fp16"),
        (
            {"zero_stage": 2, "bf16": True, "grad_accum_dtype": "fp16"},
            "--grad_accum_dtype .*'fp16'",
        ),
        ({"zero_stage": 2, "grad_accum_dtype": "bf16"}, "--grad_accum_dtype .*--bf16"),
    ],
)
def test_contradictions_name_the_flags(options, flags):
    with pytest.raises(ValueError, match=flags):
        DeepspeedStrategy(**options)


def test_evaluation_shards_only_at_stage_3_or_for_offload(gpu):
    stages = [DeepspeedStrategy(zero_stage=stage).get_ds_eval_config() for stage in range(4)]
    assert [config["zero_optimization"]["stage"] for config in stages] == [0, 0, 0, 3]
    offloaded = DeepspeedStrategy(zero_stage=0).get_ds_eval_config(offload=True)[
        "zero_optimization"
    ]
    assert offloaded["stage"] == 3
    assert offloaded["offload_param"] == {"device": "cpu", "pin_memory": gpu}
    # the EMA is written into the shards, so every parameter must be a shard
    assert offloaded["stage3_param_persistence_threshold"] == 0
    assert (
        DeepspeedStrategy(zero_stage=3, bf16=True).get_ds_eval_config()["bf16"]["enabled"] is True
    )
    assert "managed_gradient_accumulation" not in stages[3]


def test_two_ranks(run_checks):
    output = run_checks(
        "engines.py",
        "check_collectives",
        "check_zero_equals_plain_torch",
        "check_fused_calls_change_no_weight",
        "check_sums_are_averaged_in_fp32",
        "check_bf16_stays_near_fp32",
        "check_fp16_finds_its_loss_scale",
        "check_fp16_loss_scale_moves",
        "check_fp16_is_refused",
        "check_activation_offload_in_shards",
        "check_skip_step",
        "check_moving_average",
        "check_gathered_parameters",
        "check_prepare",
        "check_scheduler_steps_once_per_step",
        "check_sharded_from_the_start",
        "check_no_pass_waits_for_the_device",
        world_size=2,
        timeout=400,
    )
    assert "FutureWarning" not in output


@pytest.mark.long  # with an option of each kind above
def test_two_ranks_with_every_option(run_checks):
    run_checks(
        "engines.py",
        "check_zero_equals_plain_torch",
        "check_fused_calls_change_no_weight",
        "check_bf16_stays_near_fp32",
        "check_fp16_finds_its_loss_scale",
        "check_moving_average",
        every_case=True,
        timeout=400,
    )


@pytest.mark.long
def test_skipped_steps_in_every_configuration(run_checks):
    run_checks("engines.py", "check_skip_step_everywhere", world_size=2, timeout=400)


def test_one_process_without_a_launcher(run_checks):
    checks = (
        "check_zero_equals_plain_torch",
        "check_fused_calls_change_no_weight",
        "check_one_rank_averages_nothing",
        "check_late_copies",
    )
    run_checks("engines.py", *checks, world_size=1, timeout=400)


@pytest.mark.long  # as on two ranks
def test_one_process_skips_and_averages_too(run_checks):
    run_checks("engines.py", "check_skip_step", "check_moving_average", world_size=1, timeout=400)


def test_a_rank_that_is_lost_ends_the_job(tmp_path):
    """Rank 1 never comes to the collective: the process group's time-out, not the test's, ends the run."""
    script = tmp_path / "lost.py"
    script.write_text(
        "import time\n"
        "from datetime import timedelta\n"
        "from lightppo.distributed.deepspeed import DeepspeedStrategy\n"
        "strategy = DeepspeedStrategy()\n"
        "strategy.setup_distributed(timeout=timedelta(seconds=4))\n"
        "strategy.all_reduce(1.0)\n"
        "if strategy.get_rank() == 1:\n"
        "    time.sleep(6)\n"
        "strategy.all_reduce(1.0)\n"
    )
    result = run_ranks(script, timeout=120, check=False)
    assert result.returncode != 0
    assert "imed out" in result.output


def test_importing_the_strategy_loads_neither_deepspeed_nor_transformers(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys\n"
        "import lightppo.distributed.deepspeed\n"
        "assert not {'deepspeed', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    run_ranks(script, launcher="python", world_size=1)
