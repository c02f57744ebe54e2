"""CUDA graphs for the host: a capture notes every operator, a replay runs them on the same memory.

As with CUDA's, what is captured has not run: memory of others that the operators wrote is put back,
and what they made is NaN until a replay. No Python of the captured function runs in a replay, and a
capture that reads a value on the host raises, as with CUDA.

Checked against `torch.cuda.graph` of torch 2.11 and 2.13. Not modeled: streams that join a capture
or are left out of it, pools that reuse memory between graphs, and host memory that is pinned.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fsdp_adapter.megatron.layers.layer_graphs import layer_graphs


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wait(result: Any) -> None:
    """For a collective, if it is one's."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()


def _over(args: Any) -> Any:
    """A collective in the same group that is over. To wait once more for a reduction of gloo's
    copies pieces, which would be noted."""
    _, _, group, op, *_ = args  # those that have their default are left out
    _, work = torch.ops.c10d.allreduce_([torch.zeros(1)], group, op, None)
    _wait(work)
    return work


READS_BY_THE_HOST = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_consecutive.default,
)
"""Operators that wait for the device: cudaErrorStreamCaptureUnsupported in a capture."""


ON_THE_HOST_ANYWAY = (
    ("megatron.core.tensor_parallel.random", "fork"),  # states of the host's generator
    ("megatron.core.transformer.attention", "custom_forward"),  # a kind of mask, a host tensor
)
"""Functions, by module, whose reads no capture would refuse on a GPU."""


def _is_exempt() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in ON_THE_HOST_ANYWAY:
            return True
    return False


class Recorder(TorchDispatchMode):
    """Notes what runs: (operator, arguments, keywords, what it returned)."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS_BY_THE_HOST and not _is_exempt():
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        if func.namespace == "profiler":  # a name for what is launched
            return func(*args, **kwargs)
        if types:  # a wrapper has no memory: what it does with that of its fields is noted
            with self:
                return types[0].__torch_dispatch__(func, types, args, kwargs)
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        for argument, value in itertools.zip_longest(func._schema.arguments, args):
            name = argument.name
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(kwargs.get(name, value)) if written else ():
                place = _memory(tensor)
                if place not in self.made and place not in self.before:
                    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.before[place] = (flat, flat.clone())
        out = func(*args, **kwargs)
        _wait(out)
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            out = (out[0], _over(args))
        for tensor in _tensors(out):
            if _memory(tensor) not in given:
                self.made[_memory(tensor)] = tensor
        self.operators.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def end(self) -> None:
        for flat, before in self.before.values():
            flat.copy_(before)
        for tensor in self.made.values():
            if tensor.is_floating_point():
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operators:
            if "empty" in func.__name__:
                continue
            # A replay is unknown to autograd, which looks for writes to what it has saved.
            touched = tuple(_tensors((args, kwargs, out)))
            with torch.autograd._unsafe_preserve_version_counter(touched):
                result = func(*args, **kwargs)
                _wait(result)
                for old, new in zip(_tensors(out), _tensors(result), strict=True):
                    if _memory(old) != _memory(new):
                        old.copy_(new)


class FakeGraphs:
    """Attributes:
    captures: how many functions were captured. replays: (pool, number of the graph in it) of each
        replay, in their order. around: called at each replay. running: whether something is being
        captured or replayed.
    """

    running = False

    def __init__(self, around: Callable[[], None] = lambda: None) -> None:
        self.captures = 0
        self.pools = 0
        self.around = around
        self.replays: list[tuple[int, int]] = []
        self._in_pool: dict[int, int] = {}

    def wait(self) -> None:
        """Nothing: a replay is over when it returns."""

    def make_room(self) -> None:
        """Nothing: pools have no memory of their own."""

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def pool_bytes(self, pool: int) -> int:
        return pool * 2**29

    def capture(self, function: Callable[[], Any], pool: int) -> tuple[Callable[[], None], Any]:
        self.captures += 1
        number = self._in_pool[pool] = self._in_pool.get(pool, 0) + 1
        self.running = True
        with Recorder() as recorder:
            result = function()
        self.running = False
        recorder.end()

        def replay() -> None:
            self.replays.append((pool, number))
            self.around()
            self.running = True
            recorder.replay()
            self.running = False

        return replay, result

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def put_graphs_into(wrapper: Any, graphs: FakeGraphs, *parts: str) -> None:
    """What the wrapper does where its options ask for graphs of layers, or of parts of them, from
    the second step on, which they cannot without a GPU."""
    asked = SimpleNamespace(
        cuda_graph_impl="local", cuda_graph_warmup_steps=1, cuda_graph_scope=list(parts)
    )
    wrapper._layers = layer_graphs(wrapper.engine, wrapper.module, asked, graphs)


def has_accumulator(param: torch.nn.Parameter) -> bool:
    """Whether some graph keeps the node that adds gradients to a weight: what is written to it is
    still there when it is asked for again."""
    get_gradient_edge(param).node.metadata["looked at"] = True
    return "looked at" in get_gradient_edge(param).node.metadata


class HostTorch:
    """Stands for `torch` in core's modules that capture: its graphs are noted on the host.

    capturing: whether something is being captured.
    """

    def __init__(self) -> None:
        self.capturing = False
        self.cuda = SimpleNamespace(
            CUDAGraph=lambda: SimpleNamespace(),
            synchronize=lambda: None,
            Stream=lambda: None,
            graph_pool_handle=lambda: 1,
            graph=self._graph,
        )
        self.distributed = torch.distributed

    @contextmanager
    def _graph(self, graph: Any, **unused: Any) -> Iterator[None]:
        """As `torch.cuda.graph`."""
        with Recorder() as recorder:
            self.capturing = True
            yield
            self.capturing = False
        recorder.end()
        graph.replay = recorder.replay
