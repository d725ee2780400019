"""``lightppo ppo`` in which one rank meets one fault: ``faulty.py '{"fault": …, "phase": …, "rank": …}' flags…``

The fault comes in PPO step ``step``, at the phase's first call on the given rank; "loading" has no step. It comes from
a user's subclass, so the product knows nothing of it. The file ``struck`` tells that it came.

Also without a fault: ``network`` names the network namespace of each rank, which it enters before it joins the others;
``folders`` a working folder of each; ``environment`` has variables of all; ``pids`` a folder where each rank writes its
number. With ``operation`` N, the rank dies at the N-th file operation of the step's save, or at none and writes to
``struck`` how many there are.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(sys.argv[1])
RANK = int(os.environ.get("RANK", 0))
HUGE = 1 << 40  # bytes


def main() -> None:
    """As cli/ppo.py, with the trainer below."""
    os.environ.update(SPEC.get("environment", {}))
    if "pids" in SPEC:
        Path(SPEC["pids"], str(RANK)).write_text(str(os.getpid()))
    if "network" in SPEC:
        from support.two_machines import enter_network

        enter_network(SPEC["network"][RANK])
    if "folders" in SPEC:
        os.chdir(SPEC["folders"][RANK])

    from lightppo.config import parse_args
    from lightppo.trainer import run

    config = parse_args(sys.argv[2:])
    run(lambda: trainer_class().from_config(config).fit())


def trainer_class() -> type:
    from lightppo import PPOTrainer

    class Faulty(PPOTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if SPEC.get("rank") == RANK and "operation" in SPEC:
                in_save(self)
            elif SPEC.get("rank") == RANK and "fault" in SPEC:
                owner, method = {
                    "generation": (self.rollout_engine, "generate"),
                    "scoring": (self.reward_source, "score"),
                    "training": (self.strategy, "backward"),
                    "sync": (self.rollout_engine, "sync_weights"),
                    "saving": (self.checkpointer, "save")
                    if SPEC["fault"] == "NaN"
                    else (self.strategy, "save_ckpt"),
                    "loading": (self.strategy, "load_ckpt"),
                }[SPEC["phase"]]
                around(self, owner, method)

    return Faulty


def around(trainer: Any, owner: Any, method: str) -> None:
    """The fault comes before the call, "NaN" in what it gets or gives; of a save, between the parts."""
    original, calls = getattr(owner, method), 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        # A save and the steps' count: the state has counted the step by then.
        step = trainer.state.global_step + (SPEC["phase"] != "saving")
        if SPEC["phase"] == "loading" or step == SPEC["step"]:
            calls += 1
            if calls == (2 if method == "save_ckpt" else 1):
                tell()
                if SPEC["fault"] == "NaN":
                    return not_finite(trainer, original, *args, **options)
                FAULTS[SPEC["fault"]]()
        return original(*args, **options)

    setattr(owner, method, call)


CHANGES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.utime",
)


def in_save(trainer: Any) -> None:
    """Counts what one save does to files of the checkpoints, and dies before the chosen operation."""
    original, done, under = trainer.checkpointer.save, [], os.path.realpath(SPEC["under"])

    def operation(name: str, path: Any) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if os.path.realpath(os.fspath(path)).startswith(under):
            done.append(name)
            if len(done) == SPEC["operation"]:
                FAULTS["SIGKILL"]()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if saving and (writes or event in CHANGES):
            operation(event, args[0])

    def save(root: Any, step: int, state: Any) -> None:
        nonlocal saving
        saving = step == SPEC["step"]
        try:
            original(root, step, state)
        finally:
            if saving:
                Path(SPEC["struck"]).write_text(json.dumps(done))
            saving = False

    def fsync(file: Any, sync: Callable[[Any], None] = os.fsync) -> None:
        if saving:
            operation("os.fsync", file if isinstance(file, int) else file.fileno())
        sync(file)

    saving, trainer.checkpointer.save, os.fsync = False, save, fsync
    sys.addaudithook(hook)


def tell() -> None:
    """When the fault came."""
    Path(SPEC["struck"]).write_text(repr(time.time()))


def not_finite(trainer: Any, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    nan = float("nan")
    match SPEC["phase"]:
        case "scoring":
            output = original(*args, **options)
            output.scores[0] = nan
            return output
        case "training":
            loss, *others = args
            return original(loss * nan, *others, **options)
        case "generation" | "saving":
            for parameter in trainer.actor.model.parameters():
                parameter.data.fill_(nan)
            return original(*args, **options)
    raise ValueError(f"nothing is computed in {SPEC['phase']}")


# -- faults ----------------------------------------------------------------------------------------------------------


def raise_error() -> None:
    raise RuntimeError("injected")


def use_up_memory() -> None:
    """A limit, so that it is this process that has no memory, not the machine."""
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (HUGE, HUGE))
    torch.zeros(2 * HUGE, dtype=torch.int8)


def be_slow() -> None:
    time.sleep(SPEC.get("seconds", 4))


def kill_server() -> None:
    os.kill(SPEC["server"], signal.SIGKILL)
    time.sleep(0.2)


def fill_disk() -> None:
    """All that is left on the file system of the run."""
    with (Path(SPEC["disk"]) / "filled").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def pull_cable() -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def jump_back() -> None:
    """The clock of the machine goes back a day: this process asks for the time, and files are of the future."""
    real = time.time
    time.time = lambda: real() - 86400
    for path in Path(SPEC["clocked"]).rglob("*"):
        if path.is_file():
            os.utime(path, (real() + 86400, real() + 86400))


FAULTS: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": raise_error,
    "os._exit": lambda: os._exit(3),
    "out of memory": use_up_memory,
    "slow rank": be_slow,
    "dead reward server": kill_server,
    "dead vLLM server": kill_server,
    "full disk": fill_disk,
    "lost network": pull_cable,
    "clock jump": jump_back,
}


if __name__ == "__main__":
    main()
