"""DeepspeedStrategy on real ranks. Each test is one launch; what it checks is in ranks/*.py."""

from __future__ import annotations


def test_two_ranks_under_the_deepspeed_launcher(run_checks):
    output = run_checks(
        "engines.py",
        "check_collectives",
        "check_zero_equals_plain_torch",
        "check_bf16_stays_near_fp32",
        "check_moving_average",
        "check_gathered_parameters",
        "check_prepare",
        "check_scheduler_steps_once_per_step",
        "check_unsharded_parameters_stay_whole",
        launcher="deepspeed",
        world_size=2,
    )
    assert "FutureWarning" not in output


def test_one_process_without_a_launcher(run_checks):
    run_checks("engines.py", "check_zero_equals_plain_torch", launcher="python", world_size=1)
