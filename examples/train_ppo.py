"""Train a causal language model with PPO: ``lightppo ppo``, as a script.

    deepspeed examples/train_ppo.py --pretrain MODEL --prompt_data prompts.jsonl --reward_fn reward.py ...
    deepspeed --num_gpus 2 examples/train_ppo.py ...
    torchrun --nproc_per_node 2 examples/train_ppo.py ...
    python examples/train_ppo.py ...                # one process; pdb works

``--help`` lists all options; ``--config FILE.yaml`` takes them from a file.
"""

from lightppo.cli.ppo import main

if __name__ == "__main__":
    main(prog="train_ppo.py")
