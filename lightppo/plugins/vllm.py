"""Rollouts by vLLM: in the training processes, or on servers."""

from lightppo.option import register_section
from lightppo.plugin import COMMANDS, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-vllm",
        Command("lightppo.cli.serve_vllm:main", about="serve rollouts by vLLM"),
    )
    register_section("vllm", "lightppo.config.vllm_options:VLLMConfig", adds_to="engine")
