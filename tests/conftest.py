"""Settings of every test: offline, CPU, one thread per process, seeded; GPU and vLLM tests only where these are."""

import atexit
import gc
import importlib.util
import math
import os
import random
import shutil
import sys
import tempfile
from itertools import islice

import pytest
from support.fixtures.small_runs import assets, made, make_config, parts, trainer_with, world

__all__ = ["assets", "made", "make_config", "parts", "trainer_with", "world"]

gc.disable()  # until all is imported, which is no garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # as in the runs that tests start
# Compiled files are kept, as Docker images often forbid: compiling all tests takes each test process six seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# For tiny models, threads that read weights cost more than they save.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "LIGHTPPO_CACHE" not in os.environ:  # of this process, and of those that it starts
    os.environ["LIGHTPPO_CACHE"] = tempfile.mkdtemp(prefix="lightppo-tests-")
    atexit.register(shutil.rmtree, os.environ["LIGHTPPO_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_files_first(items, shares=getattr(config, "workerinput", {}).get("workercount", 1))
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        skip(items, "gpu", "needs a CUDA GPU", torch.cuda.is_available())
    skip(items, "vllm", "vLLM is not installed", importlib.util.find_spec("vllm") is not None)


def skip(items: list[pytest.Item], marker: str, reason: str, is_there: bool) -> None:
    for item in items:
        if not is_there and item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def slow_files_first(items: list[pytest.Item], shares: int) -> None:
    """Each test process begins with files of long tests, so that what is left for whoever has time is short.

    With --dist worksteal, a process starts with a part of the list, and takes from the end of another's. Files with
    vLLM are all in the first part, because a process that forks ranks with vLLM takes long to start.
    """
    slow_files = dict.fromkeys(item.path for item in items if item.get_closest_marker("slow"))
    with_vllm = dict.fromkeys(item.path for item in items if item.get_closest_marker("vllm"))
    share = dict.fromkeys(with_vllm, 0)
    share |= {
        path: n % shares
        for n, path in enumerate((p for p in slow_files if p not in with_vllm), start=1)
    }
    parts: list[list[pytest.Item]] = [[] for _ in range(shares)]
    for item in sorted(items, key=lambda item: item.path not in with_vllm):
        if item.path in share:
            parts[share[item.path]].append(item)
    others = iter([item for item in items if item.path not in share])
    length = len(items) // shares
    items[:] = [
        item for part in parts for item in (*part, *islice(others, max(0, length - len(part))))
    ] + list(others)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What all tests share is no garbage, which DeepSpeed's engines look for: a quarter of a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Else nanobind takes what is left for leaks; not sooner, as pytest itself collects five times at its end.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """None at the end of a run: drawing takes as long as the run. Tests of pictures override this."""
    if report := sys.modules.get("lightppo.logging.report_page"):
        monkeypatch.setattr(report, "FEWEST_STEPS", math.inf)


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """Each test draws the same random numbers, whatever ran before it in its process."""
    random.seed(0)
    for name, seed in (
        ("numpy", lambda m: m.random.seed(0)),
        ("torch", lambda m: m.manual_seed(0)),
    ):
        if (module := sys.modules.get(name)) is not None:
            seed(module)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Llama and its tokenizer."""
    from support.tiny import save_causal_lm

    return save_causal_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory):
    """The character tokenizer of :func:`tiny_model`."""
    from support.tiny import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
