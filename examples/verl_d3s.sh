#!/usr/bin/env bash
# D3S in verl 0.9.1: GRPO with the trainer mode d3s_sync, on one node of eight GPUs.
#
#     pip install --no-build-isolation '.[verl]'
#     examples/verl_d3s.sh trainer.total_epochs=2         # further options of verl follow
#
# It has not been run as a whole: that takes GPUs and vLLM. What is tested, on a CPU (tests/verl/test_verl_example.py):
# verl's configuration takes every option below, and D3S takes the configuration that comes of them.
set -euo pipefail

DATA=${DATA:-$HOME/data/gsm8k}  # made by verl's examples/data_preprocess/gsm8k.py
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}

options=(
  # D3S: a quarter of each prompt's rollouts at first and all at the end; 5 % of their tokens at first, then 20 %
  trainer.v1.trainer_mode=d3s_sync
  +trainer.v1.d3s_sync.rollouts_start=0.25
  +trainer.v1.d3s_sync.rollouts_end=1.0
  +trainer.v1.d3s_sync.token_ratio_start=0.05
  +trainer.v1.d3s_sync.token_ratio_end=0.20
  actor_rollout_ref.model.use_fused_kernels=true  # the head computes the tokens that are read, and no others
  actor_rollout_ref.model.fused_kernel_options.impl_backend=d3s
  # all the rest is verl's
  algorithm.adv_estimator=grpo
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=128
  data.max_prompt_length=512
  data.max_response_length=1024
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=32
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.use_kl_loss=false
  trainer.n_gpus_per_node=8
  trainer.nnodes=1
  trainer.total_epochs=1
  trainer.logger=console
)
exec python -m verl.trainer.main_ppo "${options[@]}" "$@"
