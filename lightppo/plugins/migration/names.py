"""Other trainers' options and what they are here: for the errors that meet them, and the tables of docs/migrating.md.

A row is ``names | what it is here``: names of one meaning with blanks between; ``*`` stands for any beginning, ``A=B``
for a value of one of our options. What is here begins with "not here", or is "=" where name and meaning are the same.
Of several patterns that fit a name, one that says how the name begins wins, then the longest.
"""

# ruff: noqa: E501  (the rows)

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

OPENRLHF = """
advantage_estimator=dr_grpo | the same, with `--loss_agg_mode seq-mean-token-sum-norm` by default
eval_dataset eval.dataset | `--eval_data`
eval_n_samples_per_prompt eval.n_samples_per_prompt | `--eval_n_samples` (4 there, 1 here)
eval_temperature eval.temperature | `--eval_temperature` (0.6 there, greedy here)
policy_loss_type actor.policy_loss_type | `--policy_loss`
eps_clip_low_high actor.eps_clip_low_high | `--eps_clip_low A --eps_clip_high B`
dual_clip actor.dual_clip | `--dual_clip`
no_advantage_std_norm algo.advantage.no_std_norm | `--no_adv_std_norm`
entropy_loss_coef actor.entropy_coef | `--entropy_coef`; the entropy is always logged
stop_properly_penalty_coef reward.stop_properly_penalty_coef | `--stop_properly_penalty`, which never raises a score
enable_vllm_is_correction vllm_is_correction_type algo.advantage.is_correction_enable algo.advantage.is_correction_type | `--rollout_correction tis`, `icepop`, `seq_mask_tis`
vllm_is_truncated_threshold algo.advantage.is_correction_threshold | `--correction_low A --correction_high B`
use_icepop | `--rollout_correction icepop`
kl_estimator algo.kl.estimator | `--kl_estimator`, with `--kl_clip 10` (before 0.8.6 nothing is clipped there)
use_kl_estimator_k3 | `--kl_estimator k3`
load_checkpoint ckpt.load_enable | on by default; `--resume never`
use_wandb logger.wandb.key | `--use_wandb`; best with the key in WANDB_API_KEY
remote_rm_url reward.remote_url | `--remote_rm_url`, also `path.py` with `reward_func(queries, prompts, labels)`
freezing_actor_steps critic.freezing_steps | `--freezing_actor_steps`
ref_reward_offload ref.offload reward.offload | `--ref_offload`, `--reward_offload`, with ZeRO 3
best_metric_key ckpt.best_metric_key | `--best_metric eval/accuracy`
max_len data.max_len | `--prompt_max_len` and `--generate_max_len`
max_new_tokens rollout.max_new_tokens | `--generate_max_len`
dynamic_filtering algo.dynamic_filtering_enable | `--dynamic_sampling`
dynamic_filtering_reward_range algo.dynamic_filtering_range | `--filter_range A B`
vllm_generate_batch_size rollout.vllm_generate_batch_size | `--gen_batch_size`
use_dynamic_batch train.dynamic_batch_enable train_max_tokens_per_gpu train.max_tokens_per_gpu | `--max_tokens_per_micro_batch`
rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu | `--micro_batch_specs actor=4096t`
vllm_tensor_parallel_size vllm.tensor_parallel_size | `--tensor_parallel_size`, with `--rollout_engine vllm`
vllm_gpu_memory_utilization vllm.gpu_memory_utilization | `--gpu_memory_utilization` (0.95 there, for GPUs of its own; 0.4 here, shared with training)
vllm_enable_sleep vllm.enable_sleep | `--free_cache_engine` (on)
enable_prefix_caching vllm.enable_prefix_caching | `--enable_prefix_caching` (on)
enforce_eager vllm.enforce_eager | `--enforce_eager`
vllm_num_engines vllm.num_engines | not here: `--rollout_engine vllm` has one engine per `--tensor_parallel_size` ranks; for servers, one `--vllm_server_url` each
vllm_sync_backend vllm.sync_backend vllm_sync_with_ray vllm.sync_with_ray | not here: `--vllm_server_sync` for servers; else weights are handed over in the process
colocate_all_models train.colocate_all colocate_actor_ref train.colocate_actor_ref colocate_critic_reward train.colocate_critic_reward | not here: all models are always on all ranks
*_num_nodes *.num_nodes *_num_gpus_per_node *.num_gpus_per_node | not here: no Ray; the launcher sets the ranks (`deepspeed --num_gpus`, `--hostfile`)
actor_init_on_gpu | not here: models are loaded where they train
async_train train.async_enable async_queue_size train.async_queue_size partial_rollout train.partial_rollout_enable | not here: rollouts and training take turns, so that every step is on-policy
agent_func_path train.agent_func_path | not here: one turn per sample; score programs and tools by `--reward_fn`
deepspeed_enable_sleep ds.enable_sleep | not here: `--adam_offload` and `--param_offload` free the GPU's memory
deepcompile ds.deepcompile | `--torch_compile`
ds_tensor_parallel_size ds.tensor_parallel_size | not here: `--zero_stage 3` shards the models
ring_attn_size ds.ring_attn_size ring_head_stride ring_attn_head_stride ds.ring_attn_head_stride | not here: sequences are not split over ranks
use_ds_universal_ckpt universal_ckpt ds.use_universal_ckpt | `--reshape_ckpt`, at the resume alone: nothing is converted beforehand
param_dtype ds.param_dtype | `--bf16`, `--fp16`
perf | not here: times of each part are always logged, under perf/
use_ms | not here: give a local folder, or a hub id of Hugging Face
aux_loss_coef actor.aux_loss_coef | `--aux_loss_coef`
eps_clip actor.eps_clip | `--eps_clip`
value_clip critic.value_clip | `--value_clip` (0.5 there, 0.2 before 0.8.2, as here)
lambd algo.advantage.lambd | `--lambd` (1 there; 0.95 before 0.5.7 and from 0.6.0 to 0.6.3, as here)
gamma algo.advantage.gamma | `--gamma`
actor.model_name_or_path critic.model_name_or_path reward.model_name_or_path | `--pretrain`, `--critic_pretrain`, `--reward_pretrain`
actor.adam.lr critic.adam.lr actor.lr critic.lr | `--actor_learning_rate`, `--critic_learning_rate`
actor.adam.betas critic.adam.betas actor.adam.weight_decay critic.adam.weight_decay | `--adam_betas`, `--l2`; the critic's `--critic_adam_betas`, `--critic_l2`
actor.adam.eps critic.adam.eps | not here: AdamW's 1e-8
actor.lr_scheduler critic.lr_scheduler actor.lr_warmup_ratio critic.lr_warmup_ratio actor.min_lr_ratio critic.min_lr_ratio actor.max_norm critic.max_norm | `--lr_scheduler`, `--lr_warmup_ratio`, `--min_lr_ratio`, `--max_norm`; the critic's with `critic_` before the name
actor.optim critic.optim *.muon.* | not here: AdamW
actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant | `--gradient_checkpointing`, `--gradient_checkpointing_use_reentrant`
actor.freeze_visual_encoder freeze_visual_encoder data.image_key image_key data.max_images_per_prompt max_images_per_prompt | not here: text only
algo.advantage.estimator | `--advantage_estimator`
algo.kl.init_coef algo.kl.target algo.kl.horizon algo.kl.use_loss | `--init_kl_coef`, `--kl_target`, `--kl_horizon`, `--use_kl_loss`
critic.save_value_network | `--save_value_network`
train.num_episodes train.max_epochs train.batch_size train.micro_batch_size train.seed | `--num_episodes`, `--max_epochs`, `--train_batch_size`, `--micro_train_batch_size`, `--seed`
train.enable_ema train.ema_beta train.full_determinism_enable | `--enable_ema`, `--ema_beta`, `--full_determinism`
rollout.batch_size rollout.micro_batch_size rollout.n_samples_per_prompt rollout.temperature rollout.top_p | `--rollout_batch_size`, `--micro_rollout_batch_size`, `--n_samples_per_prompt`, `--temperature`, `--top_p`
reward.normalize_enable reward.clip_range reward.overlong_buffer_len reward.overlong_penalty_factor | `--normalize_reward`, `--reward_clip_range`, `--overlong_buffer_len`, `--overlong_penalty_factor`
data.prompt_dataset data.prompt_probs data.prompt_split data.input_key data.label_key data.input_template data.apply_chat_template data.max_samples | `--prompt_data`, `--prompt_data_probs`, `--prompt_split`, then the same names
data.disable_fast_tokenizer data.dataloader_num_workers dataloader_num_workers | `--disable_fast_tokenizer`, `--data_num_workers` (tokenises; the loader there)
eval_split eval.split | `--eval_split` (train there, test here)
eval_steps eval.steps | `--eval_steps` (-1: never there, once per episode here)
ckpt.path ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds ckpt.max_num ckpt.max_mem | `--ckpt_path`, `--save_path`, `--save_steps`, `--save_hf_ckpt`, `--disable_ds_ckpt`, `--max_ckpt_num`, `--max_ckpt_mem`
ds.zero_stage ds.zpg ds.adam_offload ds.attn_implementation ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm ds.packing_samples ds.load_in_4bit ds.value_head_prefix | the last part of the name
ds.experts_implementation disable_trace_cache | not here: transformers' and DeepSpeed's defaults
ds.lora.rank ds.lora.alpha ds.lora.dropout ds.lora.target_modules | `--lora_rank`, `--lora_alpha`, `--lora_dropout`, `--target_modules`
logger.logging_steps logger.tensorboard_dir logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name | `--logging_steps`, `--use_tensorboard`, `--wandb_org`, `--wandb_group`, `--wandb_project`, `--wandb_run_name`
rollout_batch_size | the same (1024 there with Ray, 512 here)
use_kl_loss | the same (off there; here on for estimators that divide by a group's deviation)
packing_samples | the same (off there; here on where it is exact)
actor_learning_rate adam_betas adam_offload advantage_estimator apply_chat_template attn_implementation bf16 ckpt_path critic_learning_rate critic_pretrain disable_ds_ckpt disable_fast_tokenizer ema_beta enable_ema flash_attn full_determinism generate_max_len grad_accum_dtype gradient_checkpointing gradient_checkpointing_use_reentrant init_kl_coef input_key input_template kl_horizon kl_target l2 label_key load_in_4bit local_rank logging_steps lora_alpha lora_dropout lora_rank lr_scheduler lr_warmup_ratio max_ckpt_mem max_ckpt_num max_epochs max_norm max_samples micro_rollout_batch_size micro_train_batch_size n_samples_per_prompt normalize_reward num_episodes overlap_comm overlong_buffer_len overlong_penalty_factor pretrain pretrain_data pretrain_data_probs pretrain_split prompt_data prompt_data_probs prompt_max_len prompt_split ptx_coef reward_clip_range reward_pretrain save_hf_ckpt save_path save_steps save_value_network seed target_modules temperature top_p torch_compile train_batch_size use_liger_kernel use_tensorboard value_head_prefix wandb_group wandb_org wandb_project wandb_run_name zero_stage zpg | =
"""

LIGHTRFT = """
advantages_norm | `--adv_norm`
normalize_advantages use_sequence_rewards | not here: options of GSPO there that change nothing
use_gspo | `--policy_loss gspo`
use_cpg_loss | `--advantage_estimator cpgd`, which brings its loss along; `--cpgd_drift_coef 0` for the loss of LightRFT
loss_agg_mode | `--loss_agg_mode` (`seq-mean-token-mean` there, `token-mean` here)
kl_estimator | the same, nothing is clipped (k1 or k3 there, by the script; here k1 in the reward, k2 in the loss)
high_entropy_token_ratio advantage_clip | the same; 0 is off
overlong_buffer overlong_buffer_len | `--overlong_buffer_len` alone switches it on; leave it out where overlong_buffer is not set
overlong_buffer_penalty_factor | `--overlong_penalty_factor`
reward_clip | `--reward_clip_range -X X` (off there, -10 and 10 here)
reward_running_norm_minus_mean | not here: always so with `--reward_running_norm`
normalize_reward_for_critic | `--normalize_reward`
reference_key | `--label_key`
system_prompt_path | `--system_prompt`, the text itself
max_eval_samples | `--eval_max_samples` (500 there, all here)
max_len | `--prompt_max_len` and `--generate_max_len`
reward_pretrain | `--reward_pretrain A B`; a script may keep the comma
remote_rm_url | `--remote_rm_url A B`; a script may keep the comma
use_wandb | `--use_wandb`; best with the key in WANDB_API_KEY
load_checkpoint | on by default; `--resume never`
lambd value_clip critic_learning_rate | the same; with a critic only
engine_type | `--rollout_engine vllm` (no SGLang)
engine_tp_size | `--tensor_parallel_size`
engine_mem_util | `--gpu_memory_utilization` (0.5 there, 0.4 here)
enable_engine_sleep disable_engine_sleep | `--free_cache_engine` (on), `--no_free_cache_engine`
use_fire first_token_temperature | `--fire_sampling`, `--fire_temperature`
log_dir | `--use_tensorboard`
save_trajectories num_trajectories_to_save | `--record_samples`; all of them: `--rollout_data_dir`
ckpt_path_local | `--ckpt_path`
print_replay_buffer_stats trajectory_analysis plot_every mark_high_entropy_tokens | not here: numbers of every rollout are logged, `lightppo report` shows samples and colours their tokens
actor_init_on_gpu | not here: models are loaded where they train
meta_init initial_model_shard_size no_shard_vit fsdp fsdp_cpu_offload use_mp_opt | not here: DeepSpeed shards (`--zero_stage`, `--adam_offload`, `--param_offload`)
sp_size | not here: sequences are not split over ranks
fused_linear_logprob chunk_size disable_logprobs_flashattn | not here: log probs are always computed in chunks of positions that are read
rm_use_engine rm_engine_cudagraph | not here: reward models run in the training processes, or behind `--remote_rm_url`
freeze_prefix images_key limit_mm_image_per_prompt limit_mm_video_per_prompt fps max_pixels mixed_mm_data text_only | not here: text only
use_ms | not here: give a local folder, or a hub id of Hugging Face
use_kl_loss | the same (off there; here on for estimators that divide by a group's deviation)
packing_samples | the same (off there; here on where it is exact)
actor_learning_rate adam_betas adam_offload advantage_estimator apply_chat_template aux_loss_coef bf16 ckpt_path critic_pretrain disable_ds_ckpt disable_fast_tokenizer dynamic_sampling enable_ema eps_clip eval_data eval_split eval_steps flash_attn freezing_actor_steps gamma generate_max_len grad_accum_dtype gradient_checkpointing gradient_checkpointing_use_reentrant init_kl_coef input_key input_template kl_target l2 label_key load_in_4bit local_rank logging_steps lora_alpha lora_dropout lora_rank lr_warmup_ratio max_ckpt_mem max_ckpt_num max_epochs max_norm max_samples micro_rollout_batch_size micro_train_batch_size n_samples_per_prompt num_episodes overlap_comm pretrain pretrain_data pretrain_data_probs pretrain_split prompt_data prompt_data_probs prompt_max_len prompt_split ptx_coef reward_running_norm rollout_batch_size save_hf_ckpt save_path save_steps save_value_network seed system_prompt target_modules temperature top_p train_batch_size use_tensorboard value_head_prefix wandb_group wandb_org wandb_project wandb_run_name zero_stage zpg | =
"""

TRL = """
model_name_or_path sft_model_path | `--pretrain`, `--ref_pretrain` where it differs
reward_model_path reward_model_name_or_path | `--reward_pretrain`
model_revision model_init_kwargs cache_implementation | not here: give a local folder; `--override_config` changes its config
reward_funcs | `--reward_fn path.py:name`
reward_weights multi_objective_aggregation | a `CombinedReward` in the file of `--reward_fn`
dataset_name dataset_train_split | `--prompt_data`, `--prompt_split`
dataset_test_split | `--eval_data`, `--eval_split`
datasets datasets.* | `--prompt_data A,B`, with `--prompt_data_probs`
dataset_config dataset_streaming streaming dataset_num_proc remove_unused_columns test_split_size | not here: rows are read once, other columns go to the reward function
fraction | `--max_samples`, as a number of rows
shuffle_dataset | `--data_shuffle` (on)
data_seed | not here: all random numbers come from `--seed`
dataloader_num_workers | `--data_num_workers`
dataloader_in_order dataloader_multiprocessing_context dataloader_persistent_workers dataloader_prefetch_factor ignore_data_skip length_column_name train_sampling_strategy label_names | not here: prompts are read and tokenised once, before the first step
dataloader_drop_last | not here: what is left of an episode is a smaller rollout
chat_template_kwargs | not here: `--apply_chat_template` renders as the tokenizer does
per_device_train_batch_size local_batch_size micro_batch_size backward_batch_size | `--micro_train_batch_size`
gradient_accumulation_steps batch_size mini_batch_size local_mini_batch_size global_backward_batch_size global_batch_size | `--train_batch_size`: samples per optimizer step over all ranks
num_mini_batches | `--ppo_n_minibatches`
generation_batch_size steps_per_generation | `--rollout_batch_size`, in prompts
local_rollout_forward_batch_size forward_batch_size | `--micro_rollout_batch_size`
num_generations rloo_k | `--n_samples_per_prompt`
num_generations_eval | `--eval_n_samples`
per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics prediction_loss_only | not here: `--micro_rollout_batch_size` holds for evaluations too
max_prompt_length | `--prompt_max_len`
max_completion_length response_length | `--generate_max_len`
stop_token stop_token_id | `--stop`, `--stop_token_ids`
missing_eos_penalty | not here: `--stop_properly_penalty` leaves a share of the score, `--mask_no_eos_with_zero` none of it
beta | `--init_kl_coef` (0.01 here): GRPO's (0 there) with `--use_kl_loss --kl_estimator k3`, RLOO's (0.05 there) in the reward
kl_coef | `--init_kl_coef` (0.05 there, 0.01 here)
init_kl_coef adap_kl_ctrl target horizon | `--init_kl_coef` (0.2 there, 0.01 here); `--kl_target` makes it adaptive (6 there), `--kl_horizon`
kl_penalty | `--kl_estimator`: `k1`, `k2` for `kl`, `mse`
token_level_kl | not here: the KL in the reward is always per token
early_stopping target_kl | `--early_stop_kl`
ratio_threshold | `--early_stop_imp_ratio` (10 there, 5 here)
use_score_scaling use_score_norm score_clip normalize_reward | `--reward_running_norm`, over the run; `--reward_clip_range -X X`
use_bias_correction_kl | not here
epsilon epsilon_high cliprange | `--eps_clip_low`, `--eps_clip_high`, `--eps_clip`
cliprange_value | `--value_clip`
vf_coef | not here: the critic has its own optimizer, `--critic_learning_rate`
delta | `--dual_clip`
lam | `--lambd`
loss_type | `--loss_agg_mode seq-mean-token-mean` (`grpo`), `token-mean` (`dapo`, `bnpo`), `seq-mean-token-sum-norm` (`dr_grpo`); `--policy_loss cispo`, `sapo`
loss_agg_mode=grpo | `seq-mean-token-mean`
loss_agg_mode=dapo loss_agg_mode=bnpo | `token-mean`
loss_agg_mode=dr_grpo | `seq-mean-token-sum-norm`
sapo_temperature_pos sapo_temperature_neg | `--sapo_tau_pos`, `--sapo_tau_neg`
vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg | not here
importance_sampling_level | `--policy_loss gspo` for `sequence`
scale_rewards | `--advantage_estimator grpo --grpo_std_eps 1e-4` for `group`; with `--grpo_std_scope batch` for `batch`; `--no_group_std_norm` for `none`
normalize_advantages normalize_advantage | `--adv_norm`
whiten_rewards | not here: `--reward_running_norm` normalises scores
top_entropy_quantile | `--high_entropy_token_ratio`
entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target use_adaptive_entropy | not here: `--entropy_coef` is constant
router_aux_loss_coef | `--aux_loss_coef` (0.001 there, off here)
disable_dropout | not here: dropout is off unless `--override_config` sets it
cast_lm_head_to_fp32 use_liger_loss | not here: log probs are taken in float32, in chunks of positions that are read
pad_to_multiple_of | not here: `--packing_samples`
ds3_gather_for_generation | not here: weights are gathered to sample
generation_kwargs | the options of sampling, each by its name
use_vllm vllm_mode | `--rollout_engine vllm` for `colocate`, `vllm_server` for `server`
vllm_model_impl vllm_structured_outputs_regex vllm_guided_decoding_regex vllm_group_port vllm_device | not here
vllm_enable_sleep_mode | `--free_cache_engine` (on)
vllm_server_base_url vllm_server_host vllm_server_port | `--vllm_server_url http://HOST:PORT`
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size | `--gpu_memory_utilization`, `--max_model_len`, `--tensor_parallel_size`
vllm_importance_sampling_correction vllm_importance_sampling_mode | `--rollout_correction tis`, `seq_tis`, `icepop`, `seq_mis` for `token_truncate`, `sequence_truncate`, `token_mask`, `sequence_mask`
vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max vllm_importance_sampling_cap | `--correction_low`, `--correction_high`
off_policy_mask_threshold | `--rollout_rejection opsm=` the threshold
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged | not here: `--rollout_engine hf` always batches continuously
mask_truncated_completions | `--mask_too_long`
sync_ref_model ref_model_sync_steps ref_model_mixup_alpha | `--ref_reset_steps N` for α 1; `--ref_ema_eta` α for 1 step
num_iterations | `--max_epochs`
num_ppo_epochs ppo_epochs | `--max_epochs` (4 there, 1 here)
num_train_epochs | `--num_episodes` (1 here, 3 there)
total_episodes | not here: samples there; `--num_episodes` counts passes over the prompts, `--total_training_steps` PPO steps
max_steps steps | `--total_training_steps`, PPO steps (optimizer steps there)
save_steps eval_steps logging_steps | the same, in PPO steps (optimizer steps there)
lora_alpha lora_dropout | the same (32 and 0.05 there, 16 and 0 here)
gradient_checkpointing bf16 | the same (on there, off here)
reward_clip_range | the same (off there, -10 and 10 here)
vllm_server_timeout | `--vllm_server_start_timeout`; `--vllm_server_timeout` is a response's
num_total_batches world_size | not here: they follow from the other sizes
learning_rate | `--actor_learning_rate`, `--critic_learning_rate`
lr_scheduler_type lr_scheduler_kwargs warmup_ratio warmup_steps | `--lr_scheduler`, `--min_lr_ratio`, `--lr_warmup_ratio`, `--lr_warmup_steps` (linear without warm-up there; a cosine after 3% of warm-up here)
weight_decay max_grad_norm adam_beta1 adam_beta2 | `--l2`, `--max_norm`, `--adam_betas`
adam_epsilon optim optim_args | not here: AdamW with 1e-8
dtype torch_dtype bf16_full_eval | `--bf16`, `--fp16`
fp16_full_eval label_smoothing_factor is_encoder_decoder is_peft_model use_cache optim_target_modules liger_kernel_config parallelism_config accelerator_config accelerator_kwargs tf32 torch_compile_backend torch_compile_mode neftune_noise_alpha auto_find_batch_size | not here
use_cpu optimize_cuda_cache optimize_device_cache | not here: a machine without GPUs trains on its CPUs
ddp_timeout | `--dist_timeout`, in minutes (seconds there)
ddp_backend ddp_broadcast_buffers ddp_static_graph ddp_find_unused_parameters ddp_bucket_cap_mb | not here: DeepSpeed reduces gradients
average_tokens_across_devices | not here: losses are always averaged over the tokens of all ranks
gradient_checkpointing_kwargs | `--gradient_checkpointing_use_reentrant`
use_peft lora_r lora_target_modules | `--lora_rank`, `--target_modules`
lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage model_adapter_name ref_adapter_name | not here: LoRA or QLoRA of linear layers in NF4 ([lora.md](lora.md))
deepspeed fsdp fsdp_config | not here: DeepSpeed's options are flags (`--zero_stage`, …)
output_dir | `--save_path`, `--ckpt_path`
save_strategy save_total_limit resume_from_checkpoint | `--save_steps`, `--max_ckpt_num`, `--resume`
enable_jit_checkpoint restore_callback_states_from_checkpoint save_on_each_node | not here: checkpoints hold all that resuming needs; signals save one
save_only_model save_safetensors | `--hf_save_steps`: the model alone, always as safetensors
load_best_model_at_end metric_for_best_model greater_is_better | `--best_metric`; the best is in `--ckpt_path`, the last in `--save_path`
eval_strategy do_train do_eval do_predict eval_delay | `--eval_steps`, `--eval_epochs`, `--eval_seconds`
eval_on_start | `--val_before_train` (on)
log_completions num_completions_to_print num_sample_generations log_unique_prompts wandb_log_unique_prompts | `--num_examine`, `--rollout_data_dir`
log_multimodal max_tool_calling_iterations | not here: text, one turn per sample
log_completions_hub_repo push_to_hub push_to_hub_if_best_kwargs hub_always_push hub_revision trackio_bucket_id trackio_space_id trackio_static_space_id hub_model_id hub_strategy hub_token hub_private_repo torch_empty_cache_steps ignore_bias_buffers | not here
report_to run_name project logging_dir log_with exp_name model_name query_dataset task_name tracker_project_name tracker_kwargs project_kwargs | `--use_wandb`, `--use_tensorboard FOLDER`, `--use_trackio PROJECT`, `--use_mlflow URI`, `--wandb_run_name`, `--wandb_project`
logging_strategy logging_first_step disable_tqdm log_level log_level_replica log_on_each_node logging_nan_inf_filter skip_memory_metrics include_num_input_tokens_seen compare_steps | not here: `--logging_steps` alone (1 here, 10 there)
top_k | `--top_k`, off is 0 there, -1 here
fp16 kl_estimator dataloader_pin_memory gamma temperature top_p min_p repetition_penalty entropy_coef trust_remote_code attn_implementation load_in_4bit use_liger_kernel gradient_checkpointing_use_reentrant local_rank debug seed full_determinism torch_compile | =
"""

VERL = """
advantage_estimator=reinforce_plus_plus | `reinforce++`
advantage_estimator=reinforce_plus_plus_baseline | `reinforce++_baseline`
kl_estimator=kl | `k1`
kl_estimator=mse | `k2`
kl_estimator=low_var_kl | `k3`, with `--kl_clip 10`
policy_loss=vanilla | `ppo`
policy_loss=geo_mean | `gmpo`
rollout_engine=sglang | not here: `hf`, `vllm` or `vllm_server`
data.train_files data.val_files | `--prompt_data`, `--eval_data`
data.prompt_key | `--input_key`
data.reward_fn_key | `--data_source_key`
data.train_max_samples data.val_max_samples | `--max_samples`, `--eval_max_samples`
data.train_batch_size | `--rollout_batch_size`, in prompts
data.gen_batch_size | `--gen_batch_size`; groups beyond the batch wait for the next step (dropped there)
algorithm.filter_groups.enable algorithm.filter_groups.metric | `--dynamic_sampling`, `--filter_metric` (`score` if not given; no default there)
algorithm.filter_groups.max_num_gen_batches | `--max_num_gen_batches` (10 here; 0 is no limit in both). When they run out, verl ends the run: `--on_exhausted raise`. By default lightppo warns and trains on the groups it has, because late in a run most groups are solved
algorithm.filter_groups.max_inflight_gen_batches | not here: generation batches run one after another
data.val_batch_size | not here: `--micro_rollout_batch_size` holds for evaluations too
data.max_prompt_length data.max_response_length *.rollout.prompt_length *.rollout.response_length | `--prompt_max_len`, `--generate_max_len`
data.filter_overlong_prompts data.truncation | `--filter_overlong_prompts`, `--truncation`
data.dataloader_num_workers data.filter_overlong_prompts_workers | `--data_num_workers`
*.seed *.data_loader_seed | `--seed`
data.shuffle | `--data_shuffle` (on)
data.validation_shuffle | not here: evaluations keep their order
data.trust_remote_code *.model.trust_remote_code | `--trust_remote_code`
data.tokenizer *.tokenizer_path | `--tokenizer_path`
*.hf_config_path | not here: it comes with `--pretrain`
data.apply_chat_template_kwargs *.custom_chat_template | not here: `--apply_chat_template` renders as the tokenizer does
data.tool_config_path data.custom_cls.* data.sampler.* data.datagen.* | not here: a class of your own goes into a script ([extending.md](extending.md))
data.image_key data.video_key data.audio_key data.mm_processor_kwargs data.image_patch_size data.return_multi_modal_inputs *.freeze_vision_tower *.limit_images | not here: text only
data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.use_shm *.use_shm | not here
actor_rollout_ref.model.path critic.model.path reward_model.model.path reward.reward_model.model_path | `--pretrain`, `--critic_pretrain`, `--reward_pretrain`
*.model.override_config *.model.override_config.* | `--override_config '{"NAME": VALUE}'`, also of dropout
*.model.override_config.moe_config.* | not here: routers are trained like all other weights
*.model.external_lib *.model.external_libs | `--external_lib`
*.load_weight | `--init_from_scratch` for False
*.model.enable_gradient_checkpointing *.model.gradient_checkpointing_kwargs.* *.model.enable_activation_offload | `--gradient_checkpointing`, `--activation_offload`
*.use_remove_padding | `--packing_samples`, on where it is exact
*.pad_to_length *.pad_to_length_bucket | not here: a micro batch is as long as its longest row
*.model.lora_rank *.model.lora_alpha *.model.target_modules *.model.lora.rank *.model.lora.alpha *.model.lora.dropout *.model.lora.target_modules | `--lora_rank`, `--lora_alpha`, `--lora_dropout`, `--target_modules`
*.exclude_modules *.lora_adapter_path *.lora.* | not here: name the layers by `--target_modules`; merge an adapter first
*.use_liger | `--use_liger_kernel`
*.use_torch_compile | `--torch_compile`
*.use_fused_kernels *.fused_kernel_options.* *.tiled_mlp.* *.entropy_from_logits_with_chunking *.entropy_from_logits_chunk_size *.entropy_checkpointing *.sum_pi_squared_checkpointing *.calculate_sum_pi_squared | not here: log probs are computed in chunks of positions that are read
*.use_prefix_grouper | `--share_prompts` (on)
*.ppo_mini_batch_size | `--train_batch_size`, in samples: prompts times `--n_samples_per_prompt`
*.ppo_micro_batch_size_per_gpu *.ppo_micro_batch_size | `--micro_train_batch_size`
*.log_prob_micro_batch_size_per_gpu *.log_prob_micro_batch_size *.forward_micro_batch_size_per_gpu *.forward_micro_batch_size reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size | `--micro_rollout_batch_size`; `--micro_batch_specs reference=8` for one call
*use_dynamic_bsz *.ppo_max_token_len_per_gpu *.log_prob_max_token_len_per_gpu *.forward_max_token_len_per_gpu | `--max_tokens_per_micro_batch`; `--micro_batch_specs actor_train=4096t` for one call
trainer.balance_batch | `--balance_ranks` (on)
actor_rollout_ref.actor.ppo_epochs critic.ppo_epochs | `--max_epochs`, `--critic_max_epochs`
*.actor.shuffle critic.shuffle | `--shuffle samples` (always shuffled here)
*.clip_ratio *.clip_ratio_low *.clip_ratio_high | `--eps_clip`, `--eps_clip_low`, `--eps_clip_high`
*.clip_ratio_c | `--dual_clip` (3 there, off here)
*.tau_pos *.tau_neg | `--sapo_tau_pos`, `--sapo_tau_neg`
*.policy_loss.loss_mode | `--policy_loss`: `ppo` for `vanilla`, `gmpo` for `geo_mean`; set the epsilons, or leave them to the loss
*.clip_cov_ratio *.clip_cov_lb *.clip_cov_ub | `--clip_cov_ratio`, `--clip_cov_low`, `--clip_cov_high`
*.kl_cov_ratio *.ppo_kl_coef | `--kl_cov_ratio`, `--kl_cov_coef`
*.policy_loss.dro_beta | not here
*.loss_agg_mode | `--loss_agg_mode`
*.loss_scale_factor | not here: the constant is `--generate_max_len`
*.entropy_coeff *.calculate_entropy | `--entropy_coef`; the entropy is always logged
*.use_kl_loss *.kl_loss_coef *.kl_loss_type | `--use_kl_loss`, `--init_kl_coef`, `--kl_estimator` (`k1`, `k2`, `k3` for `kl`, `mse`, `low_var_kl`)
actor_rollout_ref.actor.optim.lr critic.optim.lr | `--actor_learning_rate`, `--critic_learning_rate`
*.optim.lr_warmup_steps_ratio *.optim.lr_warmup_steps *.optim.min_lr_ratio *.optim.lr_scheduler_type *.optim.warmup_style *.optim.lr_decay_style *.optim.decay_type | `--lr_warmup_ratio`, `--lr_warmup_steps` (-1 there is None here), `--min_lr_ratio`, `--lr_scheduler` (constant without warm-up there; a cosine after 3% of warm-up here); the critic's with `critic_` before the name
*.optim.weight_decay *.optim.betas *.optim.clip_grad *.grad_clip | `--l2` (0.01 there, 0 here), `--adam_betas` (0.9 0.999 there), `--max_norm`; `--critic_l2`, `--critic_adam_betas`, `--critic_max_norm`
*.optim.total_training_steps | not here: it follows from `--total_training_steps`
*.optim.min_lr *.optim.lr_min *.optim.min_lr_factor *.optim.lr_decay_ratio | `--min_lr_ratio`, a share of the peak
*.optim.* | not here: AdamW with 1e-8, and schedules over all optimizer steps
actor_rollout_ref.ref.optim.* | not here: the reference is not trained
actor_rollout_ref.ref.model | `--ref_pretrain`
*.param_offload *.optimizer_offload *.offload_policy | `--param_offload`, `--adam_offload`, `--critic_param_offload`, `--critic_adam_offload`, `--ref_offload`
*.model_dtype *.fsdp_config.dtype *.fsdp.dtype *.torchtitan.dtype *.megatron.dtype | `--bf16`, `--fp16`
*.full_determinism | `--full_determinism`
*.fsdp_config.* *.fsdp.* *.torchtitan.* *.veomni.* *.megatron.* actor_rollout_ref.*.strategy critic.strategy critic.*.strategy reward_model.strategy | not here: DeepSpeed shards, by `--zero_stage`
*.ulysses_sequence_parallel_size | not here: sequences are not split over ranks
*.checkpoint.save_contents *.checkpoint.load_contents *.checkpoint.async_save *.checkpoint.* | not here: a checkpoint holds all that resuming needs; `--save_hf_ckpt` adds the HF format
*.router_replay.* *.enable_rollout_routing_replay *.moe_load_balance_metrics_interval *.mtp *.mtp.* *.quantization* *.qat *.qat.* | not here
*.rollout_n critic.enable actor_rollout_ref.hybrid_engine *.layered_summon | not here: it follows from other options
*.nccl_timeout | `--dist_timeout`, in minutes (seconds there)
*.rollout.name *.rollout.mode | `--rollout_engine` (`hf`, `vllm`, `vllm_server`)
*.rollout.n | `--n_samples_per_prompt`
*.rollout.temperature *.rollout.top_p *.rollout.top_k *.rollout.do_sample *.rollout.ignore_eos | the last part of the name
*.rollout.tensor_model_parallel_size | `--tensor_parallel_size`
*.rollout.gpu_memory_utilization | `--gpu_memory_utilization` (0.5 there, 0.4 here: the models of training share the GPU)
*.rollout.dtype | `--vllm_dtype`
*.rollout.load_format *.rollout.enforce_eager *.rollout.free_cache_engine *.rollout.max_num_batched_tokens *.rollout.max_model_len *.rollout.max_num_seqs *.rollout.enable_prefix_caching | the last part of the name
*.rollout.cudagraph_capture_sizes *.rollout.data_parallel_size *.rollout.expert_parallel_size *.rollout.pipeline_model_parallel_size *.rollout.enable_chunked_prefill *.rollout.disaggregation.* *.rollout.layer_name_map.* *.rollout.update_weights_bucket_megabytes *.rollout.logprobs_mode *.rollout.scheduling_policy *.rollout.disable_log_stats *.rollout.over_sample_rate *.rollout.multi_stage_wake_up *.rollout.skip_tokenizer_init *.rollout.engine_kwargs.* *.rollout.checkpoint_engine.* *.rollout.prometheus.* *.rollout.trace.* | not here: for vLLM servers, options of vLLM go to `lightppo serve-vllm`
*.rollout.val_kwargs.n *.rollout.val_kwargs.temperature *.rollout.val_kwargs.top_p *.rollout.val_kwargs.top_k *.rollout.val_kwargs.do_sample | `--eval_n_samples`, `--eval_temperature` (0 for greedy), `--eval_top_p`, `--eval_top_k`
*.rollout.multi_turn.* *.rollout.agent.* *.rollout.chat_scheduler data.function_tool_path data.continuous_token.* | not here: one turn per sample
*.rollout.calculate_log_probs | not here: always recorded
*.rollout.use_fire_sampling | `--fire_sampling`
*.rollout.skip_rollout *.rollout.skip_dump_dir *.rollout.skip.* skip.* | `--skip_rollout DIR`
*.profiler.* global_profiler.* *.profile.* trainer.profile_steps trainer.*_nsight_options.* trainer.npu_profile.* | `--profile_steps`
algorithm.gamma algorithm.lam | `--gamma`, `--lambd` (1 there, 0.95 here)
algorithm.adv_estimator | `--advantage_estimator`: `reinforce++`, `reinforce++_baseline` for `reinforce_plus_plus`, `reinforce_plus_plus_baseline`; whitening there is `--adv_std_unbiased`
algorithm.norm_adv_by_std_in_grpo | `--no_group_std_norm` for False
algorithm.use_kl_in_reward algorithm.kl_penalty | `--use_kl_in_reward`, `--kl_estimator`
critic.kl_ctrl.* algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon | `--init_kl_coef`, `--kl_target` (which makes it adaptive), `--kl_horizon`; the coefficient is 0.001 there, 0.01 here
algorithm.rollout_correction.rollout_is | `--rollout_correction tis` for `token`, `seq_tis` for `sequence`
algorithm.rollout_correction.rollout_is_threshold | `--correction_high 2`; `0.5_5.0` is `--rollout_correction icepop --correction_low 0.5 --correction_high 5`
algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold algorithm.rollout_correction.rollout_rs_threshold_lower | `--rollout_rejection seq_mean_k3=0.01`, also several; for `…_k1` with `a_b` `seq_mean_ratio=` 1/b`:`1/a, as numbers
algorithm.rollout_correction.rollout_token_veto_threshold algorithm.rollout_correction.rollout_is_batch_normalize | `--correction_veto`, `--correction_batch_norm`
algorithm.rollout_correction.bypass_mode algorithm.rollout_correction.loss_type algorithm.rollout_correction.use_policy_gradient | `--old_log_probs rollout`; with `--policy_loss cispo` for `reinforce`
algorithm.use_pf_ppo algorithm.pf_ppo.* | not here
critic.cliprange_value | `--value_clip` (0.5 there, 0.2 here)
distillation.enabled distillation.teacher_models.*.model_path | `--teacher_pretrain`, or `--teacher_url` for servers
distillation.distillation_loss.distillation_loss_coef | `--distill_coef`
distillation.distillation_loss.use_policy_gradient | `--distill_by advantage` for True, `loss` for False
distillation.distillation_loss.loss_mode distillation.distillation_loss.topk | not here: `--distill_by advantage` takes the sampled token, `loss` all tokens by `--distill_beta` (1 is the reverse KL)
distillation.distillation_loss.use_task_rewards | `--advantage_estimator on_policy_distill` for False
distillation.* | not here: one teacher for all rows, in the training processes or behind `--teacher_url`
reward_model.enable reward.reward_model.enable | not here: `--reward_pretrain` alone switches it on
reward_model.model.input_tokenizer | `--reward_input_tokenizer`, the reward model's own (there the actor's)
reward_model.max_length | `--reward_max_length`; `--reward_truncation left` cuts the start
reward_model.reward_manager *reward_manager.name | `--reward_manager`; `prime` needs `--reward_timeout`. A failure is an error or unscored, never 0
*overlong_buffer.* *overlong_buffer_cfg.* | `--overlong_buffer_len`, which alone switches it on, and `--overlong_penalty_factor`; the penalty is always logged
reward.reward_kwargs.max_resp_len | not here: the longest response is `--generate_max_len`
reward_model.reward_loop_source reward_model.reward_loop_module_path reward_model.reward_loop_class_name reward_model.use_reward_loop *reward_manager.source *reward_manager.module.* | not here: `--reward_fn` takes functions; a source of your own goes into a script
reward_model.launch_reward_fn_async | `--async_rewards`: during generation
reward_model.num_workers reward.num_workers | `--reward_workers`
*sandbox_fusion.url *sandbox_fusion.memory_limit_mb | `--reward_source code`, `--sandbox_fusion_url`, `--sandbox_fusion_memory_limit_mb`
*sandbox_fusion.max_concurrent | `--sandbox_fusion_max_concurrent`: of each rank here, of the whole run there
reward_model.rollout.* reward.reward_model.rollout.* *reward_model.enable_resource_pool *reward_model.nnodes *reward_model.n_gpus_per_node reward_model.model.use_* | not here: reward models run in the training processes, or behind `--remote_rm_url`
*custom_reward_function.path *custom_reward_function.name | `--reward_fn path.py:name`
*custom_reward_function.reward_kwargs.* | `functools.partial` in the file of `--reward_fn`
trainer.total_epochs trainer.total_training_steps | `--num_episodes`, `--total_training_steps`
trainer.critic_warmup | `--freezing_actor_steps` N − 1: there the actor trains from step N on
trainer.save_freq trainer.test_freq | `--save_steps`, `--eval_steps` (-1: never there, once per episode here)
trainer.default_local_dir trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep | `--ckpt_path`, `--max_ckpt_num`
trainer.resume_mode trainer.resume_from_path | `--resume auto`, `never` or `PATH`
trainer.val_before_train trainer.val_only | `--no_val_before_train`, `--val_only`
trainer.logger logger | `--use_wandb`, `--use_tensorboard FOLDER`, `--use_trackio PROJECT`, `--use_mlflow URI`, several at once; the console has a line per step in any case
trainer.project_name trainer.experiment_name | `--wandb_project`, `--use_trackio`, `--mlflow_experiment`; `--wandb_run_name`
trainer.log_val_generations trainer.val_generations_to_log_to_wandb trainer.rollout_data_dir trainer.validation_data_dir | `--num_examine`, `--rollout_data_dir`; evaluations are in the folder eval of `--save_path`
trainer.use_v1 trainer.v1.* | not here: rollouts and training take turns, so that every step is on-policy
trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.remove_previous_ckpt_in_save | not here: see `--ckpt_path`, `--save_path`
trainer.nnodes trainer.n_gpus_per_node trainer.device trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl trainer.esi_redundant_time actor_rollout_ref.rollout.nnodes actor_rollout_ref.rollout.n_gpus_per_node ray_init.* ray_kwargs.* transfer_queue.* | not here: no Ray; the launcher sets the ranks
"""

AREAL = """
experiment_name trial_name | `--save_path`, `--wandb_run_name`
mode partition schedule_strategy allocation_mode n_nodes n_gpus_per_node nodelist exclude ray_temp_path cluster.* launcher.* image_name allocation_use_cache cpus_per_* mem_per_* scheduler.* *.scheduling_spec.* *.scheduling_strategy.* *.backend *.device_mesh *.parallel.* | not here: one process per GPU, by the launcher
metric_discovery_port ignore_worker_error cache_clear_freq torch_cache_mysophobia fuse_rew_ref ppo.fuse_rew_ref enable_offload | not here
actor.path critic.path ref.path rew.path | `--pretrain`, `--critic_pretrain`, `--ref_pretrain`, `--reward_pretrain`
*.init_from_scratch *.init_critic_from_actor | the last part of the name
*.type *.type._class actor.is_critic *.is_critic | not here: known from the checkpoint
train_dataset.type valid_dataset.type *.dataset_kwargs | not here: rows are prompts; `lightppo sft` trains on answers
actor.temperature critic.temperature | `--temperature`: that of sampling holds in training too
ref.mb_spec.* | `--micro_batch_specs reference=4096t`
ref.zero_stage rew.zero_stage | `--ref_zero_stage`, `--reward_zero_stage`
ref.* rew.optimizer.* | not here: reference and reward model are not trained
*.gradient_checkpointing *.bf16 *.enable_bf16 *.enable_fp16 *.attn_impl *.dtype | `--gradient_checkpointing`, `--bf16` or `--fp16`, `--attn_implementation`
*.use_lora *.lora_rank *.lora_alpha *.target_modules *.peft_type | `--lora_rank`, `--lora_alpha`, `--target_modules`
actor.optimizer.lr critic.optimizer.lr | `--actor_learning_rate`, `--critic_learning_rate`
*.optimizer.weight_decay *.optimizer.beta1 *.optimizer.beta2 *.optimizer.gradient_clipping *.optimizer.warmup_steps_proportion *.optimizer.lr_scheduler_type *.optimizer.min_lr_ratio | `--l2` (0.01 in 1.x, 0.05 in 0.x, 0 here), `--adam_betas` (0.9 0.999 in 1.x, 0.9 0.95 in 0.x and here), `--max_norm`, `--lr_warmup_ratio`, `--lr_scheduler` (constant there; a cosine after 3% of warm-up here), `--min_lr_ratio`; the critic's with `critic_` before the name
*.optimizer.offload *.offload | `--adam_offload`
*.optimizer.eps *.optimizer.type *.initial_loss_scale *.min_loss_scale *.loss_scale_window *.hysteresis | not here: AdamW with 1e-8; `--fp16` starts at a loss scale of 65536
*.zero_stage *.megatron.* *.fsdp.* *.archon.* *.grad_reduce_dtype *.enable_tree_training *.use_kernels *.weight_update_mode | not here: DeepSpeed shards, by `--zero_stage`
*.mb_spec *.mb_spec.n_mbs *.mb_spec.max_tokens_per_mb *.mb_spec.* | `--max_tokens_per_micro_batch`; `--micro_batch_specs actor_train=4096t` for one call
*.disable_dropout *.pad_to_maximum dataset.fill_to_max_length dynamic_bs | not here: dropout is off unless `--override_config` sets it; no padding where it is not needed
dataset.path train_dataset.path | `--prompt_data`
valid_dataset.path | `--eval_data`
train_dataset.split valid_dataset.split | `--prompt_split`, `--eval_split`
valid_dataset.batch_size | not here: `--micro_rollout_batch_size` holds for evaluations too
valid_dataset.max_length | `--prompt_max_len`, which holds for evaluations too
dataset.max_prompt_len train_dataset.max_length | `--prompt_max_len`; a longer prompt is an error, or `--filter_overlong_prompts`
dataset.train_bs_n_seqs train_dataset.batch_size | `--rollout_batch_size`
shuffle_dataset *.shuffle | `--data_shuffle` (on)
*.drop_last | not here: what is left of an episode is a smaller rollout (dropped there)
*.pin_memory *.num_workers *.num_dataset_workers | `--dataloader_pin_memory`, `--data_num_workers`
group_size actor.group_size gconfig.n_samples ppo.gen.n | `--n_samples_per_prompt`
generation_size | the same: the best of them train
ppo.gen.max_new_tokens gconfig.max_new_tokens actor.max_new_tokens | `--generate_max_len`
gconfig.max_tokens | `--prompt_max_len` and `--generate_max_len`
ppo.gen.min_new_tokens gconfig.min_new_tokens ppo.gen.temperature gconfig.temperature ppo.gen.top_p gconfig.top_p gconfig.stop gconfig.stop_token_ids gconfig.ignore_eos gconfig.frequency_penalty | the last part of the name
ppo.gen.top_k gconfig.top_k | `--top_k`, off is 1e8 there, -1 here
ppo.gen.greedy gconfig.greedy | `--no_do_sample`
ppo.gen.use_cuda_graph ppo.gen.force_* gconfig.skip_special_tokens gconfig.lora_name gconfig.use_beam_search | not here
eval_gconfig.n_samples eval_gconfig.temperature eval_gconfig.top_p eval_gconfig.top_k eval_gconfig.greedy | `--eval_n_samples`, `--eval_temperature` (0 is greedy), `--eval_top_p`, `--eval_top_k`
eval_gconfig.* | not here: as in training
ppo.ppo_n_minibatches actor.ppo_n_minibatches critic.ppo_n_minibatches | `--ppo_n_minibatches` (4 there; None here)
ppo.eps_clip actor.eps_clip actor.eps_clip_higher | `--eps_clip`, `--eps_clip_low`, `--eps_clip_high`
ppo.c_clip actor.c_clip | `--dual_clip`
ppo.value_eps_clip critic.eps_clip | `--value_clip`
ppo.early_stop_imp_ratio | `--early_stop_imp_ratio`, and `--early_stop_kl`
ppo.actor_sample_reuse ppo.critic_sample_reuse | `--max_epochs`, `--critic_max_epochs`
ppo.max_reward_clip actor.reward_clip | `--max_reward_clip`; above 10 with `--reward_clip_range None`
ppo.reward_output_scaling rm_output_scaling actor.reward_scaling | `--reward_scaling`
ppo.reward_output_bias | `--reward_bias`, subtracted too
actor.reward_bias | `--reward_bias` with the other sign
actor.reward_norm.* | `--reward_running_norm`, over the run; [conformance.md](conformance.md)
actor.overlong_reward_penalty actor.overlong_tokens actor.overlong_penalty_factor | `--overlong_buffer_len`, `--overlong_penalty_factor`
ppo.discount actor.discount ppo.gae_lambda actor.gae_lambda | `--gamma`, `--lambd` (1 there, 0.95 here)
ppo.adv_norm actor.adv_norm.* | `--adv_norm`, `--adv_norm_scope`
ppo.group_adv_norm group_adv_norm | `--adv_norm_scope group`, or `--advantage_estimator group_adv_norm` without a critic
ppo.kl_ctl actor.kl_ctl ppo.use_adaptive_kl_ctl | `--init_kl_coef` (0.1 there, 0.01 here), `--kl_target`
actor.kl_estimator | `--kl_estimator`, with `--kl_clip 10`
ppo.disable_value | `--advantage_estimator reinforce`, with `gae_lambda` 1
ppo.value_norm ppo.value_norm_type ppo.value_norm_beta ppo.value_norm_eps | `--value_norm exp` or `ma` (on there, off here), `--value_norm_beta`, `--value_norm_eps`
ppo.recompute_logprob actor.recompute_logprob actor.prox_logp_method | `--old_log_probs`
ppo.use_decoupled_loss actor.use_decoupled_loss ppo.behav_imp_weight_cap actor.behav_imp_weight_cap | `--rollout_correction decoupled`, `--correction_high`
actor.m2_threshold | `--rollout_rejection m2po=` the threshold
actor.rejection_sampling.* | `--rollout_correction tis` or `geo_tis` for `clamp`, `icepop` or `geo_mis` for `mask` of level `token` or `sequence`; `--rollout_rejection token_k2=…` for other metrics
actor.importance_sampling_level | `--policy_loss gspo` for `sequence`
actor.use_sapo_loss actor.sapo_tau_pos actor.sapo_tau_neg | `--policy_loss sapo`, `--sapo_tau_pos`, `--sapo_tau_neg`
*.mask_no_eos_with_zero | `--mask_no_eos_with_zero`
rw_type reward_delta *.reward_delta | `--use_dense_reward` for `dense`; with `--reward_delta`, which is on there and off here
success_rate_ub success_rate_lb | `--dynamic_sampling --filter_range`: other prompts take their place; there the step gets smaller
dataset_filter_threshold dataset_max_filter_percentage ref_ema_eta check_verifier_status check_xml_format mask_no_eos_with_zero mask_too_long | the same; 0 and None are off
no_training | `--val_only`
task | `--reward_source math` or `code`
REAL_CODE_METADATA_PATH | `--prompt_metadata`
prompt_id_key | not here: ids of rows are in the column `query_id` or `id`
external_libs | `--external_lib`
actor.dynamic_sampling | `--dynamic_sampling`: other prompts take the place of groups of equal scores; there the step gets smaller
FUNCTIONCALL_SERVICE_DOMAIN scheduler.functioncall_service_domain | `--function_call_url`, for `--reward_source code`
exp_ctrl.total_train_epochs total_train_epochs total_train_steps total_train_n_seqs | `--num_episodes`, `--total_training_steps`
exp_ctrl.save_freq_* saver.freq_* | `--hf_save_steps`, `--hf_save_epochs`, `--hf_save_seconds` (HF format)
exp_ctrl.ckpt_freq_* recover.freq_* | `--save_steps`, `--save_epochs`, `--save_seconds`
exp_ctrl.eval_freq_* evaluator.freq_* | `--eval_steps`, `--eval_epochs`, `--eval_seconds`
exp_ctrl.benchmark_steps exp_ctrl.benchmark_n_seqs | `--benchmark_steps`
evaluator.eval_before_train | `--val_before_train` (on)
saver.fileroot evaluator.fileroot recover.fileroot | `--save_path`, `--ckpt_path`
saver.mode | not here
recover_mode recover.mode | `--resume auto`, `never`
recover_retries recover_after recover.retries recover.no_* | not here: start the command again, it goes on by itself
auto_eval auto_eval_config.* | `--eval_data` while training, or `lightppo eval` on an export
wandb.mode wandb.entity wandb.project wandb.name wandb.group tensorboard.path stats_logger.* | `--use_wandb`, `--wandb_org`, `--wandb_project`, `--wandb_run_name`, `--wandb_group`, `--use_tensorboard`
trackio.project trackio.name | `--use_trackio`, `--wandb_run_name`
wandb.job_type wandb.notes wandb.tags wandb.config swanlab.* trackio.* | not here; trackers read their environment variables
perf_tracer.* memory_profiler.* | `--profile_steps`
*vllm.gpu_memory_utilization sglang.mem_fraction_static *.sglang.mem_fraction_static | `--gpu_memory_utilization`: 0.9 there, for GPUs of its own; 0.4 here, shared with training
*vllm.dtype | `--vllm_dtype`
*vllm.max_num_seqs *vllm.max_model_len *vllm.block_size *vllm.enforce_eager *vllm.enable_prefix_caching | the last part of the name
*vllm.* *sglang.* | not here: for vLLM servers, options of vLLM go to `lightppo serve-vllm`
rollout.tokenizer_path rollout.dump_to_file | `--tokenizer_path`, `--rollout_data_dir`
rollout.request_timeout rollout.request_retries | `--vllm_server_timeout`, `--vllm_server_retries`
scheduler.reward_model_path scheduler.reward_model_service_url scheduler.reward_functioncall_config | `--reward_pretrain`, `--remote_rm_url`, `--function_call_url`
max_head_offpolicyness max_concurrent_rollouts n_rollout_workers schedule_policy new_tokens_per_chunk flush_request_timeout rollout.* | not here: rollouts and training take turns, so that every step is on-policy
teacher.* *.agent.* | not here
*.log_agent_stats* *.temperature *.request_timeout *.setup_timeout *.log_level *._version *._OPENAI_UNSUPPORTED_ARGS *.admin_api_key *.optimizer *.experiment_name *.trial_name | not here
seed tokenizer_path use_dense_reward debug | =
"""

LAST_PART = "the last part of the name"
TABLES = {"OpenRLHF": OPENRLHF, "LightRFT": LIGHTRFT, "TRL": TRL, "verl": VERL, "AReaL": AREAL}


@functools.cache
def rows(trainer: str) -> list[tuple[list[str], str]]:
    """(their names, what they are here) of every row of a trainer's table."""
    lines = [line.partition(" | ") for line in TABLES[trainer].strip().split("\n")]
    return [(names.split(), text) for names, _, text in lines]


def hint(name: str, value: Any = None) -> str:
    """``": here --x (verl)"`` for a name of another trainer, or its value of our option; else an empty string."""
    name = name.lstrip("+~-") if value is None else f"{name}={value}"
    matches = [
        ((pattern == name, not pattern.startswith("*"), len(pattern)), trainer, text)
        for trainer in TABLES
        for patterns, text in rows(trainer)
        for pattern in patterns
        if text != "=" and (pattern == name or ("*" in pattern and fnmatchcase(name, pattern)))
    ]
    found: dict[str, list[str]] = {}
    for closeness, trainer, text in matches:
        if closeness == max(matches)[0]:
            ours = f"--{name.rpartition('.')[2]}" if text == LAST_PART else _plain(text)
            found.setdefault(ours, []).append(trainer)
    texts = [text if text.startswith("not here") else f"here {text}" for text in found]
    return ": " * bool(found) + "; ".join(f"{t} ({', '.join(who)})" for t, who in zip(texts, found.values()))


def _plain(text: str) -> str:
    return re.sub(r"\[(\S+)\]\(\S+\)", r"docs/\1", text).replace("`", "")


# -- docs/migrating.md -----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"


def with_tables(page: str) -> str:
    """The page with each table between ``<!-- TRAINER -->`` and ``<!-- end -->`` written anew."""
    return re.sub(r"(?s)(<!-- (\w+): generated by `make docs` -->\n).*?(<!-- end -->)", _table, page)


def _table(markers: re.Match[str]) -> str:
    trainer, same, lines = markers[2], [], [f"{markers[2]} | lightppo", "---|---"]
    for names, text in rows(trainer):
        if text == "=":
            same += names
        else:
            theirs = ", ".join(f"`{name}`".replace("*", "…") for name in names)
            lines.append(f"{theirs} | {text}")
    if same:
        lines += ["", f"The same here: {', '.join(f'`{name}`' for name in same)}."]
    return markers[1] + "\n".join(lines) + "\n" + markers[3]


def write_page() -> None:
    """Write the tables of docs/migrating.md."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
