#!/usr/bin/env bash
# transformers 5.24.0: a sequence classifier reads the last token that is not the pad token. Where one token pads and ends
# texts, as many tokenizers have it, the score is that of the token before the end, also for one text without padding.
# Rows: the pad token of the config, the token whose score comes back, of a text that ends with token 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import torch
import transformers
from transformers import AutoModelForSequenceClassification, LlamaConfig

print("torch", torch.__version__, "transformers", transformers.__version__)
END = 2
TEXT = [5, 6, 7, END]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
read = {}
for pad in (0, None, END):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=pad, eos_token_id=END)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        scores = model.score(model.model(ids, attention_mask=torch.ones_like(ids))[0])[0, :, 0]
        score = model(ids, attention_mask=torch.ones_like(ids)).logits.item()
    read[pad] = TEXT[(scores - score).abs().argmin()]
    print(f"  {pad!s:5} {read[pad]}")
assert read == {0: END, None: END, END: 7}, read
PYTHON
