#!/usr/bin/env bash
# torch 2.13.0: gloo's all_reduce adds the ranks' numbers in an order that depends on the place in the tensor. With three
# ranks that hold 256, 1 and 2 everywhere (in all, 259), a bfloat16 tensor comes back with 260 in some places and 258 in
# others; alone, each of its numbers would be the same. In float32 all are 259.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/sums.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank(number, store, answers):
    dist.init_process_group("gloo", rank=number, world_size=3, store=dist.FileStore(store, 3))
    for dtype in (torch.float32, torch.bfloat16):
        numbers = torch.full((12,), (256.0, 1.0, 2.0)[number], dtype=dtype)
        dist.all_reduce(numbers)
        if number == 0:
            answers.put(numbers.tolist())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    answers = processes.get_context("spawn").SimpleQueue()
    processes.spawn(rank, (tempfile.mktemp(), answers), nprocs=3)
    in_float32, in_bfloat16 = answers.get(), answers.get()
    print("  float32 ", in_float32)
    print("  bfloat16", in_bfloat16)
    assert set(in_float32) == {259.0}, in_float32
    assert set(in_bfloat16) == {258.0, 260.0}, in_bfloat16
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/sums.py" 2>"$folder/stderr" || { cat "$folder/stderr"; exit 1; }
