"""Whole runs on some ranks: ``pieces.py COMMANDS.json``, of lists of words: ppo, sft, rm or dpo, then flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from deepspeed.accelerator import get_accelerator

    from lightppo import PPOTrainer
    from lightppo.config.cli import parse_args
    from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig
    from lightppo.supervised.trainer import SupervisedTrainer

    type(get_accelerator()).is_fp16_supported = lambda _: True  # torch computes in it on every CPU
    kinds = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
    for command, *flags in json.loads(Path(sys.argv[-1]).read_text()):
        if command == "ppo":
            PPOTrainer.from_config(parse_args(flags)).fit()
        else:
            config = parse_args(flags, f"lightppo {command}", kinds[command])
            SupervisedTrainer.from_config(config).fit()


if __name__ == "__main__":
    main()
