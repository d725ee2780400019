"""Trains with --fp16, one run after the other. Usage: half.py RUNS.json: command and options by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from lightppo import PPOTrainer
from lightppo.config import PPOConfig
from lightppo.config.supervised_options import DPOConfig, RMConfig, SFTConfig
from lightppo.distributed import deepspeed
from lightppo.supervised.trainer import SupervisedTrainer

CONFIGS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}

if __name__ == "__main__":
    type(get_accelerator()).is_fp16_supported = lambda _: True  # torch computes in it on every CPU
    deepspeed.LOSS_SCALE_POWER = 12  # gradients of tiny models are large
    for command, options in json.loads(Path(sys.argv[1]).read_text()).values():
        of_ppo = command == "ppo"
        config = (PPOConfig if of_ppo else CONFIGS[command]).from_flat(options)
        (PPOTrainer if of_ppo else SupervisedTrainer).from_config(config).fit()
