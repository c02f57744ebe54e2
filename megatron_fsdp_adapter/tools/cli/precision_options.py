"""Options of `estimate` for dtypes and memory of the optimizer, and for communication buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_fsdp_adapter.core.config import MixedPrecisionPolicy
from megatron_fsdp_adapter.core.layout.group import ParamSpec
from megatron_fsdp_adapter.plan.memory import Moments, Precision

POLICY_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "none": None}
POLICY_OPTIONS = {
    "megatron_fsdp_main_params_dtype": (
        "dtype of main weights; none: the compute dtype; default: fp32"
    ),
    "megatron_fsdp_main_grads_dtype": "dtype of gradient accumulation; default: fp32",
    "megatron_fsdp_grad_comm_dtype": (
        "dtype of gradients on the wire; default: that of main gradients"
    ),
}

UNFUSED = "no_gradient_accumulation_fusion"
SWITCHES = {
    "fsdp_double_buffer": "weights and buckets in fixed slots",
    "nccl_ub": "weights and buckets in fixed slots, registered with NCCL",
    "fsdp_copy_engine_all_gather": "weights in slots, gathered by copy engines",
    "fsdp_copy_engine_reduce_scatter": "gradients in slots, moved by copy engines",
    UNFUSED: "no fused weight gradients: copy engines move them in their own dtype",
    "chunked_optimizer_state_offload": "main weights and optimizer state in host memory",
    "optimizer_cpu_offload": "as --chunked-optimizer-state-offload",
}

EMBEDDINGS = ("embedding", "output_layer")
MATRICES_OF_ADAM = (*EMBEDDINGS, "router")
"""Modules whose matrices Adam updates in a run with Muon."""


def is_muons(spec: ParamSpec) -> bool:
    """True for a weight that Muon updates, by the rule of `megatron/optimizer/muon.py`."""
    is_matrix = len(spec.shape) == 2 and min(spec.shape) > 1
    return is_matrix and not _is_within(spec, MATRICES_OF_ADAM)


def is_lions(spec: ParamSpec) -> bool:
    """True for a weight that Lion updates, by the rule of `megatron/optimizer/lion.py` with
    megatron-core 0.18 and later."""
    return len(spec.shape) == 2 and not _is_within(spec, EMBEDDINGS)


def _is_within(spec: ParamSpec, modules: Sequence[str]) -> bool:
    return not set(modules).isdisjoint(spec.fqns[0].split("."))


MOMENTS: Mapping[str, Moments] = {
    "muon": (is_muons, 1),
    "lion": (is_lions, 1),
}
"""Value of `optimizer` -> the weights that Adam does not update, and their number of moments."""


def precision(given: Mapping[str, Any]) -> Precision:
    """The `Precision` of the options, with a training run's defaults."""
    dtypes = []
    for option, default in zip(POLICY_OPTIONS, ("fp32", "none", "none"), strict=True):
        dtypes.append(POLICY_DTYPES[given.get(option, default)])
    main, grads, comm = dtypes
    policy = MixedPrecisionPolicy(main, grads, comm)
    offloads = ("chunked_optimizer_state_offload", "optimizer_cpu_offload")
    return Precision(
        policy.main_params_dtype,
        policy.grads_dtype,
        policy.comm_dtype,
        offload=any(given.get(name, False) for name in offloads),
        moments=MOMENTS.get(given.get("optimizer", "adam")),
    )
