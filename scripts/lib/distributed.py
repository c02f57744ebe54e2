"""Processes, devices, random seeds: everything before the model."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from lib.options import Options


@dataclass(frozen=True)
class Place:
    """This process: rank, data-parallel rank and size, device."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True for rank 0, which prints and writes logs."""
        return self.rank == 0


def start(options: Options) -> Place:
    """Joins the processes of torchrun, or creates a world of one, and seeds the generators.

    On the CPU it enables CPU mode, which must precede core's first use of a device.
    """
    if options.distributed_backend == "gloo":
        from megatron_fsdp_adapter.launch.cpu_mode import enable_cpu_mode

        enable_cpu_mode()
    device = _device()
    timeout = datetime.timedelta(minutes=options.distributed_timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(options.distributed_backend, timeout=timeout)
    else:
        dist.init_process_group(
            options.distributed_backend, rank=0, world_size=1, store=dist.HashStore()
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=options.num_distributed_optimizer_instances,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )
    seed_everything(options.seed)
    return Place(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        device=device,
    )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's, torch's and the tensor-parallel generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Enables deterministic kernels only; call before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def side_stream(place: Place) -> Iterator[None]:
    """Runs a block on a side stream, as Megatron's training script does. The side stream waits for
    the current one before, and the current one for it after. No-op on the CPU."""
    if place.device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def stop() -> None:
    """Leaves the process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def largest(value: float, place: Place) -> float:
    """The largest of the ranks' values; every rank must call it."""
    tensor = torch.tensor([value], dtype=torch.float64, device=place.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())
