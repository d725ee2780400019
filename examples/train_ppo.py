"""Train a causal language model with PPO.

    deepspeed examples/train_ppo.py --pretrain MODEL --prompt_data prompts.jsonl --reward_fn reward.py ...
    deepspeed --num_gpus 2 examples/train_ppo.py ...
    torchrun --nproc_per_node 2 examples/train_ppo.py ...
    python examples/train_ppo.py ...                # one process; pdb works

``--help`` lists all options; ``--config FILE.yaml`` takes them from a file.
"""

from lightppo.config import parse_args


def main() -> None:
    config = parse_args()

    # After the command line is checked: these imports take seconds.
    from lightppo import PPOTrainer
    from lightppo.trainer import run

    run(lambda: PPOTrainer.from_config(config).fit())


if __name__ == "__main__":
    main()
