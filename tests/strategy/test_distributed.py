"""What a launcher must have set, how a process ends, and who gets which sample."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import psutil
import pytest
import torch
from support.ranks import run_ranks

from lightppo.errors import LaunchError
from lightppo.plugins.compat.seed import get_strategy
from lightppo.strategy import distributed
from lightppo.strategy.deepspeed import DeepspeedStrategy
from lightppo.strategy.distributed import (
    RankSampler,
    choose_gloo_interface,
    ensure_launcher_variables,
    keep_freed_memory,
    share_cores,
    wait_for_torch_threads,
)

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
    ("said", "of_node", "own"),
    [(None, "4", 2), (None, "16", 1), (None, None, 6), ("3", "4", 6), ("3", None, 6)],
)
def test_ranks_share_the_cores_of_their_host_and_gloo_takes_one_for_each_thread(
    monkeypatch, said, of_node, own
):
    set_to, while_gathering = [], []
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in (("OMP_NUM_THREADS", said), ("LOCAL_SIZE", of_node)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: int(of_node or 1))

    def gather(of_ranks, own, async_op):
        # torch's grain size
        while_gathering.append((set_to[-1], len(of_ranks), async_op, len(own) > 1 << 15))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(distributed.dist, "all_gather", gather)
    share_cores(collectives_on_cpu=True)
    assert set(while_gathering) == {(1, int(of_node or 1), True, True)}
    assert set_to == [1, own]
    while_gathering.clear()
    share_cores(collectives_on_cpu=False)
    assert (while_gathering, set_to[2:]) == ([], [own])


FREED = """
import resource
import torch
from lightppo.strategy.distributed import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(4 << 20) for _ in range(20)]  # 320 MiB
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

without = [faults() for _ in range(3)]
keep_freed_memory()
print(without[-1], [faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a function of glibc")
def test_freed_memory_is_kept():
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    output = subprocess.check_output([sys.executable, "-c", FREED], env=env, text=True, timeout=300)
    without, kept = map(int, output.split())
    assert 10 * kept < without  # 80,000 pages of 4 KiB, or 160 of 2 MiB


def test_what_the_user_says_about_freed_memory_stands(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    called = []
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *args: called.append(args))
    )
    keep_freed_memory()
    assert not called
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    keep_freed_memory()
    assert [size for _, size in called] == [1 << 30, 32 << 20]


class TestTorchThreads:
    """A thread of torch that needs Python's lock while Python ends aborts the process."""

    END = """
import os, sys, time
import torch
import torch.distributed as dist
from lightppo.strategy.distributed import DistributedStrategy

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


# ---------------------------------------------------------------------------------------------------------------------
# RankSampler


def samplers(size: int, ranks: int, **options) -> list[RankSampler]:
    return [RankSampler(range(size), ranks, rank, **options) for rank in range(ranks)]


def test_every_sample_once_when_the_size_divides():
    shares = [list(sampler) for sampler in samplers(12, 3, seed=1)]
    assert sorted(index for share in shares for index in share) == list(range(12))
    assert [len(share) for share in shares] == [4, 4, 4]


def test_the_remainder_wraps_around_or_is_dropped():
    # 5 samples on 2 ranks, in order: 0 1 2 3 4 and 0 again
    assert [list(s) for s in samplers(5, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 0]]
    assert [list(s) for s in samplers(5, 2, shuffle=False, drop_last=True)] == [[0, 2], [1, 3]]
    # fewer samples than ranks: 0 1 0 1 0
    assert [list(s) for s in samplers(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]


def test_epochs_differ_and_repeat_with_the_seed():
    first, again, other_seed = (RankSampler(range(20), 1, 0, seed=seed) for seed in (3, 3, 4))
    epoch_0 = list(first)
    assert epoch_0 == list(again)
    assert epoch_0 != list(other_seed)
    first.set_epoch(1)
    assert list(first) != epoch_0
    assert sorted(first) == list(range(20))


def test_resuming_gives_exactly_the_rest():
    whole = [list(sampler) for sampler in samplers(12, 2, seed=5)]
    rest = samplers(12, 2, seed=5, consumed_samples=8)  # 4 of each rank's 6
    assert [list(sampler) for sampler in rest] == [share[4:] for share in whole]
    assert [len(sampler) for sampler in rest] == [2, 2]
    rest[0].set_epoch(1)
    assert len(rest[0]) == 6
    assert list(samplers(12, 2, consumed_samples=12)[0]) == []


def test_bad_input():
    with pytest.raises(ValueError, match="0 samples on 1 ranks"):
        RankSampler([], 1, 0)
    with pytest.raises(ValueError, match="3 samples on 4 ranks"):
        RankSampler(range(3), 4, 0, drop_last=True)
    with pytest.raises(ValueError, match="consumed_samples=14 is more than one epoch of 12"):
        RankSampler(range(12), 2, 0, consumed_samples=14)
