"""What a run says about itself."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from lightppo.config import PPOConfig
from lightppo.data.datasets import PromptDataset
from lightppo.logging import run_notes as told
from lightppo.zero3 import parameter_count

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


def closing(config: PPOConfig, prompts: Any = None) -> str:
    run = SimpleNamespace(config=config, prompts=prompts, saves=False)
    return "\n".join(told.closing_lines(run))


def test_a_model_that_was_trained_on_chats_is_not_asked_without_its_template(
    tmp_path, tiny_tokenizer
):
    config = PPOConfig.from_flat(save_path=f"{tmp_path}/run").resolved()
    assert f"pipeline('text-generation', '{tmp_path}/run')('PROMPT')" in closing(config)
    for options in ({"apply_chat_template": True}, {"input_template": "Q: {}"}):
        lines = closing(config.with_options(**options))
        assert f"chat, with the template of the run: lightppo chat {tmp_path}/run" in lines
        assert "pipeline" not in lines
    # chats are rendered as such without an option
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = [{"input": [{"role": "user", "content": "1+1="}]}]
    prompts = PromptDataset(Dataset.from_list(chats), tokenizer, input_key="input")
    assert "lightppo chat" in closing(config, SimpleNamespace(dataset=prompts))
