"""CUDA graphs: pools of memory, capture, replay.

The rest of the package uses graphs of a device only by `CudaGraphs`. Tests put a class in its place
that records operators on the host: so they see without a GPU what a replay reads, writes and leaves
out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class CudaGraphs:
    """Captures functions. What they allocate is in a *pool*: memory that only captures in the same
    pool are given, at addresses that a replay uses again.

    generators: of random numbers, beside the device's own, that captured functions draw from. They
        must be in a state that graphs can use.
    around: a context in which functions are captured, for libraries that have to know of it.
    """

    def __init__(
        self,
        device: torch.device,
        generators: Callable[[], Iterable[torch.Generator]] = tuple,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        # One for all captures. Autograd runs the nodes of a captured forward on the stream that
        # they were made on, so the backward has to be captured on that stream too.
        self._stream = torch.cuda.Stream(device=device)
        self._generators = generators
        self._around = around

    def wait(self) -> None:
        """Waits for all replays, after which graphs may be deleted. Between two steps only."""
        torch.cuda.synchronize(self._stream.device)

    def make_room(self) -> None:
        """Gives memory that nothing uses back to the device, from which pools take theirs: the
        allocator does not do so in a capture. Between two steps only."""
        torch.cuda.empty_cache()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of the device's memory in the pool, in use or not."""
        total = 0
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(pool):
                total += segment["total_size"]
        return total

    def capture(
        self, function: Callable[[], Result], pool: Any
    ) -> tuple[Callable[[], None], Result]:
        """Captures `function`. Returns a callable that replays its launches on the current stream,
        and what `function` returns. Nothing has run yet: those tensors have values after a replay.

        `torch.cuda.graph` was turned down: it waits for the whole device first. A stage of a
        pipeline would wait for what another one sends it, and that one for what this one sends.

        The beginning of a capture does write, on its stream: seeds and offsets of random numbers,
        which all graphs of a generator share. The allocator may just have had that memory back from
        kernels that wait on the current stream. So the capture is ordered behind what was launched
        there, and what comes next there behind the capture."""
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators():
            graph.register_generator_state(generator)
        collects = gc.isenabled()
        gc.disable()  # giving back an event or a graph would break the capture
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (a watchdog of NCCL's) go on asking the device for events.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    with self._around():
                        result = function()
                except BaseException as error:
                    _end_after(graph, error)
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        current.wait_stream(self._stream)
        return graph.replay, result

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at the same address, with the same shape, strides and dtype, which does not keep
        the memory. The pool may give that to a later capture, which is replayed later."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes == 0:
            return tensor
        # The form in which libraries exchange memory.
        interface = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }
        memory = SimpleNamespace(__cuda_array_interface__=interface)
        flat = torch.as_tensor(memory, device=tensor.device)
        whole_elements = nbytes - nbytes % tensor.element_size()
        typed = flat[:whole_elements].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _end_after(graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
    """Ends a capture in which `error` was raised, so that the device can be used again. If that
    fails too, the text of the failure is added to `error`."""
    try:
        graph.capture_end()
    except RuntimeError as second:  # the first error explains more than the second
        error.args = (*error.args, f"the capture did not end: {second}")
