"""Other trainers' names: the table, the errors that use it, the page that is made of it."""

from __future__ import annotations

import re

import pytest

from lightppo.config import PPOConfig, aliases
from lightppo.config.options import all_options
from lightppo.errors import ConfigError

OURS = {one.name for one in all_options()}
OF_LAUNCHERS = {"num_gpus", "hostfile", "NAME"}


@pytest.mark.parametrize("trainer", aliases.TABLES)
def test_rows_name_options_that_exist(trainer):
    rows = aliases.rows(trainer)
    assert all(names and text for names, text in rows)
    names = [name for names, _ in rows for name in names]
    assert {name for name in names if names.count(name) > 1} == set()
    flags = {flag for _, text in rows for flag in re.findall(r"--(\w+)", text)} - OF_LAUNCHERS
    assert flags - OURS - {f"no_{name}" for name in OURS} == set()
    assert {name for names, text in rows if text == "=" for name in names} <= OURS
    of_values = {name.partition("=")[0] for name in names if "=" in name}
    assert of_values <= OURS


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--actor_init_on_gpu", "not here: models are loaded where they train (OpenRLHF, LightRFT)"),
        ("--max_len 2048", "--prompt_max_len and --generate_max_len (OpenRLHF, LightRFT)"),
        ("--advantages_norm", "here --adv_norm (LightRFT)"),
        ("--eval-dataset x", "here --eval_data (OpenRLHF)"),
        ("--advantage_estimator reinforce_plus_plus", "reinforce_plus_plus: here reinforce++ (verl"),
        ("--kl_estimator low_var_kl", "here k3, with --kl_clip 10 (verl)"),
        ("--rollout_engine sglang", "not here: hf, vllm or vllm_server (verl)"),
        ("--num_generations 8", "here --n_samples_per_prompt (TRL)"),
        ("--eval.dataset x", "here --eval_data (OpenRLHF)"),
        ("actor_rollout_ref.rollout.n=8", "here --n_samples_per_prompt (verl)"),
        ("+algorithm.kl_ctrl.type=fixed", "here --init_kl_coef, --kl_target"),
        ("critic.optim.lr=1e-5", "here --actor_learning_rate, --critic_learning_rate (verl)"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=8", "not here: DeepSpeed shards"),
        ("ppo.gen.max_new_tokens=8", "here --generate_max_len (AReaL)"),
        ("ppo.use_decoupled_loss=True", "here --rollout_correction decoupled, --correction_high (AReaL)"),
        ("+trainer.x=y", "write --NAME VALUE"),
    ],
)
def test_names_of_other_trainers_are_refused_with_ours(refusal, flags, flag):
    (line,) = refusal(flags).splitlines()
    assert flag in line
    assert "did you mean" not in line


def test_a_misspelt_name_of_ours_has_the_nearest(refusal):
    assert "did you mean '--train_batch_size'" in refusal("--train_batch_sise 3")


def test_keys_of_yaml_and_code_too():
    with pytest.raises(ConfigError, match="unknown option 'eval_dataset': here --eval_data"):
        PPOConfig.from_flat(eval_dataset="x")
    with pytest.raises(ConfigError, match="--policy_loss geo_mean: here gmpo"):
        PPOConfig.from_flat(policy_loss="geo_mean")


def test_the_page_has_the_tables():
    page = aliases.PAGE.read_text(encoding="utf-8")
    assert page == aliases.with_tables(page), "run `make docs`"
    for trainer in aliases.TABLES:
        assert f"\n{trainer} | lightppo\n---|---\n" in page
