"""Settings of every test: offline, CPU, one thread per process, seeded; GPU tests only where there is a GPU."""

import os
import random
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """Each test draws the same random numbers, whatever ran before it in its process."""
    random.seed(0)
    for name, seed in (("numpy", lambda m: m.random.seed(0)), ("torch", lambda m: m.manual_seed(0))):
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
