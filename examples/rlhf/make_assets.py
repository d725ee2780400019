"""Make what the example starts from, with no download: a small Llama with random weights, its tokenizer, the data.

    python examples/rlhf/make_assets.py --output_dir runs/rlhf/assets --seed 1

``model/`` loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``. ``sft.jsonl`` has the demonstrations,
``prompts.jsonl`` the requests to train on, ``eval.jsonl`` the held-out ones. See ``shop.py`` for the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shop
import tyro

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word or mark, BOS before every text. EOS is put after an answer by the data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *shop.vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    no_space_before_marks = [decoders.WordPiece(prefix="##", cleanup=True), decoders.Replace(" :", ":")]
    tokenizer.decoder = decoders.Sequence(no_space_before_marks)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Llama with about 100 thousand random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.06,  # the usual 0.02 is for wide models; at width 64 it learns several times slower
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(
    output_dir: Path = Path("runs/rlhf/assets"),
    seed: int = 1,
    n_demonstrations: int = 20_000,
    n_prompts: int = 6_000,
    n_held_out: int = 512,
) -> None:
    """Make model, tokenizer and data.

    Args:
        output_dir: folder to write to; made if missing.
        seed: of the initial weights and of the data.
        n_demonstrations: rows of supervised training.
        n_prompts: requests that pairs and PPO take.
        n_held_out: requests for things that no training asks for.
    """
    from transformers.utils.logging import disable_progress_bar

    import lightppo  # noqa: F401  it quiets what others print when they are imported

    output_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(output_dir / "sft.jsonl", shop.demonstrations(n_demonstrations, seed))
    write_jsonl(output_dir / "prompts.jsonl", shop.prompts(held_out=False, count=n_prompts, seed=seed))
    write_jsonl(output_dir / "eval.jsonl", shop.prompts(held_out=True, count=n_held_out, seed=seed))
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    disable_progress_bar()
    tokenizer.save_pretrained(output_dir / "model")
    model.save_pretrained(output_dir / "model")
    print(f"{output_dir}: a Llama of {model.num_parameters():,} parameters, {n_prompts:,} prompts to train on, "
          f"{n_held_out:,} held out")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
