"""Serve rollouts with vLLM, for trainers with ``--rollout_engine vllm_server --vllm_server_url http://HOST:PORT``.

    lightppo serve-vllm --model MODEL --port 8000
    lightppo serve-vllm --model MODEL --port 8000 --tensor-parallel-size 2 --max-model-len 4096
    KEY=… lightppo serve-vllm --model MODEL --host 0.0.0.0 --api_key_env KEY

The trainer pushes its weights here. For this the server enables vLLM's development routes, which can do anything with
the model; it therefore listens on this machine only, or asks for a key. All other options are passed on to vLLM
(``--dtype float32`` if the trainer runs without ``--bf16``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightppo.config.cli import CommandParser, exit_on_mistakes
from lightppo.data.folders import check_model
from lightppo.http_client import check_bind, read_token
from lightppo.rollout.vllm.serving import REFUSED, server_command, server_environment


def main(arguments: Sequence[str] | None = None, prog: str = "lightppo serve-vllm") -> None:
    """Become the server that the arguments describe; those of this process, if ``None`` are given."""
    parser = CommandParser(
        prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub id, the same as the trainer's --pretrain"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="addresses other than loopback need --api_key_env"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--api_key_env", help="environment variable with the key that clients must send"
    )
    parser.add_argument(
        "--lora_rank",
        type=int,
        default=0,
        help="the trainer's, so that its adapter alone travels here; without, merged weights do",
    )
    request, engine_options = parser.parse_known_args(arguments)
    with exit_on_mistakes(prog, ValueError):
        for option in REFUSED:
            if any(
                engine_option.split("=")[0].replace("_", "-") == option
                for engine_option in engine_options
            ):
                raise ValueError(f"{option} cannot be given here: {REFUSED[option]}")
        key = read_token(env=request.api_key_env, option="--api_key_env")
        check_bind(request.host, key is not None, "--api_key_env", request.port)
        check_model(request.model, "--model", weights=False)
        command = server_command(
            request.model, request.host, request.port, engine_options, request.lora_rank
        )
    sys.stdout.flush()
    os.execve(command[0], command, server_environment(key))
