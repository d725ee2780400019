"""``lightppo chat``: talk to a model in a terminal, or through a pipe, where each line is a turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightppo.cli.convert import BaseOptions, add_base, add_override, open_model
from lightppo.config import RolloutConfig, StrategyConfig
from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.config.rules import template_kwargs
from lightppo.data.folders import check_model
from lightppo.errors import ConfigError, UserError
from lightppo.redaction import plain

SAMPLING = ("temperature", "top_p", "generate_max_len")


def main(arguments: Sequence[str], program: str = "lightppo chat") -> None:
    """Answer until ``/quit`` or the end of the input; exit code 2 if the model cannot be loaded."""
    parser = CommandParser(
        program, description="Talk to a model: /reset starts a new chat, /quit ends, Ctrl-C stops an answer. Without a "
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
    for option_name in SAMPLING:
        option = RolloutConfig.options()[option_name]
        parser.add_argument(
            f"--{option_name}",
            default=option.default,
            help=f"{option.help} Default: {option.default}",
        )
    parser.add_argument("--seed", default=42, help="sampling seed; default: 42")
    add_base(parser, "base model of an adapter or a checkpoint; default: the one that it names")
    add_override(parser)
    request = parser.parse_args(arguments)
    with exit_on_mistakes(program, UserError):
        options = StrategyConfig.options() | RolloutConfig.options()
        for option_name in ("seed", *SAMPLING):
            try:
                setattr(
                    request,
                    option_name,
                    options[option_name].conform(getattr(request, option_name)),
                )
            except ValueError as error:
                raise ConfigError(str(error)) from error
        template_kwargs(request.chat_template_kwargs, "--chat_template_kwargs")
        if request.base is not None:
            check_model(request.base, "--base")
        if not Path(request.model).expanduser().is_dir():
            check_model(request.model, "MODEL")
        talk(request)


def talk(request: argparse.Namespace) -> None:
    """Load the model and answer turn after turn."""
    import torch

    model, tokenizer, options = open_model(request.model, BaseOptions.of(request))
    torch.manual_seed(request.seed)
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    template = template_of(request, options, tokenizer)
    turns: list[dict[str, str]] = []
    in_terminal = sys.stdin.isatty()
    typed_lines = filter(None, (typed_line.rstrip("\n") for typed_line in sys.stdin))
    if in_terminal:
        typed_lines = terminal_lines()
        prompt_form = (
            template.input_template or "as they are; --apply_chat_template makes them chats"
        )
        if template.apply_chat_template:
            prompt_form = "turns of a chat"
        parameters = f"{model.num_parameters():,} parameters"
        print(f"{request.model}: {parameters}; prompts: {prompt_form}; /reset, /quit")
    for typed_line in typed_lines:
        if typed_line == "/quit":
            return
        if typed_line == "/reset":
            turns = []
            continue
        chat = [*turns, {"role": "user", "content": typed_line}]
        prompt = chat if template.apply_chat_template else typed_line
        try:
            answer = respond(model, tokenizer, template, prompt, request)
            turns = [*chat, {"role": "assistant", "content": answer}]
        except ConfigError as error:
            if not in_terminal:
                raise
            print(plain(error))
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            print(" … stopped; the turn is forgotten")


def terminal_lines() -> Iterator[str]:
    """Yield lines of the terminal, with history and editing, until its end (Ctrl-D)."""
    import readline  # noqa: F401 - input() uses it

    while True:
        try:
            if typed_line := input("> ").strip():
                yield typed_line
        except (EOFError, KeyboardInterrupt):
            return print()


def template_of(request: argparse.Namespace, options: Mapping[str, Any], tokenizer: Any) -> Any:
    """Return how prompts become text: as asked for, as in the run, or by a chat template that is there."""
    from lightppo.data.chat_templates import PromptTemplate

    is_chat = request.apply_chat_template
    input_template = request.input_template
    system_prompt = request.system_prompt or options.get("system_prompt")
    variables = request.chat_template_kwargs or options.get("chat_template_kwargs")
    if not is_chat and input_template is None:
        input_template = options.get("input_template")
        is_chat = options.get("apply_chat_template", bool(tokenizer.chat_template and not options))
        # the rows of such a run were chats
        is_chat = is_chat or (
            (system_prompt is not None or bool(variables)) and input_template is None
        )
    return PromptTemplate(tokenizer, is_chat, input_template, system_prompt, variables)


def respond(
    model: Any, tokenizer: Any, template: Any, prompt: Any, request: argparse.Namespace
) -> str:
    """Return the answer, printed while it is made."""
    import torch
    from transformers import GenerationConfig, TextStreamer

    from lightppo.rollout.sampling import end_of_text_ids

    (prompt_ids,) = template.encode_rendered([template.render(prompt)])
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    if len(prompt_ids) >= positions:
        raise ConfigError(
            f"{len(prompt_ids)} tokens so far, and the model has {positions} positions: /reset"
        )
    sampling = {
        "do_sample": request.temperature > 0,
        "max_new_tokens": min(request.generate_max_len, positions - len(prompt_ids)),
    }
    if request.temperature > 0:
        sampling |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
    end_ids = end_of_text_ids(tokenizer, model.generation_config)

    class Answer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(plain(text) if sys.stdout.isatty() else text, stream_end)

    # A new one: what training sampled by has none of the model's own settings.
    model.generation_config = GenerationConfig(
        eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id, **sampling
    )
    prompt_row = torch.tensor([prompt_ids], device=model.device)
    streamer = Answer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(
        prompt_row, attention_mask=torch.ones_like(prompt_row), streamer=streamer
    )
    return tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True)
