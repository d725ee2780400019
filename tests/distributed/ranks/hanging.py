"""What ends a run on some rank. Usage: hanging.py CASE REWARD_FILE SECONDS; a hang is so many seconds long."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import Store

from lightppo.data.records import Prompt, Rollout
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.logging.performance import PhaseTimer
from lightppo.ranks import heartbeat
from lightppo.rewards.function import FunctionReward
from lightppo.trainer import run
from lightppo.user_code import load_python_function


def main(case: str, reward: str, seconds: float) -> None:
    if os.environ.get("AS_TORCH") == "2.6" and hasattr(Store, "clone"):
        del Store.clone
    strategy, timer = DeepspeedStrategy(), PhaseTimer()
    strategy.setup_distributed(timedelta(seconds=100))
    last = strategy.get_rank() == strategy.world_size - 1
    if case.startswith("hang"):
        heartbeat.limit, heartbeat.step = seconds, 4
        with timer("rollout"):
            for _ in range(14):  # longer than the limit, with signs of life
                time.sleep(seconds / 10)
                heartbeat.beat()
        print("the rollout is done", flush=True)
        if case == "hang_as_nccl":
            with timer("train"):
                wait_outside_torch(last)
        if last:
            with timer("reward"):
                samples = [Rollout(Prompt("1+1=", [5]), i, [6], "2", "stop") for i in (0, 1)]
                FunctionReward(load_python_function(reward, case)).score(samples)
    elif last:
        time.sleep(0.5)
        match case:
            case "error":
                {}["the cause"]
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    with timer("train"):
        strategy.all_reduce(1)


def wait_outside_torch(last: bool) -> None:
    """As with NCCL: a collective returns at once, and a rank waits where it reads its result."""
    work = None if last else distributed.all_reduce(torch.ones(1), async_op=True)
    while work is None or not work.is_completed():
        time.sleep(0.1)


if __name__ == "__main__":
    case, reward, seconds = sys.argv[-3:]  # the launcher puts --local_rank first
    run(lambda: main(case, reward, float(seconds)))
