"""Training: PPO (``ppo_trainer``), and what all trainers share (``loop``)."""

from lightppo.distributed.rank_main import run as run
