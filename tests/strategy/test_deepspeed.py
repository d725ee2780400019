"""DeepspeedStrategy on real ranks. Each test is one launch; what it checks is in ranks/*.py."""

from __future__ import annotations

from support.ranks import run_ranks


def test_two_ranks_under_the_deepspeed_launcher(run_checks):
    output = run_checks(
        "engines.py",
        "check_collectives",
        "check_zero_equals_plain_torch",
        "check_bf16_stays_near_fp32",
        "check_skip_step",
        "check_moving_average",
        "check_gathered_parameters",
        "check_prepare",
        "check_scheduler_steps_once_per_step",
        "check_sharded_from_the_start",
        launcher="deepspeed",
        world_size=2,
        timeout=400,
    )
    assert "FutureWarning" not in output


def test_one_process_without_a_launcher(run_checks):
    checks = ("check_zero_equals_plain_torch", "check_skip_step", "check_moving_average")
    run_checks("engines.py", *checks, launcher="python", world_size=1, timeout=400)


def test_a_rank_that_is_lost_ends_the_job(tmp_path):
    """Rank 1 never comes to the collective: the process group's time-out, not the test's, ends the run."""
    script = tmp_path / "lost.py"
    script.write_text(
        "import time\n"
        "from datetime import timedelta\n"
        "from lightppo.strategy.deepspeed import DeepspeedStrategy\n"
        "strategy = DeepspeedStrategy()\n"
        "strategy.setup_distributed(timeout=timedelta(seconds=4))\n"
        "strategy.all_reduce(1.0)\n"
        "if strategy.get_rank() == 1:\n"
        "    time.sleep(600)\n"
        "strategy.all_reduce(1.0)\n"
    )
    result = run_ranks(script, launcher="torchrun", timeout=120, check=False)
    assert result.returncode != 0
    assert "imed out" in result.output


def test_importing_the_strategy_loads_neither_deepspeed_nor_transformers(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys\n"
        "import lightppo.strategy.deepspeed\n"
        "assert not {'deepspeed', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    run_ranks(script, launcher="python", world_size=1)
