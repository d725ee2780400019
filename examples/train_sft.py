"""Train a causal language model on demonstrations: ``lightppo sft``, as a script.

    deepspeed examples/train_sft.py --pretrain MODEL --dataset sft.jsonl --output_key output --save_path ckpt/sft
    deepspeed --num_gpus 2 examples/train_sft.py ...
    torchrun --nproc_per_node 2 examples/train_sft.py ...
    python examples/train_sft.py ...                # one process; pdb works

``--help`` lists all options.
"""

from lightppo.cli.supervised import sft

if __name__ == "__main__":
    sft(prog="train_sft.py")
