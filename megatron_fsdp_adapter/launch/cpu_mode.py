"""CPU mode: lets megatron-core train on a CPU with gloo.

megatron-core asks CUDA for things without looking whether there is any: the current device, a
stream, a zero on ``device="cuda"``. `enable_cpu_mode` answers these questions for the CPU. Neither
the engine nor the adapter of this package needs it; only megatron-core does. Nothing is switched
on by an import, and it refuses where CUDA is present.

How. Each module of core that asks is listed in `VIEWS` with what it asks. There the module
global ``torch`` is replaced by a `ModuleView`, which answers for the CPU and passes everything else
on to torch. torch itself is left alone: ``torch.cuda.is_available()`` stays False, and other
libraries see no change. What a view cannot reach (methods of a tensor, helpers that call C
functions) is listed in `FUNCTIONS`.

Why not a TorchFunctionMode that rewrites ``device="cuda"``: it runs Python on every torch call.
Measured on one training step (4 layers of width 64, 4 microbatches of 64 tokens, distributed
optimizer, one thread of a busy machine, 60 steps each in turn): median 90 ms with the views, 112 ms
with such a mode around the step; a second run gave the same ratio, 1.24. The views themselves cost
455 reads of 0.7 us, 0.3 ms of the 90. A mode is also local to a thread, so it misses whatever
runs in another one.

Streams and events become objects that do nothing; what they would show on a GPU
(ordering, overlap, races) cannot be seen in this mode.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fsdp_adapter.megatron.compat import patches, releases
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView, Patch, makes, stands

_CORE = "megatron.core"
_RANDOM = f"{_CORE}.tensor_parallel.random"


# --------------------------------------------------------------------------------------------
# What a view answers


class NullStream:
    """A stream or an event that has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = __init__

    def record_event(self, event: object = None) -> NullStream:
        return NullStream()

    def query(self) -> bool:
        return True


_HOST = torch.device("cpu")
_ONLY_STREAM = NullStream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _only_stream(*args: Any, **kwargs: Any) -> NullStream:
    return _ONLY_STREAM


def _set_host_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _get_host_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


CUDA_ANSWERS: dict[str, Any] = {
    "current_device": lambda: _HOST,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": torch.manual_seed,
    "get_rng_state": _get_host_rng_state,
    "set_rng_state": _set_host_rng_state,
    "Stream": NullStream,
    "Event": NullStream,
    "stream": _only_stream,
    "current_stream": _only_stream,
    "default_stream": _only_stream,
    "nvtx": ModuleView(
        torch.cuda.nvtx,
        {"range_push": _nothing, "range_pop": _nothing, "range": contextlib.nullcontext},
    ),
}

# The factory functions to which core passes the literal "cuda".
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "ones",
    "tensor",
    "zeros",
    "zeros_like",
)


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory, with every CUDA device read as the CPU and page locking left out: there is no
    allocator of locked pages without a GPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _HOST
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def make_view() -> ModuleView:
    """A view of torch that answers for the CPU."""
    answers: dict[str, Any] = {name: _on_host(getattr(torch, name)) for name in FACTORIES}
    answers["cuda"] = ModuleView(torch.cuda, CUDA_ANSWERS)
    return ModuleView(torch, answers)


# --------------------------------------------------------------------------------------------
# The tables (megatron-core 0.16.1 to 0.19)

_VIEW_ROWS = (
    # module, what it asks in some release
    # Parallel state and utilities
    ("parallel_state", "current_device synchronize"),
    ("utils", "cuda Event current_device nvtx pin_memory synchronize"),
    ("timers", "current_device synchronize"),
    ("energy_monitor", "cuda current_device"),
    ("rerun_state_machine", "cuda current_device get_rng_state set_rng_state"),
    # Schedules
    ("pipeline_parallel.schedules", "cuda"),
    ("pipeline_parallel.p2p_communication", "current_device synchronize"),
    ("pipeline_parallel.utils", "cuda Event Stream current_stream nvtx stream"),
    ("pipeline_parallel.combined_1f1b", "current_stream"),
    ("models.common.model_chunk_schedule_plan", "Event current_stream nvtx stream"),
    ("models.gpt.fine_grained_callables", "current_stream nvtx stream"),
    # Data parallelism and optimizer
    ("distributed.distributed_data_parallel", "Stream current_device empty_cache synchronize"),
    (
        "distributed.param_and_grad_buffer",
        "cuda current_device current_stream default_stream stream",
    ),
    ("optimizer.optimizer", "cuda current_device empty_cache"),
    ("optimizer.distrib_optimizer", "current_device"),
    ("optimizer.clip_grads", "cuda"),
    ("optimizer.grad_scaler", "cuda current_device"),
    ("optimizer.layer_wise_optimizer", "cuda"),
    # Tensor parallelism
    ("tensor_parallel.layers", "current_device"),
    ("tensor_parallel.mappings", "current_device"),
    ("tensor_parallel.utils", "current_device"),
    ("tensor_parallel.data", "cuda current_device"),
    ("tensor_parallel.random", "current_device get_rng_state manual_seed"),
    # Layers
    ("models.common.embeddings.rope_utils", "pin_memory"),
    ("models.common.embeddings.rotary_pos_embedding", "current_device"),
    ("models.common.embeddings.yarn_rotary_pos_embedding", "current_device"),
    ("models.gpt.gpt_model", "current_device"),
    ("models.common.utils", "stream"),
    ("models.hybrid.hybrid_block", "cuda"),
    ("transformer.module", "current_device"),
    ("transformer.mlp", "empty_cache"),
    ("transformer.attention", "current_device"),
    ("transformer.dot_product_attention", "current_device"),
    ("transformer.transformer_layer", "Event current_device"),
    ("transformer.multi_token_prediction", "current_device"),
    ("transformer.utils", "cuda empty_cache"),
    ("transformer.moe.experts", "current_device"),
    ("transformer.moe.router", "current_device"),
    ("transformer.moe.moe_utils", "cuda current_stream"),
    ("transformer.moe.moe_layer", "cuda Event Stream current_stream stream"),
    ("transformer.moe.moe_logging", "current_device"),
    ("transformer.moe.shared_experts", "Stream current_stream stream"),
    ("transformer.moe.token_dispatcher", "cuda Stream current_stream stream"),
    ("transformer.experimental_attention_variant.dsa", "current_device"),
    # Checkpoints
    ("dist_checkpointing.tensor_aware_state_dict", "synchronize"),
    ("dist_checkpointing.exchange_utils", "cuda"),
    ("dist_checkpointing.strategies.filesystem_async", "synchronize"),
    ("dist_checkpointing.strategies.fully_parallel", "synchronize"),
    ("dist_checkpointing.strategies.state_dict_saver", "cuda current_device"),
    ("dist_checkpointing.strategies.async_utils", "current_device synchronize"),
)
_LATER = ("models.common.utils", "models.hybrid.hybrid_block", "transformer.moe.moe_logging")
"""Modules that 0.16.1 does not have."""

_VIEW = make_view()
VIEWS = tuple(
    Patch(f"{_CORE}.{module}", "torch", _VIEW, stands, required=module not in _LATER,
          why=f"asks for {asks}")
    for module, asks in _VIEW_ROWS
)  # fmt: skip
"""A module of core whose global `torch` is replaced, and what it asks over all releases."""


def _for_callers_in(package: str, answer: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Replace a method of tensors for callers whose module is inside ``package`` only.

    ``answer(original, tensor, *args, **kwargs)`` gives the value for those callers.
    """

    def make(owner: Any, original: Any) -> Any:
        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == package or caller.startswith(package + "."):
                return answer(original, tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        return method

    return make


def _type_as_on_cuda(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = original(tensor, *args, **kwargs)
    # Only the query `tensor.type()` answers a string; a conversion answers a tensor.
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def _stay_on_host(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _splits_as_numpy(
    original: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


FUNCTIONS = (
    # Compared with 'torch.cuda.*' in optimizer: distrib_optimizer, optimizer, clip_grads.
    Patch("torch", "Tensor.type", _for_callers_in(f"{_CORE}.optimizer", _type_as_on_cuda), makes),
    # In models.common (language_module, rope_utils), tensor_parallel.data, optimizer.optimizer,
    # dist_checkpointing.exchange_utils.
    Patch("torch", "Tensor.cuda", _for_callers_in(_CORE, _stay_on_host), makes),
    Patch(
        _RANDOM, "_get_cuda_rng_state", _get_host_rng_state, stands,
        why="reads torch.cuda's generators",
    ),
    Patch(
        _RANDOM, "_set_cuda_rng_state", _set_host_rng_state, stands,
        why="calls torch._C's CUDA functions",
    ),
    Patch(
        f"{_CORE}.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _splits_as_numpy,
        why="makes the split sizes numpy arrays only if is_cuda",
    ),
    # Bound only where Transformer Engine is, and read everywhere.
    Patch(
        f"{_CORE}.transformer.moe.moe_utils", "te_general_gemm",
        lambda module, original: original, makes, default=None,
    ),
)  # fmt: skip

PATCHES = (*VIEWS, *FUNCTIONS)


def _is_of_one_generator(record: logging.LogRecord) -> bool:
    """Whether it is not core's warning that the CPU generator moved inside a CUDA RNG context. In
    this mode both are one generator, so it always has."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def enable_cpu_mode() -> None:
    """Make megatron-core usable on a CPU, for this process. Calling it again does nothing.

    Raises RuntimeError where CUDA is available (core needs no help there, and answers for the CPU
    would be wrong), and where the installed core has none of a place that the tables name.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "enable_cpu_mode() refuses: torch.cuda.is_available() is True, and megatron-core runs "
            "on the GPU as it is. Hide the GPUs (CUDA_VISIBLE_DEVICES='') to train on the CPU"
        )
    missing = patches.missing(PATCHES)
    if missing:
        import megatron.core

        raise RuntimeError(
            f"CPU mode does not know megatron-core {megatron.core.__version__}: "
            f"{releases.remedy()} (there is no {', no '.join(missing)})"
        )
    patches.install(PATCHES)
    logging.getLogger(_RANDOM).addFilter(_is_of_one_generator)


def disable_cpu_mode() -> None:
    """Undo `enable_cpu_mode`: every patched place gets its original back. Harmless when off."""
    patches.uninstall(PATCHES)
    logging.getLogger(_RANDOM).removeFilter(_is_of_one_generator)


def cpu_mode_enabled() -> bool:
    """Whether CPU mode is on in this process."""
    return patches.is_installed(VIEWS[0])


@contextlib.contextmanager
def cpu_mode() -> Iterator[None]:
    """CPU mode for the length of a ``with`` block; a mode that was on before stays on."""
    was_on = cpu_mode_enabled()
    enable_cpu_mode()
    try:
        yield
    finally:
        if not was_on:
            disable_cpu_mode()
