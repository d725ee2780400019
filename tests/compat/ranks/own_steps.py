"""Two steps with halves in the seed's form, then with the trainer's own. Usage: own_steps.py OPTIONS FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightppo import PPOTrainer
from lightppo.config import PPOConfig

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from support.own_methods import KL_LOSS, OwnSteps

    assets, folder = json.loads(sys.argv[1]), sys.argv[2]
    small = {
        "prompt_max_len": 12,
        "generate_max_len": 5,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 1,
        "actor_learning_rate": 1e-2,
        "critic_learning_rate": 1e-2,
        "num_examine": 0,
        "loss_agg_mode": "seq-mean-token-mean",
        "packing_samples": False,
    }
    for name, kind in {"own": OwnSteps, "ours": PPOTrainer}.items():
        places = {"save_path": f"{folder}/{name}", "ckpt_path": f"{folder}/{name}_ckpt"}
        kind.from_config(PPOConfig.from_flat(assets | small | KL_LOSS | places)).fit()
