"""Digests of tensors; and, as a script, the other process of test_weight_broadcast.py: a worker that receives, or a
trainer that is killed in mid-push."""

import hashlib
import json
import os
import signal
import sys
import time

import torch

from lightppo.rollout.weight_broadcast import BroadcastError, WeightSender, receive_tensors, send_tensors


def digest(tensor):
    """Type, shape and content, as text."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def received(invitation, rank, kill_after=None, stop_after=None):
    """Digests of what comes, or the error; this process ends or stops after some tensors."""
    seen = {}
    try:
        for name, tensor in receive_tensors(invitation, rank):
            seen[name] = digest(tensor)
            if len(seen) == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(seen) == stop_after:
                os.kill(os.getpid(), signal.SIGSTOP)
    except BroadcastError as error:
        return {"error": str(error), "names": list(seen)}
    return seen


def worker():
    """Receives whatever it is invited to, one line of JSON each."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(received(**json.loads(line))), flush=True)


def trainer():
    """Invites one worker, and is killed after some of the tensors."""
    sender = WeightSender("127.0.0.1", 60.0)
    print(json.dumps(sender.invite(1)), flush=True)

    def tensors():
        for i in range(5):
            if i == 3:
                time.sleep(0.5)  # so that the first ones have been sent
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"{i}", torch.full((1 << 20,), float(i))

    send_tensors(tensors(), [sender], torch.device("cpu"))


if __name__ == "__main__":
    {"worker": worker, "trainer": trainer}[sys.argv[1]]()
