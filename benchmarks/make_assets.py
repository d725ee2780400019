"""Make what both sides start from, with no download: a Llama with random weights, its tokenizer, the prompts.

    python benchmarks/make_assets.py --output_dir runs/bench/assets [--scale gpu]

The same files every time. End-of-text has the same probability at every token, so that the responses' lengths spread
from one token to the limit.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workloads import BOS, EOS, PAD, SCALES, SEED, SPECIAL_TOKENS, WORKLOADS, Scale, prompt_texts

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# One channel of the residual stream is the same for every token, and end-of-text has its logit from there. Layers read
# it and do not write it; it is as large as all others together, so that the last norm does not move it much.
_CONSTANT_CHANNEL = 0
_HALF_CHANNEL = 1  # of give_long_answers
_NEVER = -40.0  # logit of the other special tokens


def build_tokenizer(scale: Scale) -> PreTrainedTokenizerFast:
    """Words w3, w4, …, one token each; nothing is put before or behind a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(len(SPECIAL_TOKENS), scale.vocabulary))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def llama_config(scale: Scale) -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        max_position_embeddings=scale.prompt_tokens[1] + scale.new_tokens,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )


def build_model(scale: Scale, seed: int = SEED) -> LlamaForCausalLM:
    """Random weights; the head is set so that end-of-text has ``scale.end_probability``."""
    import torch
    from transformers import LlamaForCausalLM

    config = llama_config(scale)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding[:, _CONSTANT_CHANNEL] = config.initializer_range * math.sqrt(scale.hidden)
        head[:, _CONSTANT_CHANNEL] = 0
        head[: len(SPECIAL_TOKENS)] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[_CONSTANT_CHANNEL] = 0
            layer.mlp.down_proj.weight[_CONSTANT_CHANNEL] = 0
        # as long as prompts: the other channels change with what a token attends to
        length = max(64, scale.prompt_tokens[1])
        ids = torch.arange(8 * length).view(8, length) % (scale.vocabulary - len(SPECIAL_TOKENS))
        hidden = model.model(ids + len(SPECIAL_TOKENS)).last_hidden_state[:, length // 8 :]
        level = hidden[..., _CONSTANT_CHANNEL].mean().item()
        others = (hidden @ head[len(SPECIAL_TOKENS) :].T).exp().sum(-1).mean().item()
        odds = scale.end_probability / (1 - scale.end_probability)
        head[: len(SPECIAL_TOKENS), _CONSTANT_CHANNEL] = _NEVER / level
        head[config.eos_token_id, _CONSTANT_CHANNEL] = math.log(others * odds) / level
    model.generation_config.do_sample = True
    return model


def give_long_answers(model: LlamaForCausalLM, scale: Scale) -> None:
    """Have answers never end behind words of the vocabulary's second half, and words of a half follow each other.

    A second channel that layers only read says the half of a word. So a prompt's last word decides over its answers:
    behind a word of the first half each token ends them with ``scale.end_probability``, as before.
    """
    import torch

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    eos = model.config.eos_token_id
    middle = scale.vocabulary // 2
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[_HALF_CHANNEL] = 0
            layer.mlp.down_proj.weight[_HALF_CHANNEL] = 0
        level = embedding[0, _CONSTANT_CHANNEL].item()
        embedding[:middle, _HALF_CHANNEL] = level
        embedding[middle:, _HALF_CHANNEL] = -level
        ids = torch.arange(8 * 64).view(8, 64) % (middle - len(SPECIAL_TOKENS))
        hidden = model.model(ids + len(SPECIAL_TOKENS)).last_hidden_state[:, 8:]
        level = hidden[..., _HALF_CHANNEL].mean().item()
        head[:, _HALF_CHANNEL] = 0
        words = head[len(SPECIAL_TOKENS) : middle]
        others = (hidden @ words.T).exp().sum(-1).mean().item()
        head[len(SPECIAL_TOKENS) : middle, _HALF_CHANNEL] = -_NEVER / level / 2
        head[middle:, _HALF_CHANNEL] = _NEVER / level / 2
        odds = scale.end_probability / (1 - scale.end_probability)
        # behind the first half as likely as the odds say, behind the second half never
        logit = math.log(others * odds) - _NEVER / 2
        head[eos, _CONSTANT_CHANNEL] = (logit + _NEVER) / 2 / level
        head[eos, _HALF_CHANNEL] = (logit - _NEVER) / 2 / level


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/bench/assets"))
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument(
        "--changes", type=json.loads, default={}, help="of the scale: '{\"vocabulary\": 8192}'"
    )
    parser.add_argument(
        "--prompts", type=int, help="prompts of each workload; default: as many as it has"
    )
    options = parser.parse_args()
    scale = replace(SCALES[options.scale], **options.changes)
    folder = options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    for workload in WORKLOADS.values():
        workload = replace(workload, prompts=options.prompts or workload.prompts)
        rows = [{"input": text, "label": ""} for text in prompt_texts(workload, scale)]
        (folder / f"{workload.name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    model = build_model(scale)
    if scale.bf16:
        model = model.bfloat16()
    build_tokenizer(scale).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    print(
        f"{folder}: a Llama of {model.num_parameters():,} parameters, prompts of {', '.join(WORKLOADS)}"
    )


if __name__ == "__main__":
    main()
