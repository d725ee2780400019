"""Two ranks on two machines: network namespaces joined by a cable. docs/multi-node.md says what is shown here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from faults.small_run import flags, outcome
from support.ranks import ENVIRONMENT, WITH_SUPPORT, kill_marked, marked, run_ranks
from support.two_machines import ADDRESSES, HOSTS, TwoMachines, two_machines, why_not


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    if reason := why_not():
        pytest.skip(reason)
    with two_machines(tmp_path_factory.mktemp("machines")) as made:
        yield made


def test_two_machines_train_as_one(machines, start, undisturbed, tmp_path):
    environment = {"MASTER_ADDR": ADDRESSES[0], "LOCAL_WORLD_SIZE": "1"}
    start(tmp_path, {"network": machines.names, "environment": environment})
    assert outcome(tmp_path) == undisturbed


def test_weights_get_to_a_server_on_the_other_machine(machines, tmp_path):
    """Its group asks no host name, which leads nowhere in these networks."""
    words = (json.dumps(machines.names), ADDRESSES[0], tmp_path)
    run_ranks(Path(__file__).with_name("pushed.py"), *words, timeout=120, env=WITH_SUPPORT)
    assert (tmp_path / "came").read_text() == "weight 499500"


@pytest.mark.parametrize("flag", ["save_path", "ckpt_path"])
def test_a_folder_that_is_not_shared_is_noticed_at_the_start(start, tmp_path, flag):
    """The same path leads each rank to a folder of its own."""
    folders = [tmp_path / "node-a", tmp_path / "node-b"]
    for folder in folders:
        folder.mkdir()
    result = start(
        tmp_path, {"folders": [str(folder) for folder in folders]}, check=False, **{flag: "here"}
    )
    assert result.returncode == 2
    assert f"--{flag} here: rank 1 on " in result.output
    assert "does not see what rank 0 on " in result.output
    assert "(1 of 2 ranks do not): name one that all nodes share" in result.output
    assert "models: actor" not in result.output  # before they load
    assert not list(folders[0].glob("here/.seen*"))


def torchrun(machines: TwoMachines, words: list[str]) -> list[list[str]]:
    """torchrun on each machine, which meet where the first one's name leads."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS[0]}:29400", "--rdzv_id=run"]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        *meet,
    ]
    return [
        machines.command(node, [*launch, "--module", "lightppo", "ppo", *words]) for node in (0, 1)
    ]


def hostfile(machines: TwoMachines, words: list[str]) -> list[list[str]]:
    """DeepSpeed's launcher on the first machine, which finds ssh and pdsh that lead into the namespaces."""
    (machines.folder / "hostfile").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    programs = {f"on-{host}": f'exec {shlex.join(machines.command(node, ["sh", "-c"]))} "$*"\n'
                for node, host in enumerate(HOSTS)}  # fmt: skip
    programs["ssh"] = (
        'while [ "${1#-}" != "$1" ]; do shift $((1 + (${#1} == 2))); done\nhost=$1; shift\nexec on-$host "$@"\n'
    )
    programs["pdsh"] = (
        "hosts=$(echo $5 | tr , ' '); shift 5; n=0\n"  # -S -f 1024 -w a,b
        'for host in $hosts; do on-$host "$(echo "$*" | sed "s/%n/$n/g")" & pids="$pids $!"; n=$((n + 1)); done\n'
        "for pid in $pids; do wait $pid || code=$?; done\nexit ${code:-0}\n"
    )
    for name, text in programs.items():
        program = machines.folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
    launch = [
        str(Path(sys.executable).parent / "deepspeed"),
        f"--hostfile={machines.folder / 'hostfile'}",
    ]
    return [[*launch, "--module", "lightppo", "ppo", *words]]


def launched(
    machines: TwoMachines, commands: list[list[str]], log: Path
) -> list[subprocess.Popen[bytes]]:
    marked = {
        "LIGHTPPO_TEST_RUN": str(machines.folder),
        "LIGHTPPO_CACHE": str(machines.folder / "cache"),
    }
    environment = os.environ | ENVIRONMENT | marked
    environment["PATH"] = f"{machines.folder / 'bin'}{os.pathsep}{environment['PATH']}"
    with log.open("w") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return [
            subprocess.Popen(c, env=environment, start_new_session=True, **streams)
            for c in commands
        ]


@pytest.fixture
def log(machines, tmp_path) -> Iterator[Path]:
    """What the launchers print; what is left of them is killed at the end."""
    yield tmp_path / "log"
    kill_marked(str(machines.folder))


@pytest.mark.faults
@pytest.mark.parametrize("launcher", [torchrun, hostfile])
def test_launchers(machines, inputs, undisturbed, tmp_path, log, launcher):
    for process in launched(machines, launcher(machines, flags(inputs, tmp_path)), log):
        assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    assert outcome(tmp_path) == undisturbed


@pytest.mark.faults
@pytest.mark.parametrize("launcher", [torchrun, hostfile])
def test_a_cable_that_is_pulled_ends_both_sides(
    machines, inputs, undisturbed, tmp_path, log, launcher
):
    """Ranks end after --dist_timeout on both machines; put together again, the run goes on as if nothing had been."""
    words = flags(inputs, tmp_path, dist_timeout=0.3)
    running = launched(machines, launcher(machines, words), log)
    wait_for(lambda: (tmp_path / "ckpt" / "latest").is_file(), 300)
    assert len(ranks_of(machines)) == 2
    machines.cut()
    # The launchers may stay longer: torchrun asks for minutes on the side that has lost its store.
    wait_for(lambda: not ranks_of(machines), 60 + 18)
    assert running[0].wait(timeout=60) != 0
    kill_marked(str(machines.folder))
    machines.mend()
    for process in launched(machines, launcher(machines, words), log):
        assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    assert outcome(tmp_path) == undisturbed


def ranks_of(machines: TwoMachines) -> list[int]:
    """Numbers of the processes that run as ranks, without their launchers."""
    found = []
    for process in marked(str(machines.folder)):
        with suppress(psutil.NoSuchProcess):
            if " -m lightppo " in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
