"""Types that a device trains in slowly, or not at all; the latter is in tests/distributed/ranks/engines.py, too."""

from __future__ import annotations

import pytest

from lightppo.distributed import device_type
from lightppo.distributed.deepspeed import DeepspeedStrategy
from lightppo.distributed.device_type import trainable_type
from lightppo.errors import LaunchError

SUPPORTED = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported"


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("option", ["", "bf16", "fp16"])
def test_fp32_on_a_gpu_is_told_at_the_start(gpu, option, monkeypatch, caplog):
    monkeypatch.setattr(device_type, "on_cuda", lambda: gpu)
    monkeypatch.setattr(SUPPORTED, lambda _: True)
    strategy = DeepspeedStrategy(zero_stage=2, **({option: True} if option else {}))
    with caplog.at_level("WARNING"), trainable_type(strategy):
        pass
    assert ("10 times as long as --bf16 (or --fp16)" in caplog.text) == (gpu and not option)


def test_a_type_that_the_device_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(SUPPORTED, lambda _: False)
    told = "^--fp16: DeepSpeed does not train in it on this CPU: set --bf16, or neither for fp32"
    with (
        pytest.raises(LaunchError, match=told),
        trainable_type(DeepspeedStrategy(zero_stage=2, fp16=True)),
    ):
        pass
