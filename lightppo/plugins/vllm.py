"""Rollouts by vLLM: in the training processes, or on servers."""

from lightppo.option import register_section
from lightppo.plugin import COMMANDS, ENGINES, METRICS, SAMPLING, Command
from lightppo.table import Entry


def register() -> None:
    """Add what this plugin brings to the tables of ``lightppo.plugin``."""
    ENGINES.register("vllm", Entry("lightppo.rollout.vllm.colocated:VLLMRolloutEngine"))
    ENGINES.register("vllm_server", Entry("lightppo.rollout.vllm.servers:VLLMServerRolloutEngine"))
    COMMANDS.register(
        "serve-vllm",
        Command("lightppo.cli.serve_vllm:main", about="serve rollouts by vLLM"),
    )
    register_section("vllm", "lightppo.config.vllm_options:VLLMConfig", adds_to="engine")
    SAMPLING.register("rollout_check", Entry("lightppo.rollout.vllm.rollout_check:check_first"))
    METRICS.register("perf", {"sync_megabytes": "megabytes of the last push of weights to vLLM"})
