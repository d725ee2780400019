#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0: llama.cpp keeps the scaled rotary frequencies of Llama 3.1 and later in the tensor rope_freqs.weight.
# transformers reads such a GGUF file without them and without a warning, as if nothing was scaled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

import gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("transformers", version("transformers"), "gguf", version("gguf"))
SCALING = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=128, rope_parameters=SCALING, initializer_range=0.3)).eval()


def write(name, scaled):
    """Write the model as llama.cpp's converter does, with or without its scaled frequencies."""
    writer = gguf.GGUFWriter(name, "llama")
    writer.add_name("tiny")
    for key, value in {"block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
                       "head_count": 4, "head_count_kv": 4, "layer_norm_rms_eps": 1e-6, "rope_freq_base": 500000.0,
                       "rope_dimension_count": 8, "vocab_size": 40}.items():
        getattr(writer, f"add_{key}")(value)
    for key, weight in model.state_dict().items():
        if "q_proj" in key or "k_proj" in key:
            weight = weight.view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)
        for ours, theirs in NAMES.items():
            key = key.replace(ours, theirs)
        writer.add_tensor(key, weight.contiguous().numpy())
    if scaled:
        plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ids = torch.arange(100)[None] % 40
errors = {}
with torch.no_grad():
    expected = model(ids).logits
    for scaled in (False, True):
        write("tiny.gguf", scaled)
        read = AutoModelForCausalLM.from_pretrained(".", gguf_file="tiny.gguf", dtype=torch.float32)
        errors[scaled] = (read(ids).logits - expected).abs().max().item()
        print(f"rope_freqs.weight {'in' if scaled else 'not in'} the file: rope {read.config.rope_parameters}, "
              f"largest error of a logit {errors[scaled]:.4f} (largest logit {expected.abs().max():.4f})")
    read.config.rope_parameters = SCALING
    mended = LlamaForCausalLM(read.config)
    mended.load_state_dict(read.state_dict())
    error = (mended(ids).logits - expected).abs().max().item()
    print(f"with the scaling of the original model: {error:.6f}")
assert errors[True] == errors[False] > 0.1 and error < 1e-4, (errors, error)
PYTHON
