"""Checkpoints and Hugging Face folders on real ranks; what is checked is in ranks/files.py."""

from __future__ import annotations


def test_written_by_two_ranks_and_resumed_by_two_new_ones(run_checks):
    run_checks(
        "files.py",
        "check_write",
        "check_rotation_and_errors",
        "check_damage_and_full_disks",
        "check_save_model",
    )
    run_checks(
        "files.py",
        "check_resume",
        "check_weights_alone",
        "check_folders_and_bad_models",
    )
