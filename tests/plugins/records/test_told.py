"""What a run says about itself."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from lightppo.config import PPOConfig
from lightppo.plugins.records import told
from lightppo.strategy.zero3 import parameter_count

pytestmark = pytest.mark.usefixtures("world")


def test_the_options_that_were_set_are_described(make_config):
    asked = make_config(gamma=0.5, adv_norm=False, policy_loss="ppo")
    text = told.described(asked)
    set_there = {name for name, value in asked.flat().items() if value != PPOConfig().flat()[name]}
    # which it would be without the option
    assert set(re.findall(r"(\w+)=", text)) == set_there - {"policy_loss"}
    assert "algorithm: gamma=0.5 adv_norm=False" in text


def test_sizes_of_the_models_and_places_are_said(make_config, parts, tmp_path):
    actor = parts["actor"][0]
    models = {
        "--pretrain": actor,
        "--reward_pretrain m": parts["reference"],
    }
    building = SimpleNamespace(models=models, sizes={"ema": 7})
    count = f"{parameter_count(actor):,} parameters"
    assert told.model_sizes(building) == (
        f"actor {count}, reward model 1 {count}, moving average 7 parameters"
    )
    for parameter in (frozen := list(actor.parameters()))[1:]:
        parameter.requires_grad_(False)
    try:
        assert told.model_sizes(building).startswith(f"actor {count} ({frozen[0].numel():,} train)")
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    assert (
        told.places(make_config())
        == f"model and logs in {tmp_path}/run, no checkpoints (--save_steps)"
    )
    where = told.places(make_config(save_epochs=1, use_tensorboard="tb", profile_steps=[2]))
    assert (
        f"checkpoints in {tmp_path}/ckpt, TensorBoard in tb, profiles in {tmp_path}/run/profile"
        in where
    )


def test_a_run_says_where_its_checkpoints_are(tmp_path):
    """Also one that goes on from some, or was stopped: it writes one at its end, without --save_steps too."""
    config = PPOConfig.from_flat(save_path=str(tmp_path)).resolved()
    assert "no checkpoints (--save_steps)" in told.places(config)
    assert f"checkpoints in {tmp_path}/checkpoints_ppo" in told.places(
        config.with_options(save_steps=2)
    )
    (tmp_path / "checkpoints_ppo" / "_actor" / "global_step2").mkdir(parents=True)
    assert f"checkpoints in {tmp_path}/checkpoints_ppo" in told.places(config)
    assert "no checkpoints" in told.places(config.with_options(resume="never"))
