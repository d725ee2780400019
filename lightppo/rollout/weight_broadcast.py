"""Tensors from a trainer to the workers of servers, by broadcasts of torch.distributed. Knows neither HTTP nor vLLM.

For each push and server the trainer opens a process group of its own: rank 0 is the trainer, ranks 1 to n are the
workers. They meet at a ``TCPStore`` of the trainer, which listens on one address alone, at a port of this push. What
the workers have to know to come there is an invitation, with a key made for this push; both sides prove that they have
it. gloo carries the tensors through CPU memory, NCCL from GPU to GPU. Only tensors travel, under a header in JSON;
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from lightppo.rollout.weight_buckets import Bucket, buckets, unpacked
from lightppo.rollout.weight_group import CONNECT_SECONDS, PushGroup, backend_of, gpu_of

PATIENCE = 0.25
"""Share of its time for which one server may keep the others waiting, at the start or for some of the tensors."""

_MOST_HEADER_BYTES = 1 << 26
_POLL_SECONDS = 0.001
_LOOK_SECONDS = 0.2  # between two looks whether the trainer has given up


class BroadcastError(Exception):
    """The tensors did not arrive; the message says why."""


class WeightSender:
    """The trainer's end of one push to one server.

    :meth:`invite` and :meth:`fail` may be called from the thread that asks the server; all others are for the thread
    that sends.

    Args:
        address: of this machine, where the workers connect to. Nothing listens anywhere else.
        seconds: from the invitation to the last tensor, for the workers. A server for which this end has waited
            ``PATIENCE`` of that has failed: the others still have the rest of the time.

    Attributes:
        failure: why this push is over, or ``None``.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self.failure: str | None = None
        self._address, self._seconds = address, seconds
        self._patience = PATIENCE * seconds
        self._deadline = math.inf
        self._key = secrets.token_hex(16)
        self._ranks = range(0)
        self._store: Any = None
        self._group: PushGroup | None = None
        self._count = 0

    def invite(self, workers: int) -> dict[str, Any]:
        """Opens the store; what each of the workers needs to know for :func:`receive_tensors`.

        Raises:
            BroadcastError: the address is not one of this machine, or cannot be listened on.
        """
        try:
            family, _, _, _, place = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family)
            port = listener.getsockname()[1]
            store = distributed.TCPStore(
                self._address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._seconds),
                master_listen_fd=listener.detach(),  # by its number alone it would listen on every address
            )
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else _line(error)
            raise BroadcastError(
                f"--vllm_server_sync_address {self._address}: this machine cannot listen there: {reason}"
            ) from None
        self._deadline = time.monotonic() + self._patience
        self._ranks, self._store = range(1, workers + 1), store
        invitation = {"address": self._address, "port": port, "key": self._key}
        return invitation | {"workers": workers, "seconds": self._seconds}

    def fail(self, reason: str) -> None:
        """Gives this push up; the sending thread notices at its next look."""
        self.failure = self.failure or reason

    def begin(self, device: torch.device) -> bool:
        """Makes the group when all workers have come; ``False`` while that is not so.

        Args:
            device: where the tensors are.
        """
        if self._store is None or self.failure is not None:
            return self.failure is not None
        try:
            if not self._store.check([_place_of(rank) for rank in self._ranks]):
                self._look_at_the_time("its workers did not come")
                return False
            backend = backend_of([gpu_of(device), *map(self._gpu, self._ranks)])
            self._store.set("start", json.dumps({"backend": backend, "proof": _proof(self._key, "start", backend)}))
            size = len(self._ranks) + 1
            self._group = PushGroup(self._store, 0, size, backend, device, self._address, self._patience)
        except (BroadcastError, RuntimeError) as error:
            self._give_up(error)
        return True

    def send(self, bucket: Bucket | None) -> None:
        """Begins to send some tensors, or to say that these were all; :meth:`is_done` says when they are there."""
        if self.failure is not None or self._group is None:
            return
        self._deadline = time.monotonic() + self._patience
        try:
            if bucket is None:
                self._group.broadcast(torch.tensor([0, self._count]))
                return
            header, payload = bucket.header, bucket.payload(self._group.device)
            self._count += len(bucket)
            self._group.broadcast(torch.tensor([len(header), payload.numel()]))
            self._group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            self._group.broadcast(payload)
        except RuntimeError as error:
            self._give_up(error)

    def is_done(self) -> bool:
        """Whether what was sent has arrived, or never will."""
        if self._group is None:
            return True
        try:
            if self.failure is not None:
                raise BroadcastError(self.failure)
            if not self._group.is_done():
                self._look_at_the_time("its workers took no more weights")
                return False
        except (BroadcastError, RuntimeError) as error:
            self._give_up(error)
        return True

    def close(self) -> None:
        """Ends group and store. It may be called again."""
        if self._group is not None:
            self._group.close()
        self._group, self._store = None, None

    def _look_at_the_time(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise BroadcastError(f"{what} for {self._patience:g} s ({PATIENCE:g} of --vllm_server_timeout)")

    def _give_up(self, error: Exception) -> None:
        """Tells the workers why, who may wait for NCCL, and would not learn it from a closed connection."""
        self.fail(_line(error))
        with suppress(RuntimeError):
            self._store.set("stop", self.failure or "")
        if self._group is not None:
            self._group.close()
        self._group = None

    def _gpu(self, rank: int) -> str | None:
        """That of a worker, which has proved that it was invited."""
        try:
            said = json.loads(self._store.get(_place_of(rank)))
            is_invited = hmac.compare_digest(str(said["proof"]), _proof(self._key, rank, said["gpu"]))
        except (ValueError, KeyError, TypeError):
            is_invited = False
        if not is_invited:
            raise BroadcastError(f"worker {rank} came with another key than that of this push")
        return said["gpu"]


def send_tensors(tensors: Iterable[tuple[str, Tensor]], senders: Sequence[WeightSender], device: torch.device) -> None:
    """Sends tensors to several servers at the same time. Reads ``tensors`` to the end whatever happens to servers:
    other ranks iterate along. Which of them failed, ``failure`` of its sender says.

    Args:
        tensors: names and tensors.
        senders: one per server; those that are not invited yet are waited for until they are, or have failed.
        device: where the tensors are.
    """
    try:
        _all(senders, lambda sender: sender.begin(device))
        for bucket in buckets(tensors):
            _all(senders, WeightSender.is_done)  # the one before, while this one was gathered
            for sender in senders:
                sender.send(bucket)
        _all(senders, WeightSender.is_done)
        for sender in senders:
            sender.send(None)
        _all(senders, WeightSender.is_done)
    except BaseException as error:
        for sender in senders:
            sender.fail(f"the trainer failed: {type(error).__name__}")
            sender.is_done()
        raise


def receive_tensors(
    invitation: dict[str, Any], rank: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """A worker's end of one push: names and tensors as the trainer sends them.

    Args:
        invitation: of :meth:`WeightSender.invite`.
        rank: of this worker, from 1.
        device: of this worker. By gloo the tensors come in CPU memory, whatever it is.

    Raises:
        BroadcastError: the trainer cannot be reached, has another key, gave up or is gone, or was too slow.
    """
    address, port, seconds = str(invitation["address"]), int(invitation["port"]), float(invitation["seconds"])
    deadline, device = time.monotonic() + seconds, torch.device(device)
    store, group = None, None

    def receive(length: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(length, dtype=dtype, device=group.device)
        group.broadcast(tensor)
        _wait(group.is_done, store, deadline)
        return tensor

    try:
        store = distributed.TCPStore(address, port, timeout=timedelta(seconds=min(CONNECT_SECONDS, seconds)))
        backend = _meet(store, str(invitation["key"]), rank, device, deadline)
        own = _own_address(address, port)
        group = PushGroup(store, rank, int(invitation["workers"]) + 1, backend, device, own, seconds)
        count = 0
        while True:
            header_bytes, payload_bytes = receive(2, torch.int64).tolist()
            if header_bytes == 0:
                break
            if not (0 < header_bytes <= _MOST_HEADER_BYTES and payload_bytes >= 0):
                raise ValueError(f"a header of {header_bytes} bytes was announced")
            header = bytes(receive(header_bytes, torch.uint8).cpu().numpy())
            for name, tensor in unpacked(header, receive(payload_bytes, torch.uint8)):
                count += 1
                yield name, tensor
        if count != payload_bytes:
            raise ValueError(f"{count} tensors came of {payload_bytes}")
    except (RuntimeError, OSError, ValueError, KeyError) as error:  # RuntimeErrors are time-outs and lost connections
        reason = _reason_to_stop(store) or f"{address}:{port}: {_line(error)}"
        raise BroadcastError(f"the trainer's weights did not arrive: {reason}") from error
    finally:
        if group is not None:
            group.close()


def _meet(store: Any, key: str, rank: int, device: torch.device, deadline: float) -> str:
    """Comes to the trainer's store and waits until all others have; the backend that the trainer has chosen."""
    gpu = gpu_of(device)
    store.set(_place_of(rank), json.dumps({"gpu": gpu, "proof": _proof(key, rank, gpu)}))
    _wait(lambda: store.check(["start"]), store, deadline)
    start = json.loads(store.get("start"))
    if not hmac.compare_digest(str(start["proof"]), _proof(key, "start", start["backend"])):
        raise ValueError("who waits there has another key than that of this push")
    return str(start["backend"])


def _wait(is_done: Callable[[], bool], store: Any, deadline: float) -> None:
    """Waits, for a worker: until something is true, the trainer has given up or is gone, or it is too late."""
    look = time.monotonic() + _LOOK_SECONDS
    while not is_done():
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError("the time of --vllm_server_timeout is over")
        if now > look:
            look = now + _LOOK_SECONDS
            if store.check(["stop"]):  # fails when the trainer is gone
                raise RuntimeError("the trainer has given up")
        time.sleep(_POLL_SECONDS)


def _reason_to_stop(store: Any) -> str | None:
    """What the trainer says why it has given up; ``None`` if it says nothing."""
    with suppress(RuntimeError):
        if store is not None and store.check(["stop"]):
            return f"it has given up: {store.get('stop').decode(errors='replace')}"
    return None


def _all(senders: Sequence[WeightSender], is_done: Callable[[WeightSender], bool]) -> None:
    """Waits until something is true of each."""
    waiting = list(senders)
    while waiting := [sender for sender in waiting if not is_done(sender)]:
        time.sleep(_POLL_SECONDS)


def _place_of(rank: int) -> str:
    return f"worker/{rank}"


def _proof(key: str, *words: Any) -> str:
    """That somebody who has the key says this; the key itself does not travel here."""
    return hmac.new(key.encode(), json.dumps(words).encode(), hashlib.sha256).hexdigest()


def _own_address(address: str, port: int) -> str:
    """That of this machine on the way to the trainer."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)  # sends nothing
        return sock.getsockname()[0]


def _line(error: Exception) -> str:
    """The first line of an error, without the name of a source file that gloo puts before it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2] if text.startswith("[/") else text
