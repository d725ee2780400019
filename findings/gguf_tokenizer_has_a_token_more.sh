#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0: the tokenizer of a GGUF file with a byte-level vocabulary that lacks <|endoftext|>, as Llama 3's does,
# has this token nevertheless, without a warning. Its id is one beyond the model's embedding: a text with it ends in an IndexError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

import gguf
import torch
from transformers import AutoTokenizer

print("transformers", version("transformers"), "gguf", version("gguf"))


def read(tokens):
    """Return the tokenizer of a file with these tokens, of which the first two are special."""
    writer = gguf.GGUFWriter("tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(".", gguf_file="tiny.gguf")


sizes = []
for special in (["<begin>", "<|endoftext|>"], ["<begin>", "<end>"]):
    tokens = [*special, "a", "b", "ab"]
    tokenizer = read(tokens)
    ids = tokenizer("<|endoftext|>", add_special_tokens=False)["input_ids"]
    sizes.append(len(tokenizer))
    print(f"{tokens}: {len(tokens)} tokens in the file, {len(tokenizer)} in the tokenizer, <|endoftext|> is {ids}")
assert (sizes, ids) == ([5, 6], [5]), (sizes, ids)
try:
    torch.nn.Embedding(len(tokens), 2)(torch.tensor(ids))
except IndexError as error:
    print("IndexError of the embedding:", error)
else:
    raise AssertionError("no IndexError")
PYTHON
