#!/usr/bin/env bash
# transformers 5.24.0: Dory with `recurrent_kv_cache_mode="last_loop"` gives other logits when it decodes with its cache
# than for the whole text: earlier loops read keys that they did not write. "per_loop", the default, agrees.
# Rows: mode, largest error of the last logits, as a share of the largest logit (float32 rounds to 1e-7).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import torch
import transformers
from transformers import AutoModelForCausalLM, DoryConfig

print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_input_layers": 1,
    "n_recurrent_layers": 1,
    "n_output_layers": 1,
    "layer_types": ["full_attention"] * 3,
}
errors = {}
for mode in ("per_loop", "last_loop"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DoryConfig(**SIZES, recurrent_kv_cache_mode=mode)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)  # far from a uniform distribution
    ids = torch.randint(1, 40, (1, 12))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0, -1]
        output = model(ids[:, :6], use_cache=True)
        for place in range(6, 12):
            output = model(ids[:, place : place + 1], cache=output.cache, use_cache=True)
    errors[mode] = ((whole - output.logits[0, -1]).abs().max() / whole.abs().max()).item()
    print(f"  {mode:10} {errors[mode]:.7f}")
assert errors["per_loop"] < 1e-5 < 1e-3 < errors["last_loop"], errors
PYTHON
