"""Self-tests of models: in each dry run, and once for a model's folder and what else they depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import save_causal_lm

from lightppo import PPOTrainer
from lightppo.errors import ModelLoadError
from lightppo.preflight import run_checks

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def tests_of(make_config, monkeypatch, tmp_path):
    """What is tested while a run of these options is built."""
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "cache"))
    names = ("check_padding", "check_training", "check_decoding")
    seen: list[str] = []
    for name in names:
        monkeypatch.setattr(run_checks, name, lambda *_, name=name, **__: seen.append(name))

    def build(**options) -> list[str]:
        seen.clear()
        PPOTrainer.from_config(make_config(**options)).close()
        return sorted(seen)

    return build


ALL = ["check_decoding", "check_padding", "check_training"]


def test_once_for_a_model_and_its_options(tests_of, tmp_path):
    assert tests_of() == ALL
    assert tests_of() == []
    assert tests_of(actor_learning_rate=1e-3) == []
    assert tests_of(attn_implementation="eager") == ALL
    assert tests_of(attn_implementation="eager") == []
    other = save_causal_lm(tmp_path / "other", seed=7)
    assert tests_of(pretrain=str(other)) == ALL
    assert tests_of() == []


def test_each_dry_run_and_code_of_the_model_are_tested(tests_of):
    assert tests_of() == ALL
    assert tests_of(dry_run=True) == ALL
    assert tests_of(trust_remote_code=True) == ALL
    assert tests_of(trust_remote_code=True) == ALL


def test_a_test_that_fails_is_done_again(tests_of, monkeypatch):
    def fail(*_, **__) -> None:
        raise ModelLoadError("wrong")

    with monkeypatch.context() as patch:
        patch.setattr(run_checks, "check_training", fail)
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="wrong"):
                tests_of()
    assert tests_of() == ALL


def test_a_cache_that_cannot_be_written_is_no_error(tests_of, monkeypatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "file"))
    assert tests_of() == tests_of() == ALL
