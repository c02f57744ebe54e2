#!/usr/bin/env bash
# Pretrains Llama-3 8B with Megatron-LM's own pretrain_gpt.py on 8 GPUs of one machine, sharded, and
# goes on from its newest checkpoint. Data are mock, so that nothing has to be downloaded.
#
#   MEGATRON_LM=path/to/Megatron-LM bash examples/megatron_lm.sh [further flags of Megatron-LM]
#
# Two things differ from a run with Megatron's DDP: `-m megatron_fsdp_adapter` before the script, and
# --use-megatron-fsdp. Rank 0 prints the options that the flag sets, and a line
# "FullyShardedDataParallel: strategy optim_grads_params over 8 ranks, ... units".
# Check it first, without starting it: `DOCTOR=1 bash examples/megatron_lm.sh`.
#
# Run on two H200 with torch 2.11, Megatron-LM core_v0.19.0 and Transformer Engine 2.20.2, with two
# layers of this width, through and resumed: losses are within 3e-4 of those of Megatron's DDP. A
# test runs it with core_v0.16.1 on two CPU processes, with two layers of small width and without
# kernels of Transformer Engine. Not run with all 32 layers.
set -euo pipefail
: "${MEGATRON_LM:?set MEGATRON_LM to a checkout of Megatron-LM}"
gpus=${GPUS:-8}

model=(
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --seq-length 8192
  --max-position-embeddings 8192
  --position-embedding-type rope
  --rotary-base 500000
  --swiglu
  --normalization RMSNorm
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
)
training=(
  --bf16
  --micro-batch-size 1
  --global-batch-size 128
  --train-iters 1000
  --lr 3e-4
  --min-lr 3e-5
  --lr-decay-style cosine
  --lr-warmup-iters 100
  --weight-decay 0.1
  --adam-beta2 0.95
  --clip-grad 1.0
  --log-interval 10
  --eval-interval 500
  --eval-iters 10
)
data=(
  --mock-data
  --tokenizer-type NullTokenizer
  --vocab-size 128256
)
sharding=(
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads_params
)
checkpoints=(
  --save "${CHECKPOINTS:-checkpoints/llama3-8b}"
  --load "${CHECKPOINTS:-checkpoints/llama3-8b}"
  --save-interval 500
)
flags=("${model[@]}" "${training[@]}" "${data[@]}" "${sharding[@]}" "${checkpoints[@]}" "$@")

if [ -n "${DOCTOR:-}" ]; then
  exec python -m megatron_fsdp_adapter doctor --world-size "$gpus" "$MEGATRON_LM/pretrain_gpt.py" "${flags[@]}"
fi
exec torchrun --nproc-per-node "$gpus" -m megatron_fsdp_adapter "$MEGATRON_LM/pretrain_gpt.py" "${flags[@]}"
