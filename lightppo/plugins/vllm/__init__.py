"""Rollouts by vLLM: in the training processes, or on servers."""

from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register("serve-vllm", Command("lightppo.plugins.vllm.serve_vllm:main", about="serve rollouts by vLLM"))
