"""Rollouts by vLLM: in the training processes, or on servers."""

from lightppo.option import register_section
from lightppo.plugin import CALLBACKS, COMMANDS, METRICS, CallbackEntry, Command


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    COMMANDS.register(
        "serve-vllm",
        Command("lightppo.cli.serve_vllm:main", about="serve rollouts by vLLM"),
    )
    register_section("vllm", "lightppo.config.vllm_options:VLLMConfig", adds_to="engine")
    CALLBACKS.register(
        "room", CallbackEntry("lightppo.rollout.vllm.offload_optimizer:sleep_after_evaluation")
    )
    CALLBACKS.register(
        "pushed_bytes", CallbackEntry("lightppo.rollout.vllm.lora_adapters:pushed_bytes")
    )
    METRICS.register("perf", {"sync_megabytes": "megabytes of the last push of weights to vLLM"})
    CALLBACKS.register("rollout_check", CallbackEntry("lightppo.experience.rollout_check:watch"))
