"""Parameters of which a rank holds nothing never reach a multi-tensor kernel (trap M12).

TE's kernels drop a list of tensors that ends in an empty one. There is no TE here, so the local
stand-ins of megatron-core are made to behave like it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks

WORLD = 2


def _strict(original: Any) -> Any:
    def applier(op: Any, buffer: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        for tensors in lists:
            assert all(tensor.numel() > 0 for tensor in tensors), "an empty tensor in a list"
        return original(op, buffer, lists, *args)

    return applier


def _train(rank: int, world: int) -> dict[str, tuple[Any, Any, int]]:
    from megatron.core.optimizer import clip_grads

    from tests.distributed.gpt import Case, batches, build_trainer, init_megatron, train_step

    device = init_megatron()
    case = Case(num_layers=1, hidden=6, heads=1, ffn=10, vocab=11, clip=0.01)
    reference = build_trainer(case, None, device)
    expected = [train_step(reference, batches(case, n, rank, device))[1] for n in range(2)]
    clip_grads.multi_tensor_applier = _strict(clip_grads.multi_tensor_applier)
    found = {}
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        trainer = build_trainer(case, strategy, device)
        norms = [train_step(trainer, batches(case, n, rank, device))[1] for n in range(2)]
        trainer.wrapper.stop_communication()
        empty = sum(p._local_tensor.numel() == 0 for p in trainer.wrapper.parameters())
        found[strategy] = (norms, expected, empty)
    return found


def test_norm_and_clipping_never_see_an_empty_shard() -> None:
    for found in run_ranks(_train, WORLD):
        for strategy, (norms, expected, empty) in found.items():
            assert empty > 0, f"{strategy}: the model has no parameter that a rank holds nothing of"
            assert norms == pytest.approx(expected, rel=1e-6), strategy
