"""Train a causal language model on pairs of answers, without a reward model: ``lightppo dpo``, as a script.

    deepspeed examples/train_dpo.py --pretrain MODEL --dataset pairs.jsonl --save_path ckpt/dpo
    torchrun --nproc_per_node 2 examples/train_dpo.py ...
    python examples/train_dpo.py ...                # one process; pdb works

``--help`` lists the usual options, ``--help all`` all of them.
"""

from lightppo.cli.supervised import dpo

if __name__ == "__main__":
    dpo(prog="train_dpo.py")
