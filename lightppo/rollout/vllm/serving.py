"""How a vLLM server for rollouts is started: its command line, its environment, and a folder for its sockets.

Run as a module it is the server: ``python -m lightppo.rollout.vllm.serving OPTIONS``, with vLLM's options.
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
from lightppo.rollout.vllm.lora_adapters import SLOTS, AdapterRoutes, slot_rank
from lightppo.rollout.vllm.versions import check_release, server_options
from lightppo.rollout.vllm.weight_routes import WeightRoutes

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


def server_command(
    model: str,
    host: str,
    port: int,
    engine_options: Sequence[str],
    lora_rank: int = 0,
) -> list[str]:
    """Return the command that starts a server; ``engine_options`` are vLLM's, and win over what is set here. With a
    ``lora_rank`` it takes adapters of at most that rank.

    Raises:
        ValueError: vLLM is not installed or too old, or takes no adapters of that rank.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed: docs/rollouts.md says how, for this kind of machine"
        )
    check_release("this server")
    import torch

    given_options = {
        text.split("=")[0].replace("_", "-") for text in engine_options if text.startswith("--")
    }
    defaults = {"--uvicorn-log-level": "warning"}
    if not torch.cuda.is_available():
        # Without a size vLLM takes what is free, or refuses to start; nothing is compiled on a CPU. Prompts in pieces
        # and seeds together end a server there: see vllm.engine_arguments.
        defaults |= {"--kv-cache-memory-bytes": str(_CPU_KV_CACHE_BYTES), "--enforce-eager": ""}
        defaults |= {"--no-enable-chunked-prefill": ""}
    if lora_rank:
        lora_slot_rank = slot_rank(lora_rank)
        if lora_slot_rank is None:
            raise ValueError(f"--lora_rank {lora_rank}: vLLM takes no adapters of that rank")
        defaults |= {
            "--enable-lora": "",
            "--max-lora-rank": str(lora_slot_rank),
            "--max-loras": str(SLOTS),
        }
    options = {
        "--model": model,
        "--host": host,
        "--port": str(port),
        "--worker-extension-cls": "lightppo.rollout.vllm.worker.WorkerExtension",
        "--weight-transfer-config": '{"backend": "lightppo"}',
        "--middleware": "lightppo.rollout.vllm.serving.KeyGate",
        "--generation-config": "vllm",
    } | server_options()
    options |= {name: value for name, value in defaults.items() if name not in given_options}
    option_words = [word for name, value in options.items() for word in (name, value) if word]
    return [sys.executable, "-m", "lightppo.rollout.vllm.serving", *option_words, *engine_options]


def server_environment(key: str | None) -> dict[str, str]:
    """Return the environment of a server: this one's, with the routes that take weights, and the key that clients need."""
    environment = {"VLLM_NO_USAGE_STATS": "1"} | {
        variable: value for variable, value in os.environ.items() if variable != KEY_VARIABLE
    }
    # The workers import lightppo, which need not be installed.
    python_paths = [str(Path(lightppo.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",
        # its sampler cannot be given another definition of log probs
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, python_paths)),
    }
    return environment | ({} if key is None else {KEY_VARIABLE: key})


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder for the sockets of one server, in ``VLLM_RPC_BASE_PATH`` or the folder for temporary files.

    It is locked by this process and by those that are forked from it: what killed servers left is not, and is removed.
    A ValueError says that the path is too long for sockets.
    """
    parent_folder = Path(os.environ.get(_SOCKETS) or tempfile.gettempdir()).resolve()
    for stale_folder in parent_folder.glob(f"{_PREFIX}*"):
        with (
            suppress(OSError),
            _locked(stale_folder, os.O_DIRECTORY | os.O_NOFOLLOW, fcntl.LOCK_NB) as lock,
        ):
            if os.fstat(lock).st_uid == os.getuid():
                _remove(stale_folder)
    # It gets the name that others look for when it is locked.
    hidden_folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent_folder))
    with _locked(hidden_folder):
        folder = hidden_folder.rename(hidden_folder.with_name(hidden_folder.name[1:]))
        try:
            if len(os.fsencode(folder)) > _LONGEST_FOLDER:
                raise ValueError(
                    f"{folder} is too long for the names of sockets: set {_SOCKETS} to a folder whose path has at most "
                    f"{_LONGEST_FOLDER - len(folder.name) - 1} bytes"
                )
            yield folder
        finally:
            with suppress(OSError):
                _remove(folder)


@contextmanager
def _locked(folder: Path, flags: int = 0, operation: int = 0) -> Iterator[int]:
    """Lock a folder; OSError where it is gone, another user's, or in use."""
    descriptor = os.open(folder, os.O_RDONLY | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | operation)
        yield descriptor
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, and what workers on a CPU that share a model have left in shared memory: it is named after the
    file by which they met."""
    for path in folder.glob("vllm_dist_*"):
        for shared_file in SHARED_MEMORY.glob(f"{path.name}-*"):
            shared_file.unlink(missing_ok=True)
    shutil.rmtree(folder)


class KeyGate:
    """ASGI middleware: every route but ``/health`` needs the key, and no web page may ask.

    vLLM's own check leaves out the routes for development, among them the one that calls any method of a worker.
    Browsers reach servers on loopback too, for whatever page is open; they name it in ``Origin``.
    """

    def __init__(self, app: Any) -> None:
        key = os.environ.get(KEY_VARIABLE)
        self._app = WeightRoutes(AdapterRoutes(app))
        self._expected = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            may_pass = True
        elif self._expected is None:
            may_pass = b"origin" not in headers
        else:
            may_pass = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
        if may_pass:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            if self._expected:
                reason = "the API key is missing or wrong"
            else:
                reason = "web pages may not ask"
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send(
                {"type": "http.response.body", "body": json.dumps({"error": reason}).encode()}
            )


def serve() -> None:
    """Run a server in this process, with the command line's options, until it is told to end."""
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
