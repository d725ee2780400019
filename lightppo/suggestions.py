"""What a user may have meant by a name that does not exist: a table of what people mean, then similar names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache, partial

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
model_id model_dir model_file hf_model_path pretrained pretrained_model pretrained_path load_model | --pretrain
pretrain_path base_model_path policy_path actor_path actor_pretrain initial_model init_model start_model | --pretrain
pretrained_model_name_or_path checkpoint_model actor_checkpoint sft_model sft_path sft_checkpoint | --pretrain
enable_thinking thinking no_think thinking_mode template_kwargs | --chat_template_kwargs
model_type model_class architecture | : the config in the checkpoint says which model it is
reward_model rm rm_path reward_model_path reward_model_name | --reward_pretrain
rm_model rm_pretrain rm_checkpoint reward_models reward_model_dir reward_checkpoint | --reward_pretrain
reward reward_func reward_function reward_file reward_funcs reward_functions reward_path | --reward_fn
reward_script reward_func_path reward_fn_path reward_function_path custom_reward custom_reward_function | --reward_fn
rm_url reward_url reward_server remote_rm rm_server reward_server_url reward_api reward_api_url | --remote_rm_url
api_url | --remote_rm_url
judge judge_model judge_url llm_judge | --reward_fn --remote_rm_url
reward_type verifier verifiers verifier_type rule_based_reward rm_type scorer grader | --reward_source
math_reward math_verify accuracy_reward | --reward_source math
code_reward sandbox code_execution | --reward_source code
format_reward format think_format_reward | --reward_source format
reward_weight reward_weights reward_mix | --reward_source
ref ref_model reference reference_model | --ref_pretrain
ref_path ref_model_path reference_path reference_model_path ref_checkpoint | --ref_pretrain
critic critic_model value_model | --critic_pretrain
critic_path critic_model_path value_model_path value_pretrain critic_checkpoint use_critic | --critic_pretrain
no_critic | --advantage_estimator
teacher teacher_model teacher_path teacher_model_path teacher_checkpoint | --teacher_pretrain
teacher_server teacher_server_url | --teacher_url
tokenizer tokenizer_name tokenizer_file tok tok_path tokenizer_name_or_path tokenizer_id | --tokenizer_path
trust_remote remote_code | --trust_remote_code
epochs epoch n_epochs num_epochs num_train_epochs train_epochs num_episodes episodes | --num_episodes | --num_epochs
total_epochs epoch_num train_epoch n_epoch num_epoch passes n_passes num_passes | --num_episodes | --num_epochs
max_epochs max_epoch max_train_epochs | --num_epochs
ppo_epoch ppo_epochs n_ppo_epochs update_epochs inner_epochs epochs_per_rollout k_epochs mu reuse | --max_epochs
steps num_steps train_steps total_steps max_steps | --total_training_steps | --max_steps
training_steps total_training_steps | --total_training_steps | --max_steps
n_steps iterations num_iters max_iters n_iter n_iters total_iterations | --total_training_steps | --max_steps
num_updates n_updates | --total_training_steps | --max_steps
num_train_steps max_train_steps max_training_steps train_iters | --total_training_steps | --max_steps
num_training_steps | --total_training_steps | --max_steps
total_timesteps rollouts num_rollouts n_rollouts_total num_steps_total | --total_training_steps | --max_steps
max_iterations | --total_training_steps | --max_steps
n samples n_samples num_samples samples_per_prompt n_sample | --n_samples_per_prompt
num_generations num_return_sequences n_rollouts num_return | --n_samples_per_prompt
samples_per_group group_size num_group group n_responses num_responses responses_per_prompt | --n_samples_per_prompt
rollouts_per_prompt rollouts_per_example rollout_n n_rollout n_generations | --n_samples_per_prompt
completions_per_prompt | --n_samples_per_prompt
n_completions num_completions num_samples_per_prompt n_samples_per_query | --n_samples_per_prompt
num_return_sequences_per_prompt | --n_samples_per_prompt
best_of_n best_of bon | --generation_size
advantage adv adv_estimator advantages estimator | --advantage_estimator
algo algorithm alg method rl_algorithm | --advantage_estimator | --preference_loss
ppo use_ppo | --advantage_estimator gae
grpo use_grpo | --advantage_estimator grpo
rloo use_rloo | --advantage_estimator rloo
gspo use_gspo | --policy_loss gspo
cispo use_cispo | --policy_loss cispo
dapo use_dapo | {_DAPO}
drop_std no_std use_std std_norm norm_by_std norm_adv_by_std_in_grpo | --group_std_norm
loss loss_type loss_fn loss_func loss_function | --policy_loss | --preference_loss
policy_loss_type pg_loss surrogate_loss | --policy_loss
loss_agg loss_aggregation loss_reduction agg_mode | --loss_agg_mode
max_length max_len max_seq_len max_seq_length max_tokens | --prompt_max_len --generate_max_len | --max_len
max_sequence_length seq_len cutoff_len seq_length sequence_length | --prompt_max_len --generate_max_len | --max_len
context_length context_len max_context_length max_context_len | --prompt_max_len --generate_max_len | --max_len
max_total_length | --prompt_max_len --generate_max_len | --max_len
prompt_max_len max_prompt_len max_prompt_length prompt_length prompt_len | --prompt_max_len | --max_len
max_input_length | --prompt_max_len | --max_len
max_input_len max_prompt_tokens max_prompt_size prompt_tokens max_query_length | --prompt_max_len | --max_len
input_max_len | --prompt_max_len | --max_len
generate_max_len max_new_tokens max_completion_length | --generate_max_len | --max_len
response_length max_response_length gen_len | --generate_max_len | --max_len
max_new_token new_tokens max_gen_len max_generation_length max_generate_len max_response_len | --generate_max_len
response_max_len response_len output_len output_length max_output_tokens max_output_len | --generate_max_len
max_completion_tokens max_completion_len completion_length gen_max_len generate_len | --generate_max_len
generation_length | --generate_max_len
generation_max_length gen_length max_gen_tokens max_generated_tokens | --generate_max_len
data dataset dataset_name train_data train_dataset train_file data_path | --prompt_data | --dataset
data_dir data_file data_files dataset_path dataset_dir dataset_file input_file input_data | --prompt_data | --dataset
jsonl | --prompt_data | --dataset
train_files train_path train_set train_dir training_data training_file training_dataset | --prompt_data | --dataset
train_jsonl | --prompt_data | --dataset
prompts prompt_data prompt_file | --prompt_data | --dataset
prompts_file prompt_path prompts_path prompt_dataset prompt_dir train_prompts prompts_data | --prompt_data | --dataset
eval_data eval_dataset eval_file test_data test_file val_data validation_data | --eval_data | --eval_dataset
valid_data | --eval_data | --eval_dataset
val_file val_files val_dataset val_path val_set eval_files eval_path eval_set | --eval_data | --eval_dataset
valid_file | --eval_data | --eval_dataset
eval_prompts eval_prompt_data test_files test_path test_dataset test_set | --eval_data | --eval_dataset
validation_file validation_files validation_dataset validation_path dev_data dev_file | --eval_data | --eval_dataset
split prompt_split dataset_split train_split | --prompt_split | --dataset_split
val_split validation_split test_split | --eval_split
prompt_key prompt_column input_column question_key | --input_key
prompt_field prompt_col text_column text_field text_key input_field question_column question_field | --input_key
query_key query_column messages_key messages_column chat_key instruction_key | --input_key
label label_column answer_key answer_column target_key ground_truth_key | --label_key
label_field answer_field target_column target_field gt_key gt_column solution_key reward_key | --label_key
response_key response_column completion_key completion_column | --output_key
max_rows max_train_samples max_examples num_examples n_rows num_rows limit num_prompts | --max_samples
max_prompts subset subset_size max_train_examples train_samples | --max_samples
eval_limit max_eval_samples max_eval_examples num_eval_examples max_val_samples val_max_samples | --eval_max_samples
shuffle_data shuffle_prompts shuffle_dataset no_shuffle dataset_shuffle | --data_shuffle
random_seed rng_seed seed_data manual_seed random_state | --seed
system system_message sys_prompt | --system_prompt
num_proc n_workers num_workers dataloader_workers data_workers preprocessing_num_workers | --data_num_workers
tokenize_workers | --data_num_workers
lr learning_rate actor_lr policy_lr actor_learning_rate | --actor_learning_rate | --learning_rate
lr_actor lr_policy policy_learning_rate learning_rate_actor base_lr peak_lr | --actor_learning_rate | --learning_rate
max_lr | --actor_learning_rate | --learning_rate
critic_lr value_lr lr_critic lr_value value_learning_rate critic_learning | --critic_learning_rate
learning_rate_critic vf_lr | --critic_learning_rate
lr_schedule lr_scheduler_type scheduler schedule lr_decay lr_decay_style decay | --lr_scheduler
learning_rate_schedule lr_schedule_type anneal_lr | --lr_scheduler
min_lr lr_min min_learning_rate final_lr end_lr | --min_lr_ratio
batch_size bs batch global_batch_size train_bs | --train_batch_size
batchsize batch_sz global_bs train_batch ppo_batch_size optim_batch_size minibatch_size | --train_batch_size
mini_batch_size | --train_batch_size
mini_bs ppo_mini_batch_size sgd_batch_size gradient_batch_size | --train_batch_size
grad_accum grad_acc grad_accum_steps gradient_accumulation gradient_accumulation_steps | --train_batch_size
accumulate_grad_batches accum_steps accumulation_steps grad_acc_steps accumulation | --train_batch_size
rollout_bs rollout_batch prompts_per_step prompts_per_rollout num_prompts_per_step | --rollout_batch_size
generation_batch_size sampling_batch_size prompt_batch_size prompts_per_batch | --rollout_batch_size
mini_batches num_mini_batches num_minibatches n_mini_batches minibatches nminibatches | --ppo_n_minibatches
micro_batch_size per_device_batch_size per_device_train_batch_size micro_bs | --micro_train_batch_size
micro_batch micro_batchsize microbatch_size mbs per_gpu_batch_size per_gpu_train_batch_size | --micro_train_batch_size
device_batch_size device_train_batch_size ppo_micro_batch_size local_batch_size | --micro_train_batch_size
batch_size_per_gpu | --micro_train_batch_size
eval_batch_size eval_bs val_batch_size test_batch_size | --micro_rollout_batch_size | --micro_train_batch_size
per_device_eval_batch_size | --micro_rollout_batch_size | --micro_train_batch_size
token_budget tokens_per_batch max_tokens_per_batch max_tokens_per_gpu tokens_per_gpu | --max_tokens_per_micro_batch
output output_dir out out_dir save save_dir | --save_path | --out | --output
output_path output_folder save_folder save_to result_dir results_dir exp_dir experiment_dir | --save_path | --out
model_save_path save_model_path save_model work_dir workdir run_dir run_path dump_dir | --save_path
logdir log_dir log_path logging_dir | --save_path --use_tensorboard
ckpt ckpt_dir checkpoint_dir checkpoint_path | --ckpt_path
ckpt_folder checkpoint_folder checkpoints checkpoints_dir ckpts | --ckpt_path
resume_from resume_from_checkpoint resume_path | --resume
resume_ckpt resume_from_ckpt load_ckpt load_checkpoint_path from_checkpoint restore restore_from | --resume
continue continue_from continue_training resume_training auto_resume no_resume init_checkpoint | --resume
save_interval save_freq save_every save_frequency save_iters save_every_steps saving_steps | --save_steps
checkpoint_interval checkpoint_every checkpoint_steps checkpoint_freq checkpointing_steps | --save_steps
ckpt_interval ckpt_every ckpt_steps ckpt_freq save_strategy | --save_steps
save_total_limit max_checkpoints keep_checkpoints keep_last keep_last_n keep_ckpts num_checkpoints | --max_ckpt_num
max_ckpts | --max_ckpt_num
save_hf hf_save export_hf save_hf_model save_hf_format export_hf_model | --save_hf_ckpt
hf_interval hf_save_interval hf_save_freq export_interval export_steps | --hf_save_steps
save_merged merge_lora | : LoRA is merged in what a run writes at its end; the folder adapter has it alone
eval_interval eval_freq eval_every eval_frequency eval_every_steps evaluate_every evaluation_steps | --eval_steps
test_freq test_interval val_freq val_interval val_steps val_every validation_steps validation_interval | --eval_steps
eval_strategy evaluation_strategy eval_iters | --eval_steps
eval_on_start eval_at_start eval_before_train eval_before_training validate_before_train | --val_before_train
eval_only evaluate_only test_only | --val_only
eval_samples n_eval_samples num_eval_samples eval_n eval_num_samples pass_k pass_at_k eval_k | --eval_n_samples
eval_temp val_temperature test_temperature | --eval_temperature
eval_max_len eval_max_new_tokens eval_generate_max_len | --generate_max_len
best_model save_best metric_for_best metric_for_best_model best_metric_key load_best_model | --best_metric
patience early_stopping early_stopping_patience | : a run ends with its steps; --best_metric keeps the best model
log_interval log_every log_freq log_steps logging_freq logging_interval print_every print_freq | --logging_steps
report_every | --logging_steps
kl kl_coef kl_coeff kl_weight kl_beta | --init_kl_coef
kl_coefficient kl_loss_coef kl_penalty_coef kl_ctl kl_control kl_reward_coef init_kl no_kl kl_factor | --init_kl_coef
kl_loss kl_in_loss use_kl | --use_kl_loss
kl_reward kl_in_reward | --use_kl_in_reward
kl_type kl_loss_type kl_penalty kl_penalty_type kl_approx kl_method | --kl_estimator
kl_max max_kl kl_early_stop kl_threshold | --early_stop_kl
adaptive_kl target_kl adap_kl_ctrl kl_adaptive | --kl_target
clip clip_range cliprange clip_eps clip_epsilon clip_ratio epsilon | --eps_clip
clip_param clip_coef ppo_clip ppo_epsilon eps_clip_ratio ratio_clip policy_clip clip_threshold | --eps_clip
clip_low eps_low epsilon_low clip_ratio_low clip_eps_low clip_range_low eps_min | --eps_clip_low
clip_high eps_high epsilon_high clip_ratio_high clip_eps_high clip_range_high clip_higher eps_max | --eps_clip_high
clip_ratio_c clip_c dual_clip_c c_clip | --dual_clip
vf_clip value_clip_range clip_value clip_vloss value_clipping cliprange_value clip_range_vf | --value_clip
vf_clip_param | --value_clip
vf_coef value_coef value_loss_coef vf_loss_coef critic_coef critic_loss_coef | --critic_learning_rate
discount discount_factor gamma_discount discounting | --gamma
gae_lambda gae_lam lam lambda lambda_gae lmbda td_lambda gae lambda_ | --lambd
ent_coef entropy entropy_bonus entropy_weight entropy_reg entropy_beta entropy_loss_coef entropy_loss | --entropy_coef
entropy_coeff entropy_coefficient ent_weight | --entropy_coef
whiten whiten_advantages whiten_adv adv_whiten adv_whitening norm_adv normalize_adv norm_advantages | --adv_norm
normalize_advantage normalize_advantages advantage_normalization adv_normalization advantage_norm | --adv_norm
adv_clip clip_adv clip_advantage max_advantage | --advantage_clip
normalize_rewards reward_norm norm_reward reward_normalization | --normalize_reward --reward_running_norm
standardize_rewards | --normalize_reward --reward_running_norm
whiten_rewards scale_rewards normalize_scores | --reward_running_norm
reward_scale reward_coef reward_scaling_factor reward_multiplier rew_scale score_scale | --reward_scaling
reward_clip clip_reward clip_rewards reward_clipping reward_clip_value max_reward rew_clip | --reward_clip_range
score_clip | --reward_clip_range
reward_shift reward_offset reward_baseline | --reward_bias
length_penalty overlong_penalty soft_overlong soft_overlong_punishment overlong_buffer | --overlong_buffer_len
mask_truncated mask_overlong overlong_filter overlong_filtering filter_truncated | --mask_too_long
mask_truncated_completions | --mask_too_long
truncation_penalty no_eos_penalty missing_eos_penalty eos_penalty | --stop_properly_penalty
dynamic_filter dynamic_filtering filter_groups filter_zero_std zero_std_filter oversampling | --dynamic_sampling
skip_zero_std remove_zero_std drop_zero_std group_filter | --dynamic_sampling
accuracy_lower_bound accuracy_upper_bound accuracy_range difficulty_range | --filter_range
over_sampling_batch_size oversampling_batch_size | --gen_batch_size
tis importance_sampling is_correction truncated_is off_policy_correction importance_correction | --rollout_correction
icepop use_icepop | --rollout_correction icepop
async_train async_training train_async asynchronous async_enable one_step_off | --max_staleness
one_step_off_policy off_policy_steps steps_off_policy max_off_policy_steps | --max_staleness
staleness max_head_offpolicyness max_async_level async_level staleness_threshold | --max_staleness
critic_warmup critic_warmup_steps value_warmup value_pretrain_steps freeze_actor | --freezing_actor_steps
freeze_actor_steps | --freezing_actor_steps
actor_freeze_steps freeze_steps critic_only_steps | --freezing_actor_steps
ema use_ema moving_average | --enable_ema
ema_decay ema_alpha ema_momentum | --ema_beta
ref_update sync_ref update_ref ref_sync_steps ref_update_steps ref_update_interval reset_ref | --ref_reset_steps
weight_decay wd wdecay weight_decay_rate decay_rate | --l2
warmup warmup_ratio warm_up warmup_proportion warmup_fraction warm_up_ratio | --lr_warmup_ratio
warmup_steps warm_up_steps warmup_step warmup_iters num_warmup_steps n_warmup_steps | --lr_warmup_steps
beta1 beta2 betas adam_beta adam_beta1 adam_beta2 adam_b1 adam_b2 | --adam_betas
optim optimizer adamw adam adam_epsilon adam_eps | : AdamW alone; its options are --adam_betas, --l2 and --max_norm
optimizer_type | : AdamW alone; its options are --adam_betas, --l2 and --max_norm
grad_clip clip_grad gradient_clipping max_grad_norm | --max_norm
max_grad grad_norm gradient_clip gradient_clip_val clip_grad_norm grad_clip_norm clip_norm | --max_norm
max_gradient_norm | --max_norm
dtype precision mixed_precision | --bf16 --fp16
torch_dtype data_type model_dtype param_dtype train_dtype amp half_precision mixed use_amp | --bf16 --fp16
bfloat16 bf use_bf16 bfloat | --bf16
float16 half use_fp16 | --fp16
fp32 float32 full_precision | : float32 is the default, without --bf16 and --fp16
lora lora_r rank use_lora peft use_peft lora_dim | --lora_rank
peft_type adapter_type | : LoRA alone: --lora_rank
lora_modules lora_target lora_target_modules lora_layers | --target_modules
qlora use_4bit load_4bit load_in_4_bit bits quantize quantization quantization_bit | --load_in_4bit
load_in_8bit load_8bit | : 4 bits alone: --load_in_4bit
gradient_checkpoint grad_checkpoint grad_checkpointing grad_ckpt use_gradient_checkpointing | --gradient_checkpointing
enable_gradient_checkpointing activation_checkpointing activation_checkpoint | --gradient_checkpointing
checkpoint_activations | --gradient_checkpointing
recompute recompute_activations recomputation | --gradient_checkpointing
offload cpu_offload offload_optimizer optimizer_offload optim_offload offload_adam | --adam_offload
offload_params offload_param param_offloading | --param_offload
offload_activations activation_offloading | --activation_offload
flash_attention use_flash_attn use_flash_attention flash_attn_2 flash_attention_2 fa2 | --flash_attn
attention attn attn_impl attention_implementation attention_backend sdpa eager | --attn_implementation
pack packing pack_samples pack_sequences use_packing sample_packing sequence_packing | --packing_samples
remove_padding | --packing_samples
use_remove_padding remove_padding_tokens padding_free | --packing_samples
compile use_compile torchcompile use_torch_compile | --torch_compile
liger liger_kernel use_liger | --use_liger_kernel
deterministic determinism full_deterministic cudnn_deterministic | --full_determinism
zero stage deepspeed_stage ds_stage zero_opt_stage zero3 zero2 deepspeed_zero_stage | --zero_stage
deepspeed deepspeed_config ds_config | : DeepSpeed's options are flags: --zero_stage, --adam_offload, --param_offload
fsdp fsdp_config accelerate_config | : DeepSpeed's options are flags: --zero_stage, --adam_offload, --param_offload
vllm use_vllm | --rollout_engine vllm
engine backend inference_engine rollout_backend rollout_type generation_backend engine_type sampler | --rollout_engine
vllm_server vllm_url server_url engine_url vllm_host inference_url | --vllm_server_url
tp tp_size tensor_parallel vllm_tp vllm_tp_size rollout_tp tensor_model_parallel | --tensor_parallel_size
tensor_model_parallel_size | --tensor_parallel_size
tensor_parallel_degree num_gpus_per_engine | --tensor_parallel_size
gpu_util gpu_mem gpu_mem_util gpu_memory gpu_utilization vllm_gpu_util vllm_gpu_memory | --gpu_memory_utilization
mem_fraction | --gpu_memory_utilization
vllm_mem gpu_memory_fraction mem_fraction_static vllm_memory | --gpu_memory_utilization
kv_cache kv_cache_size kv_cache_memory | --kv_cache_memory_bytes
max_seqs max_num_sequences max_running_requests | --max_num_seqs
chat_template template use_chat_template | --apply_chat_template
chat use_template apply_template chat_format template_name template_type use_chat apply_chat | --apply_chat_template
temp gen_temperature generation_temperature sampling_temperature rollout_temperature | --temperature
topp nucleus nucleus_p top_p_sampling | --top_p
topk topk_sampling k top_k_sampling | --top_k
minp | --min_p
greedy sample do_sampling no_sample greedy_decoding | --do_sample
rep_penalty repetition repeat_penalty repetition_pen | --repetition_penalty
stop_words stop_strings stop_sequences | --stop
stop_word stop_sequence stop_string stopwords stop_text | --stop
eos eos_token_id eos_id stop_tokens stop_ids stop_token stop_id | --stop_token_ids
environment environments env_path env_file env_class env_name agent agent_path agent_func | --env
tool tool_path tools_file tools_path functions | --tools
max_turn num_turns n_turns turns max_tool_turns max_agent_steps max_steps_per_episode max_rounds | --max_turns
tool_timeout step_timeout | --env_timeout
n_envs num_envs env_num_workers | --env_workers
save_rollouts dump_rollouts rollout_dir rollouts_dir dump_samples save_samples save_trajectories | --rollout_data_dir
log_samples print_samples num_examine_samples n_print_samples show_samples log_completions sample_log | --num_examine
timeout nccl_timeout ddp_timeout distributed_timeout | --dist_timeout
reward_timeout_s score_timeout | --reward_timeout
aux_loss aux_coef moe_aux_loss router_loss router_aux_loss balance_loss load_balancing_loss | --aux_loss_coef
dpo_beta beta_dpo | --beta
cfg conf config_file config_path yaml yaml_file yaml_config settings | --config
wandb | --use_wandb
wandb_key wandb_api_key wandb_token | --use_wandb
wandb_entity entity | --wandb_org
wandb_run wandb_name_run wandb_id run_id | --wandb_run_name
tensorboard tensorboard_dir tb tb_dir use_tb tensorboard_log tensorboard_path | --use_tensorboard
mlflow mlflow_uri mlflow_tracking_uri use_mlflow_uri | --use_mlflow
trackio trackio_project | --use_trackio
tracker trackers logger loggers report_to log_with | --use_wandb --use_tensorboard --use_trackio --use_mlflow
project project_name wandb_name run_name experiment_name exp_name experiment name | --wandb_project --wandb_run_name
verbose log_level verbose_logging debug_mode loglevel traceback | --debug
profiler profile profiling profile_step | --profile_steps
dryrun test_run check smoke_test | --dry_run
quiet silent disable_tqdm no_progress | : redirect what is printed; metrics are in SAVE_PATH/metrics.jsonl
device devices cuda gpu gpus n_gpus num_gpus gpu_ids nodes num_nodes nnodes | {_DEVICE}
num_processes nproc nproc_per_node n_gpus_per_node num_gpus_per_node world_size node_rank master_port | {_DEVICE}
master_addr | {_DEVICE}
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
    """Return what an unknown name may have meant, such as ``" (did you mean 'x'?)"``; an empty string if nothing is close.

    Args:
        name: as the user wrote it.
        known: the names that exist.
        kind: what the names are: ``"flag"``, ``"command"``, or the option whose values they are.
    """
    return meant(name, known := list(known), kind) or _question(similar(name, known))


def meant(name: str, known: Collection[str], kind: str) -> str:
    """Return what the table of this kind says about the name, as the end of a message; an empty string if nothing."""
    answer = answer_of(name, known, kind)
    if answer.startswith(":"):
        return answer
    words = answer.split()
    return _question(words if all(word in known for word in words) else [answer])


def answer_of(name: str, known: Collection[str], kind: str) -> str:
    """Return the table's answer: names that are known, with a space between, a flag and its value, or ``": a sentence"``."""
    for answer in _table(kind).get(name.lstrip("-").lower().replace(" ", "_"), ()):
        first, *others = answer.split()
        # A flag may have its value behind it.
        flags = [word for word in others if word.startswith("--")]
        names = others if flags or not first.startswith("--") else []
        if first == ":" or all(word in known for word in (first, *names)):
            return answer
    return ""


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that share the most words with this one, mistyped ones too; none below :data:`BOUND`."""
    scores = {candidate: likeness(name, candidate) for candidate in known}
    best = max(scores.values(), default=0.0)
    nearest_names = [candidate for candidate, score in scores.items() if score == best]
    return nearest_names if best >= BOUND and len(nearest_names) <= MOST else []


def likeness(name: str, other: str) -> float:
    """Return from 0 to 1 the share of whole words that two names have in common; a mistyped word counts nine tenths."""
    words = _words(name)
    remaining = _words(other)
    letters = "".join(words)
    other_letters = "".join(remaining)
    if letters == other_letters:
        return 1.0
    total = len(words) + len(remaining)
    common = 0.0
    for word in words:
        closest = max(remaining, key=partial(_word_likeness, word), default="")
        if score := _word_likeness(word, closest):
            common += score
            remaining.remove(closest)
    share = common / (total - common) if common else 0.0
    if _is_typo(letters, other_letters) and typing_errors(letters, other_letters) == 1:
        return max(share, 0.9)
    return share


def typing_errors(typed: str, known: str) -> int:
    """Count the fewest letters to add, drop, replace, or swap with their neighbour, that make one of the other."""
    row = list(range(len(known) + 1))
    previous: list[int] = []
    for i, letter in enumerate(typed, start=1):
        before_previous = previous
        previous = row
        row = [i]
        for j, other in enumerate(known, start=1):
            replaced = previous[j - 1] + (letter != other)
            row.append(min(previous[j] + 1, row[j - 1] + 1, replaced))
            is_swapped = i > 1 and j > 1 and letter == known[j - 2] and other == typed[i - 2]
            if is_swapped:
                row[j] = min(row[j], before_previous[j - 2] + 1)
    return row[-1]


def _word_likeness(typed: str, known: str) -> float:
    if typed == known:
        return 1.0
    if _is_typo(typed, known):
        return 0.9
    return 0.0


def _is_typo(typed: str, known: str) -> bool:
    """Tell whether there is one mistake in a word of three letters or more, two from six on."""
    allowed = 2
    if min(len(typed), len(known)) < 3:
        allowed = 0
    elif max(len(typed), len(known)) < 6:
        allowed = 1
    return abs(len(typed) - len(known)) <= allowed and typing_errors(typed, known) <= allowed


_SAME = {"length": "len", "maximum": "max", "number": "num", "coefficient": "coef", "coeff": "coef"}
_SAME |= {"checkpoint": "ckpt", "normalize": "norm", "normalise": "norm", "gradient": "grad"}
_SAME |= {"validation": "eval", "val": "eval", "evaluation": "eval", "log": "logg", "scale": "scal"}
_SAME |= dict.fromkeys(("interval", "freq", "frequency", "every"), "step")


def _words(name: str) -> list[str]:
    """Return words without endings: ``gradient_checkpoints`` is ``gradient_checkpointing``."""
    words = re.split(r"[-_.\s]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.strip("-_ ")).lower())
    stems = (re.sub(r"(?<=\w{3})(ing|(?<!s)s)$", "", word) for word in words)
    return [_SAME.get(word, word) for word in stems]


def _question(names: Collection[str]) -> str:
    if names:
        return f" (did you mean {' or '.join(map(repr, names))}?)"
    return ""


@cache
def _table(kind: str) -> dict[str, list[str]]:
    """Return name in small letters → answers."""
    lines = [line.split(" | ") for line in _MEANT.get(kind, "").strip().splitlines()]
    return {name: answers for names, *answers in lines for name in names.split()}
