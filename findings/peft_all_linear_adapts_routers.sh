#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0: `target_modules="all-linear"` on a mixture of experts also puts adapters on the router
# and on the experts, which are parameters and no linear layers. A router that is trained sends tokens to other experts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES))
is_linear = {name: isinstance(module, nn.Linear) for name, module in model.named_modules()}
get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
names = (name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name)
adapted = sorted({name.replace(".base_layer", "") for name in names})
for name in adapted:
    print(f"  {name:30} {'linear' if is_linear[name] else 'no nn.Linear'}")
others = {name.partition("layers.0.")[2] for name in adapted if not is_linear[name]}
assert others == {"mlp.gate", "mlp.experts"}, others
PYTHON
