"""What a user may have meant by a name that does not exist: a table of what people mean, then similar names."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable

BOUND = 0.5  # share of words that two names have in common, below which nothing is suggested
MOST = 3  # names in one suggestion; more of them are no help

_DAPO = ": DAPO is a recipe of several options: --config examples/recipes/dapo.yaml"
_DEVICE = (
    ": a GPU is used where there is one; CUDA_VISIBLE_DEVICES chooses it, and torchrun or deepspeed "
    "starts one process for each"
)

# What kind of name → lines of "names people write | an answer | another answer". The first answer counts whose flags,
# or names, exist where the mistake was made. An answer that begins with a colon is a sentence, and always counts.
_MEANT = {
    "flag": f"""
model model_path model_name base_model policy policy_model actor actor_model hf_model | --pretrain
reward_model rm rm_path reward_model_path reward_model_name | --reward_pretrain
reward reward_func reward_function reward_file reward_funcs | --reward_fn
rm_url reward_url reward_server remote_rm | --remote_rm_url
ref ref_model reference reference_model | --ref_pretrain
critic critic_model value_model | --critic_pretrain
teacher teacher_model | --teacher_pretrain
tokenizer tokenizer_name | --tokenizer_path
epochs epoch n_epochs num_epochs num_train_epochs train_epochs num_episodes episodes | --num_episodes | --num_epochs
max_epochs | --num_epochs
steps num_steps train_steps total_steps max_steps | --total_training_steps | --max_steps
training_steps total_training_steps | --total_training_steps | --max_steps
n samples n_samples num_samples samples_per_prompt | --n_samples_per_prompt
num_generations num_return_sequences n_rollouts | --n_samples_per_prompt
advantage adv adv_estimator advantages estimator | --advantage_estimator
algo algorithm alg method rl_algorithm | --advantage_estimator | --preference_loss
loss loss_type loss_fn | --policy_loss | --preference_loss
max_length max_len max_seq_len max_seq_length max_tokens | --prompt_max_len --generate_max_len | --max_len
max_sequence_length seq_len cutoff_len | --prompt_max_len --generate_max_len | --max_len
prompt_max_len max_prompt_len max_prompt_length prompt_length prompt_len max_input_length | --prompt_max_len | --max_len
generate_max_len max_new_tokens max_completion_length | --generate_max_len | --max_len
response_length max_response_length gen_len | --generate_max_len | --max_len
data dataset dataset_name train_data train_dataset train_file data_path | --prompt_data | --dataset
prompts prompt_data prompt_file | --prompt_data | --dataset
eval_data eval_dataset eval_file test_data test_file val_data validation_data valid_data | --eval_data | --eval_dataset
split prompt_split dataset_split | --prompt_split | --dataset_split
prompt_key prompt_column input_column question_key | --input_key
label label_column answer_key answer_column target_key ground_truth_key | --label_key
lr learning_rate actor_lr policy_lr actor_learning_rate | --actor_learning_rate | --learning_rate
critic_lr value_lr | --critic_learning_rate
batch_size bs batch global_batch_size train_bs | --train_batch_size
micro_batch_size per_device_batch_size per_device_train_batch_size micro_bs | --micro_train_batch_size
output output_dir out out_dir save save_dir | --save_path | --out | --output
ckpt ckpt_dir checkpoint_dir checkpoint_path | --ckpt_path
resume_from resume_from_checkpoint resume_path | --resume
kl kl_coef kl_coeff kl_weight kl_beta | --init_kl_coef
clip clip_range cliprange clip_eps clip_epsilon clip_ratio epsilon | --eps_clip
weight_decay wd | --l2
warmup warmup_ratio | --lr_warmup_ratio
warmup_steps | --lr_warmup_steps
grad_clip clip_grad gradient_clipping max_grad_norm | --max_norm
dtype precision mixed_precision | --bf16 --fp16
bfloat16 | --bf16
float16 half | --fp16
lora lora_r rank | --lora_rank
zero stage deepspeed_stage | --zero_stage
vllm use_vllm | --rollout_engine vllm
engine backend inference_engine | --rollout_engine
tp tp_size tensor_parallel | --tensor_parallel_size
chat_template template use_chat_template | --apply_chat_template
temp | --temperature
stop_words stop_strings stop_sequences | --stop
wandb | --use_wandb
tensorboard tensorboard_dir | --use_tensorboard
project wandb_name run_name | --wandb_project --wandb_run_name
verbose log_level | --debug
device devices cuda gpu gpus n_gpus num_gpus gpu_ids nodes num_nodes nnodes | {_DEVICE}
""",
    "command": f"""
train training run start rlhf | ppo sft | ppo
finetune fine-tune supervised instruct | sft
reward reward-model reward_model train-rm train_rm | rm
train_ppo train-ppo | ppo
train_sft train-sft | sft
train_dpo train-dpo preference | dpo
evaluate evaluation validate test score benchmark | eval
dapo | {_DAPO}, for lightppo ppo
help usage commands | --help
version | --version
plot plots show summary tensorboard | report
monitor tail status | watch
talk generate infer inference play | chat
export to-hf to_hf save | convert
merge-lora merge_lora lora | merge
serve server vllm | serve-reward serve-vllm
reward-server reward_server serve-rm serve_rm | serve-reward
vram gpu estimate | memory
dataset datasets tokenize | data
compare | diff
""",
    "argument": """
pretrain model model_path model_name name | MODEL | ADAPTER | CHECKPOINT
checkpoint ckpt ckpt_path ckpt_dir save_path path run | CHECKPOINT | RUN | MODEL | ADAPTER
runs run_dir folder dir logdir log_dir | RUN
adapter lora lora_path peft | ADAPTER
out output output_dir out_dir to | OUT
""",
    "advantage_estimator": f"""
ppo a2c actor_critic critic vanilla | gae
dapo | {_DAPO}
dpo | : that is a command of its own: lightppo dpo
sft | : that is a command of its own: lightppo sft
""",
    "policy_loss": f"""
dapo | {_DAPO}
dpo | : that is a command of its own: lightppo dpo
clip clipped vanilla surrogate | ppo
""",
    "reward_fn_style": """
openrlhf lightrft queries_prompts_labels | queries
naive batch prime | : that is a --reward_manager
""",
    "rollout_engine": """
transformers huggingface native torch generate | hf
server vllm-server remote | vllm_server
""",
    "attn_implementation": """
flash flash_attn flash_attention fa fa2 flash2 | flash_attention_2
""",
}


def nearest(name: str, known: Iterable[str], kind: str = "") -> str:
    """What an unknown name may have meant, such as ``" (did you mean 'x'?)"``; an empty string if nothing is close.

    Args:
        name: as the user wrote it.
        known: the names that exist.
        kind: what the names are: ``"flag"``, ``"command"``, or the option whose values they are.
    """
    return meant(name, known := list(known), kind) or _question(similar(name, known))


def meant(name: str, known: Collection[str], kind: str) -> str:
    """What the table of this kind says about the name, as the end of a message; an empty string if nothing."""
    answer = answer_of(name, known, kind)
    if answer.startswith(":"):
        return answer
    words = answer.split()
    return _question(words if all(word in known for word in words) else [answer])


def answer_of(name: str, known: Collection[str], kind: str) -> str:
    """The table's answer: names that are known, with a space between, a flag and its value, or ``": a sentence"``."""
    for answer in _table(kind).get(name.lstrip("-").lower().replace(" ", "_"), ()):
        first, *others = answer.split()
        is_flag_with_value = first.startswith("--") and not any(
            word.startswith("--") for word in others
        )
        if first == ":" or (
            first in known and (is_flag_with_value or all(word in known for word in others))
        ):
            return answer
    return ""


def similar(name: str, known: Iterable[str]) -> list[str]:
    """The known names that share the most words with this one, mistyped ones too; none below :data:`BOUND`."""
    scores = {other: likeness(name, other) for other in known}
    best = max(scores.values(), default=0.0)
    found = [other for other, score in scores.items() if score == best]
    return found if best >= BOUND and len(found) <= MOST else []


def likeness(name: str, other: str) -> float:
    """From 0 to 1: the share of whole words that two names have in common; a mistyped word counts nine tenths."""
    ours, theirs = _words(name), _words(other)
    whole, whole_other = "".join(ours), "".join(theirs)
    if whole == whole_other:
        return 1.0
    left, common = list(theirs), 0.0
    for word in ours:
        closest = max(left, key=lambda candidate: _word_likeness(word, candidate), default="")
        if worth := _word_likeness(word, closest):
            common += worth
            left.remove(closest)
    of_words = common / (len(ours) + len(theirs) - common) if common else 0.0
    is_one_letter_off = _is_typo(whole, whole_other) and typing_errors(whole, whole_other) == 1
    return max(of_words, 0.9 if is_one_letter_off else 0.0)


def typing_errors(typed: str, known: str) -> int:
    """The fewest letters to add, drop, replace, or swap with their neighbour, that make ``b`` of ``a``."""
    before: list[int] = []
    row = list(range(len(known) + 1))
    for i, letter in enumerate(typed, start=1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(known, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            is_swapped = i > 1 and j > 1 and letter == known[j - 2] and other == typed[i - 2]
            if is_swapped:
                row[j] = min(row[j], earlier[j - 2] + 1)
    return row[-1]


def _word_likeness(typed: str, known: str) -> float:
    return 1.0 if typed == known else 0.9 if _is_typo(typed, known) else 0.0


def _is_typo(typed: str, known: str) -> bool:
    """One mistake in a word of three letters or more, two from six on."""
    longest = max(len(typed), len(known))
    allowed = 0 if min(len(typed), len(known)) < 3 else 1 if longest < 6 else 2
    return abs(len(typed) - len(known)) <= allowed and typing_errors(typed, known) <= allowed


_SAME = {"length": "len", "maximum": "max", "number": "num", "coefficient": "coef", "coeff": "coef"}


def _words(name: str) -> list[str]:
    found = re.split(r"[-_.\s]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.strip("-_ ")).lower())
    return [_SAME.get(word, word) for word in found]


def _question(names: Collection[str]) -> str:
    return f" (did you mean {' or '.join(map(repr, names))}?)" if names else ""


@functools.cache
def _table(kind: str) -> dict[str, list[str]]:
    """Name in small letters → answers."""
    lines = [line.split(" | ") for line in _MEANT.get(kind, "").strip().splitlines()]
    return {name: answers for names, *answers in lines for name in names.split()}
