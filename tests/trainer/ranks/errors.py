"""Ranks that fail: with an error of each alone, then all with the same one. What each tells goes to standard output."""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as dist

from lightppo.errors import ConfigError
from lightppo.trainer import run

dist.init_process_group("gloo")
rank = dist.get_rank()


def fail(text: str) -> None:
    raise ConfigError(text)


for text in (f"rank {rank}'s own", "the same"):
    dist.barrier()
    time.sleep(0.3 * (rank == 0))  # the others are first
    with suppress(SystemExit):
        run(lambda text=text: fail(text), "train.py")
dist.barrier()
dist.destroy_process_group()
