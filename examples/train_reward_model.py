"""Train a reward model on pairs of a chosen and a rejected answer: ``lightppo rm``, as a script.

    deepspeed examples/train_reward_model.py --pretrain SFT_MODEL --dataset pairs.jsonl --save_path ckpt/rm
    deepspeed --num_gpus 2 examples/train_reward_model.py ...
    torchrun --nproc_per_node 2 examples/train_reward_model.py ...
    python examples/train_reward_model.py ...       # one process; pdb works

Then: lightppo ppo --reward_pretrain ckpt/rm --normalize_reward ...
"""

from lightppo.cli.supervised import rm

if __name__ == "__main__":
    rm(prog="train_reward_model.py")
