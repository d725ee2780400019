"""Other trainers' names: the table, the errors that use it, the page that is made of it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lightppo.config import PPOConfig
from lightppo.config import other_trainers as aliases
from lightppo.config.option_errors import nearest
from lightppo.errors import ConfigError
from lightppo.plugin import trained_by

OURS = {one.name for kind in trained_by().values() for one in kind.all_options()}
OF_LAUNCHERS = {"num_gpus", "hostfile", "NAME", "for"}  # and of lightppo data
NAMES = Path(__file__).with_name("names_of_other_trainers.txt")


def names_of(trainer: str) -> list[str]:
    lines = [
        line.split(" | ")
        for line in NAMES.read_text(encoding="utf-8").splitlines()
        if line[0] != "#"
    ]
    of_trainer = [(start, last_parts) for who, start, last_parts in lines if who == trainer]
    return [
        f"{start}.{last}".lstrip(".")
        for start, last_parts in of_trainer
        for last in last_parts.split()
    ]


@pytest.mark.parametrize("title", aliases.tables())
def test_rows_name_options_that_exist(title):
    rows = aliases.tables()[title]
    assert all(names and all(texts) for names, texts in rows)
    assert [names for names, texts in rows if len(texts) not in (1, len(names))] == []
    names = [name for names, _ in rows for name in names]
    assert {name for name in names if names.count(name) > 1} == set()
    texts = " ".join(text for _, texts in rows for text in texts)
    flags = set(re.findall(r"--(\w+)", texts)) - OF_LAUNCHERS
    assert flags - OURS - {f"no_{name}" for name in OURS} == set()
    assert {name for names, texts in rows if texts == ["="] for name in names} <= OURS
    of_values = {name.partition("=")[0] for name in names if "=" in name}
    assert of_values <= OURS


@pytest.mark.parametrize("title", aliases.tables())
def test_a_name_has_one_flag_of_its_own(title):
    """A list of several flags for several names leaves the reader to guess which is whose."""
    several = [
        (names, texts)
        for names, texts in aliases.tables()[title]
        if len(names) > 1 and len(texts) == 1 and re.match(r"`--\w+`, `--\w+`(,|$|;)", texts[0])
    ]
    assert [names for names, _ in several] in (
        [],
        [["report_to", "log_with"]],
        [["trainer.logger", "logger"]],
    )


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (
            "--actor_init_on_gpu",
            "not here: models are loaded where they train (OpenRLHF, LightRFT)",
        ),
        ("--max_len 2048", "--prompt_max_len and --generate_max_len (OpenRLHF, LightRFT)"),
        ("--advantages_norm", "here --adv_norm (LightRFT)"),
        ("--eval-dataset x", "here --eval_data (OpenRLHF)"),
        (
            "--advantage_estimator reinforce_plus_plus",
            "reinforce_plus_plus: here reinforce++ (verl",
        ),
        ("--kl_estimator low_var_kl", "here k3, with --kl_clip 10 (verl)"),
        ("--rollout_engine sglang", "not here: hf, vllm or vllm_server (verl)"),
        ("--num_generations 8", "here --n_samples_per_prompt (TRL)"),
        ("--eval.dataset x", "here --eval_data (OpenRLHF)"),
        ("actor_rollout_ref.rollout.n=8", "here --n_samples_per_prompt (verl)"),
        ("+algorithm.kl_ctrl.type=fixed", "here --kl_target for adaptive (verl)"),
        ("critic.optim.lr=1e-5", "here --critic_learning_rate (verl)"),
        ("--critic.adam.weight_decay 0", "not here: the critic has the actor's --l2 (OpenRLHF)"),
        (
            "--agent_func_path a.py",
            "here --env openrlhf:FILE.py (docs/environments.md); a function",
        ),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4", "here --max_turns (verl)"),
        ("data.tool_config_path=t.yaml", "here --tools FILE.py:f,g, functions with type hints"),
        ("--max_tool_calling_iterations 4", "here --max_turns, one more"),
        ("teacher.path=m", "here --teacher_pretrain, or --teacher_url for servers (AReaL)"),
        ("--ref.num_nodes 1", "not here: no Ray; the launcher sets the ranks (deepspeed"),
        ("--critic_num_gpus_per_node 8", "(deepspeed --num_gpus, --hostfile) (slime)"),
        ("--data.max_prompt_id_length 8", "ids of rows are in the column query_id or id"),
        ("--max_steps 9", "with --num_episodes as large, because there it goes round"),
        ("--hf-checkpoint m", "here --pretrain (slime)"),
        ("--use-unbiased-kl", "here --kl_estimator k3_ratio (slime)"),
        ("orchestrator.group_size=8", "here --n_samples_per_prompt (prime-rl)"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=8", "not here: DeepSpeed shards"),
        ("ppo.gen.max_new_tokens=8", "here --generate_max_len (AReaL)"),
        (
            "ppo.use_decoupled_loss=True",
            "here --rollout_correction decoupled (AReaL)",
        ),
        ("+trainer.x=y", "write --NAME VALUE"),
    ],
)
def test_names_of_other_trainers_are_refused_with_ours(refusal, flags, flag):
    (line,) = refusal(flags).splitlines()
    assert flag in line
    assert "did you mean" not in line


TITLES = ["OpenRLHF", "LightRFT", "TRL", "verl", "AReaL", "slime"]
TITLES += ["OpenRLHF sft rm dpo", "TRL sft rm dpo", "verl sft"]


@pytest.mark.parametrize("title", TITLES)
def test_every_option_of_theirs_is_in_the_table(title):
    trainer, *commands = title.split()
    for command in commands or ["ppo"]:
        titles = [title for title in aliases.parts_of(command) if title.split()[0] == trainer]
        known = {one.name for one in trained_by()[command].all_options()}
        patterns = [
            name for title in titles for names, _ in aliases.tables()[title] for name in names
        ]
        names = names_of(title)
        assert len(names) > 40
        missing = [name for name in names if not any(fnmatchcase(name, one) for one in patterns)]
        assert [name for name in missing if name not in known] == []


@pytest.mark.parametrize("title", TITLES)
def test_every_option_of_theirs_has_an_answer_of_the_command(title):
    for command in title.split()[1:] or ["ppo"]:
        flags = [f"--{one.name}" for one in trained_by()[command].all_options()]
        assert [
            name
            for name in names_of(title)
            if f"--{name}" not in flags
            and not nearest(f"--{name}", flags, "option").startswith(": ")
        ] == []


def test_a_row_that_keeps_the_last_part_names_an_option_with_it():
    names = [
        name
        for rows in aliases.tables().values()
        for names, texts in rows
        if texts == [aliases.LAST_PART]
        for name in names
    ]
    assert len(names) > 3
    every = {one.name for kind in trained_by().values() for one in kind.all_options()}
    assert {name.rpartition(".")[2] for name in names} <= every


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("algorithm.filter_groups.enable", "here --dynamic_sampling (verl)"),
        ("algorithm.filter_groups.metric", "--filter_metric"),
        ("algorithm.filter_groups.max_num_gen_batches", "verl ends the run: --on_exhausted raise"),
        ("data.gen_batch_size", "here --gen_batch_size"),
        (
            "reward_model.overlong_buffer.enable",
            "--overlong_buffer_len alone switches it on",
        ),
        ("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", "--overlong_penalty_factor"),
        ("actor_rollout_ref.model.override_config.attention_dropout", "here --override_config"),
        ("actor_rollout_ref.rollout.top_k", "here --top_k (verl)"),
        # How a name begins decides before the length of a pattern does.
        ("reward.reward_model.rollout.gpu_memory_utilization", "not here: reward models run"),
        ("actor_rollout_ref.ref.optim.weight_decay", "not here: the reference is not trained"),
        ("task", "here --reward_source math or code (AReaL)"),
        ("rm_output_scaling", "here --reward_scaling (AReaL)"),
        ("REAL_CODE_METADATA_PATH", "here --prompt_metadata (AReaL)"),
        ("external_libs", "here --external_lib (AReaL)"),
        ("prompt_id_key", "query_id or id, of any length (AReaL)"),
        ("actor.optimizer.weight_decay", "0.01 in 1.x, 0.05 in 0.x, 0 here"),
        ("num_ppo_epochs", "here --max_epochs (4 there, 1 here) (TRL)"),
        ("datasets", "here --prompt_data A,B, with --prompt_data_probs (TRL)"),
        ("value_clip", "0.5 there, 0.2 before 0.8.2, as here) (OpenRLHF)"),
        ("lambd", "0.95 before 0.5.7"),
        ("load_in_8bit", "LoRA or QLoRA of linear layers in NF4 (docs/lora.md) (TRL)"),
    ],
)
def test_what_a_name_is_here(name, ours):
    assert ours in aliases.hint(name)


def test_lightrft_clips_no_kl():
    (text,) = [texts[0] for names, texts in aliases.tables()["LightRFT"] if "kl_estimator" in names]
    assert "kl_clip" not in text
    assert "nothing is clipped" in text


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
    for title in aliases.tables():
        assert (
            f"<!-- {title}: generated by `make docs` -->\n{title.split()[0]} | lightppo\n" in page
        )
