"""A pytest plugin for PyTorch's own tests of FSDP2, unmodified, with `fully_shard` of this package
in the place of torch's; or torch's own under the same conditions, with FSDP2_SIDE=torch.

Ranks are processes, where some tests would start threads: they fork from pytest without GPUs, and
are of gloo, and a machine of them is taken to have four. Shards are compared as
whole tensors: which rows a rank has is not the same.
"""

from __future__ import annotations

import functools
import importlib
import os
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.distributed.tensor import DTensor
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from megatron_fsdp_adapter import use_as_fsdp2

RANKS = torch.cuda.device_count() or 4
OURS = os.environ.get("FSDP2_SIDE", "ours") == "ours"

PARALLEL = "tensor parallelism"
INTERNALS = "it looks into torch's FSDP2: at its state, its hooks, or counts of its collectives"
APART = {
    "largest_dim": "Shard(1)",
    "shard_placement_fn": "Shard(1)",
    "shard_dim_neg1": "Shard(1)",
    "invalid_shard_dim": "Shard(1)",
    "NDTraining": PARALLEL,
    "3DTraining": PARALLEL,
    "DTensor": PARALLEL,
    "norm_2d": PARALLEL,
    "2d_init": PARALLEL,
    "2d_state_dict": PARALLEL,
    "_2d_transformer": PARALLEL,
    "_tp_": PARALLEL,
    "cudagraph": "a graph of CUDA",
    "test_share_comm_context": INTERNALS,
    "test_modules_to_run_forward": INTERNALS,
    "test_partial_group_reshard_toggle": INTERNALS,
    "test_gradient_accumulation": INTERNALS,
    "test_train_mixed_requires_grad": INTERNALS,
    "ManagedModulesAndStates": INTERNALS,
    "ParamModuleInfos": INTERNALS,
    "LazyInit::test_fully_shard_": INTERNALS,
}
"""By parts of names: tests that are skipped, as they are about something else."""

FOR_GPUS = {
    "test_dp_state_dict_cpu_offload": "weights on another device than the model's",
    "test_cached_state_dict": "weights on another device than the model's",
    "test_norm_modules": "an error of a kernel for GPUs",
    "FullyShardMemory": "statistics of the allocator for GPUs",
    "test_train_parity_with_activation_checkpointing": "minutes of work for two cores",
}
"""Those that tell nothing on a CPU: torch's own fails as well, or does not end."""

PACKED = "rows are packed: a rank's shard may be empty, and depends on the parameters beside it"
SUMS = "four ranks add up bfloat16 in another order"
DIFFERS = {
    "test_clip_grad_norm_1d": PACKED,
    "test_dp_state_dict_save_load": PACKED,
    "test_partial_group_forward": PACKED,
    "test_compute_dtype": SUMS,
    "test_reduce_dtype": SUMS,
    "test_param_registration_after_forward": "unsharded until the backward",
    "test_to_float64_after_init": "refused: float64",
    "test_shared_params_separate": "weights that units share are trained, not refused",
    "test_shard_tensor_parameters": PACKED,
    "test_hsdp_broadcast_across_replicas": PACKED,
    "test_raise_scalar_parameter": "a scalar is sharded, not refused",
    "test_raise_noncontiguous_parameter": "strides of another order become contiguous, not refused",
    "test_reset_sharded_param_in_lazy_init": "refused: a parameter replaced after to_empty",
    "test_custom_hsdp_all_reduce_hook": PACKED,
    "test_mixed_dtypes_no_grad_param": "refused: frozen parameters of 8-bit floats",
}
"""By parts of names: tests that fail, and have to as long as this is so; docs/fsdp2.md says it."""

WORDS = {
    "expects a 1D or 2D DeviceMesh": "dims for data parallelism are not supported",
    "should be materialized from meta": r"8 parameters .*: \['0.in_proj.weight'",
    "with mesh_dim_names specified": "its dims have no names",
    "stream cannot be set when using native HSDP": "the mesh has replicas.*Leave stream out",
}
"""By parts of messages that tests expect of torch: those of the same errors here. Some are of
AssertionError there and of ValueError here."""


def pytest_configure(config: Any) -> None:
    """Replaces what the tests import, before any of them is imported."""
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # type: ignore[misc,assignment]
    common_distributed.MultiProcessTestCase._spawn_processes = _start  # type: ignore[method-assign]
    if not torch.cuda.is_available():
        common_distributed.skip_if_lt_x_gpu = _skip_if_fewer
        common_distributed.requires_nccl_version = lambda *args: lambda test: test
        torch.cpu.current_device = lambda: None  # type: ignore[assignment,return-value]
        torch.cpu.device_count = torch.accelerator.device_count = lambda: RANKS
        torch.accelerator.current_accelerator = lambda check_available=False: (
            None if check_available else torch.device("cpu")
        )
        torch.nn.Module.cuda = lambda self, *unused: self  # type: ignore[method-assign,assignment]
        torch.Tensor.cuda = lambda self, *unused: self  # type: ignore[method-assign,assignment]
    if OURS:
        common_fsdp.check_sharded_parity = _check_whole_parity
        common_utils.TestCase.assertRaisesRegex = _in_own_words(
            common_utils.TestCase.assertRaisesRegex
        )
        common_utils.TestCase.assertEqual = _or_own_words(common_utils.TestCase.assertEqual)
        use_as_fsdp2()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves tests out, and says which fail; gives no test more ranks than there are."""
    for item in items:
        for part, reason in {**APART, **({} if torch.cuda.is_available() else FOR_GPUS)}.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
        for part, reason in DIFFERS.items():
            if OURS and part in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    for case in {item.cls for item in items}:
        _take_ranks_that_exist(case)


def _take_ranks_that_exist(case: Any) -> None:
    asked = case.world_size
    case.world_size = property(lambda self: min(asked.fget(self), RANKS))


def _start(self: Any) -> None:
    forks = torch.multiprocessing.get_context("fork").Process
    spawns = functools.partial(_spawned, type(self).__module__, type(self).__name__)
    self._start_processes(spawns if torch.cuda.is_available() else forks)


def _spawned(module: str, case: str, target: Any, name: str, args: Any, kwargs: Any) -> Any:
    return torch.multiprocessing.get_context("spawn").Process(
        target=_run_in_child, name=name, args=(module, case, args, kwargs)
    )


def _run_in_child(module: str, name: str, args: Any, kwargs: Any) -> None:
    pytest_configure(None)
    case = getattr(importlib.import_module(module), name)
    _take_ranks_that_exist(case)
    case._run(*args, **kwargs)


def _skip_if_fewer(count: int, **unused: Any) -> Callable[[Any], Any]:
    if count <= RANKS:
        return lambda test: test
    return unittest.skip(f"it needs {count} ranks")


def _in_own_words(original: Callable[..., Any]) -> Any:
    def expects(case: Any, error: Any, regex: str, *args: Any, **options: Any) -> Any:
        own = [words for part, words in WORDS.items() if part in regex]
        errors = (error, ValueError) if own else error
        return original(case, errors, *own or [regex], *args, **options)

    return expects


def _or_own_words(original: Callable[..., Any]) -> Any:
    def equal(case: Any, found: Any, expected: Any, *args: Any, **options: Any) -> Any:
        if isinstance(expected, str) and expected in WORDS:
            return case.assertRegex(found, WORDS[expected])
        return original(case, found, expected, *args, **options)

    return equal


def _check_whole_parity(
    case: Any, replicated: Any, sharded: Any, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Whether names, values and gradients are equal."""
    found = dict(sharded.named_parameters())
    for prefix in prefixes_to_ignore:
        found = {name.replace(prefix, ""): param for name, param in found.items()}
    expected = dict(replicated.named_parameters())
    case.assertEqual(list(found), list(expected))
    for name, param in found.items():
        for one, other in ((param, expected[name]), (param.grad, expected[name].grad)):
            case.assertEqual(one is None, other is None)
            if one is not None:
                case.assertIsInstance(one, DTensor)
                case.assertEqual(one.full_tensor(), other)
