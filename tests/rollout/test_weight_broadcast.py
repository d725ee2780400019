"""Tensors over torch.distributed: several processes and groups, keys, and ends that are killed or hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.broadcasts import digest, received
from support.ranks import REPO
from torch import distributed

from lightppo.rollout import weight_buckets, weight_group
from lightppo.rollout.weight_broadcast import BroadcastError, WeightSender, receive_tensors, send_tensors
from lightppo.rollout.weight_buckets import Bucket, unpacked

CPU = torch.device("cpu")
SCRIPT = REPO / "tests" / "support" / "broadcasts.py"
SECONDS = 60.0


class Process:
    """broadcasts.py in a process of its own."""

    def __init__(self, role):
        environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), role],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_line = self.process.stdout.readline()

    def tell(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start():
    started = []

    def make(role="worker"):
        started.append(Process(role))
        return started[-1]

    yield make
    for process in started:
        process.end()


def some_tensors(scale=1.0):
    """Of all types and odd shapes, and one larger than a bucket."""
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(7, 3, generator=generator) * scale
    yield "float32", floats
    for name in ("bfloat16", "float16", "float64"):
        yield name, floats.to(getattr(torch, name))
    yield "float8", floats.to(torch.float8_e4m3fn)
    yield "transposed", floats.T
    yield "scalar", torch.tensor(5)
    yield "bool", floats > 0
    yield "empty", torch.empty(0, 4)
    yield "odd bytes", torch.arange(13, dtype=torch.uint8)
    yield "large", torch.randn(4000, 1000, generator=generator)  # more than the kernel takes at once
    yield "last", torch.tensor([scale])


def expected(scale=1.0):
    return {name: digest(tensor) for name, tensor in some_tensors(scale)}


def in_thread(function, *args):
    """What it will return."""
    result = SimpleNamespace(value=None)
    result.thread = threading.Thread(target=lambda: setattr(result, "value", function(*args)), daemon=True)
    result.thread.start()
    return result


def joined(result):
    result.thread.join(SECONDS)
    assert not result.thread.is_alive()
    return result.value


def listening():
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def sender():
    made = WeightSender("127.0.0.1", SECONDS)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 300)


def test_two_servers_get_the_same_in_every_push(start):
    """One with two workers in processes of their own, one with a worker here."""
    first, second = start(), start()
    before = listening()
    for scale in (1.0, -2.0):
        senders = [WeightSender("127.0.0.1", SECONDS) for _ in range(2)]
        invitation = senders[0].invite(2)
        first.tell(invitation=invitation, rank=1)
        second.tell(invitation=invitation, rank=2)
        here = in_thread(received, senders[1].invite(1), 1)
        open_now = listening() - before
        assert len(open_now) >= 2
        assert {address.ip for address in open_now} == {"127.0.0.1"}
        send_tensors(some_tensors(scale), senders, CPU)
        assert [sender.failure for sender in senders] == [None, None]
        assert first.answer() == second.answer() == joined(here) == expected(scale)
        for sender in senders:
            sender.close()
    assert not distributed.is_initialized()
    deadline = time.monotonic() + SECONDS
    while listening() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert listening() <= before


def test_a_worker_that_is_killed_in_mid_push_fails_alone(start):
    killed, whole = start(), start()
    senders = [WeightSender("127.0.0.1", SECONDS) for _ in range(2)]
    killed.tell(invitation=senders[0].invite(1), rank=1, kill_after=3)
    whole.tell(invitation=senders[1].invite(1), rank=1)
    read = []

    def tensors():
        for pair in some_tensors():
            read.append(pair[0])
            yield pair

    send_tensors(tensors(), senders, CPU)
    assert "onnection" in senders[0].failure
    assert senders[1].failure is None
    assert whole.answer() == expected()
    assert read == list(expected())
    for sender in senders:
        sender.close()


def test_one_of_two_workers_that_is_killed_ends_the_push_for_both(start, sender):
    killed, other = start(), start()
    invitation = sender.invite(2)
    killed.tell(invitation=invitation, rank=1, kill_after=3)
    other.tell(invitation=invitation, rank=2)
    send_tensors(some_tensors(), [sender], CPU)
    assert sender.failure is not None
    assert "the trainer's weights did not arrive" in other.answer()["error"]


def test_a_worker_that_hangs_keeps_the_others_waiting_for_a_part_of_the_time(start):
    hanging = start()
    senders = [WeightSender("127.0.0.1", 20.0) for _ in range(2)]
    hanging.tell(invitation=senders[0].invite(1), rank=1, stop_after=2)
    worker = in_thread(received, senders[1].invite(1), 1)
    large = ((f"{i}", torch.zeros(1 << 22)) for i in range(4))  # more than the kernel takes at once
    send_tensors(large, senders, CPU)
    assert senders[0].failure is not None
    assert senders[1].failure is None
    assert list(joined(worker)) == ["0", "1", "2", "3"]
    for sender in senders:
        sender.close()
    hanging.process.send_signal(signal.SIGCONT)
    assert "the trainer's weights did not arrive" in hanging.answer()["error"]


def test_a_trainer_that_is_killed_in_mid_push_ends_the_wait(start):
    trainer = start("trainer")
    begun = time.monotonic()
    seen = received(json.loads(trainer.first_line), 1)
    assert "the trainer's weights did not arrive" in seen["error"]
    assert seen["names"] == ["0", "1", "2"][: len(seen["names"])]
    assert time.monotonic() - begun < SECONDS


def test_a_trainer_that_fails_in_mid_push_says_so(sender):
    def tensors():
        yield from some_tensors()
        raise ZeroDivisionError

    worker = in_thread(received, sender.invite(1), 1)
    with pytest.raises(ZeroDivisionError):
        send_tensors(tensors(), [sender], CPU)
    assert "it has given up: the trainer failed: ZeroDivisionError" in joined(worker)["error"]


def test_a_server_whose_request_failed_is_given_up(sender):
    """What the thread that asks the server learned; the worker is told."""
    worker = in_thread(received, sender.invite(1), 1)

    def tensors():
        yield from some_tensors()
        sender.fail("HTTP 500")
        yield from some_tensors()

    send_tensors(tensors(), [sender], CPU)
    assert sender.failure == "HTTP 500"
    assert "it has given up: HTTP 500" in joined(worker)["error"]


def test_a_server_that_failed_before_it_was_invited_is_not_waited_for(sender):
    sender.fail("unreachable")
    read = []
    send_tensors((read.append(name) or (name, tensor) for name, tensor in some_tensors()), [sender], CPU)
    assert read == list(expected())


def test_workers_that_do_not_come_keep_the_others_waiting_for_a_part_of_the_time():
    senders = [WeightSender("127.0.0.1", 20.0) for _ in range(2)]
    senders[0].invite(1)
    worker = in_thread(received, senders[1].invite(1), 1)
    send_tensors(some_tensors(), senders, CPU)
    assert senders[0].failure == "its workers did not come for 5 s (0.25 of --vllm_server_timeout)"
    assert senders[1].failure is None
    assert joined(worker) == expected()
    for sender in senders:
        sender.close()


def test_a_worker_without_the_key_gets_nothing(sender):
    worker = in_thread(received, sender.invite(1) | {"key": "another"}, 1)
    send_tensors(some_tensors(), [sender], CPU)
    assert sender.failure == "worker 1 came with another key than that of this push"
    assert joined(worker) == {
        "error": f"the trainer's weights did not arrive: it has given up: {sender.failure}",
        "names": [],
    }


def test_a_trainer_without_the_key_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    store.set("start", json.dumps({"backend": "gloo", "proof": "0" * 64}))
    invitation = {"address": "127.0.0.1", "port": port, "key": "k", "workers": 1, "seconds": SECONDS}
    with pytest.raises(BroadcastError, match="who waits there has another key than that of this push"):
        next(receive_tensors(invitation, 1))


def test_every_push_has_a_key_and_a_port_of_its_own(sender):
    other = WeightSender("127.0.0.1", SECONDS)
    first, second = sender.invite(1), other.invite(1)
    assert first["key"] != second["key"]
    assert first["port"] != second["port"]
    assert len(first["key"]) == 32
    other.close()


def test_an_address_of_another_machine():
    message = r"--vllm_server_sync_address 192\.0\.2\.1: this machine cannot listen there"
    with pytest.raises(BroadcastError, match=message):
        WeightSender("192.0.2.1", SECONDS).invite(1)


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    invitation = {"address": "127.0.0.1", "port": port, "key": "k", "workers": 1, "seconds": 0.5}
    with pytest.raises(BroadcastError, match=f"the trainer's weights did not arrive: 127.0.0.1:{port}"):
        next(receive_tensors(invitation, 1))


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        b'[["w", "float32", [5], 0]]',
        b'[["w", "float32", [-1], 0]]',
        b'[["w", "float32", [1], -4]]',
        b'[["w", "load", [1], 0]]',
        b'[["w", "float32", "x", 0]]',
        b'[["w", "float32", [1], 3]]',
        b"{}x",
        b"[[1]]",
    ],
)
def test_headers_that_are_none(header):
    with pytest.raises(ValueError, match="the header that came is none"):
        list(unpacked(header, torch.zeros(16, dtype=torch.uint8)))


def test_a_bucket_is_unpacked_as_it_was_packed():
    bucket = Bucket(list(some_tensors()))
    found = {name: digest(tensor) for name, tensor in unpacked(bucket.header, bucket.payload(CPU))}
    assert found == expected()


def test_nccl_needs_a_gpu_of_its_own_for_everybody(monkeypatch):
    assert weight_group.gpu_of(CPU) is None
    assert weight_group.backend_of(["a", "b", "c"]) == "nccl"
    assert weight_group.backend_of(["a", "b", "a"]) == "gloo"
    assert weight_group.backend_of(["a", None]) == "gloo"
    gpu = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert weight_group.gpu_of(torch.device("cuda:0")) == "GPU-1"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert weight_group.gpu_of(torch.device("cuda:0")) is None
