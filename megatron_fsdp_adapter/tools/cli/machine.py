"""Capabilities of this machine, and environment variables that harm them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.megatron.options.validation import CONNECTIONS

OFF = ("", "0", "FALSE", "OFF", "N")
"""Values, in capitals, that switch a variable off."""

VARIABLES: Mapping[str, tuple[str | None, str]] = {
    CONNECTIONS: ("1", "one hardware queue: communication waits for compute; rejected"),
    "CUDA_LAUNCH_BLOCKING": (None, "the host waits for every kernel: nothing overlaps"),
    "NCCL_P2P_DISABLE": (None, "GPUs of one host communicate through host memory"),
    "NCCL_SHM_DISABLE": (None, "ranks of one host without P2P communicate through the network"),
    "NCCL_IB_DISABLE": (None, "hosts communicate over sockets, not InfiniBand"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for every call"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is preceded by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": (None, "the host waits for each collective"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (None, "each gather allocates memory from the driver"),
    "TORCH_SHOW_CPP_STACKTRACES": (None, "errors take seconds to be raised"),
}
"""Environment variables: the harmful value (None: any that switches it on), and its effect."""


def harmful_variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Rows of `VARIABLES` that are set to a harmful value."""
    rows = []
    for name, (harmful, effect) in VARIABLES.items():
        value = environment.get(name, "")
        setting = value.upper()
        is_on = setting not in OFF
        if is_on and (harmful is None or setting == harmful):
            rows.append({"variable": name, "value": value, "effect": effect})
    return rows


def device() -> torch.device:
    """The device of this process: its GPU, or the CPU without one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def capabilities() -> dict[str, Any]:
    """Python, backends, network, devices, driver, CUDA and NCCL. Without a GPU it has the first
    three, and a remark in place of the devices."""
    found: dict[str, Any] = {
        "Python": platform.python_version(),
        "backends": [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)],
        "RDMA ports": rdma_ports(),
    }
    if not torch.cuda.is_available():
        return {**found, "devices": "no CUDA device: trains on the CPU with gloo (CPU mode)"}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found["devices"] = [f"{one.name}, {one.total_memory / 2**30:.1f} GiB" for one in devices]
    found["driver"] = _first_line(Path("/proc/driver/nvidia/version"))
    found["GPUDirect module"] = "nvidia_peermem" if _PEER_MEMORY.exists() else "none"
    found["CUDA"] = torch.version.cuda
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """The ports of this machine's InfiniBand and RoCE adapters: name, link, state, rate."""
    rows = []
    for port in sorted(root.glob("*/ports/*")):
        adapter = port.parent.parent.name
        facts = [_first_line(port / name) for name in ("link_layer", "state", "rate")]
        rows.append(" ".join([f"{adapter}:{port.name}", *facts]))
    return rows


def _first_line(file: Path) -> str:
    """The first line of a file of the kernel, "unknown" if it is not there."""
    if file.exists():
        return file.read_text().partition("\n")[0]
    return "unknown"


_PEER_MEMORY = Path("/sys/module/nvidia_peermem")
