"""Adam in one pass: the kernel's arguments, and that gradients are clipped in it, on a stand-in
for Transformer Engine's FusedAdam. The kernel itself: tests/gpu/test_gpu_optimizer.py."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.optim import fused_adam, multi_tensor
from megatron_fsdp_adapter.optim.fused_adam import FusedAdamStep
from megatron_fsdp_adapter.optim.multi_tensor import Update, chunks_of, is_aligned
from tests.lib.gpt.checks import check_run_bits, recorded_step
from tests.lib.gpt.fused_adam import HostKernel, multi_tensor_adam, transformer_engine_optimizer
from tests.lib.gpt.gpt import (
    Case,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("optim/fused_adam.py", "optim/triton_adam.py", "optim/multi_tensor.py")

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)
OFFLOAD = {"chunked_optimizer_state_offload": True}
CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 17))
def test_chunks_cover_every_tensor_once(sizes: list[int], chunk: int) -> None:
    tensor_of, first_of = chunks_of(sizes, chunk)
    covered = [set[int]() for _ in sizes]
    for place, number in enumerate(tensor_of):
        start = (place - first_of[number]) * chunk
        elements = set(range(start, min(sizes[number], start + chunk)))
        assert elements
        assert not elements & covered[number]
        covered[number] |= elements
    assert covered == [set(range(size)) for size in sizes]


@pytest.mark.parametrize(
    ("addresses", "sizes", "expected"),
    [
        ([[256, 512], [0, 64]], [8, 16], True),
        ([[256, 516], [0, 64]], [8, 16], False),
        ([[256, 512], [0, 64]], [8, 12], False),  # the next read of 8 numbers in bf16 is not
    ],
)
def test_reads_of_16_bytes_need_addresses_and_sizes_that_allow_them(
    addresses: list[list[int]], sizes: list[int], expected: bool
) -> None:
    assert is_aligned(addresses, sizes) is expected


def _tensors(count: int, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    return [[torch.rand(5 + n).to(dtype) for n in range(count)] for _ in range(4)]


def _call(adam: FusedAdamStep, lists: Any, step: int = 1) -> None:
    adam(65536, None, lists, 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, 0.1)


def test_a_table_is_made_again_where_an_address_has_changed_and_kept_where_none_has() -> None:
    kernel = HostKernel()
    adam = FusedAdamStep(multi_tensor_adam, lambda _: kernel)
    lists = _tensors(3)
    for step in (1, 2):
        _call(adam, lists, step)
    lists[0][1] = torch.rand(6)
    _call(adam, lists, 3)
    first, second, third = kernel.tables
    assert first is second
    assert third is not first
    assert third.tensor_of is first.tensor_of, "chunks depend on sizes alone"
    _call(adam, [[tensor[:4] for tensor in row] for row in lists], 4)
    assert kernel.tables[-1] is not third, "another unit's tensors, in the same memory"


def test_what_the_kernel_does_not_take_is_clipped_and_goes_to_the_optimizers_own() -> None:
    kernel = HostKernel()
    adam = FusedAdamStep(multi_tensor_adam, lambda _: kernel)
    half = torch.float16
    wide = _tensors(2)
    mixed = [[wide[0][0], wide[0][1].bfloat16()], *wide[1:]]
    apart = [[torch.rand(10)[::2], wide[0][1]], *wide[1:]]
    for lists in (_tensors(2, half), mixed, apart):
        expected = [[tensor.clone() for tensor in row] for row in lists]
        expected[0] = [grad * 0.25 for grad in expected[0]]
        adam.clip = torch.tensor([0.25])  # core's norm has a dimension from 0.17 on
        _call(adam, lists)
        _call(FusedAdamStep(multi_tensor_adam, lambda _: None), expected)
        for row, other in zip(lists, expected, strict=True):
            assert all(map(torch.equal, row, other))
    assert not kernel.tables


def test_a_step_that_is_captured_is_an_error() -> None:
    """A graph would read a table that goes when tensors move."""
    kernel = HostKernel()
    adam = FusedAdamStep(multi_tensor_adam, lambda _: kernel)
    captured = mock.patch.object(multi_tensor, "is_capturing", lambda device: True)
    with captured, pytest.raises(RuntimeError, match="Take the step outside of the graph"):
        _call(adam, _tensors(2))
    assert not kernel.tables


def _off_by_a_hundredth(kernel: Any, at: int, table: Any, lists: Any, update: Update) -> None:
    kernel(table, lists, update)
    lists[at][0][-1] += 0.01


def test_the_kernel_is_tried_before_it_is_used_and_without_it_a_warning_says_what_is_done() -> None:
    """Triton is not where the tests run: a module stands for the kernel's."""
    name = "megatron_fsdp_adapter.optim.triton_adam"
    kernel = HostKernel()
    tried = fused_adam.tried
    with mock.patch.dict(sys.modules, {name: SimpleNamespace(update=kernel)}):  # type: ignore[dict-item]
        assert tried(CPU) is kernel
    assert [table.aligned for table in kernel.tables] == [True, False]
    for at, what in ((1, "weights"), (2, "moments"), (3, "second moments")):
        broken = SimpleNamespace(update=functools.partial(_off_by_a_hundredth, kernel, at))
        with (
            mock.patch.dict(sys.modules, {name: broken}),  # type: ignore[dict-item]
            pytest.warns(UserWarning, match=f"updated {what} are off by"),
        ):
            assert tried(CPU) is None
    with (
        mock.patch.dict(sys.modules, {name: None}),  # type: ignore[dict-item]
        pytest.warns(UserWarning, match="Adam is left to the optimizer's own kernels"),
    ):
        assert tried(CPU) is None


@on_ranks(2)
def test_gradients_are_clipped_in_the_pass_that_updates(rank: int) -> None:
    """In the bits of clipping first, also where updates go on behind the step."""
    device = init_megatron()
    for strategy, ddp in (("optim", {}), ("optim_grads_params", {}), ("optim_grads", OFFLOAD)):
        runs = []
        told = list[Update]()
        for kernel in (None, HostKernel()):
            with (
                transformer_engine_optimizer(),
                mock.patch.object(fused_adam, "kernel_of", lambda _, found=kernel: found),
            ):
                trainer = build_trainer(CASE, strategy, device, ddp=ddp)
                shards = distributed_optimizer(trainer).optimizer._fsdp_shards
                if kernel is None:
                    shards.fused_step = None  # clipped first, by core
                data = [batches(CASE, number, rank, device) for number in range(3)]
                runs.append([recorded_step(trainer, one) for one in data])
            if kernel is not None:
                told = kernel.updates
                assert shards.fused_step.clip is None
                assert shards.clip is None
        check_run_bits(runs[1], runs[0], strategy)
        assert told
        assert all(update.clip is not None and update.clip < 0.9 for update in told)


@on_ranks(2)
def test_clipped_gradients_are_left_by_a_step_that_is_left_out(rank: int) -> None:
    """A step that is left out leaves clipped gradients; a count of zeros reads them before."""
    device = init_megatron()
    for options, leaves_out in (({}, True), ({"log_num_zeros_in_grad": True}, False)):
        with transformer_engine_optimizer():
            trainer = build_trainer(CASE, "optim", device, optimizer=options)
        inner = distributed_optimizer(trainer)
        inner.config.grad_norm_skip_threshold = 0.0 if leaves_out else float("inf")
        forward_backward(trainer, batches(CASE, 0, rank, device))
        before = [param.grad._local_tensor.clone() for param in inner.get_parameters()]
        stepped, norm, _ = inner.step()
        assert stepped is not leaves_out or not hasattr(inner.config, "grad_norm_skip_threshold")
        factor = CASE.clip / (float(norm) + 1e-6)
        for param, old in zip(inner.get_parameters(), before, strict=True):
            torch.testing.assert_close(param.grad._local_tensor, old * factor)
