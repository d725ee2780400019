"""LoRA adapters under ZeRO on real ranks: what is checked is in ranks/adapters.py."""

from __future__ import annotations


def test_adapters_on_two_ranks(run_checks):
    """Training, exports and a critic; then a checkpoint by one launch, and going on from it by another."""
    checks = ("check_adapters_train_as_in_plain_peft", "check_export", "check_critic", "check_write")
    run_checks("adapters.py", *checks, timeout=400)
    run_checks("adapters.py", "check_resume", timeout=200)


def test_adapters_in_one_process(run_checks):
    checks = ("check_adapters_train_as_in_plain_peft", "check_critic", "check_write")
    run_checks("adapters.py", *checks, launcher="python", world_size=1, timeout=300)
    run_checks("adapters.py", "check_resume", launcher="python", world_size=1, timeout=200)
