"""A pytest plugin for Megatron-LM's unit test of `megatron_fsdp.fully_shard`, unmodified, with this
package's functions under the names that it imports.

Without GPUs the ranks are of gloo, and its `torch` means the CPU by "cuda". Without Transformer
Engine the tests that use it are left out.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import peer_tests
import torch
from torch.distributed import device_mesh

from megatron_fsdp_adapter.plain import megatron_fsdp

NAMES = ("MixedPrecisionPolicy", "fully_shard", "fully_shard_model", "fully_shard_optimizer")
OF_ENGINE = ("TE_TRANSFORMER", "te_transformer", "te_quantized", "cuda_graph", "custom_dtype")
"""In names of tests that need Transformer Engine, or look into the engine that is replaced."""


def _on_host(name: Any) -> torch.device:
    return torch.device(str(name).replace("cuda", "cpu"))


def pytest_configure(config: Any) -> None:
    """Imports what is replaced, before any test module is imported."""
    if not torch.cuda.is_available():
        peer_tests._pretend_cuda()
        make = device_mesh.init_device_mesh
        device_mesh.init_device_mesh = lambda kind, *args, **kwargs: make("cpu", *args, **kwargs)
    importlib.import_module("tests.unit_tests.test_utilities")
    importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if "transformer_engine" not in sys.modules:
        sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    items[:] = [item for item in items if not any(name in item.nodeid for name in OF_ENGINE)]
    for module in {item.module for item in items}:
        for name in NAMES:
            assert hasattr(module, name)
            setattr(module, name, getattr(megatron_fsdp, name))
    if not torch.cuda.is_available():
        peer_tests.on_cpu.put_views(("tests.unit_tests",))
        for module in {item.module for item in items}:
            vars(module.torch)["device"] = _on_host
