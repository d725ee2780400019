"""LoRA adapters under ZeRO on real ranks, over dense weights and over weights in 4 bits; see ranks/."""

from __future__ import annotations

import pytest
from support.tiny import save_tokenizer

pytestmark = pytest.mark.slow


def test_adapters_on_two_ranks(run_checks, tmp_path):
    """Training, exports, a critic, rollouts; then a checkpoint by one launch, and going on from it by another."""
    save_tokenizer(tmp_path / "tokenizer")
    checks = (
        "check_adapters_train_as_in_plain_peft",
        "check_export",
        "check_critic",
        "check_rollouts",
        "check_write",
    )
    run_checks("adapters.py", *checks, timeout=500)
    run_checks("adapters.py", "check_resume", timeout=400)


@pytest.mark.long  # with an option of each kind above
def test_adapters_on_two_ranks_with_every_option(run_checks):
    checks = (
        "check_adapters_train_as_in_plain_peft",
        "check_export",
        "check_critic",
        "check_write",
    )
    run_checks("adapters.py", *checks, every_case=True, timeout=500)
    run_checks("adapters.py", "check_resume", every_case=True, timeout=400)


@pytest.mark.long  # on two ranks above; and test_lora_runs.py has runs in one process
def test_adapters_in_one_process(run_checks):
    checks = ("check_adapters_train_as_in_plain_peft", "check_critic", "check_write")
    run_checks("adapters.py", *checks, world_size=1, every_case=True, timeout=300)
    run_checks("adapters.py", "check_resume", world_size=1, every_case=True, timeout=400)


def test_quantised_weights_on_two_ranks(run_checks):
    """Training; then a checkpoint, and going on from it."""
    checks = (
        "check_the_bits_are_nobodys_business",
        "check_adapters_train_as_in_plain_peft",
        "check_write",
    )
    run_checks("quantised.py", *checks, timeout=500)
    run_checks("quantised.py", "check_resume", timeout=200)


@pytest.mark.long  # over dense weights above
def test_what_else_quantised_weights_do_on_two_ranks(run_checks, tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    run_checks("quantised.py", "check_export", "check_critic", "check_rollouts", timeout=500)


@pytest.mark.long  # on two ranks above; and test_quantised_runs.py has runs in one process
def test_quantised_weights_in_one_process(run_checks):
    checks = ("check_the_bits_are_nobodys_business", "check_critic", "check_write")
    run_checks("quantised.py", *checks, world_size=1, timeout=300)
    run_checks("quantised.py", "check_resume", world_size=1, timeout=200)
