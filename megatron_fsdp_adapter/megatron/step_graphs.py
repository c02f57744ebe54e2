"""The optimizer's step in a CUDA graph (`optimizer_cuda_graph`), captured by core's own wrapper.

Core puts its wrapper in the place of `optimizer.step`: some steps run, one is captured, and from
then on it is replayed. No Python of a step runs in a replay, so what follows a step on the host has
a place that does: the call of core's wrapper.

    in a capture      norm, clipping, the inner optimizer's step. Gathered weights are not called
                      outdated, and none are gathered: that is of each step, not of the graph
    after a replay    gathered weights are outdated, the first gather is launched
    for good          gradients keep their storage, and main weights, state and the learning rate
                      theirs: the graph has the addresses. From the first step on that core's
                      wrapper runs: what one before the capture makes for its addresses (tables of
                      `sharding/tensor_table.py`) is what the graph reads

A gather inside of the graph was turned down: the host would not know what is gathered, and its
buffers would have to stay for good. So was to look for a step when a forward begins: weights are
read in between (checkpoints, exports), and whether a step was taken cannot be seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer

from ..core.engine.engine import FsdpEngine
from ..sharding.group_options import as_numbers
from . import late_step
from .hybrid_optimizer import COMPUTED
from .inner import our_chunks
from .options.ddp_options import OFFLOAD
from .options.support import STEP_GRAPH as OPTION
from .options.support import is_on
from .seams import core_api

GRAPH = "a CUDA graph of the optimizer's step"
READ = COMPUTED | {"step"}
"""Options of parameter groups that a step reads."""


class StepCapture:
    """One wrapper's part in captured steps.

    told: whether core's wrapper runs the present step, and will say when it has been replayed.
    read: what the captured step reads of parameter groups, of each inner optimizer; None before.
    """

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine, self.told = engine, False
        self.read: list[list[dict[str, Any]]] | None = None

    @property
    def running(self) -> bool:
        """Whether what is called now belongs to a step that goes into a graph."""
        return self.told and self._engine.runtime.is_capturing()

    def stepped(self) -> None:
        """The optimizer has written main weights, or a graph has that now.

        Raises:
            RuntimeError: somebody captures the step who does not tell of replays.
        """
        if self.told:
            self._keep_memory()
        if not self._engine.runtime.is_capturing():
            self._engine.main_weights_changed(stepped=True)
            return
        if not self.told:
            raise RuntimeError(
                f"optimizer.step() in a CUDA graph: its replays would leave gathered weights as "
                f"they are; set {OPTION}=True in the optimizer's config, and let "
                "megatron-core's OptimizerCudaGraphWrapper capture it"
            )

    def _keep_memory(self) -> None:
        """Of weights, and of the gradients that this step has read."""
        self._engine.memory.held_by = GRAPH
        for group in self._engine.groups:
            if group.key.requires_grad and group.grad.allocated:
                group.grad.keep()


def problems(config: Any, chunks: Sequence[Any]) -> list[str]:
    """What there is against it, beside what the optimizer's config says by itself."""
    if not is_on(config, OPTION):
        return []
    found = []
    if core_api.STEP_GRAPHS is None:
        found.append("this megatron-core captures no optimizer's step; use 0.17 or later")
    if any(chunk.device.type != "cuda" for chunk in chunks):
        found.append("the model is on the CPU, where there are no CUDA graphs")
    if core_optimizer.USING_PYTORCH_OPTIMIZER or not core_api.norms_stay_on_device():
        found.append(
            "without Transformer Engine the gradient norm is asked on the host, and the learning "
            "rate is a number, which a replay would keep; install it"
        )
    if any((getattr(chunk.config, "cuda_graph_warmup_steps", 1) or 0) < 1 for chunk in chunks):
        found.append("a step has to run before one is captured; set cuda_graph_warmup_steps=1")
    engines = [chunk.engine for chunk in chunks]
    trained = [group for one in engines for group in one.groups if group.key.requires_grad]
    dtypes = {group.main_dtype for group in trained}
    if {*dtypes, *(one.config.policy.grads_dtype for one in engines)} != {torch.float32}:
        found.append(
            "in a graph the fused Adam takes main weights and gradients in float32 alone; leave "
            "megatron_fsdp_main_params_dtype and megatron_fsdp_main_grads_dtype unset"
        )
    if any(one.config.offload for one in engines) or late_step.asked_for(chunks):
        found.append(
            "updates that go on behind the step are not over when a replay is; set "
            f"{OFFLOAD}=False and {late_step.OPTION}=False in the DDP config"
        )
    return [f"{OPTION}=True: {line}; or set it to False" for line in found]


def shown_options(
    meta: Mapping[str, Mapping[str, Any]], optimizer: Any
) -> dict[str, dict[str, Any]]:
    """Group options by parameter name, as a checkpoint has them: numbers for tensors."""
    change = as_numbers if getattr(optimizer, "capturable", False) else dict
    return {name: change(options) for name, options in meta.items()}


def _read_by(inner: Any) -> list[dict[str, Any]]:
    """What a step of an inner optimizer reads of each of its groups: numbers, and where tensors
    are."""
    return [
        {
            name: f"a tensor at {value.data_ptr()}" if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name in READ
        }
        for group in inner.param_groups
    ]


def _check(inner: Any, captured: list[dict[str, Any]] | None) -> None:
    """RuntimeError if a replay would not do what a step does now. captured: what was read when it
    was captured; None before."""
    inner._fsdp_shards.check()
    rates = [group["lr"] for group in inner.param_groups]
    if not all(isinstance(rate, torch.Tensor) for rate in rates):
        raise RuntimeError(
            f"optimizer.step() in a CUDA graph: learning rates are {rates}, and a replay would go "
            f"on with a number; set {OPTION}=True in the optimizer's config, and fill the tensors "
            "that param_groups have then, as core's scheduler does"
        )
    for then, now in zip(captured or (), _read_by(inner), strict=captured is not None):
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            said = ", ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in changed)
            raise RuntimeError(
                f"optimizer.step() is replayed from a CUDA graph, which does not follow options "
                f"of parameter groups: {said}; leave them alone (weight decay without a schedule), "
                f"or set {OPTION}=False"
            )


def _step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    optimizer = getattr(self.optimizer_step_func, "__self__", None)
    several = getattr(optimizer, "chained_optimizers", [optimizer])
    chunks = [chunk for one in several for chunk in our_chunks(one)]
    if not chunks:
        return original(self, *args, **kwargs)
    inner = [one.optimizer for one in several if not one.is_stub_optimizer]
    captures: list[StepCapture] = [chunk.step_capture for chunk in chunks]
    known = captures[0].read
    for number, one in enumerate(inner):
        _check(one, None if known is None else known[number])
    for chunk, capture in zip(chunks, captures, strict=True):
        chunk.engine.gather.begin_step()
        capture.told = True
    try:
        result = original(self, *args, **kwargs)
    finally:
        for capture in captures:
            capture.told = False
    for one in inner:
        one._fsdp_shards.held_by = GRAPH
    if self.cuda_graph is None:
        return result
    # Core replays what it has just captured, too.
    if captures[0].read is None:
        captures[0].read = [_read_by(one) for one in inner]
    for capture in captures:
        capture.stepped()
    for chunk in chunks:
        chunk.start_param_sync()
    return result
