"""A worker of a server in a process of its own, which gets a push by gloo; light, so that it starts soon."""

import torch

from lightppo.rollout.vllm.weights import GlooGroup


def worker(pipe, rank):
    """Joins when it is told where, gets one tensor when it is told to, and says each time how that went."""
    pipe.send("ready")
    try:
        group = GlooGroup.join(pipe.recv(), rank)
        pipe.send("joined")
        pipe.recv()
        tensor = torch.empty(1 << 24, dtype=torch.uint8)
        group.begin([tensor])
        group.wait()
        pipe.send(int(tensor.sum()))
    except RuntimeError as error:
        pipe.send(f"error: {error}")
