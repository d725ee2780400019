"""How a vLLM server for rollouts is started: its command line, its environment, and a folder for its sockets.

Run as a module it is the server: ``python -m lightppo.rollout.serving OPTIONS``, with vLLM's options.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import lightppo
from lightppo.rollout.server_worker import KEY_VARIABLE
from lightppo.rollout.weight_files import SHARED_MEMORY

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
_SOCKETS = "VLLM_RPC_BASE_PATH"  # where vLLM puts its sockets; it never removes them
_PREFIX = "lightppo-vllm-"
_LONGEST_FOLDER = 107 - 1 - 36  # a socket's path has at most 107 bytes, its name is a UUID


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
    return [sys.executable, "-m", "lightppo.rollout.serving", *words, *engine_options]


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


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for the sockets of one server, there for as long as the block lasts.

    It is in the folder for temporary files, or in ``VLLM_RPC_BASE_PATH``. It is locked by this process and by those
    that are forked from it: what servers left that were killed is not, and is removed now.

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


def serve() -> None:
    """A server in this process, with the command line's options, until it is told to end."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(socket_folder())
        except (ValueError, OSError) as error:
            sys.exit(str(error))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # that one is to stay
        # The second for a file by which workers meet; vLLM leaves that behind as it does its sockets.
        os.environ |= {_SOCKETS: str(folder), "TMPDIR": str(folder)}
        tempfile.tempdir = None
        # The command `vllm serve` asks for a distribution named vllm, which builds for CPUs are not.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
