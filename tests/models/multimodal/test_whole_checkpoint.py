"""The language model of a checkpoint with towers, and the whole checkpoint written anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.towers import KINDS, save_with_tower, sums_of, sums_of_tower
from transformers import DynamicCache

from lightppo.checkpoint.export import save_model
from lightppo.errors import ModelLoadError
from lightppo.models import loading
from lightppo.models.actor import Actor
from lightppo.models.batches import cache_argument
from lightppo.models.critic import Critic
from lightppo.models.loading import check_trainable, load_causal_lm, load_config
from lightppo.ranks import Alone
from lightppo.rollout.decoding import CachedForward

IDS = torch.tensor([[6, 7, 8, 9, 10, 11]])


@pytest.fixture(scope="module", params=list(KINDS))
def whole(request, tmp_path_factory) -> str:
    """A checkpoint with its tower."""
    return save_with_tower(request.param, tmp_path_factory.mktemp("whole") / request.param)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> str:
    return save_with_tower("gemma3", tmp_path_factory.mktemp("gemma") / "gemma3")


def moved(model: Actor | Critic) -> Actor | Critic:
    """All weights are others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    return model


def exported(model: Actor | Critic, folder: Path) -> Path:
    save_model(Alone(), model, None, folder)
    return folder


def change(folder: str | Path, target: Path, **config: object) -> Path:
    """A copy whose config.json has other entries."""
    shutil.copytree(folder, target)
    told = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(told | config))
    return target


def in_bf16(folder: str, target: Path) -> Path:
    """A copy whose weights and config are in bfloat16."""
    copied = change(folder, target, dtype="bfloat16")
    weights = load_file(copied / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in weights.items()}, copied / "model.safetensors")
    return copied


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    """(S, V) of the same text."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[0].float().log_softmax(-1)


def test_the_export_is_the_checkpoint_with_new_weights(whole, tmp_path):
    actor = moved(Actor(whole))
    assert actor.untrainable is None
    assert not [name for name, _ in actor.named_parameters() if "vision" in name or "aud" in name]
    out = exported(actor, tmp_path / "out")
    before, after = sums_of(whole), sums_of(out)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] == after[name]} == set(sums_of_tower(whole))
    for name in ("config.json", "preprocessor_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (Path(whole) / name).read_bytes(), name
    auto_class = getattr(transformers, actor.hf_model.whole.auto_class)
    assert auto_class.__name__ in (out / "README.md").read_text()
    loaded, info = auto_class.from_pretrained(out, output_loading_info=True)
    assert [type(loaded).__name__] == json.loads((out / "config.json").read_text())["architectures"]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(log_probs(loaded), log_probs(actor.hf_model), atol=1e-5, rtol=0)
    again = Actor(str(out))
    assert again.hf_model.whole.digest == actor.hf_model.whole.digest


def test_types_that_differ_lose_no_digit(gemma, tmp_path):
    """A tower in bfloat16 beside weights that trained in float32, and the other way round."""
    half = in_bf16(gemma, tmp_path / "half")
    wide = exported(moved(Actor(str(half), dtype=torch.float32)), tmp_path / "wide")
    narrow = exported(moved(Actor(gemma, bf16=True)), tmp_path / "narrow")
    for before, after in ((half, wide), (gemma, narrow)):
        assert sums_of_tower(before) == sums_of_tower(after)
        assert json.loads((after / "config.json").read_text())["dtype"] == "float32"
        model = transformers.AutoModelForImageTextToText.from_pretrained(after)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        ours = Actor(str(after), dtype=torch.float32).hf_model
        torch.testing.assert_close(log_probs(model), log_probs(ours), atol=1e-5, rtol=0)
    types = {tensor.dtype for tensor in load_file(narrow / "model.safetensors").values()}
    assert types == {torch.float32, torch.bfloat16}


def test_files_of_the_checkpoint_stay_as_they_are_cut(gemma, tmp_path):
    cut = tmp_path / "cut"
    model = transformers.AutoModelForImageTextToText.from_pretrained(gemma)
    model.save_pretrained(cut, max_shard_size="20KB")
    out = exported(moved(Actor(str(cut))), tmp_path / "out")
    names = sorted(path.name for path in cut.glob("model*"))
    assert len(names) > 3
    assert sorted(path.name for path in out.glob("model*")) == names
    index = "model.safetensors.index.json"
    maps = [json.loads((folder / index).read_text())["weight_map"] for folder in (cut, out)]
    assert maps[0] == maps[1]
    assert sums_of_tower(cut) == sums_of_tower(out)
    transformers.AutoModelForImageTextToText.from_pretrained(out)


def test_what_override_config_changes_is_in_the_export(gemma, tmp_path):
    options = {"text_config": {"sliding_window": 4, "attention_dropout": 0.5}}
    out = exported(Actor(gemma, override_config=options), tmp_path / "out")
    told, before = (json.loads((Path(f) / "config.json").read_text()) for f in (out, gemma))
    assert told["text_config"].pop("sliding_window") == 4
    assert told["text_config"].pop("attention_dropout") == 0.5
    assert before["text_config"].pop("sliding_window") == 8
    del before["text_config"]["attention_dropout"]
    assert told == before


def test_other_frequencies_are_in_the_export(tmp_path):
    mistral = save_with_tower("mistral3", tmp_path / "mistral3")
    actor = Actor(mistral, override_config={"text_config": {"rope_theta": 77.0}})
    out = exported(actor, tmp_path / "out")
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(out)
    ours = log_probs(actor.hf_model)
    torch.testing.assert_close(log_probs(loaded), ours, atol=1e-5, rtol=0)
    assert (log_probs(Actor(mistral).hf_model) - ours).abs().max() > 1e-3


def test_dropout_that_training_switches_off_stays_in_the_config(gemma, tmp_path):
    noisy = change(gemma, tmp_path / "noisy")
    told = json.loads((noisy / "config.json").read_text())
    told["text_config"]["attention_dropout"] = 0.25
    (noisy / "config.json").write_text(json.dumps(told))
    out = exported(Actor(str(noisy)), tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == told


def test_a_classifier_is_whole_where_transformers_has_its_class(gemma, tmp_path):
    critic = moved(Critic(gemma))
    out = exported(critic, tmp_path / "out")
    assert sums_of_tower(gemma) == {k: v for k, v in sums_of_tower(out).items() if "score" not in k}
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert type(loaded).__name__ == "Gemma3ForSequenceClassification"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(loaded.score.weight, critic.hf_model.score.weight)
    again = Critic(str(out), init_value_head=False)
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS), critic.eval()(IDS))
    assert sums_of(exported(again, tmp_path / "again")) == sums_of(out)


def test_another_classifier_is_of_the_language_model_alone(tmp_path):
    mistral = save_with_tower("mistral3", tmp_path / "mistral3")
    out = exported(moved(Critic(mistral)), tmp_path / "out")
    assert not [name for name in sums_of(out) if "vision" in name or "language_model" in name]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert type(loaded).__name__ == "MistralForSequenceClassification"


def test_other_towers_on_the_disk_end_an_export(gemma, tmp_path):
    copied = change(gemma, tmp_path / "copy")
    actor = Actor(str(copied))
    file = copied / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last tensor is of the tower
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match="its towers have changed since the start"):
        exported(actor, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_gone_is_still_in_the_export(gemma, tmp_path):
    copied = change(gemma, tmp_path / "copy")
    actor = Actor(str(copied))
    shutil.rmtree(copied)
    assert sums_of(exported(actor, tmp_path / "out")) == sums_of(gemma)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_map": {"AutoConfig": "a.b"}}, "brings code of its own"),
        ({"quantization_config": {"quant_method": "fp8"}}, "it is quantised"),
    ],
)
def test_what_cannot_be_written_as_it_came_is_refused(gemma, tmp_path, config, message):
    folder = str(change(gemma, tmp_path / "copy", **config))
    with pytest.raises(ModelLoadError, match=message):
        check_trainable(folder)


def test_a_stranger_among_the_parts_is_refused_by_name_and_still_reads(gemma, tmp_path):
    folder = change(gemma, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    weights |= {"fusion.layers.0.weight": torch.ones(2), "fusion.layers.1.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"known kind: fusion.layers \(2 tensors\)") as error:
        check_trainable(str(folder))
    assert error.value.exit_code == 2
    assert Actor(str(folder)).untrainable == str(error.value)


def test_a_weight_that_is_not_the_checkpoints_is_refused(gemma, monkeypatch):
    """As if transformers had loaded one under the name of another."""
    from lightppo.models.multimodal import whole_checkpoint as whole

    monkeypatch.setattr(whole.Whole, "name_of", lambda self, name: _twisted(self, name))
    with pytest.raises(
        ModelLoadError, match=r"cannot be told from its towers: the model has other"
    ):
        load_causal_lm(gemma)


def _twisted(whole, name: str) -> str:
    pair = ("up_proj", "gate_proj")
    for here, there in (pair, pair[::-1]):
        if here in name:
            name = name.replace(here, there)
            break
    return whole.parts.body + name.removeprefix("model.")


def test_a_weight_that_the_model_lacks_is_refused(gemma, tmp_path):
    folder = change(gemma, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    weights["language_model.model.layers.7.more.weight"] = torch.ones(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"does not load these weights: language_model\.model"):
        load_causal_lm(str(folder))


def test_configs_are_of_the_language_model(whole):
    assert load_config(whole).model_type == load_causal_lm(whole).config.model_type
    assert check_trainable(whole)


def test_decoding_with_a_cache_is_decoding_without(whole):
    """Whatever this transformers calls the cache; of some kinds the class of the language model is lightppo's."""
    model = load_causal_lm(whole)
    assert cache_argument(model) == cache_argument(model.base_model)
    forward, ids = CachedForward(model), IDS
    cache, tokens = DynamicCache(config=model.config), IDS
    for _ in range(3):
        seen = ids.shape[1]
        positions = torch.arange(seen - tokens.shape[1], seen)[None]
        logits = forward(tokens, torch.ones_like(ids), positions, cache)
        torch.testing.assert_close(logits, model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
        tokens = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, tokens], 1)


def test_a_model_that_was_built_with_its_towers_is_refused(gemma, monkeypatch):
    monkeypatch.setattr(loading, "language_model_or_reason", lambda *_: (None, None))
    built = load_causal_lm(gemma)
    del built.untrainable
    assert "training would drop or change" in Actor(built).untrainable


def test_layers_for_speculative_decoding_stay_as_they_came(tmp_path):
    folder = Path(save_with_tower("qwen3_5", tmp_path / "qwen3_5"))
    weights = load_file(folder / "model.safetensors")
    more = {"mtp.fc.weight": torch.randn(3, 4), "mtp.layers.0.norm.weight": torch.randn(4)}
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    out = exported(moved(Actor(str(folder))), tmp_path / "out")
    assert sums_of(out).keys() == sums_of(folder).keys()
    assert sums_of_tower(out) == sums_of_tower(folder)
    assert more.keys() < sums_of_tower(out).keys()


def test_experts_are_written_as_the_checkpoint_has_them(tmp_path):
    """One by one, or those of a layer together."""
    one = Path(save_with_tower("qwen3_5_moe", tmp_path / "one"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(one)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if load_file(one / "model.safetensors").keys() == weights.keys():
        pytest.skip("this transformers has one way to write them")
    other = change(one, tmp_path / "other")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    outs = [
        exported(moved(Actor(str(start))), tmp_path / f"out {start.name}") for start in (one, other)
    ]
    for before, after in zip((one, other), outs):
        assert sums_of(before).keys() == sums_of(after).keys()
        assert sums_of_tower(before) == sums_of_tower(after)
    first, second = (transformers.AutoModelForImageTextToText.from_pretrained(o) for o in outs)
    assert torch.equal(log_probs(first), log_probs(second))
    assert not torch.equal(log_probs(first), log_probs(model))
