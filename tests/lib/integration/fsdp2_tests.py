"""A pytest plugin for PyTorch's own tests of FSDP2, unmodified, with `fully_shard` of this package
in the place of torch's; or torch's own under the same conditions, with FSDP2_SIDE=torch.

Ranks are processes, where some tests would start threads: they fork from pytest without GPUs, and
are of gloo, and a machine of them is taken to have four.
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
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import (
    common_cuda,
    common_distributed,
    common_fsdp,
    common_utils,
    inductor_utils,
)

from megatron_fsdp_adapter import use_as_fsdp2

RANKS = torch.cuda.device_count() or 4
OURS = os.environ.get("FSDP2_SIDE", "ours") == "ours"

INTERNALS = "it looks into torch's FSDP2: at its state, its hooks, or counts of its collectives"
APART = {
    "cudagraph": "a graph of CUDA",
    "test_share_comm_context": INTERNALS,
    "test_modules_to_run_forward": INTERNALS,
    "test_partial_group_reshard_toggle": INTERNALS,
    "test_gradient_accumulation": INTERNALS,
    "test_train_mixed_requires_grad": INTERNALS,
    "ManagedModulesAndStates": INTERNALS,
    "ParamModuleInfos": INTERNALS,
    "LazyInit::test_fully_shard_": INTERNALS,
    "TestFullyShardState::test_fully_shard_state$": INTERNALS,
    "CollectiveOps": INTERNALS,
    "test_fully_shard_communication_count": INTERNALS,
    "test_manual_reshard_with_reshard": INTERNALS,
    "_backward_prefetch": INTERNALS,
    "_forward_prefetch": INTERNALS,
    "test_fully_shard_multi_module_unused_module": INTERNALS,
}
"""By parts of names, $ for the end of one: tests that are skipped, as they are about something
else."""

FSDP1 = "the first FSDP, which needs a GPU"
FOR_GPUS = {
    "test_dp_state_dict_cpu_offload": "weights on another device than the model's",
    "test_cached_state_dict": "weights on another device than the model's",
    "test_move_states_to_device_dtensor_invalid": "a mesh of another device than the model's",
    "test_norm_modules": "an error of a kernel for GPUs",
    "FullyShardMemory": "statistics of the allocator for GPUs",
    "FullyShardOverlap": "streams of GPUs",
    "test_gradient_scaler": "a scaler for GPUs",
    "test_train_parity_with_activation_checkpointing": "minutes of work for two cores",
    "test_broadcast_from_rank0": FSDP1,
    "test_compiled_fsdp": FSDP1,
    "test_cpu_offload_full_state_dict": FSDP1,
    "test_deprecate_fsdp_api": FSDP1,
    "TestStateDict::test_fsdp$": FSDP1,
    "test_fsdp_ddp": FSDP1,
    "test_fsdp_root_not_initialized": FSDP1,
    "test_shared_weight": FSDP1,
    "test_save_with_fsdp1": FSDP1,
    "test_save_with_tp": "torch's accelerator",
    "test_save_with_fsdp2_tp": "torch's accelerator",
    "test_activation_ckpt_fqns_fsdp1": FSDP1,
}
"""Those that tell nothing on a CPU: torch's own fails as well, or does not end."""

GONE = "it calls private functions of torch 2.6, which torch 2.13 has not"
OF_OLD_RELEASES = {
    "test_1d_process_group_init": GONE,
    "test_2d_process_group_init": GONE,
    "test_compute_dtype": GONE,
    "test_param_registration_after_forward": "it expects that the root stays unsharded",
    "test_clip_grad_norm_2d": "torch's own norm differs from its reference",
}
"""Tests of PyTorch 2.6 that torch 2.13 fails with its own FSDP2."""

DIFFERS = {
    "test_mixed_dtypes_no_grad_param": "refused: frozen parameters of 8-bit floats",
    "test_shared_params_separate": "weights that units share are trained, not refused",
    "test_raise_scalar_parameter": "a scalar is sharded, not refused",
    "test_raise_noncontiguous_parameter": "strides of another order become contiguous, not refused",
}
"""By parts of names: tests that fail, and have to as long as this is so; docs/contributing/fsdp2.md
says it."""

WORDS = {
    "expects a 1D or 2D DeviceMesh": "dims for data parallelism are not supported",
    "should be materialized from meta": r"8 parameters .*: \['0.in_proj.weight'",
    "with mesh_dim_names specified": "its dims have no names",
    "only be applied to a module once": "fully_shard was called with it before",
    "containers that do not implement forward": "it has no forward",
    "does not support deepcopy": "cannot be copied",
    "does not support uneven sharding on dim 1": r"Shard\(1\) for .*cannot have equal parts",
    "Shard dim 1 is invalid": r"Shard\(1\) for parameter 0.bias, which has 1 dims",
    "stream cannot be set when using native HSDP": "the mesh has replicas.*Leave stream out",
}
"""By parts of messages that tests expect of torch: those of the same errors here. Some are of
AssertionError there and of ValueError here."""


def pytest_configure(config: Any) -> None:
    """Replaces what the tests import, before any of them is imported."""
    common_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test  # type: ignore[attr-defined]
    inductor_utils.HAS_CUDA = torch.cuda.is_available()  # type: ignore[attr-defined]
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # type: ignore[misc,assignment]
    common_distributed.MultiProcessTestCase._spawn_processes = _start  # type: ignore[method-assign]
    if not torch.cuda.is_available():
        common_distributed.skip_if_lt_x_gpu = _skip_if_fewer
        common_distributed.requires_nccl_version = lambda *args: lambda test: test
        common_cuda.TEST_CUDA = True
        common_fsdp.DEVICE_COUNT = RANKS
        torch.cpu.current_device = lambda: None  # type: ignore[assignment,return-value]
        torch.cpu._sleep = lambda cycles: None  # type: ignore[attr-defined]
        common_utils.get_cycles_per_ms = lambda: 0.0
        torch.cpu.device_count = torch.accelerator.device_count = lambda: RANKS
        torch.accelerator.current_accelerator = lambda check_available=False: (
            None if check_available else torch.device("cpu")
        )
        DistributedDataParallel.__init__ = _without_device_ids(DistributedDataParallel.__init__)
        torch.nn.Module.cuda = lambda self, *unused: self  # type: ignore[method-assign,assignment]
        torch.Tensor.cuda = lambda self, *unused: self  # type: ignore[method-assign,assignment]
    if OURS:
        common_utils.TestCase.assertRaisesRegex = _in_own_words(
            common_utils.TestCase.assertRaisesRegex
        )
        common_utils.TestCase.assertEqual = _or_own_words(common_utils.TestCase.assertEqual)
        use_as_fsdp2()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves tests out, and says which fail; gives no test more ranks than there are."""
    skipped = APART | OF_OLD_RELEASES
    if not torch.cuda.is_available():
        skipped |= FOR_GPUS
    for item in items:
        name = f"{item.nodeid}$"
        for part, reason in skipped.items():
            if part in name:
                item.add_marker(pytest.mark.skip(reason=reason))
        for part, reason in DIFFERS.items():
            if OURS and part in name:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    items[:] = [item for item in items if item.cls is not None]
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


def _without_device_ids(original: Callable[..., None]) -> Any:
    def init(ddp: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        original(ddp, module, **options)

    return init


def _in_own_words(original: Callable[..., Any]) -> Any:
    def expects(case: Any, error: Any, regex: str, *args: Any, **options: Any) -> Any:
        own = [words for part, words in WORDS.items() if part in regex]
        errors = (error, ValueError, RuntimeError) if own else error
        return original(case, errors, *own or [regex], *args, **options)

    return expects


def _or_own_words(original: Callable[..., Any]) -> Any:
    def equal(case: Any, found: Any, expected: Any, *args: Any, **options: Any) -> Any:
        if isinstance(expected, str) and expected in WORDS:
            return case.assertRegex(found, WORDS[expected])
        return original(case, found, expected, *args, **options)

    return equal
