"""``lightppo tiny-model``: a small Llama with random weights and a tokenizer of characters, to try things with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"


def main(arguments: Sequence[str], program: str = "lightppo tiny-model") -> None:
    """Make a model; exit code 2 if the folder is there already, or without characters."""
    parser = CommandParser(
        program,
        description="Create a small Llama with random weights and a tokenizer, without downloads. Each character is "
        "one token. The model trains on a CPU in seconds; use it to try out data, rewards and settings.",
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="new folder")
    parser.add_argument(
        "--characters", default="", help="characters that the model knows, such as '0123456789+='"
    )
    parser.add_argument(
        "--characters_of",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="take the characters of these text files",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights; default: 1")
    parser.add_argument("--hidden_size", type=int, default=64, help="default: 64")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; default: 4")
    parser.add_argument("--max_len", type=int, default=256, help="maximum tokens of a prompt and its answer; "
                        "default: 256")  # fmt: skip
    options = parser.parse_args(arguments)
    with exit_on_mistakes(program):
        _check(options)
        characters = options.characters + "".join(_read(path) for path in options.characters_of)
        if not characters:
            raise ConfigError(
                "give --characters or --characters_of: the tokenizer has no character yet"
            )
        tokenizer = character_tokenizer(characters)
        model = small_llama(
            tokenizer,
            seed=options.seed,
            hidden_size=options.hidden_size,
            layers=options.layers,
            heads=options.heads,
            positions=options.max_len,
        )
        save(model, tokenizer, options.output)
    print(
        f"{options.output}: a Llama of {model.num_parameters():,} random parameters, {len(tokenizer)} tokens.\n"
        "It knows nothing yet. PPO reinforces answers that a model gives now and then: if random answers never score, "
        "train it on demonstrations first (lightppo sft)."
    )


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError, which names the flag."""
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ConfigError(f"{options.output} is there already: name a new folder")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed {options.seed}: must be a whole number ≥0 <2^63")
    for option_name in ("hidden_size", "layers", "heads", "max_len"):
        option_value = getattr(options, option_name)
        if option_value < 1:
            raise ConfigError(f"--{option_name} {option_value} is not a positive number")
    if options.hidden_size % (2 * options.heads):
        raise ConfigError(
            f"--hidden_size {options.hidden_size} with --heads {options.heads}: rotary positions need heads of an even "
            f"width, so take a multiple of {2 * options.heads}"
        )


def _read(path: Path) -> str:
    """Return all characters of a text file but its line breaks, which end rows and are no part of them."""
    try:
        return "".join(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--characters_of {path} cannot be read as text: {error}") from error


def character_tokenizer(characters: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return one token per character, BOS before every text; a character that is not among them becomes ``<unk>``.

    EOS is put after an answer by the data, not by the tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, BOS, EOS, *dict.fromkeys(characters), UNKNOWN]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )


def small_llama(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    head_dim: int | None = None,
    positions: int = 64,
) -> LlamaForCausalLM:
    """Return a Llama with random weights for this tokenizer: by default about 84 thousand parameters with 16 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim or hidden_size // heads,
        max_position_embeddings=positions,
        # The usual 0.02 is for wide models. With it, a model of width 64 learns several times slower.
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write both where ``AutoModelForCausalLM`` and ``AutoTokenizer`` read them."""
    from transformers.utils.logging import disable_progress_bar

    from lightppo.distributed.device import name_accelerator

    disable_progress_bar()
    name_accelerator()  # transformers loads DeepSpeed when it saves
    try:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
