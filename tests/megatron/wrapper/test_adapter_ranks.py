"""What Megatron and a user read from the wrapper where it takes two ranks: slices, empty shards,
groups, weights that differ. One rank: tests/megatron/wrapper/test_adapter_contract.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import clip_grads
from torch.distributed.tensor import DTensor

from tests.lib.gpt.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    full_all,
    init_megatron,
)
from tests.lib.gpt.variants import Variant, compare
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("megatron/wrapper/adapter.py", "megatron/optimizer/clipping.py", "optim/local_shards.py")

CASE = Case(num_layers=1, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2)


def _behind_backwards(case: Case, strategy: str, rank: int) -> tuple[Trainer, dict[str, Any]]:
    """A trainer before its first step, and its parameters by name."""
    device = init_megatron()
    trainer = build_trainer(case, strategy, device)
    forward_backward(trainer, batches(case, 0, rank, device))
    trainer.wrapper.stop_communication()
    return trainer, dict(trainer.wrapper.module.module.named_parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_and_state_are_of_this_rank_s_rows(rank: int, strategy: str) -> None:
    """Zero-size locals included, with slice(0, 0): every rank emits the same keys (trap C3), none
    of global shape (trap M11)."""
    trainer, params = _behind_backwards(CASE, strategy, rank)
    grads = {name: param.grad for name, param in params.items()}
    before = full_all(grads)
    trainer.wrapper.scale_gradients(torch.tensor(0.5))
    for name, grad in full_all(grads).items():
        assert params[name].grad is grads[name]
        assert torch.equal(grad, before[name] * 0.5)
        grads[name]._local_tensor.add_(1.0)  # as the embedding all-reduce does, in place
    trainer.wrapper.scale_gradients(0.0)
    assert trainer.optimizer.step()[1] == 0.0, "the norm of what the optimizer reads"
    state = distributed_optimizer(trainer).optimizer.state
    assert set(state) == set(params.values())
    for name, param in params.items():
        assert param._local_tensor.numel() or param.megatron_fsdp_slice == slice(0, 0), name
        for value in (grads[name], state[param]["exp_avg"], state[param]["exp_avg_sq"]):
            assert isinstance(value, DTensor), name
            assert value.dtype == param.dtype, name
            assert value.shape == param.shape
            assert value._local_tensor.shape == param._local_tensor.shape


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_each_element_counts_once_in_the_norm_and_among_zeros(rank: int, strategy: str) -> None:
    """Each element counts once. Traps G4, H7: replicated gradients were added up over the ranks.
    M4: zeros were counted in gradients that the step does not read. Tokens that do not occur have
    zero gradients."""
    trainer, params = _behind_backwards(CASE.but(microbatches=1), strategy, rank)
    grads = full_all({name: param.grad for name, param in params.items()})
    norms = [grad.double().norm() for grad in grads.values()]
    exact = torch.stack(norms).norm().item()
    zeros = sum(int((grad == 0).sum()) for grad in grads.values())
    assert trainer.optimizer.count_zeros() == zeros > 0
    distributed_optimizer(trainer).config.log_num_zeros_in_grad = True
    _, norm, counted = trainer.optimizer.step()
    assert (norm, counted) == (pytest.approx(exact, rel=1e-6), zeros)


def _strict_kernels() -> Any:
    """Inside, the stand-ins of core for multi-tensor kernels take no empty tensors."""
    original = clip_grads.multi_tensor_applier

    def applier(op: Any, buffer: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        for tensors in lists:
            for tensor in tensors:
                assert tensor.numel(), "an empty tensor"
        return original(op, buffer, lists, *args)

    return mock.patch.object(clip_grads, "multi_tensor_applier", applier)


def _some_shards_are_empty(ours: Any, reference: Any, strategy: str) -> None:
    assert any(param._local_tensor.numel() == 0 for param in ours.wrapper.parameters())


@on_ranks(2)
def test_empty_shards_never_reach_a_multi_tensor_kernel(rank: int, seed: int) -> None:
    """Parameters of which a rank holds nothing never reach a multi-tensor kernel (trap M12): TE's
    drop a list of tensors that ends in an empty one. The stand-ins of core, which are there without
    TE, are made to behave like it."""
    case = {"num_layers": 1, "hidden": 6, "heads": 1, "ffn": 10, "vocab": 11, "clip": 0.01}
    row = Variant(
        "",
        STRATEGIES[1:],
        case=case,
        around=_strict_kernels,
        steps=2,
        expect=_some_shards_are_empty,
    )
    compare(row, rank, seed)
