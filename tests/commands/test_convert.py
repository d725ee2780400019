"""``lightppo convert`` and ``lightppo merge``: equal to the bit to what a run exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import randomize_b
from support.ranks import run_ranks
from support.tiny import save_causal_lm, sums, write_jsonl

from lightppo.__main__ import main


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_model(folder: Path, export: Path) -> None:
    """Weights to the bit, and all files but the model card and the manifest."""
    found, expected = weights(folder), weights(export)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (folder / name).read_text() == (export / name).read_text(), name


@pytest.mark.parametrize("name", ["one", "two"])  # ZeRO 0; ZeRO 3 on two ranks
def test_a_checkpoint_becomes_what_its_run_has_exported(name, recorded, tmp_path, capsys):
    main(["convert", str(recorded / name), str(tmp_path / "out")])
    assert "global_step4" in capsys.readouterr().out
    assert_same_model(tmp_path / "out", recorded / name)
