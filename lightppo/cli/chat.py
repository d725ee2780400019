"""``lightppo chat``: talk to a model in a terminal, or through a pipe, where each line is a turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightppo.cli.convert import Base, add_base, add_override, open_model
from lightppo.config import RolloutConfig, StrategyConfig
from lightppo.config.arguments import CommandParser
from lightppo.config.cli import exit_on_mistakes
from lightppo.config.rules import template_kwargs
from lightppo.data.folders import check_model
from lightppo.errors import ConfigError, UserError
from lightppo.redaction import plain

SAMPLING = ("temperature", "top_p", "generate_max_len")


def main(argv: Sequence[str], prog: str = "lightppo chat") -> None:
    """Answer until ``/quit`` or the end of the input; exit code 2 if the model cannot be loaded."""
    parser = CommandParser(
        prog, description="Talk to a model: /reset starts a new chat, /quit ends, Ctrl-C stops an answer. Without a "
        "terminal, each input line is a turn and the answers are the output."
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a model, folder of a LoRA adapter, "
                        "--save_path or --ckpt_path of a run")  # fmt: skip
    parser.add_argument("--system_prompt", help="system message; default: the run's")
    parser.add_argument("--apply_chat_template", action="store_true", help="use the tokenizer's chat template; default "
                        "(also of --input_template): as in the run; without a run, if it has one")  # fmt: skip
    parser.add_argument("--input_template", help="text around each prompt; {} stands for the prompt. Earlier turns are "
                        "not in it")  # fmt: skip
    parser.add_argument("--chat_template_kwargs", help="variables of the chat template as a JSON object, such as "
                        "'{\"enable_thinking\": false}'; default: the run's")  # fmt: skip
    for name in SAMPLING:
        option = RolloutConfig.options()[name]
        parser.add_argument(
            f"--{name}", default=option.default, help=f"{option.help} Default: {option.default}"
        )
    parser.add_argument("--seed", default=42, help="sampling seed; default: 42")
    add_base(parser, "base model of an adapter or a checkpoint; default: the one that it names")
    add_override(parser)
    args = parser.parse_args(argv)
    with exit_on_mistakes(prog, UserError):
        options = StrategyConfig.options() | RolloutConfig.options()
        for name in ("seed", *SAMPLING):
            try:
                setattr(args, name, options[name].conform(getattr(args, name)))
            except ValueError as error:
                raise ConfigError(str(error)) from error
        template_kwargs(args.chat_template_kwargs, "--chat_template_kwargs")
        if args.base is not None:
            check_model(args.base, "--base")
        if not Path(args.model).expanduser().is_dir():
            check_model(args.model, "MODEL")
        talk(args)


def talk(args: argparse.Namespace) -> None:
    """Load the model and answer turn after turn."""
    import torch

    model, tokenizer, options = open_model(args.model, Base.of(args))
    torch.manual_seed(args.seed)
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    template = template_of(args, options, tokenizer)
    past = []
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        how = template.input_template or "as they are; --apply_chat_template makes them chats"
        how = "turns of a chat" if template.apply_chat_template else how
        print(f"{args.model}: {model.num_parameters():,} parameters; prompts: {how}; /reset, /quit")
    for line in typed() if in_terminal else filter(None, (line.rstrip("\n") for line in sys.stdin)):
        if line in ("/quit", "/reset"):
            if line == "/quit":
                return
            past = []
            continue
        chat = [*past, {"role": "user", "content": line}]
        try:
            answer = respond(
                model, tokenizer, template, chat if template.apply_chat_template else line, args
            )
            past = [*chat, {"role": "assistant", "content": answer}]
        except (ConfigError, KeyboardInterrupt) as error:
            if not in_terminal:
                raise
            print(
                plain(error)
                if isinstance(error, ConfigError)
                else " … stopped; the turn is forgotten"
            )


def typed() -> Iterator[str]:
    """Lines of the terminal, with history and editing, until its end (Ctrl-D)."""
    import readline  # noqa: F401 - input() uses it

    while True:
        try:
            if line := input("> ").strip():
                yield line
        except (EOFError, KeyboardInterrupt):
            return print()


def template_of(args: argparse.Namespace, options: Mapping[str, Any], tokenizer: Any) -> Any:
    """How prompts become text: as asked for, as in the run, or by a chat template that is there."""
    from lightppo.data.chat_templates import PromptTemplate

    chat = args.apply_chat_template
    text = args.input_template
    system = args.system_prompt or options.get("system_prompt")
    kwargs = args.chat_template_kwargs or options.get("chat_template_kwargs")
    if not chat and text is None:
        text = options.get("input_template")
        chat = options.get("apply_chat_template", bool(tokenizer.chat_template and not options))
        # the rows of such a run were chats
        chat = chat or ((system is not None or bool(kwargs)) and text is None)
    return PromptTemplate(tokenizer, chat, text, system, kwargs)


def respond(
    model: Any, tokenizer: Any, template: Any, prompt: Any, args: argparse.Namespace
) -> str:
    """The answer, printed while it is made."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    from lightppo.rollout.sampling import end_of_text_ids

    (ids,) = template.encode_rendered([template.render(prompt)])
    room = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize) - len(
        ids
    )
    if room < 1:
        raise ConfigError(
            f"{len(ids)} tokens so far, and the model has {len(ids) + room} positions: /reset"
        )
    sampling = {
        "do_sample": args.temperature > 0,
        "max_new_tokens": min(args.generate_max_len, room),
    }
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    ends = end_of_text_ids(tokenizer, model.generation_config)
    # A new one: what training sampled by has none of the model's own settings.
    config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, **sampling)
    row = torch.tensor([ids], device=model.device)

    class Answer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(plain(text) if sys.stdout.isatty() else text, stream_end)

    shown = Answer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generation_config = config
    output = model.generate(row, attention_mask=torch.ones_like(row), streamer=shown)
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
