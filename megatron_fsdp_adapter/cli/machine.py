"""Capabilities of this machine, and environment variables that harm them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.megatron.options.validation import CONNECTIONS


@dataclass(frozen=True)
class Variable:
    """An environment variable, its harmful values, and their effect."""

    name: str
    hurts: Callable[[str], bool]
    effect: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.upper() in values


def _is_on(value: str) -> bool:
    return value.upper() not in ("", "0", "FALSE", "OFF", "N")


VARIABLES: tuple[Variable, ...] = (
    Variable(
        CONNECTIONS, _is("1"), ("one hardware queue: communication waits for compute; rejected")
    ),
    Variable("CUDA_LAUNCH_BLOCKING", _is_on, "the host waits for every kernel: nothing overlaps"),
    Variable("NCCL_P2P_DISABLE", _is_on, "GPUs of one host communicate through host memory"),
    Variable(
        "NCCL_SHM_DISABLE",
        _is_on,
        ("ranks of one host without P2P communicate through the network"),
    ),
    Variable("NCCL_IB_DISABLE", _is_on, "hosts communicate over sockets, not InfiniBand"),
    Variable("NCCL_DEBUG", _is("TRACE"), "NCCL writes a line for every call"),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", _is("DETAIL"), ("each collective is preceded by another one")
    ),
    Variable("TORCH_NCCL_BLOCKING_WAIT", _is_on, "the host waits for each collective"),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, ("each gather allocates memory from the driver")
    ),
    Variable("TORCH_SHOW_CPP_STACKTRACES", _is_on, "errors take seconds to be raised"),
)


def harmful_variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows of `VARIABLES` that are set to a harmful value."""
    return [
        {"variable": row.name, "value": environment[row.name], "effect": row.effect}
        for row in VARIABLES
        if row.name in environment and row.hurts(environment[row.name])
    ]


def device() -> torch.device:
    """The device of this process: its GPU, or the CPU without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def capabilities() -> dict[str, Any]:
    """Devices, CUDA and NCCL; without a GPU only the backends."""
    found: dict[str, Any] = {
        "backends": [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    }
    if not torch.cuda.is_available():
        return {**found, "devices": "no CUDA device: trains on the CPU with gloo (CPU mode)"}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found["devices"] = [f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in devices]
    found["CUDA"] = torch.version.cuda
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["copy-engine gathers"] = _copy_engine_gathers()
    return found


def _copy_engine_gathers() -> str:
    """Support for `fsdp_copy_engine_all_gather`: NCCL's zero-CTA policy, in torch and NCCL."""
    known = hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO")
    if not known or torch.cuda.nccl.version() < (2, 28):
        return "no: requires torch 2.11 and NCCL 2.28"
    return "yes, inside one NVLink domain"
