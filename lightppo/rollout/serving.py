"""How a vLLM server for rollouts is started: its command line and its environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lightppo
from lightppo.rollout.server_worker import KEY_VARIABLE

_WORKER = "lightppo.rollout.server_worker.WeightReceiver"
_GATE = "lightppo.rollout.server_worker.KeyGate"

REFUSED = {
    "--api-key": "name the variable of the key by --api_key_env, since command lines are seen by everybody",
    "--worker-extension-cls": "the one that takes the trainer's weights is needed",
    "--generation-config": "what a folder says about sampling would change the trainer's",
    "--data-parallel-size": "of its engines only the first would tell which weights it has; start several servers",
    "--speculative-config": "its sampler records other log probs than the trainer's",
}
"""Options of vLLM that the user may not set, and why."""

_CPU_KV_CACHE_BYTES = 1 << 30


def server_command(model: str, host: str, port: int, engine_options: Sequence[str]) -> list[str]:
    """The command that starts a server.

    Args:
        model: folder or hub id.
        host: where to listen.
        port: same.
        engine_options: of vLLM, by its names; they win over what is set here.

    Raises:
        ValueError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: docs/rollouts.md says how, for this kind of machine")
    set_here = {"--model": model, "--host": host, "--port": str(port)}
    set_here |= {"--worker-extension-cls": _WORKER, "--middleware": _GATE, "--generation-config": "vllm"}
    defaults = {"--uvicorn-log-level": "warning"}
    if not _has_gpu():
        # Without a size vLLM takes what is free, or refuses to start; nothing is compiled on a CPU.
        defaults |= {"--kv-cache-memory-bytes": str(_CPU_KV_CACHE_BYTES), "--enforce-eager": ""}
        # Prompts in pieces and seeds together end a server on a CPU: see vllm_options.cpu_arguments.
        defaults |= {"--no-enable-chunked-prefill": ""}
    given = {text.split("=")[0].replace("_", "-") for text in engine_options if text.startswith("--")}
    options = set_here | {name: value for name, value in defaults.items() if name not in given}
    words = [word for name, value in options.items() for word in (name, value) if word]
    # The command `vllm serve` asks for a distribution named vllm, which builds for CPUs are not.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *engine_options]


def server_environment(key: str | None) -> dict[str, str]:
    """The environment of a server: this one's, with the routes that take weights, and the key.

    Args:
        key: asked of every client; ``None``: of none.
    """
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot be given another definition of log probs
        "VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1"),
        # The workers import lightppo, which need not be installed.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(lightppo.__file__).parents[1]), _python_path()])),
    }
    return environment | ({} if key is None else {KEY_VARIABLE: key})


def _python_path() -> str:
    return os.environ.get("PYTHONPATH", "")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
