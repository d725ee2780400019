"""What a launcher must have set, how ranks meet and end, and what a strategy is."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import psutil
import pytest
import torch
from support.ranks import run_ranks

from lightppo.compat.script_names import get_strategy
from lightppo.distributed import distributed
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.device import import_deepspeed
from lightppo.distributed.distributed import (
    choose_gloo_interface,
    ensure_launcher_variables,
    wait_for_torch_threads,
)
from lightppo.errors import LaunchError

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


@pytest.mark.parametrize(
    ("others", "own", "chosen"),
    [
        ({}, "127.0.0.1", "eth0"),  # the first node, which is its own master: there is one only
        ({"docker0": "172.17.0.1"}, "10.0.0.1", "eth0"),  # the way to the master
        ({"docker0": "172.17.0.1"}, "127.0.0.1", None),
    ],
)
def test_the_interface_that_leads_to_the_other_nodes(no_launcher, monkeypatch, others, own, chosen):
    class Way:
        def __init__(self, *_):
            self.getsockname = lambda: (own, 0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, address):
            assert address == ("node-a", 29500)

    addresses = {name: [SimpleNamespace(family=socket.AF_INET, address=address)]
                 for name, address in {"lo": "127.0.0.1", "eth0": "10.0.0.1", **others}.items()}  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "socket", Way)
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set by the user")
    choose_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "set by the user"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    if chosen is None:
        with pytest.raises(
            LaunchError, match=r"127.0.1.1, .* interfaces docker0, eth0: set GLOO_SOCKET_IFNAME"
        ):
            choose_gloo_interface()
        return
    choose_gloo_interface()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == chosen
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # one machine
    choose_gloo_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("has_gpu", [True, False])
def test_gloo_needs_its_interface_with_gpus_too(no_launcher, monkeypatch, caplog, has_gpu):
    """vLLM makes a group over all nodes; but what needs none runs on."""

    def two_ways():
        raise LaunchError("set GLOO_SOCKET_IFNAME")

    monkeypatch.setattr(distributed, "on_cuda", lambda: has_gpu)
    monkeypatch.setattr(distributed, "choose_gloo_interface", two_ways)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "check_type", lambda strategy: None)
    monkeypatch.setattr(distributed, "share_host", lambda: None)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **options: None)
    strategy = DeepspeedStrategy()
    if not has_gpu:
        with pytest.raises(LaunchError):
            strategy.setup_distributed()
        return
    strategy.setup_distributed()
    assert (
        "GLOO_SOCKET_IFNAME; NCCL does not need it, vLLM in the training processes does"
        in caplog.text
    )
    assert strategy.device == torch.device("cuda", 0)


class TestTorchThreads:
    """A thread of torch that needs Python's lock while Python ends aborts the process."""

    END = """
import os, sys, time
import torch
import torch.distributed as dist
from lightppo.distributed.distributed import DistributedStrategy

DistributedStrategy(timeout_minutes=5).setup_distributed()

def busy(future):  # in gloo's thread, which asks for the lock again and again
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    os.write(1, b"done")

kept = dist.group.WORLD  # as DeepSpeed keeps it: gloo's threads outlive destroy_process_group()
work = dist.all_reduce(torch.ones(1), async_op=True)
called = work.get_future().then(busy)
del work
dist.destroy_process_group()
"""

    def test_a_process_ends_only_when_they_rest(self, tmp_path):
        script = tmp_path / "end.py"
        script.write_text(self.END)
        result = run_ranks(script, launcher="python", world_size=1)
        assert result.returncode == 0
        assert "done" in result.output

    @pytest.mark.parametrize(("name", "waits_at", "on_gpu", "rests"), [
        ("pt_gloo_runloop", "0", True, False), ("python", "0", False, False), ("python", "0", True, True),
        ("python", "do_epoll_wait", False, True),
    ])  # fmt: skip
    def test_without_a_gpu_one_without_a_name_counts_too(
        self, tmp_path, monkeypatch, name, waits_at, on_gpu, rests
    ):
        task = tmp_path / "1"
        task.mkdir()
        (task / "status").write_text(f"Name: {name}\nState: R (running)\nvoluntary_ctxt_switches: 1\n"
                                     "nonvoluntary_ctxt_switches: 2\n")  # fmt: skip
        (task / "wchan").write_text(waits_at)
        monkeypatch.setattr(distributed, "TASKS", tmp_path)
        monkeypatch.setattr(distributed, "on_cuda", lambda: on_gpu)
        assert wait_for_torch_threads(seconds=0.2) == rests

    @pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are known from /proc")
    def test_a_busy_one_is_waited_for_and_one_that_sleeps_is_not(self):
        stop, rest, named = threading.Event(), threading.Event(), threading.Event()

        def run():
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
            named.set()
            while not stop.is_set():
                pass
            rest.wait()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            assert named.wait(60)
            assert not wait_for_torch_threads(seconds=0.5)
            stop.set()
            assert wait_for_torch_threads(seconds=60)
        finally:
            stop.set()
            rest.set()
            thread.join()
