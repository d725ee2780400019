"""What a launcher must have set, and what a strategy is."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from lightppo.compat.seed import get_strategy
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.device import import_deepspeed
from lightppo.distributed.rendezvous import ensure_launcher_variables

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch):
    for name in VARIABLES:
        # so that monkeypatch restores what the function sets
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)


def test_plain_python_is_a_world_of_one(no_launcher):
    ensure_launcher_variables()
    assert [os.environ[name] for name in VARIABLES[:4]] == ["0", "0", "1", "127.0.0.1"]
    assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536


def test_a_launchers_variables_are_left_alone(monkeypatch):
    values = dict(zip(VARIABLES, ("1", "1", "2", "10.0.0.1", "29501")))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    ensure_launcher_variables()
    assert {name: os.environ[name] for name in VARIABLES} == values


def test_half_a_launcher_is_refused(no_launcher, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        ensure_launcher_variables()


@pytest.mark.parametrize("imported", [None, "mlflow"])
def test_mlflow_is_as_it_was_before_deepspeed_came(monkeypatch, imported):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "mlflow", imported)
    assert import_deepspeed().__name__ == "deepspeed"
    assert sys.modules.get("mlflow", None) == imported
    assert ("mlflow" in sys.modules) == bool(imported)


def test_strategy_from_any_object_with_attributes():
    args = SimpleNamespace(
        seed=3, zero_stage=3, zpg=2, bf16=True, max_norm=0.1, train_batch_size=8, dist_timeout=5
    )
    strategy = get_strategy(args)
    assert strategy.args is args
    assert (strategy.seed, strategy.zero_stage, strategy.timeout_minutes) == (3, 3, 5)
    assert strategy.micro_train_batch_size == 1  # absent, so the default
    assert strategy.get_ds_train_config()["zero_optimization"]["zero_hpz_partition_size"] == 2
    # hpZ belongs to stage 3: a critic at another stage goes without
    assert (
        "zero_hpz_partition_size"
        not in strategy.get_ds_train_config(zero_stage=2)["zero_optimization"]
    )
    assert strategy.get_ds_train_config(zero_stage=1)["zero_optimization"]["stage"] == 1
    assert strategy.get_ds_eval_config(dtype=torch.float32)["bf16"]["enabled"] is False
    assert strategy.accumulated_gradient == 8


def test_steps_must_be_whole_micro_batches():
    with pytest.raises(ValueError, match=r"--train_batch_size 6 .* --micro_train_batch_size 4"):
        _ = DeepspeedStrategy(train_batch_size=6, micro_train_batch_size=4).accumulated_gradient


def test_nothing_is_prepared_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"setup_distributed\(\) before"):
        DeepspeedStrategy().prepare(torch.nn.Linear(2, 2))


def test_seeding_repeats_and_full_determinism_switches_torch(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC")
    strategy = DeepspeedStrategy(full_determinism=True)
    try:
        strategy.set_seed(3)
        first = torch.rand(3)
        strategy.set_seed(3)
        assert torch.equal(torch.rand(3), first)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"  # transformers' name
    finally:
        torch.use_deterministic_algorithms(False)
