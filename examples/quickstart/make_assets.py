"""Make what the quickstart starts from, with no download: a small Llama with random weights, its tokenizer, the data.

    python examples/quickstart/make_assets.py --output_dir runs/quickstart/assets --seed 1

``model/`` loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``. ``sft.jsonl`` has the imperfect demonstrations,
``prompts.jsonl`` the prompts for PPO, ``eval.jsonl`` the held-out prompts. See ``task.py`` for the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import task
import tyro

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, BOS before every text. EOS is put after an answer by the data, not by the tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *task.CHARACTERS])}
    # Without unk_token a character that is not in the vocabulary would vanish; so it becomes PAD.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, head_dim: int = 16) -> LlamaForCausalLM:
    """Llama with 84 thousand random parameters, or 117 thousand with heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=64,
        initializer_range=0.06,  # the usual 0.02 is for wide models; at width 64 it learns several times slower
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(output_dir: Path = Path("runs/quickstart/assets"), seed: int = 1, head_dim: int = 16) -> None:
    """Make model, tokenizer and data.

    Args:
        output_dir: folder to write to; made if missing.
        seed: of the initial weights and of the errors in the demonstrations.
        head_dim: width of each of the model's four attention heads.
    """
    from transformers.utils.logging import disable_progress_bar

    import lightppo  # noqa: F401  it quiets what others print when they are imported

    train, held_out = task.split_pairs()
    output_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(output_dir / "sft.jsonl", task.demonstrations(seed))
    write_jsonl(output_dir / "prompts.jsonl", task.labelled_prompts(train))
    write_jsonl(output_dir / "eval.jsonl", task.labelled_prompts(held_out))

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, head_dim)
    disable_progress_bar()
    tokenizer.save_pretrained(output_dir / "model")
    model.save_pretrained(output_dir / "model")
    print(f"{output_dir}: a Llama of {model.num_parameters():,} parameters, {len(train):,} prompts to train on, "
          f"{len(held_out):,} held out")  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
