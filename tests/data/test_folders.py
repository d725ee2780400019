"""Folders of models and tokenizers that lack something: said at once, with the file's name, before torch is loaded."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lightppo.data.folders import (
    check_model,
    check_tokenizer,
    file_problem,
    weights_problem,
)
from lightppo.errors import ModelLoadError
from lightppo.models.loading import get_tokenizer, load_causal_lm, load_sequence_classifier


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    """A copy of a whole model, to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refusal(path: Path | str, **needs: bool) -> str:
    with pytest.raises(ModelLoadError) as error:
        check_model(str(path), "--pretrain", **needs)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"--pretrain {path}")
    return str(error.value)


def test_a_whole_model(model):
    check_model(str(model), "--pretrain", tokenizer=True)
    check_tokenizer(str(model), "--tokenizer_path")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 1000, -1])
def test_a_download_that_was_interrupted(model, kept):
    """Whatever is left of the file: the loader, too, names it, in one line."""
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:kept])
    told = refusal(model)
    assert "model.safetensors is " in told
    assert "download it again" in told
    if kept == -1:
        assert f"is not complete: {len(whole) - 1:,} of {len(whole):,} bytes" in told
    with pytest.raises(ModelLoadError) as error:
        load_causal_lm(str(model))
    assert "model.safetensors is " in str(error.value)
    check_model(str(model), "--pretrain", weights=False)  # random weights need none


def test_other_files_of_weights(model):
    weights = model / "model.safetensors"
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "only a pointer of Git LFS, not the weights: run `git lfs pull`" in refusal(model)
    weights.write_bytes((3).to_bytes(8, "little") + b"{{{")
    assert "is damaged" in refusal(model)
    weights.write_bytes(b"<!DOCTYPE html><html>not found</html>")
    assert "no file of weights" in refusal(model)
    weights.unlink()
    assert "no weights" in refusal(model)
    torch.save({"x": torch.zeros(1000)}, model / "pytorch_model.bin")
    check_model(str(model), "--pretrain")
    whole = (model / "pytorch_model.bin").read_bytes()
    (model / "pytorch_model.bin").write_bytes(whole[:-200])
    assert "pytorch_model.bin is not complete" in refusal(model)


def test_a_shard_that_is_missing(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "model-00002-of-00002.safetensors is missing, which its index names" in refusal(model)
    (model / "model.safetensors.index.json").write_text("{")
    assert "its index of weights cannot be read" in refusal(model)


def test_what_is_no_folder_of_a_model(model, tmp_path):
    assert f"is a file: name its folder, {model}" in refusal(model / "model.safetensors")
    (tmp_path / "notes.txt").write_text("")
    assert "is a file: give the folder of a Hugging Face model" in refusal(tmp_path / "notes.txt")
    assert "has no config.json, but folders in it have one: name one of model" in refusal(tmp_path)
    assert f"; there is {tmp_path / 'model'}" in refusal(tmp_path / "modle")


def test_an_adapter_beside_weights_is_not_added_to_them(model, tmp_path):
    """Whoever merged it may have left its files there: transformers would add it once more."""
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["v_proj"])
    )
    adapted.save_pretrained(model)
    told = "has an adapter (adapter_config.json) beside its weights, which would be added to them"
    assert told in refusal(model)
    check_model(str(model), "--pretrain", weights=False)
    heads = load_causal_lm, partial(load_sequence_classifier, kind="reward")
    for load in (*heads, partial(load_sequence_classifier, kind="critic")):
        with pytest.raises(ModelLoadError, match=r"--\w+ .* beside its weights"):
            load(str(model))
    load_causal_lm(str(model), init_from_scratch=True)
    (model / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).rename(model / "adapter" / name)  # where an export has it
    load_causal_lm(str(model))


def test_a_folder_without_the_files_of_a_tokenizer(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "has no files of a tokenizer" in refusal(model, tokenizer=True)
    assert refusal(model, tokenizer=True).endswith("or set --tokenizer_path")
    check_model(str(model), "--critic_pretrain")
    with pytest.raises(
        ModelLoadError,
        match=r"--tokenizer_path .* has no files of a tokenizer.* name another folder",
    ):
        check_tokenizer(str(model), "--tokenizer_path")
    with pytest.raises(ModelLoadError, match=r"--pretrain .* has no files of a tokenizer"):
        get_tokenizer(str(model))


def test_weights_of_another_shape_are_named_with_both(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ModelLoadError) as error:
        load_causal_lm(str(model))
    shapes = "model.layers.0.mlp.down_proj.weight is (32, 64), not (32, 128)"
    assert f"6 weights have another shape than its config says: {shapes}" in str(error.value)


@pytest.mark.parametrize("load", [load_causal_lm, get_tokenizer])
def test_the_hub_is_asked_once(monkeypatch, load):
    """Loaders alone would try each of several files for half a minute."""
    asked = []

    def model_info(self, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr(
        "transformers.utils.hub.hf_hub_download", lambda *_, **__: pytest.fail("the loader asks")
    )
    message = r"--x org/no: no such folder here, not in the hub's cache, and ConnectionError: the hub cannot be reached"
    with pytest.raises(ModelLoadError, match=message):
        load("org/no", flag="--x")
    assert asked == [("org/no", 5.0)]


def test_a_file_of_weights_is_judged_by_its_header(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(10)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert file_problem(tmp_path / "model.safetensors") is None
    assert weights_problem(tmp_path) is None
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "is damaged: it has " in file_problem(tmp_path / "model.safetensors")
