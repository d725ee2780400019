"""Types that a device trains in slowly, or not at all (the latter is in ranks/engines.py, too); shares of a host."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.fakes import FakeStrategy

from lightppo.distributed import device
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.device import (
    check_type,
    compiling_at_first_call,
    keep_freed_memory,
    peak_of_process,
    report_memory,
    share_cores,
)
from lightppo.errors import LaunchError

SUPPORTED = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported"


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("option", ["", "bf16", "fp16"])
def test_fp32_on_a_gpu_is_told_at_the_start(gpu, option, monkeypatch, caplog):
    monkeypatch.setattr(device, "on_cuda", lambda: gpu)
    monkeypatch.setattr(SUPPORTED, lambda _: True)
    strategy = DeepspeedStrategy(zero_stage=2, **({option: True} if option else {}))
    with caplog.at_level("WARNING"):
        check_type(strategy)
    assert ("10 times as long as --bf16 (or --fp16)" in caplog.text) == (gpu and not option)


def test_a_type_that_the_device_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(SUPPORTED, lambda _: False)
    told = "^--fp16: DeepSpeed does not train in it on this CPU: set --bf16, or neither for fp32"
    with pytest.raises(LaunchError, match=told):
        check_type(DeepspeedStrategy(zero_stage=2, fp16=True))


def test_functions_are_compiled_when_they_are_called(monkeypatch):
    """As DeepSpeed's Muon decorates them; whoever compiles a module, or later, compiles at once."""
    compiled = []

    def compile_now(model, **options):
        compiled.append((getattr(model, "__name__", "module"), options))
        return model if isinstance(model, torch.nn.Module) else lambda x: model(x) + 0.5

    monkeypatch.setattr(torch, "compile", compile_now)
    with compiling_at_first_call():

        @torch.compile
        def double(x):
            return 2 * x

        @torch.compile(dynamic=True)
        def triple(x):
            return 3 * double(x)

        assert compiled == []
        module = torch.nn.Identity()
        assert torch.compile(module, mode="default") is module
    assert torch.compile is compile_now
    assert [triple(1), triple(2), triple.__name__] == [8.0, 14.0, "triple"]
    assert compiled == [
        ("module", {"mode": "default"}),
        ("triple", {"dynamic": True}),
        ("double", {}),
    ]


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
    monkeypatch.setattr(dist, "get_world_size", lambda: int(of_node or 1))

    def gather(of_ranks, own, async_op):
        # torch's grain size
        while_gathering.append((set_to[-1], len(of_ranks), async_op, len(own) > 1 << 15))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_gather", gather)
    share_cores(collectives_on_cpu=True)
    assert set(while_gathering) == {(1, int(of_node or 1), True, True)}
    assert set_to == [1, own]
    while_gathering.clear()
    share_cores(collectives_on_cpu=False)
    assert (while_gathering, set_to[2:]) == ([], [own])


FREED = """
import resource
import torch
from lightppo.distributed.device import keep_freed_memory

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


def test_the_peak_of_a_process_stays_when_its_memory_is_freed() -> None:
    block = bytearray(b"1") * (200 << 20)
    del block
    strategy = FakeStrategy()
    memory = report_memory(strategy, "memory")
    assert memory["peak"] >= memory["resident"] > 0
    assert peak_of_process() / 2**30 == pytest.approx(memory["peak"], rel=0.01)
    assert strategy.printed[0].endswith(f", peak {memory['peak']:.2f} GiB")
