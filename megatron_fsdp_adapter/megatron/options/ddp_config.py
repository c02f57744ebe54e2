"""The DDP config with the fields that Megatron-LM main has for this wrapper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig as CoreConfig


@dataclass
class DistributedDataParallelConfig(CoreConfig):
    """megatron-core 0.16.1's config and what Megatron-LM main has beside it, with main's defaults.

    A plain 0.16.1 config works too: a field that it lacks is read with the default below.
    `docs/precision.md` says what the dtypes do, `docs/support.md` which fields are refused.

    Raises:
        ValueError: both `bucket_size` and `num_buckets`, as in main.
    """

    preserve_fp32_weights: bool | None = None  # type: ignore[assignment]
    """Deprecated, gone in main. True: float32 main weights. False: the parameters' own dtype. None:
    as `megatron_fsdp_main_params_dtype` says; True is 0.16.1's default and says the same there."""

    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    """Dtype of the weights that the optimizer updates; None: of each parameter."""

    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    """Dtype in which gradients accumulate and are given to the optimizer; None: float32 (in main:
    that of each parameter)."""

    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    """Dtype of gradients on the wire; None: the main-gradient dtype."""

    megatron_fsdp_use_decoupled_grad: bool = False
    """Accepted: the optimizer finds its gradients under both names, `grad` and `decoupled_grad`."""

    fsdp_copy_engine_all_gather: bool = False
    """Ours: the copy engines gather weights, inside an NVLink domain. The wrapper makes
    NCCL groups for that; gathered weights are in fixed buffers (docs/performance.md)."""

    fsdp_copy_engine_reduce_scatter: bool = False
    """Ours: the copy engines carry gradients to the ranks that add them up, each its own shard, in
    the order of the ranks. Buckets are in fixed buffers, and there is one more of them."""

    fsdp_unsharded_budget_gib: float = 0.0
    """Ours: memory of each GPU, in GiB, for weights that stay gathered, and gradients that add up
    unsharded, over the microbatches of a step, in as many units as fit (docs/design.md)."""

    fsdp_grad_comm_fp8_blocks: bool = False
    """Refused: `megatron_fsdp_grad_comm_dtype` is what makes gradients smaller on the wire."""

    chunked_optimizer_state_offload: bool = False
    """Ours: main weights and optimizer state are in host memory, and brought to the GPU for a step,
    one unit after the other (docs/optimizer_offload.md). Megatron's development branch has the name
    in its optimizer config."""

    create_all_gather_group: bool = False
    """Ours: gathers get process groups of their own where the wrapper is given none. Megatron-LM's
    flag of that name fills it; Megatron-LM itself makes such groups in some releases only."""

    report_nan_in_param_grad: bool = False
    """Like `check_for_nan_in_grad`, and names the parameter."""

    fp4_param_gather: bool = False
    """Refused: weights are gathered in bf16, and quantized in forward."""

    num_buckets: int | None = None
    """Accepted, as `bucket_size` is: units take the place of buckets."""

    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Accepted: all gradients accumulate in float32. Refused where `megatron_fsdp_main_grads_dtype`
    is another dtype."""

    megatron_fsdp_version: int = 1
    """Accepted: there is one engine here."""

    megatron_fsdp_cuda_graph_mode: bool = False
    """Accepted: the model config says what is captured, and the wrapper sees when."""

    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    """Parts of a layer's experts are units of their own, so that a layer of many experts is not
    gathered whole."""

    megatron_fsdp_max_pool_double_buffer: bool = False
    """As `fsdp_double_buffer`: slots are sized by the largest unit that uses them in any case."""

    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    """Accepted: every unit fits its slot, so that there is nothing to fall back from."""

    fsdp_all_gather_in_start_param_sync: bool = True
    """Accepted: once there is a graph of the step, weights are gathered inside it alone."""

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} exclude each "
                "other; set one of them"
            )
        super().__post_init__()  # of 0.18 asserts the same
