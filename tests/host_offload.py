"""Stand-ins that let core's offload of activations run on the host: streams and events that do
nothing, copies that are made at once, and the host for the GPU.

What is copied, when, and what backward is given is core's: 0.16.1 to 0.19.2, unmodified but for
the device it asks for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


class Copied:
    """What an offload has copied: how many tensors, and shapes of those in storages that are
    watched, by `_cdata`."""

    def __init__(self) -> None:
        self.count, self.found = 0, list[tuple[int, ...]]()
        self._forbidden: set[int] = set()

    def see(self, tensor: torch.Tensor) -> None:
        self.count += 1
        if tensor.untyped_storage()._cdata in self._forbidden:
            self.found.append(tuple(tensor.shape))

    def watch(
        self, storages: Callable[[Any], set[int]]
    ) -> Callable[[Any], AbstractContextManager[None]]:
        """A context around a run with a wrapper, whose `storages` are watched."""

        @contextmanager
        def watched(wrapper: Any) -> Iterator[None]:
            self._forbidden = storages(wrapper)
            yield

        return watched


class _Nothing:
    """A stream or an event."""

    def __init__(self, **options: Any) -> None: ...

    def _nothing(self, *args: Any) -> None: ...

    record = record_event = wait_event = wait_stream = synchronize = wait = _nothing


class _TorchOnHost:
    """`torch` for a module that offloads: no memory is pinned, and a GPU is the host."""

    cuda = types.SimpleNamespace(
        Stream=_Nothing, Event=_Nothing, stream=lambda stream: nullcontext(),
        current_stream=_Nothing, is_available=lambda: False,
        nvtx=types.SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None),
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: Any) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*sizes, **options)

    @staticmethod
    def empty_like(like: torch.Tensor, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty_like(like, **options)


@contextmanager
def core_offloads_on_the_host() -> Iterator[Copied]:
    """`fine_grained_activation_offloading` of megatron-core."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

    copied, handler = Copied(), module.ChunkOffloadHandler
    offload = handler.offload

    def seen(self: Any, tensor: torch.Tensor, pin_memory: bool = True, **options: Any) -> Any:
        copied.see(tensor)
        return offload(self, tensor, pin_memory=False, **options)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(module, "torch", _TorchOnHost()))
        enter(mock.patch.object(extension, "cpu_offload", types.SimpleNamespace()))
        enter(mock.patch.object(handler, "offload", seen))
        enter(mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        enter(mock.patch.object(module, "print_offload_summary_table", lambda found: None))
        if hasattr(handler, "_can_manage_tensor_for_offload"):
            manages = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            enter(mock.patch.object(handler, "_can_manage_tensor_for_offload", manages))
        for name in ("nvtx_range_push", "nvtx_range_pop"):
            if hasattr(module, name):
                enter(mock.patch.object(module, name, lambda message=None: None))
        module.PipelineOffloadManager.reset_instance()
        yield copied
    module.PipelineOffloadManager.OFFLOAD_MGR = None
