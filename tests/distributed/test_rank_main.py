"""The main function of each rank: what it does before the run, and what it says of errors."""

from __future__ import annotations

import gc
import traceback

import pytest
import torch

from lightppo.distributed.rank_main import importing, note_memory


def test_what_is_imported_is_no_garbage_to_look_through():
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        imported = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(imported)
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_gpu_without_memory_is_told_with_what_to_set():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    note_memory(error)
    note = traceback.format_exception(error)[-1]
    assert "--max_tokens_per_micro_batch" in note
    assert "sft, rm and dpo: --micro_train_batch_size" in note  # they have no other
    other = RuntimeError("CUDA error")
    note_memory(other)
    assert not hasattr(other, "__notes__")
