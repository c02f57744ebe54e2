"""Checkpoints of experts move between ranks on GPUs, grouped layers of Transformer Engine included.

    python -m pytest tests/gpu/test_gpu_reshard.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from tests.distributed.gpt import Trainer, batches, train_step
from tests.gpu import test_gpu_moe as moe
from tests.gpu.gpu_ranks import Check, Outcomes


def _trainer(name: str, expert_parallel: int, strategy: str) -> tuple[Trainer, torch.device]:
    """Of the model of `test_gpu_moe`, its experts shared out over so many ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    moe.EP = expert_parallel
    device = moe.init_experts()
    return moe._trainer(moe.KINDS[name], "allgather", strategy, device, {}), device


def _tensors(root: str) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole, read by torch alone."""
    [folder] = Path(root).glob("iter_*")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def _moved(name: str, source: str, target: str, expert_parallel: int, strategy: str) -> None:
    """Loads `source` into a new model, and saves that as `target`."""
    trainer, _ = _trainer(name, expert_parallel, strategy)
    with torch.no_grad():
        for param in trainer.wrapper.parameters():
            getattr(param, "_local_tensor", param).fill_(7)
    state = training_state([trainer.wrapper], trainer.optimizer, is_loading=True)
    _, state = load_checkpoint(source, state)
    load_training_state([trainer.wrapper], state, trainer.optimizer)
    save_checkpoint(target, 2, training_state([trainer.wrapper], trainer.optimizer))


def experts_move(rank: int, world: int, name: str) -> str:
    """From two expert-parallel ranks to one and back, bit for bit, under other strategies."""
    box: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    root = box[0]
    trainer, device = _trainer(name, 2, "optim_grads_params")
    for step in range(2):
        train_step(trainer, batches(trainer.case, step, rank, device))
    save_checkpoint(f"{root}/a", 2, training_state([trainer.wrapper], trainer.optimizer))
    _moved(name, f"{root}/a", f"{root}/b", 1, "optim")
    _moved(name, f"{root}/b", f"{root}/c", 2, "optim_grads")
    first, *others = (_tensors(f"{root}/{part}") for part in "abc")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)
    experts = [key for key in first if ".experts." in key and key.startswith("model.")]
    assert len(experts) == 3 * moe.EXPERTS * moe.CASE.num_layers, experts
    for other in others:
        assert set(other) == set(first)
        assert [key for key in first if not torch.equal(first[key], other[key])] == []
    return f"{len(first)} tensors"


CHECKS = {
    name: Check(experts_move, (name,))
    for name, kind in moe.KINDS.items()
    if moe.HAS_TE or not kind.grouped
}
OUTCOMES = Outcomes(CHECKS, timeout_s=120.0)


@pytest.mark.parametrize("name", CHECKS)
def test_experts_move_between_ranks_on_gpus(name: str) -> None:
    OUTCOMES.expect(name)
