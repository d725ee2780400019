"""Checkpoints and Hugging Face folders on real ranks; what is checked is in ranks/files.py."""

from __future__ import annotations

import pytest


def test_written_by_two_ranks_and_resumed_by_two_new_ones(run_checks):
    run_checks(
        "files.py",
        "check_write",
        "check_rotation_and_errors",
        "check_damage_and_full_disks",
        "check_links",
        "check_save_model",
    )
    run_checks(
        "files.py",
        "check_resume",
        "check_weights_alone",
        "check_folders_and_bad_models",
    )


@pytest.mark.long  # each stage and each dtype above
def test_every_stage_in_every_dtype(run_checks):
    run_checks("files.py", "check_write", every_case=True)
    run_checks("files.py", "check_resume", every_case=True)


def test_no_file_of_a_checkpoint_can_run_code(run_checks):
    """A program inside of each file, one after the other: at ZeRO 0, 2 and 3, bf16, LoRA, without optimizer."""
    run_checks("hostile.py", "check_refused_on_all_ranks")


@pytest.mark.long
def test_no_reader_of_a_checkpoint_can_run_code(run_checks):
    run_checks("hostile.py", "check_every_reader_alone", "check_reshaped", world_size=1)
