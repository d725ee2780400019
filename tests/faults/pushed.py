"""Rank 0 pushes to a worker on the other machine, as to a vLLM server there. Arguments: the networks of both, rank 0's
address, and a folder that both see, where what is told over HTTP goes, and in the end what came."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from support.two_machines import enter_network

from lightppo.rollout.vllm.weights import Broadcasts, GlooGroup

SECONDS = 60.0


class Worker:
    """Rank 0's picture of it."""

    gpus = (None,)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def push_step(self, route: str, body: dict) -> None:
        name = route.strip("/")
        (self.folder / f".{name}").write_text(json.dumps(body))
        (self.folder / f".{name}").rename(self.folder / name)
        wait(self.folder / f"{name}.done")

    def take(self, told: dict, of_adapter: bool) -> None:
        self.push_step("/update_weights", {"update_info": told})


def wait(path: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.read_text()


def trainer(folder: Path, address: str) -> None:
    way, worker = Broadcasts(address, SECONDS, torch.device("cpu")), Worker(folder)
    way.open(worker)
    way.send(worker, way.pack([("weight", torch.arange(1000))]))
    way.close()


def worker(folder: Path) -> None:
    group = GlooGroup.join(json.loads(wait(folder / "init_weight_transfer_engine"))["init_info"], 1)
    (folder / "init_weight_transfer_engine.done").touch()
    ((name, tensor),) = group.receive(json.loads(wait(folder / "update_weights"))["update_info"])
    (folder / "came").write_text(f"{name} {tensor.sum()}")
    (folder / "update_weights.done").touch()
    group.close()


if __name__ == "__main__":
    networks, address, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    enter_network(networks[rank])
    worker(folder) if rank else trainer(folder, address)
