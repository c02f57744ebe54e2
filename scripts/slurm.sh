#!/usr/bin/env bash
# A run over the nodes of a Slurm job: one torchrun on each, which meet on the first. From the folder
# that relative paths begin in, which all nodes share, with this package in the environment:
#
#   sbatch --nodes 2 scripts/slurm.sh -m megatron_fsdp_adapter doctor
#   sbatch --nodes 2 scripts/slurm.sh -m megatron_fsdp_adapter path/to/Megatron-LM/pretrain_gpt.py --use-megatron-fsdp ...
#   sbatch --nodes 2 scripts/slurm.sh train.py ...
#
# What follows the script's name is what would follow torchrun's own options. Options of sbatch in
# front of it take the place of the lines below; add those of your site (partition, account, time).
# Environment: PYTHON (python), PROCESSES (of a node; gpu: one for each GPU), MAX_RESTARTS (3).
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

# Put modules, a container or `source .venv/bin/activate` of your site here, and variables of NCCL
# for your network (docs/multinode.md).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Without it ranks that torchrun starts again look for each other at their old addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Jobs that share a node meet on different ports.
port=$((20000 + SLURM_JOB_ID % 20000))

# --cpu-bind=none: a task would otherwise be bound to the one core that --ntasks-per-node=1 counts.
# --kill-on-bad-exit: a launcher that has given up ends those of the other nodes, and so the job.
exec srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --label \
  "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES:-gpu}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" "$@"
