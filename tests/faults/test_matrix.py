"""Every cell of table.py: one fault at one phase, then the same command again."""

from __future__ import annotations

import multiprocessing
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.small_run import STEPS, metric_rows, outcome
from faults.table import FAULTS, PAGE, WAIT, Cannot, Ends, Fault, GoesOn, Outcome, page_with_table
from support.fake_vllm import FakeVLLM
from support.http_server import JsonServer, ok
from support.two_machines import ADDRESSES, two_machines, why_not

STEP = 2  # in which the fault comes
SAMPLE = {("SIGKILL", "saving")}  # in `make test`


def cells() -> Iterator[Any]:
    for fault in FAULTS:
        for phase, wanted in fault.cells().items():
            if not isinstance(wanted, Cannot):
                marks = [] if (fault.name, phase) in SAMPLE else [pytest.mark.faults]
                yield pytest.param(fault, phase, wanted, id=f"{fault.name} in {phase}", marks=marks)


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "make docs"


@pytest.mark.parametrize(("fault", "phase", "wanted"), cells())
def test_outcome(fault: Fault, phase: str, wanted: Outcome, start, surroundings, tmp_path):
    around = surroundings(fault)
    folder, spec = (
        around.folder,
        {**around.spec, "struck": str(tmp_path / "struck"), "clocked": str(tmp_path)},
    )
    if phase == "loading":
        start(folder, around.spec, benchmark_steps=STEP - 1, **around.options)
    spec |= {"fault": fault.name, "phase": phase, "rank": 1, "step": STEP}
    waits = {"dist_timeout": WAIT / 60} if "dist_timeout" in getattr(wanted, "text", "") else {}
    result = start(folder, spec, check=False, **around.options, **waits)
    took = time.time() - float((tmp_path / "struck").read_text())
    if isinstance(wanted, Ends):
        assert result.returncode != 0
        assert re.search(wanted.says, result.output), result.output[-3000:]
        assert took < wanted.within, f"{took:.0f} s until all ranks had ended"
        around.repair()
        start(folder, around.spec, **around.options)
    else:
        assert isinstance(wanted, GoesOn)
        assert result.returncode == 0, result.output[-3000:]
        if wanted.counted is not None:
            counts = [row[wanted.counted] for row in metric_rows(folder) if wanted.counted in row]
            assert counts == [float(step == STEP) for step in range(1, 1 + STEPS)]
            return
    assert outcome(folder) == around.undisturbed()


# -- what a run has besides -------------------------------------------------------------------------------------------


class Surroundings:
    """Of one run: its ``folder``, further ``options``, what faulty.py is told; and the same without a fault."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.options, self.spec = folder, options or {}, spec or {}
        self.repair: Callable[[], Any] = lambda: None
        self.undisturbed: Callable[[], Any] = lambda: None


@pytest.fixture(scope="module")
def without_faults() -> dict[str, Any]:
    """Outcomes by what a run has besides."""
    return {}


@pytest.fixture
def surroundings(
    start, undisturbed, without_faults, inputs, tmp_path
) -> Iterator[Callable[[Fault], Surroundings]]:
    with ExitStack() as stack:

        def make(fault: Fault) -> Surroundings:
            if fault.needs is None:
                made = Surroundings(tmp_path / "out")
                made.undisturbed = lambda: undisturbed
                return made
            if fault.needs in ("disk", "network") and (reason := why_not()):
                pytest.skip(reason)
            made = stack.enter_context(NEEDS[fault.needs](tmp_path, inputs))

            def outcome_without_fault() -> Any:
                if fault.needs not in without_faults:
                    start(tmp_path / "undisturbed", made.spec, **made.options)
                    without_faults[fault.needs] = outcome(tmp_path / "undisturbed")
                return without_faults[fault.needs]

            made.undisturbed = (
                outcome_without_fault if "server" in fault.needs else lambda: undisturbed
            )
            return made

        yield make


@contextmanager
def server(
    serve: Callable[..., None], tmp_path: Path, options: Callable[[str], dict[str, Any]], *args: Any
):
    """A server in a process of its own, which ``repair`` starts anew at the same address."""
    made, processes = Surroundings(tmp_path / "out"), []

    def begin(port: int = 0) -> str:
        ours, its = multiprocessing.Pipe()
        processes.append(
            multiprocessing.get_context("fork").Process(target=serve, args=(its, port, *args))
        )
        processes[-1].start()
        made.spec["server"] = processes[-1].pid
        return ours.recv()

    url = begin()
    made.options = options(url)

    def repair() -> None:
        processes[-1].join(timeout=30)
        assert not processes[-1].is_alive(), "the fault did not come"
        begin(int(url.rpartition(":")[2]))

    made.repair = repair
    try:
        yield made
    finally:
        for process in processes:
            process.kill()
            process.join()


def serve_rewards(connection: Any, port: int) -> None:
    server = JsonServer(port)

    def reply(path: str, body: Any, n: int) -> tuple[int, bytes]:
        answers = [query[len(prompt) :] for query, prompt in zip(body["query"], body["prompts"])]
        return ok(rewards=[sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers])

    server.reply = reply
    connection.send(server.url)
    signal.pause()


def serve_fake_vllm(connection: Any, port: int, described: dict[str, Any]) -> None:
    server = FakeVLLM(described, port)
    connection.send(server.url)
    signal.pause()


@contextmanager
def reward_server(tmp_path: Path, inputs: dict[str, str]) -> Iterator[Surroundings]:
    def options(url: str) -> dict[str, Any]:
        return {"reward_fn": None, "remote_rm_url": url, "remote_rm_retries": 1}

    with server(serve_rewards, tmp_path, options) as made:
        yield made


@contextmanager
def vllm_server(tmp_path: Path, inputs: dict[str, str]) -> Iterator[Surroundings]:
    """It computes nothing, so what it says is not compared. Real servers: rollout/vllm/test_vllm_server_real.py."""
    from transformers import AutoConfig

    from lightppo.rollout.vllm.weights import architecture

    def options(url: str) -> dict[str, Any]:
        engine = {"rollout_engine": "vllm_server", "vllm_server_url": url, "rollout_check": "off"}
        limits = {
            "vllm_server_retries": 0,
            "vllm_server_timeout": 10,
        }
        return engine | limits | {"vllm_server_sync": "disk", "vllm_server_sync_dir": str(tmp_path)}

    described = architecture(AutoConfig.from_pretrained(inputs["pretrain"]))
    with server(serve_fake_vllm, tmp_path, options, described) as made:
        yield made


@contextmanager
def small_disk(tmp_path: Path, inputs: dict[str, str]) -> Iterator[Surroundings]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60m", "lightppo-test", str(disk)], check=True
    )
    made = Surroundings(disk / "out", spec={"disk": str(disk)})
    made.repair = (disk / "filled").unlink
    try:
        yield made
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def network(tmp_path: Path, inputs: dict[str, str]) -> Iterator[Surroundings]:
    (tmp_path / "hosts").mkdir()
    with two_machines(tmp_path / "hosts") as machines:
        environment = {"MASTER_ADDR": ADDRESSES[0], "LOCAL_WORLD_SIZE": "1"}
        made = Surroundings(
            tmp_path / "out", spec={"network": machines.names, "environment": environment}
        )
        made.repair = machines.mend
        yield made


NEEDS = {
    "reward server": reward_server,
    "vLLM server": vllm_server,
    "disk": small_disk,
    "network": network,
}
