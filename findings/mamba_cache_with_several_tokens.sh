#!/usr/bin/env bash
# transformers 5.24.0: Mamba and FalconMamba give wrong logits, without a warning, when a cache goes on with more than
# one token, as a second turn of a chat or a chunk of a prompt does. Mamba 2 and Llama give the logits of the whole text.
# Rows: family, largest error of the last logits, largest logit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
FAMILIES = {
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "llama": {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
}


def last_logits(family, new_tokens):
    """Return the last logits of one pass over twelve tokens, and of two with a cache between them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)  # far from a uniform distribution
    ids = torch.randint(1, 40, (1, 12))
    name = "past_key_values" if family == "llama" else "cache"
    with torch.no_grad():
        whole = model(ids).logits[0, -1]
        begun = model(ids[:, :-new_tokens], use_cache=True)
        continued = model(ids[:, -new_tokens:], use_cache=True, **{name: begun[name]}).logits[0, -1]
    return whole, continued


wrong = set()
for new_tokens in (1, 4):
    print(f"{new_tokens} new token(s) behind a cache")
    for family in FAMILIES:
        whole, continued = last_logits(family, new_tokens)
        error = (whole - continued).abs().max().item()
        print(f"  {family:13} {error:8.4f} {whole.abs().max():8.2f}")
        if error > 1e-3:
            wrong.add((family, new_tokens))
assert wrong == {("mamba", 4), ("falcon_mamba", 4)}, wrong
PYTHON
