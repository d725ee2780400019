"""Parts of checkpoints, told apart by names as published checkpoints have them."""

from __future__ import annotations

import pytest

from lightppo.errors import ModelLoadError
from lightppo.models.multimodal.parts import listed, parts_of

LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("body", "head", "kept"),
    [
        # Gemma 3 and Llava as transformers 4 wrote them
        ("language_model.model.", "language_model.", ["vision_tower.a", "multi_modal_projector.b"]),
        # Qwen3.5, with layers that predict further tokens
        ("model.language_model.", "", ["model.visual.blocks.0.a", "mtp.layers.0.a", "mtp.norm.b"]),
        # Gemma 3n
        ("model.language_model.", None, ["model.audio_tower.a", "model.embed_vision.b"]),
        # Qwen2-VL: its tower is beside the language model's own layers
        ("model.", "", ["visual.blocks.0.a", "model.visual.b"]),
        # Idefics3
        ("model.text_model.", "", ["model.vision_model.a", "model.connector.proj.b"]),
    ],
)
def test_parts_of_published_checkpoints(body, head, kept):
    language = {f"{body}embed_tokens.weight", f"{body}{LAYER}", f"{body}norm.weight"}
    language |= set() if head is None else {f"{head}lm_head.weight"}
    parts = parts_of([*language, *kept], "--pretrain x")
    assert (parts.body, parts.head) == (body, head)
    assert parts.language == language
    assert parts.kept == tuple(sorted(kept))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.fusion.0.a", "model.fusion.1.a"], r"known kind: model\.fusion \(2 tensors\)"),
        ([f"model.language_model.{LAYER[:9]}cross_attn.a"], "are for images or sound: .*1 tensor"),
        ([f"model.language_model.{LAYER[:9]}vision_expert.a"], "are for images or sound"),
        (["other.embed_tokens.weight"], "it has 2 input embeddings"),
        (["other.lm_head.weight"], "several output heads"),
    ],
)
def test_a_refusal_names_the_parts(names, message):
    usual = ["model.language_model.embed_tokens.weight", "lm_head.weight", "model.visual.a"]
    with pytest.raises(ModelLoadError, match=f"^--pretrain x has an image .*{message}"):
        parts_of([*usual, *names], "--pretrain x")


def test_a_tower_alone_is_refused():
    with pytest.raises(ModelLoadError, match="no input embedding outside of its towers"):
        parts_of(["vision_tower.a", "audio.embed_tokens.weight"], "--pretrain x")


def test_many_parts_are_cut_short():
    assert listed(f"part{i}.{i}.weight" for i in range(9)).endswith("part5 (1 tensors), …")
