#!/usr/bin/env bash
# torch 2.13.0 on a CPU: the L2 norm of many float32 numbers is too small, by 0.07% for 2^24 and 0.5% for 2^26 of them
# with AVX-512: their squares are added one after the other. The root of the sum of squares is right, and so is the norm in float64.
# `torch.nn.utils.clip_grad_norm_` takes such a norm. Rows: numbers, then the error of norm and of root.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch

print("torch", torch.__version__)
errors = []
for bits in (16, 20, 24, 26):
    numbers = torch.randn(1 << bits, generator=torch.Generator().manual_seed(0))
    truth = numbers.norm(dtype=torch.float64).item()
    norms = numbers.norm(), numbers.square().sum().sqrt(), torch.nn.utils.get_total_norm([numbers])
    of_norm, of_root, of_clipping = (float(norm) / truth - 1 for norm in norms)
    print(f"  2^{bits}  {of_norm:+.1e}  {of_root:+.1e}")
    assert of_clipping == of_norm
    errors.append((of_norm, of_root))
assert all(abs(of_root) < 1e-6 for _, of_root in errors), errors
assert errors[2][0] < -1e-4, errors
assert errors[3][0] < -1e-3, errors
PYTHON
