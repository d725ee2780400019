#!/usr/bin/env bash
# DeepSpeed 0.19.8 with bf16 and "grad_accum_dtype": "fp32": ZeRO 1 adds micro batches up in fp32, and rounds the sum to
# bf16 before ranks average it, even where one process has nobody to average with. 512 and 2 are 514 together, and their
# mean 257 becomes 256; ZeRO 2 and 3 keep 257, and so does ZeRO 1 with "communication_data_type": "fp32". Rows: what the
# gradient has moved the fp32 weight by.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 setuptools==80.9.0 wheel==0.45.1
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/shown.py" <<'PYTHON'
import logging
import os
import socket

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(free.getsockname()[1])

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

logging.disable()


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, factor):
        return (self.weight * factor).sum()


def moved_by(stage, **options):
    model = Product().bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,  # losses are halved
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config | options
    )
    for factor in (512.0, 2.0):
        engine.backward(engine(torch.tensor([factor], dtype=torch.bfloat16)))
        engine.step()
    return -safe_get_full_fp32_param(model.weight).item()


found = {f"ZeRO {stage}": moved_by(stage) for stage in (1, 2, 3)}
found["ZeRO 1, sent in fp32"] = moved_by(1, communication_data_type="fp32")
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
for name, step in found.items():
    print(f"  {name}: {step}")
assert list(found.values()) == [256.0, 257.0, 257.0, 257.0], found
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/shown.py" 2>&1 | grep -E "^deepspeed|^  ZeRO|Error"
