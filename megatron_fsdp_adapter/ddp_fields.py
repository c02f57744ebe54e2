"""Megatron-LM main's fields of the DDP config, for a megatron-core that lacks them.

`install()` puts this class in the place of core's. Megatron-LM fills a DDP config with every field
of the class that its parsed arguments have, so that main's flags arrive without a line about them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig as CoreDDPConfig,
)


@dataclass
class DistributedDataParallelConfig(CoreDDPConfig):
    """Core's DDP config with the FSDP options that Megatron-LM main added after 0.16.1.

    Attributes:
        megatron_fsdp_version: main's generation of wrappers; only 1 has the interface kept here.
        megatron_fsdp_main_params_dtype: dtype of the weights that the optimizer updates.
        megatron_fsdp_main_grads_dtype: dtype in which gradients accumulate; None means float32.
        megatron_fsdp_grad_comm_dtype: dtype of gradients on the wire; None means that of the main
            gradients.
        megatron_fsdp_enable_fine_grained_param_gather: gathers of single modules; refused.
        megatron_fsdp_max_pool_double_buffer: a pool of communication buffers; refused.
        fsdp_db_use_persist_buf_on_alloc_fail: what such a pool does when it is full; refused.
    """

    megatron_fsdp_version: int = 1
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
