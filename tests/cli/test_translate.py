"""``lightppo translate``: what it prints is a script whose command our own parser takes, with the same meaning."""

from __future__ import annotations

import math
import re
import shlex

import pytest

from lightppo.__main__ import main
from lightppo.cli.conversion_rules import RULES
from lightppo.cli.other_commands import PROGRAMS, OtherCommand
from lightppo.cli.translate import convert, defaults, translated
from lightppo.config import parse_args
from lightppo.config.other_trainers import tables, translations
from lightppo.plugin import trained_by


@pytest.fixture
def translate(capsys, _one_process):
    """``translate("trl grpo …")``: exit code, printed text, our words, and the config that our parser makes of them."""

    def run(*words: str, add: str = ""):
        with pytest.raises(SystemExit) as stopped:
            main(["translate", *words])
        text = capsys.readouterr().out
        script = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        ours = shlex.split(script.replace("\\\n", ""))
        start = ours.index("lightppo")
        command, flags = ours[start + 1], [*ours[start + 2 :], *add.split()]
        ranks = math.prod(
            int(count) for count in re.findall(r"\d+(?=\D*)", " ".join(ours[:start]))[:2] or "1"
        )
        kind, is_ppo = trained_by()[command], command == "ppo"
        config = parse_args(flags, kind=kind, world_size=ranks, unfed=is_ppo)
        capsys.readouterr()
        return stopped.value.code, text, ours, config.flat()

    return run


def differences(text: str) -> str:
    """The options that are to be added to train as there."""
    lines = text.partition("# Defaults of ")[2].splitlines()
    return " ".join(
        line[1:].partition("#")[0].strip() for line in lines if line.startswith("#   --")
    )


GRPO = (
    "accelerate launch --config_file zero2.yaml --num_processes 4 recipes/grpo_math.py --model_name_or_path org/base-1b "
    "--dataset_name org/sums --reward_funcs accuracy_reward think_format_reward --learning_rate 3e-6 --num_generations 8 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_iterations 2 --max_completion_length 768 "
    "--epsilon 0.2 --epsilon_high 0.28 --loss_type dr_grpo --scale_rewards group --use_vllm --vllm_mode colocate "
    "--max_steps 40 --save_steps 20 --warmup_ratio 0.05 --weight_decay 0.1 --adam_beta2 0.99 --seed 3 --output_dir runs/a"
)


def test_trl_grpo(translate):
    code, text, ours, config = translate(GRPO)
    assert code == 0
    assert ours[:5] == ["deepspeed", "--num_gpus", "4", "--module", "lightppo"]
    expected = {
        "pretrain": "org/base-1b",
        "prompt_data": "org/sums",
        "reward_source": ("math", "format"),
        "advantage_estimator": "grpo",
        "train_batch_size": 128,  # 4 × 8 on 4 ranks
        "micro_train_batch_size": 4,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 8,
        "max_epochs": 2,
        "total_training_steps": 20,  # 40 optimizer steps, two for each rollout
        "num_episodes": 20,
        "save_steps": 10,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "grpo_std_eps": 1e-4,
        "rollout_engine": "vllm",
        "rollout_correction": "seq_mis",
        "correction_high": 3.0,
        "lr_warmup_ratio": 0.05,
        "adam_betas": (0.9, 0.99),
        "actor_learning_rate": 3e-6,
        "l2": 0.1,
        "seed": 3,
        "save_path": "runs/a",
    }
    assert {name: config[name] for name in expected} == expected
    added = differences(text)
    assert "--init_kl_coef 0.0 " in added
    assert "--bf16" in added
    assert "--lr_scheduler linear" in added
    assert "--adam_betas" not in added  # one of them is said
    assert "there beta 0.0, use_bias_correction_kl True; the default here is 0.01" in text
    _, _, _, whole = translate(GRPO, add=added)
    assert whole["lr_scheduler"] == "linear"
    assert whole["init_kl_coef"] == 0


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=['a.parquet','b.parquet'] "
    "data.val_files=v.parquet data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=512 "
    "actor_rollout_ref.model.path=org/base actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.rollout.n=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl algorithm.norm_adv_by_std_in_grpo=False "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.val_kwargs.n=4 "
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 "
    "custom_reward_function.path=score.py trainer.critic_warmup=0 trainer.n_gpus_per_node=8 trainer.nnodes=1 "
    "trainer.logger=['console','wandb'] trainer.total_epochs=3 trainer.save_freq=10 trainer.test_freq=5"
)


def test_verl(translate):
    code, text, ours, config = translate(VERL)
    assert code == 0
    assert ours[2] == "8"
    expected = {
        "prompt_data": "a.parquet,b.parquet",
        "apply_chat_template": True,
        "rollout_batch_size": 64,
        "train_batch_size": 128,  # 32 prompts × 4
        "n_samples_per_prompt": 4,
        "prompt_max_len": 256,
        "generate_max_len": 512,
        "use_kl_loss": True,
        "init_kl_coef": 0.001,
        "kl_estimator": "k3",
        "kl_clip": 10,
        "group_std_norm": False,
        "eval_n_samples": 4,
        "eval_temperature": 0.6,
        "reward_fn": "score.py:compute_score",
        "use_wandb": True,
        "num_episodes": 3,
        "eval_steps": 5,
    }
    assert {name: config[name] for name in expected} == expected
    added = differences(text)
    for flag in (
        "--dual_clip 3.0",
        "--l2 0.01",
        "--adam_betas 0.9 0.999",
        "--bf16",
        "--lr_scheduler constant",
    ):
        assert flag in added
    assert "critic" not in added  # there is none
    translate(VERL, add=added)


OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/sft --reward.model_name_or_path org/rm "
    "--data.prompt_dataset org/prompts --data.input_key messages --data.apply_chat_template --data.max_len 3072 "
    "--rollout.max_new_tokens 1024 --rollout.batch_size 128 --rollout.n_samples_per_prompt 4 --train.batch_size 256 "
    "--train.micro_batch_size 2 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 1e-3 --algo.kl.estimator k2 "
    "--ds.zero_stage 3 --ds.param_dtype bf16 --actor.eps_clip_low_high 0.2 0.27 --reward.normalize_enable "
    "--actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 8 --logger.wandb.key SECRETKEY123"
)


def test_openrlhf(translate):
    code, text, _, config = translate(OPENRLHF)
    assert code == 0, text
    assert "SECRETKEY123" not in text
    expected = {
        "pretrain": "org/sft",
        "reward_pretrain": ("org/rm",),
        "prompt_max_len": 2048,
        "generate_max_len": 1024,
        "zero_stage": 3,
        "bf16": True,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.27,
        "kl_estimator": "k2",
        "kl_clip": 10,
        "normalize_reward": True,
        "critic_learning_rate": 9e-6,
        "rollout_engine": "vllm",
        "use_wandb": True,
    }
    assert {name: config[name] for name in expected} == expected
    assert "--lambd 1.0    # there algo.advantage.lambd 1; the default here is 0.95" in text
    assert "--value_clip 0.5" in text


def test_an_agent_of_openrlhf(translate):
    program = "python -m openrlhf.cli.train_ppo_ray --apply_chat_template"
    _, _, _, config = translate(
        f"{program} --pretrain m --prompt_data p --agent_func_path agents/a.py"
    )
    assert (config["env"], config["reward_source"]) == (("openrlhf:agents/a.py",), ("environment",))


def test_what_is_not_here_ends_with_code_1(translate):
    more = "--push_to_hub --hub_token hf_ABCDEFGHIJKLMNOP --made_up 3 --ddp_backend nccl"
    code, text, _, _ = translate(f"{GRPO} {more}")
    assert code == 1
    assert "# Not here:\n" in text
    assert "hub_token" in text
    assert "hf_ABCDEFGHIJKLMNOP" not in text
    assert "ddp_backend: DeepSpeed reduces gradients" in text
    assert "made_up: no option of TRL that lightppo knows" in text


def test_what_has_no_effect_and_what_is_missing(translate, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "translate",
                "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo critic.optim.lr=1e-5",
            ]
        )
    assert stopped.value.code == 1
    text = capsys.readouterr().out
    assert (
        "critic.optim.lr: --critic_learning_rate needs a critic (--advantage_estimator gae)" in text
    )
    assert "no reward: set --reward_fn path.py" in text
    assert "--pretrain is required" in text


@pytest.mark.parametrize(
    ("command", "ours", "expected"),
    [
        (
            "trl sft --model_name_or_path m --dataset_name d --num_train_epochs 2 --per_device_train_batch_size 2 "
            "--gradient_accumulation_steps 8 --use_peft --lora_r 32 --eval_strategy epoch --max_length 4096 --packing",
            "sft",
            {"num_epochs": 2, "train_batch_size": 16, "lora_rank": 32, "lora_alpha": 32, "eval_dataset": "d"}
            | {"max_len": 4096, "packing_samples": True},
        ),
        (
            "trl dpo --model_name_or_path m --dataset_name d --beta 0.2 --loss_type ipo --max_steps "
            "100 --warmup_steps 10",
            "dpo",
            {"beta": 0.2, "preference_loss": "ipo", "max_steps": 100, "lr_warmup_steps": 10},
        ),
        (
            "trl reward --model_name_or_path m --dataset_name d --learning_rate 1e-5 --bf16 False",
            "rm",
            {"learning_rate": 1e-5, "bf16": False},
        ),
        (
            "deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d --bf16 --max_epochs 2 "
            "--ipo --label_smoothing 0",
            "dpo",
            {"bf16": True, "num_epochs": 2, "preference_loss": "ipo"},
        ),
        (
            "deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path m --data.dataset d "
            "--adam.lr 2e-5 --data.max_len 512",
            "sft",
            {"learning_rate": 2e-5, "max_len": 512},
        ),
        (
            "deepspeed --module openrlhf.cli.train_rm --model.model_name_or_path m --data.dataset d "
            "--train.batch_size 64 --model.margin_loss_enable",
            "rm",
            {"train_batch_size": 64, "margin_key": "margin"},
        ),
        (
            "torchrun -m verl.trainer.sft_trainer model.path=m data.train_files=d optim.lr=1e-5 "
            "data.max_length=1024 trainer.total_epochs=2",
            "sft",
            {"dataset": "d", "learning_rate": 1e-5, "max_len": 1024, "num_epochs": 2, "apply_chat_template": True},
        ),
    ],
)  # fmt: skip
def test_training_on_data(translate, command, ours, expected):
    _, text, words, config = translate(command)
    assert words[:2] == ["lightppo", ours]
    assert {name: config[name] for name in expected} == expected
    translate(command, add=differences(text))


AREAL = """
gconfig: {n_samples: 4, max_new_tokens: 512, greedy: false, top_k: 100000000}
actor:
  path: org/base
  dtype: bfloat16
  optimizer: {lr: 1.0e-5, beta1: 0.9, beta2: 0.999, lr_scheduler_type: constant}
  eps_clip: 0.2
  eps_clip_higher: 0.3
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  reward_scaling: 10.0
  reward_bias: -0.5
  adv_norm: {mean_level: batch, std_level: batch}
  reward_norm: {mean_level: group, std_level: group, mean_leave1out: true, std_unbiased: false}
  rejection_sampling: {metric: ratio, upper: 5.0, action: clamp}
ref: {path: '${actor.path}'}
train_dataset: {path: org/sums, batch_size: 32, max_length: 256}
cluster: {n_nodes: 1, n_gpus_per_node: 2, fileroot: runs}
evaluator: {freq_epochs: 1, freq_steps: null}
stats_logger: {wandb: {mode: disabled}}
total_train_epochs: 2
"""


def test_areal(translate, tmp_path):
    (tmp_path / "grpo.yaml").write_text(AREAL)
    _, text, ours, config = translate(str(tmp_path / "grpo.yaml"))
    assert ours[2] == "2"
    expected = {
        "advantage_estimator": "reinforce",
        "reward_norm_by": ("mean=group", "std=group", "leave_one_out"),
        "adv_norm_by": ("mean=batch", "std=batch", "unbiased"),
        "reward_bias": 0.5,
        "reward_scaling": 10.0,
        "old_log_probs": "forward",
        "rollout_correction": "tis",
        "correction_high": 5.0,
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.3,
        "top_k": -1,
        "bf16": True,
        "ppo_n_minibatches": 2,
        "rollout_batch_size": 32,
        "num_episodes": 2,
        "init_kl_coef": 0.0,
        "use_wandb": False,
        "save_path": "runs",
    }
    assert {name: config[name] for name in expected} == expected
    assert "ref.path: --ref_pretrain needs --init_kl_coef above 0" in text


SLIME = """
ARGS=(
   --hf-checkpoint org/base
   --prompt-data p.jsonl --input-key prompt --rm-type math
   --num-rollout 50 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128
   --rollout-max-response-len 2048
   --eval-prompt-data aime aime.jsonl --eval-interval 10
)
ALGORITHM=(--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --lr 1e-6 --lr-decay-style constant --use-tis)
python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate ${ARGS[@]} ${ALGORITHM[@]}
"""


def test_slime(translate, tmp_path):
    (tmp_path / "run.sh").write_text(SLIME)
    _, text, ours, config = translate(str(tmp_path / "run.sh"))
    assert ours[2] == "4"
    expected = {
        "pretrain": "org/base",
        "reward_source": ("math",),
        "advantage_estimator": "grpo",
        "total_training_steps": 50,
        "train_batch_size": 128,
        "generate_max_len": 2048,
        "eval_data": "aime.jsonl",
        "eval_steps": 10,
        "init_kl_coef": 0.01,
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "rollout_correction": "tis",
        "correction_high": 2.0,
        "lr_scheduler": "constant",
    }
    assert {name: config[name] for name in expected} == expected
    assert "--loss_agg_mode seq-mean-token-mean" in differences(text)


def test_lightrft(translate):
    _, text, _, config = translate(
        "torchrun --nproc_per_node 2 train_colocate.py --pretrain m --prompt_data p --advantage_estimator group_norm "
        "--n_samples_per_prompt 4 --use_kl_loss --kl_estimator k3 --init_kl_coef 0.01 --reward_clip 5 --engine_tp_size 2 "
        "--overlong_buffer --overlong_buffer_len 128 --bf16 --advantage_clip 0"
    )
    expected = {
        "reward_clip_range": (-5.0, 5.0),
        "tensor_parallel_size": 2,
        "overlong_buffer_len": 128,
        "kl_clip": None,
        "bf16": True,
    }
    assert {name: config[name] for name in expected} == expected
    assert "--loss_agg_mode seq-mean-token-mean    # there loss_agg_mode" in text


def test_several_nodes_and_ranks_by_hand(translate):
    _, text, ours, _ = translate(VERL.replace("trainer.nnodes=1", "trainer.nnodes=2"))
    assert ours[:3] == ["torchrun", "--nnodes=2", "--nproc_per_node=8"]
    assert text.startswith("# verl (verl), 16 processes on 2 nodes\n")
    _, _, ours, config = translate("--ranks", "8", GRPO)
    assert (ours[2], config["train_batch_size"]) == ("8", 256)


def test_words_without_quotes_and_standard_input(translate, monkeypatch):
    import io

    _, _, _, config = translate(*GRPO.split())
    assert config["seed"] == 3
    monkeypatch.setattr("sys.stdin", io.StringIO(GRPO))
    assert translate("-")[3]["seed"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a command is missing"),
        (["ls -la"], "names no program that lightppo knows: say which it is by --from"),
        (["none.yaml"], "none.yaml cannot be read"),
        (["--ranks", "0", "trl grpo"], "--ranks 0: must be at least 1"),
        (["--from", "trl", "x"], "invalid choice: 'trl'"),
    ],
)
def test_what_cannot_be_translated(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["translate", *words])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("program", "name", "value", "option", "ours"),
    [
        ("trl-grpo", "max_tool_calling_iterations", "4", "max_turns", 5),
        ("trl-grpo", "ddp_timeout", "3600", "dist_timeout", 60),
        ("trl-grpo", "top_k", "0", "top_k", -1),
        ("trl-sft", "metric_for_best_model", "eval_loss", "best_metric", None),
        ("verl", "trainer.critic_warmup", "5", "freezing_actor_steps", 4),
        ("verl", "actor_rollout_ref.model.load_weight", "False", "init_from_scratch", True),
        ("verl", "actor_rollout_ref.model.load_weight", "True", "init_from_scratch", False),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean", "policy_loss", "gmpo"),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla", "policy_loss", "ppo"),
        ("verl", "algorithm.adv_estimator", "reinforce_plus_plus", "advantage_estimator", "reinforce++"),
        ("verl", "actor_rollout_ref.rollout.val_kwargs.do_sample", "False", "eval_temperature", 0),
        ("verl", "data.train_max_samples", "-1", "max_samples", None),
        ("verl", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "6", "max_turns", 6),
        ("openrlhf", "no_advantage_std_norm", True, "adv_norm_by", ("mean=batch",)),
        ("openrlhf", "reward.clip_range", ["-5", "5"], "reward_clip_range", (-5, 5)),
        ("openrlhf", "disable_fast_tokenizer", True, "disable_fast_tokenizer", True),
        ("areal", "rw_type", "dense", "use_dense_reward", True),
        ("areal", "rw_type", "sparse", "use_dense_reward", None),
        ("areal", "actor.importance_sampling_level", "sequence", "policy_loss", "gspo"),
        ("areal", "actor.importance_sampling_level", "token", "policy_loss", None),
        ("areal", "actor.reward_bias", "-0.5", "reward_bias", 0.5),
        ("slime", "advantage_estimator", "gspo", "policy_loss", "gspo"),
        ("slime", "advantage_estimator", "reinforce_plus_plus", "advantage_estimator", "reinforce++"),
        ("slime", "skip_eval_before_train", True, "val_before_train", False),
        ("slime", "attention_backend", "flash", "attn_implementation", "flash_attention_2"),
        ("lightrft", "reward_clip", "0.0", "reward_clip_range", None),
    ],
)  # fmt: skip
def test_a_value(program, name, value, option, ours):
    found = convert({name: value}, OtherCommand(program, {name: value}), {})
    assert found.values.get(option) == ours


@pytest.mark.parametrize(
    ("program", "name", "value"),
    [
        ("trl-grpo", "fraction", "0.5"),  # a number of rows here
        ("trl-grpo", "gradient_accumulation_steps", "$STEPS"),
        (
            "verl",
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
            "256",
        ),  # characters
        ("verl", "data.tool_config_path", "tools.yaml"),
        ("verl", "reward_model.sandbox_fusion.max_concurrent", "64"),  # of the whole run
        ("verl", "actor_rollout_ref.rollout.name", "sglang"),
        ("slime", "opd_type", "sglang"),
        ("slime", "dynamic_sampling_filter_path", "a.b"),
        ("areal", "task", "code"),
        ("openrlhf", "made_up", "1"),
    ],
)
def test_a_value_for_a_person(program, name, value):
    """It is neither dropped nor copied as it is."""
    found = convert({name: value}, OtherCommand(program, {name: value}), {})
    assert [*found.look] == [(name,)]
    assert found.values == {}


@pytest.mark.parametrize("program", PROGRAMS)
def test_their_defaults_are_values_that_we_have(program):
    known = defaults()[program].values
    ours = convert(known, OtherCommand(program, {}), {})
    assert ours.look == {}
    assert ours.not_here == {}
    assert len(ours.values) > 5


def test_a_default_that_is_said_is_never_missing():
    """What a program does anyway is no loss, where lightppo has no option for it."""
    theirs = OtherCommand(
        "trl-grpo", {"push_to_hub": False, "vllm_enable_sleep_mode": False, "use_cpu": "False"}
    )
    text = "\n".join(translated(theirs)[0])
    assert "Not here" not in text


def test_rules_read_names_that_are_in_the_tables():
    flags = {option.name for kind in trained_by().values() for option in kind.all_options()}
    for one in RULES:
        titles = [title for title in tables() if title.split()[0] == one.trainer]
        unknown = [
            name
            for name in one.names
            if not translations(name, titles)
            and not translations(f"{name}.x", titles)  # the whole of a part
            and not translations(name.rpartition(".")[0], titles)  # a key of an object
            and name not in flags
        ]
        assert unknown == [], one.trainer


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("value", ["True", "x"])
def test_no_value_is_too_odd(program, value):
    names = {name for title in tables() if title.split()[0] == PROGRAMS[program].trainer
             for row in tables()[title] for name in row.names if "*" not in name and "=" not in name}  # fmt: skip
    lines, _ = translated(OtherCommand(program, dict.fromkeys(sorted(names), value)))
    assert lines[0].startswith("# ")


def test_what_openrlhf_places_is_told(translate):
    _, text, _, config = translate(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p --vllm_num_engines 4 --colocate_all_models "
        "--vllm_sync_backend nccl --vllm_tensor_parallel_size 2 --actor_num_gpus_per_node 8"
    )
    assert "#   colocate_all_models: all models are always on all ranks" in text
    assert "#   vllm_sync_backend: " in text
    assert (config["rollout_engine"], config["tensor_parallel_size"]) == ("vllm", 2)
