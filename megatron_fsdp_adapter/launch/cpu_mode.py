"""CPU mode: lets megatron-core train on a CPU with gloo.

megatron-core uses CUDA without checking for it: the current device, a stream, a zero on
``device="cuda"``. `enable_cpu_mode` replaces these uses by CPU versions. Only megatron-core needs
it, not the engine or the adapter of this package. No import enables it, and it raises if CUDA is
available.

`VIEWS` lists each module of core that uses CUDA, with the names that it uses. The module's global
``torch`` is replaced by a `ModuleView` with CPU versions of these names; it forwards all others to
torch. torch itself is unchanged: ``torch.cuda.is_available()`` stays False, and other libraries see
no change. `FUNCTIONS` lists uses that a view cannot reach (methods of a tensor, helpers that call C
functions).

A TorchFunctionMode that rewrites ``device="cuda"`` would run Python on every torch call, and would
not apply to other threads.

Streams and events become no-ops, so ordering, overlap and races cannot be tested in this mode.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp_adapter.megatron.compat import patches, releases
from megatron_fsdp_adapter.megatron.compat.patches import ModuleView, Patch, makes, stands

_CORE = "megatron.core"
_RANDOM = f"{_CORE}.tensor_parallel.random"


# --------------------------------------------------------------------- The CPU versions of a view


def _nothing(*args: Any, **kwargs: Any) -> None:
    """No-op."""


class NullStream:
    """A no-op stream or event that has always finished."""

    __init__ = _nothing
    __exit__ = _nothing
    wait_stream = _nothing
    wait_event = _nothing
    wait = _nothing
    record = _nothing
    synchronize = _nothing

    def __enter__(self) -> NullStream:
        return self

    def record_event(self, event: object = None) -> NullStream:
        return NullStream()

    def query(self) -> bool:
        return True


_HOST = torch.device("cpu")
_ONLY_STREAM = NullStream()


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

# Factory functions to which core passes the literal "cuda".
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
    """`factory`, but on the CPU where a CUDA device is given, and without `pin_memory`, which needs
    a GPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _HOST
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def make_view() -> ModuleView:
    """A view of torch with CPU versions of CUDA functions."""
    answers: dict[str, Any] = {name: _on_host(getattr(torch, name)) for name in FACTORIES}
    answers["cuda"] = ModuleView(torch.cuda, CUDA_ANSWERS)
    return ModuleView(torch, answers)


# --------------------------------------------------------------------------------------------
# The tables (megatron-core 0.16.1 to 0.19)

_VIEW_ROWS = (
    # A row: module, the names that it uses in some release.
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
    Patch(
        f"{_CORE}.{module}",
        "torch",
        _VIEW,
        stands,
        required=module not in _LATER,
        why=f"uses {asks}",
    )
    for module, asks in _VIEW_ROWS
)
"""Modules of core whose global `torch` is replaced, and the names that they use in any release."""


def _for_callers_in(package: str, answer: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A function for `Patch` that makes a replacement of a tensor's method. For callers in
    ``package`` the replacement returns ``answer(original, tensor, *args, **kwargs)``; all others
    get the original.
    """

    def make(owner: Any, original: Any) -> Any:
        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # The frame that calls this method, so no function may stand between.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == package or caller.startswith(package + "."):
                return answer(original, tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        return method

    return make


def _type_as_on_cuda(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type` with the answer of a CUDA tensor: 'torch.cuda.FloatTensor', for example."""
    name = original(tensor, *args, **kwargs)
    if not isinstance(name, str):
        # Only the query `tensor.type()` returns a string; a conversion returns a tensor.
        return name
    return name.replace("torch.", "torch.cuda.", 1)


def _splits_as_numpy(
    original: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


FUNCTIONS = (
    # Compared with 'torch.cuda.*' in optimizer: distrib_optimizer, optimizer, clip_grads.
    Patch("torch", "Tensor.type", _for_callers_in(f"{_CORE}.optimizer", _type_as_on_cuda), makes),
    # In models.common (language_module, rope_utils), tensor_parallel.data, optimizer.optimizer,
    # dist_checkpointing.exchange_utils: stays on the host.
    Patch(
        "torch",
        "Tensor.cuda",
        _for_callers_in(_CORE, lambda original, tensor, *args, **kwargs: tensor),
        makes,
    ),
    Patch(
        _RANDOM,
        "_get_cuda_rng_state",
        _get_host_rng_state,
        stands,
        why="reads torch.cuda's generators",
    ),
    Patch(
        _RANDOM,
        "_set_cuda_rng_state",
        _set_host_rng_state,
        stands,
        why="calls torch._C's CUDA functions",
    ),
    Patch(
        f"{_CORE}.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        why="makes the split sizes numpy arrays only if is_cuda",
    ),
    # Bound only with Transformer Engine, but read without it too.
    Patch(
        f"{_CORE}.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda module, original: original,
        makes,
        default=None,
    ),
    # From 0.20 on: asks whether a layer is of a class that is none without Transformer Engine.
    Patch(
        f"{_CORE}.transformer.multi_token_prediction",
        "is_inference_column_parallel_linear",
        lambda module: False,
        stands,
        required=False,
    ),
)

PATCHES = (*VIEWS, *FUNCTIONS)


def _is_of_one_generator(record: logging.LogRecord) -> bool:
    """A filter of log records: False, to drop it, for core's warning that the CPU generator changed
    inside a CUDA RNG context. In this mode both are one generator, so it always changes."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def enable_cpu_mode() -> None:
    """Makes megatron-core run on the CPU in this process, where there is no GPU.

    Calls of `torch.cuda` in megatron-core then act on the CPU: streams and events do nothing, and
    there is one random number generator. A second call does nothing.

    Examples:
        >>> enable_cpu_mode()
        >>> from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        >>> model_parallel_cuda_manual_seed(1234)

    Raises:
        RuntimeError: there is a GPU; megatron-core uses Transformer Engine or apex; or its release
            is not supported.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "enable_cpu_mode() is not available: torch.cuda.is_available() is True, and "
            "megatron-core runs on the GPU without it. Hide the GPUs (CUDA_VISIBLE_DEVICES='') to "
            "train on the CPU"
        )
    import megatron.core
    from megatron.core import optimizer

    kernels = optimizer.Adam.__module__.partition(".")[0]
    if kernels in ("transformer_engine", "apex"):
        raise RuntimeError(
            f"enable_cpu_mode() is not available with {kernels}: megatron-core has found it, and "
            "takes its optimizer and layers, which need a GPU. Use an environment without it"
        )
    version = megatron.core.__version__

    def error(lacks: str) -> str:
        return (
            f"CPU mode does not support megatron-core {version}, which has no {lacks}. "
            f"{releases.remedy()}"
        )

    patches.install(PATCHES, error)
    logging.getLogger(_RANDOM).addFilter(_is_of_one_generator)


def disable_cpu_mode() -> None:
    """Undoes `enable_cpu_mode`: restores every patched name. No-op if it is off."""
    patches.uninstall(PATCHES)
    logging.getLogger(_RANDOM).removeFilter(_is_of_one_generator)
