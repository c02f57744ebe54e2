"""Flags of life cycles, as data: what a run, and the run that resumes it, may be started with.

A row is left out if Megatron's own parser (of the checkout) does not know a flag of it, and a value
if it is none of the parser's choices. `Flags.needs` and `Flags.excludes` leave out most of what
stock Megatron does not run; a cycle that it does not run is invalid. Rows of the tables `ON_GPUS_*`
are drawn on GPUs beside the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.lib.integration.lm_runs import MOE

TE = "transformer_engine"


@dataclass(frozen=True)
class Flags:
    """Flags that are drawn together.

    values: of the braces in `text`; () if it has none, and None for the choices of the parser.
    needs: words without any of which the row is not drawn; excludes: words with any of which it is
    not. asks: Transformer Engine, if the row is drawn only where that is installed."""

    text: str
    weight: float = 1.0
    values: tuple[str, ...] | None = ()
    needs: str = ""
    excludes: str = ""
    asks: str = ""


# fmt: off
MODELS = (
    Flags("--swiglu", 2),
    Flags("--quick-geglu", 0.5),
    Flags("--squared-relu", 0.5),
    Flags("--normalization {}", 1, None),
    Flags("--position-embedding-type {}", 2, ("rope", "none")),
    Flags("--group-query-attention --num-query-groups 2"),
    Flags("--qk-layernorm"),
    Flags("--apply-layernorm-1p", 0.2),
    Flags("--attention-output-gate", 0.5),
    Flags("--apply-wd-to-qk-layernorm --qk-layernorm", 0.5),
    Flags("--softmax-type {}", 0.5, None),
    Flags("--disable-bias-linear"),
    Flags("--add-qkv-bias", 0.5),
    Flags("--num-layers 4"),
    Flags(MOE, 2),
    Flags(f"{MOE} --moe-shared-expert-intermediate-size 32"),
    Flags(f"{MOE} --moe-layer-freq 2", 0.7),
    Flags(f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias", 0.7),
    Flags("--mtp-num-layers 1 --position-embedding-type rope"),
    Flags("--vocab-size 255"),
    Flags("--bf16", 0.7),
    Flags("--init-method-std {}", 0.3, ("0.05",)),
    Flags("--optimizer {}", 0.5, ("sgd",)),
)
"""Of all runs of a cycle."""

SCHEDULES = (
    Flags("--lr {}", 1, ("1e-3", "2e-3")),
    Flags("--min-lr {}", 1, ("1e-5", "5e-4")),
    Flags("--weight-decay {}", 1, ("0.0", "0.1")),
    Flags(
        "--start-weight-decay 0.0 --end-weight-decay 0.2 --weight-decay-incr-style {}",
        1, ("linear", "cosine"),
    ),
    Flags("--lr-decay-style {}", 1, ("constant", "linear", "cosine", "inverse-square-root")),
    Flags("--lr-warmup-iters {}", 1, ("1", "3")),
    Flags("--lr-decay-iters {}", 0.7, ("8", "20")),
    Flags("--decoupled-lr {}", 1, ("3e-3",)),
    Flags("--decoupled-lr 3e-3 --decoupled-min-lr 1e-4", 0.5),
)
"""Of the learning rate and the weight decay. Stock Megatron refuses most changes of these in a
resume."""

KEEPS_SCHEDULE = 0.7
"""The share of cycles whose runs have one schedule."""

RUNS = (
    Flags("--override-opt_param-scheduler", 1.5, excludes="--use-checkpoint-opt_param-scheduler"),
    Flags("--use-checkpoint-opt_param-scheduler", 1.5, excludes="--override-opt_param-scheduler"),
    Flags("--clip-grad {}", 1, ("0.1", "1.0")),
    Flags("--adam-beta1 {}", 0.5, ("0.8",)),
    Flags("--adam-eps {}", 0.5, ("1e-6",)),
    Flags("--global-batch-size {}", 1, ("8", "16")),
    Flags("--micro-batch-size 1", 0.7),
    Flags("--seed {}", 0.5, ("7",)),
    Flags("--calculate-per-token-loss", 0.7),
    Flags("--no-load-optim", 0.7),
    Flags("--no-load-rng", 0.7),
    Flags("--no-save-optim", 0.4),
    Flags("--no-save-rng", 0.7),
    Flags("--finetune", 0.7),
    Flags("--dist-ckpt-strictness {}", 1, None),
    Flags("--async-save", 0.7),
    Flags("--exit-signal-handler", 0.4),
    Flags("--ckpt-assume-constant-structure", 0.4),
    Flags("--ckpt-fully-parallel-load", 0.4),
    Flags("--use-checkpoint-args", 0.7),
    Flags("--non-persistent-ckpt-type global --non-persistent-save-interval 1", 0.4),
    Flags("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 0.7),
    Flags("--overlap-grad-reduce", 0.7),
    Flags("--hidden-dropout 0.1", 0.5),
    Flags("--eval-interval {}", 0.3, ("1", "4")),
    Flags("--mtp-loss-scaling-factor {}", 0.3, ("0.3",)),
    Flags("--log-num-zeros-in-grad", 0.3),
    Flags("--skip-train", 0.3),
)
"""Of one run."""

LAYOUTS = (
    Flags("--tensor-model-parallel-size 2", 1, excludes="--num-experts"),
    Flags("--pipeline-model-parallel-size 2", 1),
    Flags(
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 1.5,
        needs="--num-experts",
    ),
    Flags("--num-distributed-optimizer-instances 2", 0.3),
)
"""How one run is spread over its ranks."""

_TE = "--transformer-impl transformer_engine"
_FP8 = f"{_TE} --bf16 --fp8-format hybrid --fp8-recipe {{}}"
_RECIPES = ("tensorwise", "delayed")
# Rows of FP8 need rows of matrices in multiples of 16: experts get any number of tokens.
_NO_FP8 = "--num-experts --mtp-num-layers --fp8-format"

ON_GPUS_MODELS = (
    Flags(_TE, 3, asks=TE),
    Flags(f"{_TE} --bf16", 3, asks=TE),
    Flags(_FP8, 3, _RECIPES, excludes=_NO_FP8, asks=TE),
    Flags(f"{_FP8} --fp8-param-gather", 1.5, _RECIPES, excludes=_NO_FP8, asks=TE),
    Flags("--bf16", 1),
    Flags("--use-precision-aware-optimizer", 0.7, needs="--bf16", excludes="sgd", asks=TE),
    Flags("--te-rng-tracker", 2.5, asks=TE),
    Flags("--cross-entropy-loss-fusion", 0.7),
    Flags(f"{_TE} --moe-grouped-gemm", 4, needs="--num-experts", asks=TE),
    Flags(f"{_TE} --moe-grouped-gemm --moe-permute-fusion", 1, needs="--num-experts", asks=TE),
)

ON_GPUS_RUNS = (
    Flags("--recompute-activations", 1, excludes="--recompute-granularity"),
    Flags("--hidden-dropout 0.1 --attention-dropout 0.1", 0.7),
    Flags("--overlap-grad-reduce --overlap-param-gather", 1.5),
    Flags("--no-check-for-nan-in-loss-and-grad", 0.5),
    Flags("--async-save", 1),
)

ON_GPUS_LAYOUTS = (
    Flags("--tensor-model-parallel-size 2 --sequence-parallel", 1),
    Flags("--context-parallel-size 2", 0.7, needs=f"{_TE} --bf16", excludes="--softmax-type"),
    Flags(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 0.7,
        needs="--num-layers", excludes="--mtp-num-layers",
    ),
)

ON_GPUS_OURS = (
    Flags("--fsdp-unsharded-budget-gib {}", 2, ("auto", "1")),
    Flags("--fsdp-copy-engine-all-gather", 1, needs="optim_grads_params"),
    Flags("--fsdp-copy-engine-reduce-scatter", 1, excludes="no_shard optim"),
    Flags(
        "--fsdp-copy-engine-all-gather --fsdp-copy-engine-reduce-scatter", 1,
        needs="optim_grads_params",
    ),
    Flags("--fsdp-double-buffer", 1),
    Flags("--chunked-optimizer-state-offload", 1, excludes="sgd"),
    Flags("--suggested-communication-unit-size 0", 0.7),
    Flags(
        "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --fsdp-double-buffer", 4,
        needs="--te-rng-tracker", excludes="full delayed --context-parallel-size",
    ),
    Flags(
        "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1 "
        "--no-check-for-nan-in-loss-and-grad", 3,
        needs="--te-rng-tracker", excludes="--num-experts",
    ),
    Flags(
        "--expert-data-parallel-sharding-strategy {}", 1.5, ("no_shard", "optim", "optim_grads"),
        needs="--num-experts",
    ),
    Flags("--megatron-fsdp-enable-fine-grained-param-gather", 1, needs="--num-experts"),
    Flags("--outer-dp-sharding-strategy optim", 3, needs="--num-distributed-optimizer-instances"),
    Flags("--create-all-gather-group", 0.7),
)
"""Of runs with a strategy of this package alone, whose parser knows them."""
# fmt: on

WORLDS = ("1", "2", "2", "2", "4")
STOCK = "stock"
WRAPPERS = ("optim_grads_params", "optim_grads_params", "optim_grads", "optim", "no_shard", STOCK)
"""What a run of the side that is tested has: a strategy of this package, or stock DDP."""
ENDS = ("exit", "exit", "exit", "kill")
"""How a run ends after its iterations: by `--exit-interval`, or by SIGKILL after its save."""
