"""``lightppo convert MODEL.gguf``: files that gguf's own writer makes, and what other commands say of one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_config

from lightppo.__main__ import main

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for message in messages %}<start>{{ message['content'] }}<end>{% endfor %}"
TOKENS = ["<unk>", "<start>", "<end>", *"abcdefgh", "Ġ", "ab", "Ġab", "1", "ĠĠ"]
MERGES = ["a b", "Ġ ab", "Ġ Ġ"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k in llama.cpp's order: pairs of a rotation beside each other."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def llama(tied: bool = True) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        tiny_config(
            vocab_size=len(TOKENS), tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2
        )
    ).eval()


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    skip: str = "",
    add: Callable[[Any], object] = lambda writer: None,
) -> Path:
    """Write a Llama as llama.cpp's converter does, its output projections in 8 bits."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    add(writer)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads
            weight = rotated(weight, config.num_key_value_heads if "k_proj" in name else heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        kind = gguf.GGMLQuantizationType.F32
        data = weight.numpy()
        if "attn_output" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        if not (skip and skip in name):
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path: Path, out: Path, *more: str) -> None:
    main(["convert", str(path), str(out), *more])


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_computes_as_the_model_that_was_written(tied, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = llama(tied)
    out = tmp_path / "out"
    convert(write_gguf(tmp_path / "m.gguf", model), out)
    assert capsys.readouterr().out.splitlines()[0] == f"reading {tmp_path / 'm.gguf'}"
    converted = AutoModelForCausalLM.from_pretrained(out)
    assert converted.dtype == torch.float32
    assert converted.config.tie_word_embeddings is tied
    assert not hasattr(converted.config, "quantization_config")
    found, expected = converted.state_dict(), model.state_dict()
    for name, weight in expected.items():
        error = (found[name] - weight).abs().max()
        assert error < 2e-3 if "o_proj" in name else error == 0, name
    ids = torch.randint(3, len(TOKENS), (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=2e-2)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.tokenize("cab ab") == ["c", "ab", "Ġab"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<start>",
        "<end>",
        "<end>",
    )
    message = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<start>ab<end>"
    assert tokenizer("ab")["input_ids"] == [TOKENS.index("ab")]
    settings = GenerationConfig.from_pretrained(out)
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 2)


def test_what_the_reader_leaves_out_is_added_or_told(tmp_path, capsys):
    from transformers import AutoTokenizer

    def add(writer: Any) -> None:
        writer.add_add_bos_token(True)
        writer.add_tokenizer_pre("other")
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())

    convert(write_gguf(tmp_path / "m.gguf", llama(), add=add), tmp_path / "out")
    notes = capsys.readouterr().out
    assert "note: the file scales its rotary positions (rope_freqs.weight)" in notes
    assert "note: the file splits texts as 'other' does" in notes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab")["input_ids"] == [1, TOKENS.index("ab")]


@pytest.mark.parametrize(("split", "tokens"), [("gpt-2", ["Ġ", "Ġ", "1"]), ("smollm", ["ĠĠ", "1"])])
def test_digits_stand_alone_where_the_file_says_so(split, tokens, tmp_path, capsys):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "m.gguf", llama(), add=lambda w: w.add_tokenizer_pre(split))
    convert(path, tmp_path / "out")
    assert "note:" not in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("  1") == tokens


def unreadable(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Files that cannot be converted, and what is said of each."""
    whole = write_gguf(tmp_path / "whole.gguf", llama())
    for name, content in {
        "cut": whole.read_bytes()[:-3000],
        "text": b"a text",
        "pointer": b"version https://git-lfs.github.com/spec/v1",
        "m-00001-of-00002": whole.read_bytes(),
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    return {
        "cut": (tmp_path / "cut.gguf", "could not be loaded"),
        "text": (tmp_path / "text.gguf", "is no GGUF file"),
        "pointer": (tmp_path / "pointer.gguf", "git lfs pull"),
        "part": (tmp_path / "m-00001-of-00002.gguf", "llama-gguf-split --merge"),
        "lacks": (
            write_gguf(tmp_path / "lacks.gguf", llama(), skip="blk.1.ffn_up"),
            "1 weights are missing",
        ),
        "family": (
            write_gguf(tmp_path / "clip.gguf", llama(), architecture="clip"),
            "architecture clip is not supported yet",
        ),
    }


@pytest.mark.parametrize("case", ["cut", "text", "pointer", "part", "lacks", "family"])
def test_what_cannot_be_read_is_one_line(case, tmp_path, capsys):
    path, reason = unreadable(tmp_path)[case]
    with pytest.raises(SystemExit) as stop:
        convert(path, tmp_path / "out")
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert error.startswith("lightppo convert: error:")
    assert str(path) in error
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_command_line(tmp_path, capsys, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", llama())
    with pytest.raises(SystemExit):
        convert(path, tmp_path / "out", "--step", "2", "--part", "critic")
    assert "is a GGUF file: leave --step and --part out" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SystemExit):
        convert(path, tmp_path / "out")
    needs = "reading GGUF files needs gguf and accelerate: pip install 'lightppo[gguf]'"
    assert needs in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "folder"])
@pytest.mark.parametrize(
    "words",
    [
        "ppo --reward_pretrain r --prompt_data d --pretrain",
        "ppo --pretrain m --prompt_data d --reward_pretrain",
        "sft --dataset d --pretrain",
        "eval --eval_data d --reward_pretrain r --pretrain",
    ],
)
def test_other_commands_say_to_convert_it(words, place, tmp_path, capsys):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), str(path if place == "file" else tmp_path)])
    assert stop.value.code == 2
    assert f"`lightppo convert {path} OUT` makes a folder" in capsys.readouterr().err
