"""The reference runs: a name and a command line for each, and the models and data that they start from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        flags: of the script; a later one replaces an earlier one of the same name. ``{tree}`` is the checkout.
        areas: names of the groups of runs that it belongs to.
        ranks: processes.
        script: in examples/.
        first: further flags of a first start, after which the second goes on from its checkpoint.
        same_as: run that must have the same numbers.
        server: a script in examples/ with its options that runs meanwhile; ``{url}`` in the flags is its address.
        forked: whether it can live in a forked process.
    """

    flags: str
    areas: str
    ranks: int = 1
    script: str = "train_ppo.py"
    first: str = ""
    same_as: str = ""
    server: str = ""
    forked: bool = True


# What many runs share; a later flag of the same name wins. All runs work in one folder, each writes below {out}.
SMALL = """--pretrain model --prompt_data prompts.jsonl --prompt_max_len 16 --generate_max_len 10
    --rollout_batch_size 16 --train_batch_size 8 --micro_train_batch_size 4 --micro_rollout_batch_size 8
    --benchmark_steps 2 --num_examine 0 --save_path {out}/model --ckpt_path {out}/ckpt """
SCORED = SMALL + "--reward_fn reward.py --actor_learning_rate 2e-3 "
PPO = SCORED + "--critic_learning_rate 2e-3 "
GROUPS = SCORED + "--advantage_estimator grpo --n_samples_per_prompt 4 --rollout_batch_size 4 "
RECIPE = SCORED + "--config {tree}/examples/recipes/"
GROUP_RECIPE = "--n_samples_per_prompt 4 --rollout_batch_size 4"
GAE = (
    PPO
    + """--save_value_network --enable_ema --ema_beta 0.9 --pretrain_data text.jsonl --ptx_coef 0.5
    --kl_target 0.05 --kl_horizon 100 --value_norm exp --value_norm_beta 0.9 --hf_save_steps 2 """
)
MANY = GROUPS + "--rollout_batch_size 8 --train_batch_size 16 "
FILTERED = GROUPS + "--reward_fn reward.py:binary --dynamic_sampling --gen_batch_size 6 "
TAUGHT = (
    SCORED
    + "--advantage_estimator on_policy_distill --teacher_pretrain other --init_kl_coef 0 --reward_fn None "
)
SFT = """--pretrain model --dataset text.jsonl --output_key label --train_batch_size 8 --micro_train_batch_size 4
    --max_len 32 --max_steps 3 --learning_rate 2e-3 --save_path {out}/model """
VLLM = GROUPS + "--pretrain wide --rollout_engine vllm --max_num_seqs 16 "
SERVED = GROUPS + "--pretrain wide --rollout_engine vllm_server --vllm_server_url {url} "
VLLM_SERVER = """serve_vllm.py --model wide --dtype float32 --kv-cache-memory-bytes 33554432 --max-model-len 64
    --max-num-seqs 1 --block-size 32"""

RUNS = {
    # every recipe
    "recipe-cispo": Run(
        RECIPE + f"cispo.yaml {GROUP_RECIPE} --ppo_n_minibatches 4 --train_batch_size 4", "recipes"
    ),
    "recipe-dapo": Run(
        RECIPE
        + f"dapo.yaml {GROUP_RECIPE} --train_batch_size 4 --overlong_buffer_len 4 --lr_warmup_steps 2",
        "recipes",
    ),
    "recipe-dr_grpo": Run(RECIPE + f"dr_grpo.yaml {GROUP_RECIPE}", "recipes"),
    "recipe-grpo": Run(
        RECIPE + f"grpo.yaml {GROUP_RECIPE} --train_batch_size 16 --benchmark_steps 3", "recipes"
    ),
    "recipe-gspo": Run(
        RECIPE + f"gspo.yaml {GROUP_RECIPE} --ppo_n_minibatches 4 --train_batch_size 4", "recipes"
    ),
    "recipe-ppo": Run(RECIPE + "ppo.yaml --save_value_network --lr_warmup_steps 2", "recipes"),
    "recipe-reinforce_pp": Run(RECIPE + "reinforce_pp.yaml", "recipes"),
    "recipe-reinforce_pp_baseline": Run(
        RECIPE
        + f"reinforce_pp_baseline.yaml {GROUP_RECIPE} --train_batch_size 16 --benchmark_steps 3",
        "recipes",
    ),
    "recipe-remax": Run(RECIPE + "remax.yaml --train_batch_size 16", "recipes"),
    "recipe-rloo": Run(RECIPE + f"rloo.yaml {GROUP_RECIPE}", "recipes"),
    # the whole of PPO: critic, EMA, PTX, adaptive KL, value norm; ZeRO 0 to 3 on 1 and 2 ranks
    "gae-zero0": Run(GAE + "--zero_stage 0", "trainer quick"),
    "gae-zero1-2ranks": Run(GAE + "--zero_stage 1 --gradient_checkpointing", "trainer", ranks=2),
    "gae-packed-2ranks": Run(
        GAE + "--packing_samples --value_norm ma --value_norm_beta None --value_huber_delta 0.5",
        "trainer",
        ranks=2,
    ),
    "gae-zero3": Run(GAE + "--zero_stage 3 --bootstrap_truncated --gamma 0.9", "zero3"),
    "gae-zero3-2ranks": Run(GAE + "--zero_stage 3 --packing_samples", "zero3 quick", ranks=2),
    "gae-bf16": Run(GAE + "--bf16", "trainer models"),
    "freezing": Run(
        PPO
        + "--freezing_actor_steps 1 --critic_zero_stage 0 --critic_pretrain reward --value_clip None",
        "trainer models",
    ),
    "resume-whole": Run(
        GAE + "--rollout_batch_size 8 --save_steps 2 --benchmark_steps 4", "trainer resuming"
    ),
    "resume": Run(
        GAE + "--rollout_batch_size 8 --save_steps 2 --benchmark_steps 4",
        "trainer resuming",
        first="--benchmark_steps 2",
        same_as="resume-whole",
    ),
    "resume-zero3-2ranks": Run(
        MANY
        + "--zero_stage 3 --save_steps 1 --benchmark_steps 3 --reward_running_norm --ref_ema_eta 0.3",
        "zero3 resuming",
        ranks=2,
        first="--benchmark_steps 1",
    ),
    # batches, packing and what is shared in them
    "padded-2ranks": Run(MANY + "--no_balance_ranks --max_epochs 2", "models trainer", ranks=2),
    "packed-groups-2ranks": Run(
        MANY + "--packing_samples --shuffle groups --max_epochs 2", "models trainer quick", ranks=2
    ),
    "packed-not-shared": Run(
        MANY + "--packing_samples --no_share_prompts --shuffle groups", "models"
    ),
    "token-budget": Run(
        MANY + "--max_tokens_per_micro_batch 40 --micro_batch_specs reference=64t actor_train=32t",
        "models trainer",
    ),
    "token-budget-packed-2ranks": Run(
        MANY + "--packing_samples --max_tokens_per_micro_batch 60 --balance_ranks",
        "models trainer",
        ranks=2,
    ),
    "eager-attention": Run(MANY + "--attn_implementation eager --entropy_coef 0.01", "models"),
    "lora": Run(
        GROUPS + "--lora_rank 4 --lora_alpha 8 --lora_dropout 0.1 --pretrain wide", "models"
    ),
    "lora-zero3-2ranks": Run(
        PPO + "--lora_rank 4 --zero_stage 3 --target_modules q_proj v_proj", "zero3", ranks=2
    ),
    "lora-4bit": Run(
        GROUPS + "--lora_rank 4 --load_in_4bit --pretrain wide --packing_samples", "models"
    ),
    # KL: where it counts, its estimators, a reference that moves
    "kl-k1-abs": Run(
        GROUPS + "--use_kl_in_reward --kl_estimator abs --kl_clip 0.1 --init_kl_coef 0.1", "trainer"
    ),
    "kl-loss-k3": Run(GROUPS + "--use_kl_loss --kl_estimator k3+ --init_kl_coef 0.1", "trainer"),
    "kl-loss-full-packed": Run(
        GROUPS + "--use_kl_loss --kl_estimator full --init_kl_coef 0.1 --packing_samples",
        "trainer models",
    ),
    "kl-loss-full-zero3-2ranks": Run(
        GROUPS + "--use_kl_loss --kl_estimator full --init_kl_coef 0.1 --zero_stage 3",
        "zero3",
        ranks=2,
    ),
    "ref-ema": Run(GROUPS + "--ref_ema_eta 0.5 --init_kl_coef 0.1 --benchmark_steps 3", "trainer"),
    "ref-reset": Run(
        GROUPS + "--ref_reset_steps 1 --init_kl_coef 0.1 --ref_pretrain other", "trainer"
    ),
    # estimators that no recipe has
    "reinforce": Run(
        SCORED + "--advantage_estimator reinforce --gamma 0.9 --advantage_clip 1.5", "trainer"
    ),
    "opo": Run(GROUPS + "--advantage_estimator opo --adv_norm --adv_std_unbiased", "trainer"),
    "grpo_passk": Run(
        GROUPS + "--advantage_estimator grpo_passk --reward_fn reward.py:binary", "trainer"
    ),
    "group_adv_norm": Run(GROUPS + "--advantage_estimator group_adv_norm", "trainer"),
    "group_norm": Run(GROUPS + "--advantage_estimator group_norm", "trainer"),
    "gpg": Run(GROUPS + "--advantage_estimator gpg", "trainer"),
    # a teacher: in the advantages, in the loss over all tokens and over its best ones
    "teacher-alone": Run(TAUGHT + "--distill_discount 0.5 --max_epochs 2", "distillation quick"),
    "teacher-beside-2ranks": Run(
        GROUPS + "--teacher_pretrain other --distill_coef 0.3 --packing_samples --temperature 0.8 "
        "--micro_batch_specs teacher=3",
        "distillation",
        ranks=2,
    ),
    "teacher-critic": Run(
        PPO + "--teacher_pretrain other --distill_coef 0.3 --enable_ema --save_steps 1",
        "distillation",
    ),
    "teacher-loss": Run(
        GROUPS + "--teacher_pretrain other --distill_by loss --distill_beta 0.5 --distill_coef 0.3 "
        "--kl_estimator full --use_kl_loss --packing_samples",
        "distillation",
    ),
    "teacher-topk-resume": Run(
        TAUGHT + "--distill_by loss --distill_topk 3 --distill_beta 0.5 --save_steps 1",
        "distillation",
        first="--benchmark_steps 1",
    ),
    "teacher-topk-zero3-2ranks": Run(
        TAUGHT + "--distill_by loss --distill_topk 3 --zero_stage 3 --ref_offload "
        "--micro_batch_specs teacher=40t",
        "distillation",
        ranks=2,
    ),
    # losses that no recipe has, and what goes with all
    "dual-clip": Run(
        PPO + "--dual_clip 1.5 --eps_clip_low 0.01 --eps_clip_high 0.02 --max_epochs 2", "trainer"
    ),
    "gmpo": Run(GROUPS + "--policy_loss gmpo", "trainer"),
    "sapo": Run(GROUPS + "--policy_loss sapo --loss_agg_mode seq-mean-token-mean", "trainer"),
    "clip_cov": Run(
        GROUPS + "--policy_loss clip_cov --clip_cov_ratio 0.2 --clip_cov_low 0.1", "trainer"
    ),
    "kl_cov-2ranks": Run(GROUPS + "--policy_loss kl_cov --kl_cov_ratio 0.2", "trainer", ranks=2),
    "cpgd": Run(GROUPS + "--advantage_estimator cpgd --cpgd_drift_coef 0.1", "trainer"),
    "high-entropy": Run(GROUPS + "--high_entropy_token_ratio 0.3 --entropy_coef 0.01", "trainer"),
    "early-stop-2ranks": Run(
        GROUPS + "--early_stop_kl 1e-3 --early_stop_imp_ratio 1.05 --actor_learning_rate 2e-2",
        "trainer",
        ranks=2,
    ),
    "correction-tis": Run(
        GROUPS + "--rollout_correction tis --old_log_probs forward --bf16 --correction_high 1.001",
        "trainer",
    ),
    "correction-icepop": Run(
        GROUPS
        + "--rollout_correction icepop --old_log_probs forward --bf16 --correction_low 0.999 "
        "--correction_high 1.001 --correction_veto 0.9 --correction_batch_norm",
        "trainer",
    ),
    "correction-decoupled": Run(
        GROUPS + "--rollout_correction decoupled --bf16 --zero_stage 1", "trainer"
    ),
    # sampling and which groups are trained on
    "dynamic-surplus": Run(FILTERED + "--benchmark_steps 3", "sampling quick"),
    "dynamic-range-2ranks": Run(
        FILTERED
        + "--filter_metric acc --filter_range 0.1 0.9 --max_num_gen_batches 2 --on_exhausted reuse",
        "sampling",
        ranks=2,
    ),
    "best-of-n": Run(GROUPS + "--generation_size 6 --best_of_n_tie longer", "sampling"),
    "sampler-flags": Run(
        GROUPS
        + "--temperature 0.7 --top_p 0.9 --top_k 20 --repetition_penalty 1.2 --min_new_tokens 2 --stop 1 7+ "
        "--stop_token_ids 9 --bad_words 5 --fire_sampling",
        "sampling",
    ),
    "overlong": Run(
        GROUPS
        + "--mask_too_long --overlong_buffer_len 3 --reward_scaling 2 --reward_bias 0.1 --max_reward_clip 1",
        "sampling rewards",
    ),
    "evaluation": Run(
        GROUPS
        + "--eval_data held_out.jsonl --eval_steps 1 --eval_n_samples 3 --eval_temperature 0.8 "
        "--best_metric eval/reward",
        "sampling trainer",
    ),
    "prompt-filter": Run(
        GROUPS
        + "--max_samples 8 --num_episodes 3 --dataset_filter_threshold 0.1 --dataset_max_filter_percentage 0.3 "
        "--benchmark_steps 4",
        "sampling",
    ),
    # rewards
    "reward-model": Run(
        PPO + "--reward_fn None --reward_pretrain reward --normalize_reward", "rewards models quick"
    ),
    "reward-models-zero3-2ranks": Run(
        GROUPS
        + "--reward_pretrain reward reward2 --reward_fn reward.py:combine --zero_stage 3 --packing_samples",
        "rewards zero3",
        ranks=2,
    ),
    "reward-dense": Run(PPO + "--reward_fn reward.py:dense --use_dense_reward", "rewards"),
    "reward-prime": Run(
        GROUPS
        + "--reward_fn reward.py:compute_score --reward_manager prime --reward_timeout 60 --reward_workers 2",
        "rewards",
        forked=False,  # its pool of processes hangs in one
    ),
    "reward-async": Run(GROUPS + "--reward_fn reward.py:compute_score --async_rewards", "rewards"),
    "reward-sources": Run(
        GROUPS
        + "--pretrain words --reward_source math=1 format=0.5 function=0.3 --check_xml_format --reward_minimum 0 "
        "--prompt_data answers.jsonl --generate_max_len 3",
        "rewards",
    ),
    "reward-code": Run(
        GROUPS
        + "--pretrain words --reward_fn None --reward_source code --code_score share --prompt_data programs.jsonl "
        "--generate_max_len 2",
        "rewards",
    ),
    "reward-server-2ranks": Run(
        GROUPS + "--reward_fn None --remote_rm_url {url}/get_reward",
        "rewards",
        ranks=2,
        server="serve_reward_model.py --reward_pretrain reward",
    ),
    # supervised
    "sft": Run(SFT, "sft models quick", script="train_sft.py"),
    "sft-lora-zero3-2ranks": Run(
        SFT + "--lora_rank 4 --zero_stage 3", "sft zero3", ranks=2, script="train_sft.py"
    ),
    # vLLM
    "vllm": Run(VLLM, "vllm", forked=False),
    "vllm-zero3-2ranks": Run(
        VLLM + "--zero_stage 3 --rollout_correction tis", "vllm", ranks=2, forked=False
    ),
    "vllm-server": Run(SERVED, "vllm", server=VLLM_SERVER, forked=False),
    "vllm-server-collective-2ranks": Run(
        SERVED + "--zero_stage 3 --vllm_server_sync collective",
        "vllm",
        ranks=2,
        server=VLLM_SERVER,
        forked=False,
    ),
}


# -- what they start from ----------------------------------------------------------------------------------------------

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
WORDS = (  # as one token each: what verifiers look for
    "```python\nprint(sum(map(int, input().split())))\n```\n",
    "```python\nprint(4)\n```\n",
    "```python\n1 / 0\n```\n",
    "<think>7</think><answer>3</answer>",
    "<think>7</think><answer>4</answer>",
    "<answer>3</answer>",
)
REWARD = """
def reward_func(queries, prompts, labels, responses):
    return [sum(map(ord, text)) % 97 / 97 + (text[:1] == label[:1]) for text, label in zip(responses, labels)]


def binary(queries, prompts, labels, responses):
    right = [float(sum(map(ord, text)) % 3 == 0) for text in responses]
    return {"rewards": right, "scores": right, "extra_logs": {"acc": right, "length": [len(t) for t in responses]}}


def dense(queries, prompts, labels, response_ids):
    tokens = [[(i % 7 - 3) / 10 for i in ids] for ids in response_ids]
    return {"rewards": [sum(scores) for scores in tokens], "token_scores": tokens}


def combine(scores):
    return 0.25 * scores[0] + 0.75 * scores[1]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(map(ord, solution_str)) % 31 / 31, "digits": sum(map(str.isdigit, solution_str))}
"""


def make_assets(folder: Path) -> None:
    """Tiny random models with a tokenizer of one token per character, prompts, texts and reward functions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()

    def save(
        name: str, model_type: Any, seed: int, words: tuple[str, ...] = (), **changes: Any
    ) -> None:
        vocabulary = {
            token: i
            for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS, *words])
        }
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        backend.decoder = decoders.Fuse()
        special = {
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
        }
        PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder / name)

        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        sizes |= {
            "vocab_size": len(vocabulary),
            "num_hidden_layers": 2,
            "max_position_embeddings": 64,
        }
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = LlamaConfig(**{**sizes, **ids, "initializer_range": 0.2, **changes})
        config.mean, config.std = 0.5, 2.0  # of a reward model's scores, for --normalize_reward
        torch.manual_seed(seed)
        model = model_type(config)
        if model_type is LlamaForCausalLM:  # some contexts end a response, and ask for a word
            with torch.no_grad():
                model.lm_head.weight[
                    [2, *range(len(vocabulary) - len(words), len(vocabulary))]
                ] *= 3
        model.save_pretrained(folder / name)

    save("model", LlamaForCausalLM, 0)
    save("other", LlamaForCausalLM, 1)
    save("words", LlamaForCausalLM, 2, WORDS)
    # Heads of 32, the smallest of vLLM's attention on a CPU; rows of whole blocks of 4 bits.
    save("wide", LlamaForCausalLM, 3, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    save("reward", LlamaForSequenceClassification, 4, num_labels=1)
    save("reward2", LlamaForSequenceClassification, 5, num_labels=1)

    sums = [(a, a * 37 % 100) for a in range(40)]
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a, b in sums]
    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    files = {
        "prompts": rows[:32],
        "held_out": rows[32:36],
        "text": [*rows[36:], *rows[:16]],
        "programs": [row | {"label": tests} for row in rows],
        "answers": [row | {"label": "3"} for row in rows],
    }
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "reward.py").write_text(REWARD)
