"""How a vLLM server for rollouts is started: its command line, its environment, and a folder for its sockets.

Run as a module it is the server: ``python -m lightppo.rollout.serving OPTIONS``, with vLLM's options.
"""

from __future__ import annotations

import fcntl
import hmac
import importlib.util
import json
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lightppo

KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM, too, reads the key that it asks of its clients."""

REFUSED = {
    "--api-key": "name the variable of the key by --api_key_env, since command lines are seen by everybody",
    "--worker-extension-cls": "the one that takes the trainer's weights is needed",
    "--weight-transfer-config": "the one that takes the trainer's weights is needed",
    "--generation-config": "what a folder says about sampling would change the trainer's",
    "--data-parallel-size": "of its engines only the first would tell which weights it has; start several servers",
    "--speculative-config": "its sampler records other log probs than the trainer's",
}
"""Options of vLLM that the user may not set, and why."""

SHARED_MEMORY = Path("/dev/shm")

_CPU_KV_CACHE_BYTES = 1 << 30
_SOCKETS = "VLLM_RPC_BASE_PATH"  # where vLLM puts its sockets; it never removes them
_PREFIX = "lightppo-vllm-"
_LONGEST_FOLDER = 107 - 1 - 36  # a socket's path has at most 107 bytes, its name is a UUID


def server_command(model: str, host: str, port: int, engine_options: Sequence[str]) -> list[str]:
    """The command that starts a server; ``engine_options`` are vLLM's, and win over what is set here.

    Raises:
        ValueError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: docs/rollouts.md says how, for this kind of machine")
    set_here = {"--model": model, "--host": host, "--port": str(port)}
    set_here |= {
        "--worker-extension-cls": "lightppo.rollout.vllm_worker.WorkerExtension",
        "--weight-transfer-config": '{"backend": "lightppo"}',
        "--middleware": "lightppo.rollout.serving.KeyGate",
        "--enable-scale-out": "",  # the route that tells which weights a response is of
        "--generation-config": "vllm",
    }
    defaults = {"--uvicorn-log-level": "warning"}
    if not _has_gpu():
        # Without a size vLLM takes what is free, or refuses to start; nothing is compiled on a CPU.
        defaults |= {"--kv-cache-memory-bytes": str(_CPU_KV_CACHE_BYTES), "--enforce-eager": ""}
        # Prompts in pieces and seeds together end a server on a CPU: see vllm.cpu_arguments.
        defaults |= {"--no-enable-chunked-prefill": ""}
    given = {text.split("=")[0].replace("_", "-") for text in engine_options if text.startswith("--")}
    options = set_here | {name: value for name, value in defaults.items() if name not in given}
    words = [word for name, value in options.items() for word in (name, value) if word]
    return [sys.executable, "-m", "lightppo.rollout.serving", *words, *engine_options]


def server_environment(key: str | None) -> dict[str, str]:
    """The environment of a server: this one's, with the routes that take weights, and the key that clients need."""
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler cannot be given another definition of log probs
        "VLLM_NO_USAGE_STATS": environment.get("VLLM_NO_USAGE_STATS", "1"),
        # The workers import lightppo, which need not be installed.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(lightppo.__file__).parents[1]), os.environ.get("PYTHONPATH")])
        ),
    }
    return environment | ({} if key is None else {KEY_VARIABLE: key})


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for the sockets of one server, in the folder for temporary files or in ``VLLM_RPC_BASE_PATH``.

    It is locked by this process and by those that are forked from it: what killed servers left is not, and is removed.

    Raises:
        ValueError: the path is too long for sockets.
    """
    root = Path(os.environ.get(_SOCKETS) or tempfile.gettempdir()).resolve()
    _remove_unlocked(root)
    # Locked before it has the name that others look for.
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = folder.rename(folder.with_name(folder.name[1:]))
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            raise ValueError(
                f"{folder} is too long for the names of sockets: set {_SOCKETS} to a folder whose path has at most "
                f"{_LONGEST_FOLDER - len(folder.name) - 1} bytes"
            )
        yield folder
    finally:
        with suppress(OSError):
            _remove(folder)
        os.close(lock)


def _remove_unlocked(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, another user's, or in use
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(folder)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Removes a folder, and what workers on a CPU that share a model have left in shared memory: it is named after the
    file by which they met."""
    for path in folder.glob("vllm_dist_*"):
        for left in SHARED_MEMORY.glob(f"{path.name}-*"):
            left.unlink(missing_ok=True)
    shutil.rmtree(folder)


class KeyGate:
    """ASGI middleware: every route but ``/health`` needs the key, and no web page may ask.

    vLLM's own check leaves out the routes for development, among them the one that calls any method of a worker.
    Browsers reach servers on loopback too, for whatever page is open; they name it in ``Origin``.
    """

    def __init__(self, app: Any) -> None:
        key = os.environ.get(KEY_VARIABLE)
        self._app = app
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            reason = "the API key is missing or wrong" if self._expected else "web pages may not ask"
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})

    def _may_pass(self, scope: Any) -> bool:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            return True
        headers = dict(scope["headers"])
        if self._expected is None:
            return b"origin" not in headers
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected)


def serve() -> None:
    """A server in this process, with the command line's options, until it is told to end."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(socket_folder())
        except (ValueError, OSError) as error:
            sys.exit(str(error))
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # that one is to stay
        # The second for a file by which workers meet; vLLM leaves that behind as it does its sockets.
        os.environ |= {_SOCKETS: str(folder), "TMPDIR": str(folder)}
        tempfile.tempdir = None
        # The command `vllm serve` asks for a distribution named vllm, which builds for CPUs are not.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
