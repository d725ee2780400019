"""The part of a vLLM server that is ours: it takes weights from the trainer and says what it serves.

``examples/serve_vllm.py`` has vLLM load :class:`WeightReceiver` into its workers and :class:`KeyGate` before its
routes. Importing it does not import vLLM; the trainer takes :func:`architecture` from here.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 2
"""Raised whenever trainer and server have to be of the same version of lightppo."""

KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM, too, reads the key that it asks of its clients."""

_SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_local_experts",
    "num_experts",
)


def architecture(config: Any) -> dict[str, Any]:
    """What two models must have in common to take the same weights: entries of a Hugging Face config, where set."""
    text = config.get_text_config(decoder=True)
    values = {name: getattr(text, name, None) for name in _SHAPES}
    return {name: value for name, value in values.items() if value is not None}


class WeightReceiver:
    """Mixed into vLLM's worker class by ``--worker-extension-cls``; called over ``/collective_rpc``.

    A worker of vLLM has ``vllm_config``, ``model_runner``, ``rank`` and ``device``. Answers are plain dictionaries,
    since the route turns everything else into text; errors too, since an exception would lose its message on the way.
    """

    def lightppo_describe(self) -> dict[str, Any]:
        """What is served, how, and the version of the weights: ``None`` where the trainer pushed none."""
        model = self.vllm_config.model_config
        return {
            "protocol": PROTOCOL,
            "version": getattr(self, "_lightppo_version", None),
            "model": str(model.model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "device": str(self.vllm_config.device_config.device_type),
            "sleep_mode": bool(model.enable_sleep_mode),
            "architecture": architecture(model.hf_config),
        }

    def lightppo_load(
        self,
        version: str,
        vocabulary_limits: tuple[int | None, int | None],
        files: list[str] | None = None,
        broadcast: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Replaces the weights by others, which are as a checkpoint has them.

        Args:
            version: reported from now on. In an error, and while loading, there is none.
            vocabulary_limits: how many ids may be sampled, and how many log probs are over; ``None``: all.
            files: safetensors files that this machine can read.
            broadcast: or the trainer's invitation, :meth:`~lightppo.rollout.weight_broadcast.WeightSender.invite`.

        Returns:
            ``{"version"}``, or ``{"error"}``.
        """
        from lightppo.rollout.vllm_sampler import install_sampler
        from lightppo.rollout.vllm_weights import push_weights

        self._lightppo_version = None
        try:
            with self._arriving(files, broadcast) as tensors:
                install_sampler(self, *vocabulary_limits)
                missing = push_weights(self, tensors)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if missing:
            return {"error": f"{len(missing)} weights of the server got no values, first {missing[0]}"}
        self._lightppo_version = version
        return {"version": version}

    def lightppo_differing(
        self, tolerance: float, files: list[str] | None = None, broadcast: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Which weights are not those of the trainer.

        Args:
            tolerance: largest relative difference.
            files: with the fingerprints of the trainer's, :func:`~lightppo.rollout.vllm_weights.trainer_fingerprints`.
            broadcast: or the trainer's invitation to get them.

        Returns:
            ``{"differing", "unknown"}``: names, the latter of weights that cannot be compared; or ``{"error"}``.
        """
        from lightppo.rollout.vllm_weights import differing_weights, engine_fingerprints, fingerprints_from_tensors

        try:
            with self._arriving(files, broadcast) as tensors:
                expected = fingerprints_from_tensors(tensors)
            differing, unknown = differing_weights(expected, *engine_fingerprints(self), tolerance)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"differing": differing, "unknown": unknown}

    @contextmanager
    def _arriving(self, files: list[str] | None, broadcast: dict[str, Any] | None) -> Iterator[Any]:
        """The trainer's tensors. A broadcast is read to its end also after an error, which only this server has."""
        from lightppo.rollout.weight_broadcast import receive_tensors

        if broadcast is None:
            yield _tensors(files or [])
            return
        tensors = receive_tensors(broadcast, self.rank + 1, self.device)
        try:
            yield tensors
        except Exception:
            with suppress(Exception):
                for _ in tensors:
                    pass
            raise
        finally:
            tensors.close()


def _tensors(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class KeyGate:
    """ASGI middleware: every route but ``/health`` needs the key, and no web page may ask.

    vLLM's own check leaves out the routes for development, among them the one that calls any method of a worker.
    Browsers reach servers on loopback too, for whatever page is open; they name it in ``Origin``.

    Args:
        app: what is behind the gate.
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
