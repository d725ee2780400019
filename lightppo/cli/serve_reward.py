"""Serve rewards over HTTP, for trainers with ``--remote_rm_url http://HOST:PORT/get_reward``.

    lightppo serve-reward --reward_pretrain MODEL --port 5000
    lightppo serve-reward --reward_fn rewards.py:reward_func --port 5000
    TOKEN=… lightppo serve-reward --reward_fn rewards.py --host 0.0.0.0 --token_env TOKEN

Needs ``pip install lightppo[serve]``.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.errors import ConfigError
from lightppo.redaction import log_to_terminal

PROG = "lightppo serve-reward"


def parse_args(arguments: Sequence[str] | None = None, prog: str = PROG) -> argparse.Namespace:
    """Return the options, checked before anything loads; exit code 2 with a line about a problem."""
    parser = CommandParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--reward_pretrain", help="reward model: folder or hub id, with its tokenizer"
    )
    source.add_argument("--reward_fn", help="path.py[:name]: a reward function or a reward source")

    model = parser.add_argument_group("reward model")
    model.add_argument(
        "--apply_chat_template", action="store_true", help="render prompt and response as a chat"
    )
    model.add_argument(
        "--reward_max_length", type=int, help="maximum tokens of prompt and response"
    )
    model.add_argument(
        "--reward_truncation",
        choices=("error", "left"),
        default="error",
        help="if they are longer: refuse, or cut the left side; default: error",
    )
    model.add_argument("--micro_batch_size", type=int, default=8, help="samples per forward pass")
    model.add_argument(
        "--normalize_reward",
        action="store_true",
        help="normalise by mean and std from the model's config",
    )
    model.add_argument(
        "--value_head_prefix", default="score", help="name of the value head in the checkpoint"
    )
    model.add_argument(
        "--bf16", action="store_const", dest="dtype", const="bfloat16", default="float32"
    )
    model.add_argument("--fp16", action="store_const", dest="dtype", const="float16")
    model.add_argument("--trust_remote_code", action="store_true")
    model.add_argument("--device", help="default: cuda if available")

    function = parser.add_argument_group("reward function")
    function.add_argument("--reward_fn_style", default="auto", help="signature of the function")
    function.add_argument("--reward_manager", default="auto", help="how the function is called")
    function.add_argument("--reward_workers", type=int, help="concurrent calls")
    function.add_argument("--reward_timeout", type=float, help="timeout of a call in seconds")
    function.add_argument("--reward_retries", type=int, default=0, help="retries of a failed call")

    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="addresses other than loopback need --token_env"
    )
    server.add_argument("--port", type=int, default=5000, help="0: any free port")
    server.add_argument(
        "--token_env", help="environment variable with the bearer token that clients must send"
    )
    server.add_argument("--max_samples", type=int, default=4096, help="maximum samples per request")
    server.add_argument("--max_bytes", type=int, default=64 << 20, help="maximum bytes per request")
    server.add_argument(
        "--max_concurrent", type=int, default=1, help="requests scored concurrently"
    )
    options = parser.parse_args(arguments)
    if options.reward_pretrain is None and options.reward_fn is None:
        parser.error("name what scores: --reward_fn or --reward_pretrain")
    return options


def reward_model(options: argparse.Namespace) -> Any:
    """Return a reward model that reads the texts of requests in its own tokenizer's ids."""
    import torch

    from lightppo.models.critic import RewardModel
    from lightppo.models.loading import get_tokenizer
    from lightppo.rewards import RewardModelSource
    from lightppo.rewards.reward_model import Retemplated, Retokenized

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = options.reward_pretrain
    trust = options.trust_remote_code
    model = RewardModel(
        path,
        normalize_reward=options.normalize_reward,
        dtype=getattr(torch, options.dtype),
        value_head_prefix=options.value_head_prefix,
        trust_remote_code=trust,
    )
    tokenizer = get_tokenizer(path, model, trust_remote_code=trust, flag="--reward_pretrain")
    inputs = Retokenized
    if options.apply_chat_template:
        inputs = Retemplated
        if not tokenizer.chat_template:
            raise ValueError(f"--apply_chat_template: the tokenizer of {path} has no chat template")
    return RewardModelSource(
        [model.to(device)],
        device=device,
        micro_batch_size=options.micro_batch_size,
        inputs=[inputs(tokenizer, model.row_form)],
        reward_max_length=options.reward_max_length,
        reward_truncation=options.reward_truncation,
    )


def reward_function(options: argparse.Namespace) -> Any:
    """Return a reward function, or a source, from the file that the user named."""
    from lightppo.rewards import build_reward_source

    option_names = "reward_fn_style reward_manager reward_workers reward_timeout reward_retries"
    function_options = {
        option_name: getattr(options, option_name) for option_name in option_names.split()
    }
    return build_reward_source(reward_fn=options.reward_fn, function_options=function_options)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> None:
    """Serve, as the arguments say, until a signal; those of this process, if ``None`` are given."""
    options = parse_args(arguments, prog)
    log_to_terminal(logging.INFO, "%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # raised again once the server has shut down
        signal.signal(number, lambda *_: sys.exit(0))

    from lightppo.data.folders import check_model
    from lightppo.http_client import check_bind, read_token

    with exit_on_mistakes(prog, (ValueError, OSError)):
        try:
            from lightppo.rewards.reward_server import RewardApp, serve
        except ImportError as error:
            raise ConfigError(f"{error}: pip install 'lightppo[serve]'") from error
        token = read_token(env=options.token_env, option="--token_env")
        check_bind(options.host, token is not None, port=options.port)  # before a model is loaded
        if options.reward_pretrain:
            check_model(options.reward_pretrain, "--reward_pretrain", tokenizer=True)
            source = reward_model(options)
        else:
            source = reward_function(options)
        app = RewardApp(
            source,
            token=token,
            max_samples=options.max_samples,
            max_bytes=options.max_bytes,
            max_concurrent=options.max_concurrent,
        )
        serve(
            app,
            host=options.host,
            port=options.port,
            started=lambda url: print(f"serving {source.name} at {url}", flush=True),
        )
