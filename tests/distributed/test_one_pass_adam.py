"""Adam in one pass: what the kernel is told, and that gradients are clipped in it, on a stand-in
for Transformer Engine's FusedAdam. The kernel itself: tests/gpu/test_gpu_one_pass.py."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_adapter.sharding import one_pass_adam, tensor_table
from megatron_fsdp_adapter.sharding.adam_table import Update
from megatron_fsdp_adapter.sharding.one_pass_adam import OnePassAdam
from megatron_fsdp_adapter.sharding.tensor_table import chunks_of, is_aligned
from tests.distributed.checks import check_run_bits, recorded_step
from tests.distributed.fused_adam import (
    FusedAdam,
    HostKernel,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    transformer_engine_optimizer,
)
from tests.distributed.gpt import (
    Case,
    batches,
    build_trainer,
    distributed_optimizer,
    forward_backward,
    init_megatron,
)
from tests.distributed.launch import run_ranks

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=2, clip=0.05)
LATE = {"fsdp_overlap_param_gather_with_optimizer_step": True}
CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 17))
def test_chunks_cover_every_tensor_once(sizes: list[int], chunk: int) -> None:
    tensor_of, first_of = chunks_of(sizes, chunk)
    covered = [set[int]() for _ in sizes]
    for place, number in enumerate(tensor_of):
        start = (place - first_of[number]) * chunk
        elements = set(range(start, min(sizes[number], start + chunk)))
        assert elements and not elements & covered[number]
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


def _call(adam: OnePassAdam, lists: Any, step: int = 1) -> None:
    adam(65536, None, lists, 1e-2, 0.9, 0.95, 1e-8, step, 1, 1, 0.1)


def _call_capturable(adam: OnePassAdam, lists: Any, lr: Any, step: int = 1) -> None:
    adam(
        65536, torch.zeros(1, dtype=torch.int32), lists, lr, 0.9, 0.95, 1e-8,
        torch.full((1,), step, dtype=torch.int32), 1, 1, 0.1, torch.ones(1),
    )  # fmt: skip


def test_a_table_is_made_again_where_an_address_has_changed_and_kept_where_none_has() -> None:
    kernel = HostKernel()
    adam, lists = OnePassAdam(multi_tensor_adam, lambda _: kernel), _tensors(3)
    for step in (1, 2):
        _call(adam, lists, step)
    lists[0][1] = torch.rand(6)
    _call(adam, lists, 3)
    first, second, third = kernel.tables
    assert first is second and third is not first
    assert third.tensor_of is first.tensor_of, "chunks depend on sizes alone"
    _call(adam, [[tensor[:4] for tensor in row] for row in lists], 4)
    assert kernel.tables[-1] is not third, "another unit's tensors, in the same memory"


def test_what_the_kernel_does_not_take_is_clipped_and_goes_to_the_optimizers_own() -> None:
    kernel = HostKernel()
    adam = OnePassAdam(multi_tensor_adam, lambda _: kernel)
    half, wide = torch.float16, _tensors(2)
    mixed = [[wide[0][0], wide[0][1].bfloat16()], *wide[1:]]
    apart = [[torch.rand(10)[::2], wide[0][1]], *wide[1:]]
    for lists in (_tensors(2, half), mixed, apart):
        expected = [[tensor.clone() for tensor in row] for row in lists]
        expected[0] = [grad * 0.25 for grad in expected[0]]
        adam.clip = torch.tensor([0.25])  # core's norm has a dimension from 0.17 on
        _call(adam, lists)
        _call(OnePassAdam(multi_tensor_adam, lambda _: None), expected)
        for row, other in zip(lists, expected, strict=True):
            assert all(map(torch.equal, row, other))
    assert not kernel.tables


@pytest.mark.parametrize("capturable", [False, True])
def test_the_function_that_a_fused_adam_calls_is_replaced_and_no_other(capturable: bool) -> None:
    made = FusedAdam([torch.nn.Parameter(torch.ones(3))], capturable=capturable)
    adam = one_pass_adam.install(made)
    assert adam is not None
    assert (made.multi_tensor_adam is adam) is not capturable
    assert (made.multi_tensor_adam_capturable is adam) is capturable
    assert one_pass_adam.install(torch.optim.AdamW([torch.ones(3)], capturable=capturable)) is None


def test_corrections_of_a_step_on_the_device_are_those_of_a_number() -> None:
    steps = torch.tensor([*range(1, 3000), 10**5, 10**6, 2**31 - 1], dtype=torch.int32)
    for beta in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.99999):
        found = one_pass_adam._correction(beta, steps)
        numbers = [one_pass_adam._correction(beta, step) for step in steps.tolist()]
        assert torch.equal(found, torch.tensor(numbers, dtype=torch.float32)), beta


def test_a_capturable_step_has_the_bits_of_one_that_is_not() -> None:
    """Transformer Engine's own has not: what it does with the betas is in the stand-in."""
    runs = []
    for capturable, kernel in ((False, None), (True, HostKernel()), (True, None)):
        torch.manual_seed(0)
        original = multi_tensor_adam_capturable if capturable else multi_tensor_adam
        adam, lists = OnePassAdam(original, lambda _, found=kernel: found), _tensors(3)
        for step in (1, 2, 7, 1000):
            adam.clip = torch.tensor([0.3])
            given = [[grad.clone() for grad in lists[0]], *lists[1:]]  # theirs are clipped
            if capturable:
                _call_capturable(adam, given, torch.tensor(1e-2), step)
            else:
                _call(adam, given, step)
        if kernel is not None:
            assert len(kernel.updates) == 4 and all(update.on_device for update in kernel.updates)
        runs.append(lists[1:])
    plain, ours, theirs = (torch.cat([t for row in lists for t in row]) for lists in runs)
    assert torch.equal(ours, plain) and not torch.equal(theirs, plain)


def test_what_is_not_on_the_device_goes_to_the_optimizers_own() -> None:
    kernel, original = HostKernel(), mock.Mock()
    adam, lists = OnePassAdam(original, lambda _: kernel), _tensors(2)
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64), torch.empty((), device="meta")):
        _call_capturable(adam, lists, lr)
        assert original.call_args.args[3] is lr and len(original.call_args.args) == 12
    assert original.call_count == 3 and not kernel.updates
    with pytest.raises(ValueError, match="give tensors for all of them"):
        Update(1e-2, 0.9, 0.9, 1e-8, 1.0, 1.0, True, 0.0, scale=torch.ones(1))


def test_a_graph_reads_a_table_that_was_there_before_it_and_that_stays() -> None:
    kernel, original = HostKernel(), mock.Mock()
    adam, lists, lr = OnePassAdam(original, lambda _: kernel), _tensors(2), torch.tensor(1e-2)
    captured = mock.patch.object(tensor_table, "is_capturing", lambda device: True)
    none_made = mock.patch.object(
        tensor_table, "_to_device", mock.Mock(side_effect=AssertionError("made in a capture"))
    )
    _call_capturable(adam, lists, lr)
    with captured, none_made:
        _call_capturable(adam, lists, lr, 2)
    first, second = kernel.tables
    assert first is second
    table = weakref.ref(first)
    del first, second
    kernel.tables.clear()
    moved = [[tensor.clone() for tensor in lists[0]], *lists[1:]]
    with captured, none_made, pytest.warns(UserWarning, match="left to the optimizer's own kernel"):
        _call_capturable(adam, moved, lr, 3)
    assert original.call_args.args[2] is moved and not kernel.tables
    with mock.patch.object(tensor_table, "MOST_TABLES", 1):
        for other in (moved, _tensors(3), _tensors(4)):
            _call_capturable(adam, other, lr, 4)
    gc.collect()
    assert table() is not None, "a graph has its address"


def _off_by_a_hundredth(kernel: Any, at: int, table: Any, lists: Any, update: Update) -> None:
    kernel(table, lists, update)
    lists[at][0][-1] += 0.01


def test_the_kernel_is_tried_before_it_is_used_and_without_it_a_warning_says_what_is_done() -> None:
    """Triton is not where the tests run: a module stands for the kernel's."""
    name, kernel = "megatron_fsdp_adapter.sharding.triton_adam", HostKernel()
    tried = one_pass_adam.kernel_of.tried
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


def _clipped_in_the_step(rank: int, world: int) -> None:
    """In the bits of clipping first, also where updates go on behind the step."""
    device = init_megatron()
    for strategy, ddp in (("optim", {}), ("optim_grads_params", {}), ("optim_grads", LATE)):
        runs, told = [], list[Update]()
        for kernel in (None, HostKernel()):
            with (
                transformer_engine_optimizer(),
                mock.patch.object(one_pass_adam, "kernel_of", lambda _, found=kernel: found),
            ):
                trainer = build_trainer(CASE, strategy, device, ddp=ddp)
                shards = distributed_optimizer(trainer).optimizer._fsdp_shards
                if kernel is None:
                    shards.one_pass = None  # clipped first, by core
                data = [batches(CASE, number, rank, device) for number in range(3)]
                runs.append([recorded_step(trainer, one) for one in data])
            if kernel is not None:
                told = kernel.updates
                assert shards.one_pass.clip is None and shards._clip is None
        check_run_bits(runs[1], runs[0], strategy)
        assert told and all(update.clip is not None and update.clip < 0.9 for update in told)


def _left_out_or_read(rank: int, world: int) -> None:
    """A step that is left out leaves clipped gradients; who counts zeros reads them before."""
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


def _in_turn(rank: int, world: int) -> None:
    _clipped_in_the_step(rank, world)
    _left_out_or_read(rank, world)


def test_gradients_are_clipped_in_the_pass_that_updates() -> None:
    run_ranks(_in_turn, 2)
