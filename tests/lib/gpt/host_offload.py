"""Stand-ins that let core's offload of activations run on the host: streams and events that do
nothing, copies that are made at once, and the host for the GPU.

What is copied, when, and what backward is given is core's: 0.16.1 to 0.19.2 and main, unmodified
but for the device it asks for.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_fsdp_adapter.launch import cpu_mode
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView
from tests.lib.engine.engine_cases import buffers_of


class Copied:
    """What an offload has copied: how many tensors, and shapes of those in storages that are
    forbidden, by `_cdata`."""

    count: int
    found: list[tuple[int, ...]]
    forbidden: set[int]

    def clear(self) -> None:
        self.count, self.found, self.forbidden = 0, [], set()

    def see(self, tensor: torch.Tensor) -> None:
        self.count += 1
        if tensor.untyped_storage()._cdata in self.forbidden:
            self.found.append(tuple(tensor.shape))


def _torch_on_host() -> ModuleView:
    """`torch` for a module that offloads: no memory is pinned, and a GPU is the host."""
    view = cpu_mode.make_view()
    view.__dict__["device"] = lambda name: torch.device("cpu")
    view.__dict__["cuda"].__dict__["is_available"] = lambda: False
    return view


@contextmanager
def core_offloads_on_the_host(copied: Copied) -> Iterator[None]:
    """`fine_grained_activation_offloading` of megatron-core; `copied` begins empty."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

    copied.clear()
    handler = module.ChunkOffloadHandler
    offload = handler.offload

    def seen(self: Any, tensor: torch.Tensor, pin_memory: bool = True, **options: Any) -> Any:
        copied.see(tensor)
        return offload(self, tensor, pin_memory=False, **options)

    manages = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    replaced = [
        (module, "torch", _torch_on_host()),
        (handler, "offload", seen),
        (extension, "cpu_offload", types.SimpleNamespace()),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (module, "print_offload_summary_table", lambda *found, **options: None),
    ]
    of_some_releases = [
        (handler, "_can_manage_tensor_for_offload", manages),
        (module, "nvtx_range_push", lambda message=None: None),
        (module, "nvtx_range_pop", lambda message=None: None),
    ]
    replaced += [row for row in of_some_releases if hasattr(*row[:2])]
    with ExitStack() as stack:
        for row in replaced:
            stack.enter_context(mock.patch.object(*row))
        module.PipelineOffloadManager.reset_instance()
        yield
    module.PipelineOffloadManager.OFFLOAD_MGR = None


CONTIGUOUS = ("attn_norm", "qkv_linear", "mlp_norm")


def storages(wrapper: Any) -> set[int]:
    """Of all buffers of the wrapper's engine."""
    return {flat.untyped_storage()._cdata for _, flat in buffers_of(wrapper.engine)}
