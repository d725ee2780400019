"""NCCL's C functions over memory of this process, for vLLM's own wrapper of them; members are threads.

As the real one, a member waits for all others in its first call, has no time-outs, and hears nothing of one that ends.
"""

import ctypes
import itertools
import os
import threading
from contextlib import nullcontext
from unittest import mock

import torch

FAILED = 3  # ncclInternalError


class Communicator:
    """What the members of one id share."""

    def __init__(self, size):
        self.size, self.met, self.changed = size, {}, threading.Condition()

    def meet(self, number, member, content=None):
        """Waits until all members are at their call of this number; what they brought, or None after an abort."""
        with self.changed:
            self.met.setdefault(number, {})[member.rank] = content
            self.changed.notify_all()
            self.changed.wait_for(lambda: member.aborted or len(self.met[number]) == self.size)
            return None if member.aborted else self.met[number]


class Member:
    def __init__(self, communicator, rank):
        self.communicator, self.rank, self.calls, self.aborted = (
            communicator,
            rank,
            itertools.count(),
            False,
        )

    def meet(self, content=None):
        return self.communicator.meet(next(self.calls), self, content)


class FakeNCCL:
    """``functions`` are by NCCL's names. ``streams``: on which each rank 0 has sent, in their order."""

    def __init__(self):
        self.communicators, self.members, self.streams, self._lock = {}, {}, [], threading.Lock()
        self.functions = {
            name: getattr(self, name) for name in dir(self) if name.startswith("nccl")
        }

    def ncclGetErrorString(self, result):
        return b"aborted"

    def ncclGetVersion(self, version):
        version._obj.value = 22907
        return 0

    def ncclGetUniqueId(self, unique_id):
        ctypes.memmove(unique_id._obj.internal, os.urandom(128), 128)
        return 0

    def ncclCommInitRank(self, comm, size, unique_id, rank):
        with self._lock:
            shared = self.communicators.setdefault(bytes(unique_id.internal), Communicator(size))
            comm._obj.value = len(self.members) + 1
            member = self.members[comm._obj.value] = Member(shared, rank)
        return FAILED if member.meet() is None else 0

    def ncclAllReduce(self, sent, received, count, kind, operation, comm, stream):
        return FAILED if self.members[comm.value].meet() is None else 0

    def ncclBroadcast(self, sent, received, count, kind, root, comm, stream):
        member = self.members[comm.value]
        assert kind == 1, "bytes alone"
        if member.rank == root:
            self.streams.append(stream.value)
        met = member.meet((sent.value, count) if member.rank == root else count)
        if met is None:
            return FAILED
        source, length = met[root]
        assert length == count
        ctypes.memmove(received.value, source, count)
        return 0

    def ncclCommAbort(self, comm):
        member = self.members[comm.value]
        with member.communicator.changed:
            member.aborted = True
            member.communicator.changed.notify_all()
        return 0


class Stream:
    numbers = itertools.count(1)

    def __init__(self, device=None):
        self.cuda_stream, self.waited_for = next(self.numbers), []

    def wait_stream(self, other):
        self.waited_for.append(other)

    def synchronize(self):
        pass


def installed(stack):
    """A FakeNCCL that vLLM finds, on GPUs that are CPU memory."""
    from vllm.distributed.device_communicators import pynccl, pynccl_wrapper

    nccl, default = FakeNCCL(), Stream()

    def find(library, so_file=None):
        library._funcs = nccl.functions

    for target, name, value in (
        (pynccl_wrapper.NCCLLibrary, "__init__", find),
        (pynccl, "current_stream", lambda: default),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "current_stream", lambda: default),
        (torch.accelerator, "device_index", lambda index: nullcontext()),
    ):
        stack.enter_context(mock.patch.object(target, name, value))
    return nccl
