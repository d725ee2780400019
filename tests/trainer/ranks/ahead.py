"""``lightppo ppo`` on one rank of test_ahead_ranks.py: ``ahead.py '{"pids": …, "at_once": …}' flags…``

``pids``: a folder where each rank writes its number. ``at_once``: each batch is sampled before the trainer goes on, which
is what a run with samples ahead has to equal.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import wait
from pathlib import Path

SPEC = json.loads(sys.argv[1])


def main() -> None:
    if "pids" in SPEC:
        Path(SPEC["pids"], os.environ.get("RANK", "0")).write_text(str(os.getpid()))

    from lightppo import PPOTrainer
    from lightppo.config import parse_args
    from lightppo.rollout.vllm.servers import VLLMServerRolloutEngine
    from lightppo.trainer import run

    def ended(start):
        def begin(*args, **options):
            ticket = start(*args, **options)
            wait([ticket], 100)
            return ticket

        return begin

    if SPEC.get("at_once"):
        for name in ("start", "start_turns"):
            method = getattr(VLLMServerRolloutEngine, name)
            setattr(VLLMServerRolloutEngine, name, ended(method))
    config = parse_args(sys.argv[2:])
    run(lambda: PPOTrainer.from_config(config).fit())


if __name__ == "__main__":
    main()
