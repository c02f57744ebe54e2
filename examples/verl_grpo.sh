#!/usr/bin/env bash
# GRPO by verl on the GPUs of one machine: Megatron-Core trains the actor, sharded by this package,
# and vLLM generates.
#
#   pip install verl vllm megatron-bridge .      # the last one: a checkout of this repository
#   MODEL=path/to/model TRAIN=train.parquet VALID=test.parquet bash examples/verl_grpo.sh [overrides]
#
# One word is this package's, use_megatron_fsdp=True: verl finds the package by its entry point.
# A worker's log has the line "FullyShardedDataParallel: strategy optim_grads_params over 8 ranks".
#
# verl 0.9.1 reads these options into its own configuration, in a test. Sharded models of verl were
# built, moved and exported on two CPU processes. The trainer itself was not run.
set -euo pipefail
: "${MODEL:?set MODEL to a folder of a Hugging Face model}"
: "${TRAIN:?set TRAIN to a file of prompts}"
: "${VALID:?set VALID to a file of prompts}"

data=(
  data.train_files="$TRAIN"
  data.val_files="$VALID"
  data.train_batch_size=256
  data.max_prompt_length=512
  data.max_response_length=1024
)
actor=(
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
  actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.001
)
sharding=(
  actor_rollout_ref.actor.megatron.use_megatron_fsdp=True
  actor_rollout_ref.ref.megatron.use_megatron_fsdp=True
  +actor_rollout_ref.actor.megatron.override_ddp_config.data_parallel_sharding_strategy=optim_grads_params
  # Between steps the actor's memory belongs to vLLM.
  actor_rollout_ref.actor.megatron.param_offload=True
  actor_rollout_ref.actor.megatron.optimizer_offload=True
)
rollout=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
)
trainer=(
  trainer.n_gpus_per_node="${GPUS:-8}"
  trainer.nnodes=1
  trainer.total_epochs=1
  trainer.save_freq=20
  trainer.project_name=grpo
  trainer.experiment_name=sharded
  'trainer.logger=[console]'
)
exec python -m verl.trainer.main_ppo model_engine=megatron algorithm.adv_estimator=grpo \
  "${data[@]}" "${actor[@]}" "${sharding[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
