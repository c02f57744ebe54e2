"""CPU mode: lets megatron-core train on a CPU with gloo.

megatron-core asks CUDA for things without looking whether there is any: the current device, a
stream, a zero on ``device="cuda"``. `enable_cpu_mode` answers these questions for the CPU. Neither
the engine nor the adapter of this package needs it; only megatron-core does. Nothing is switched
on by an import, and it refuses where CUDA is present.

How. Each module of core that asks is listed in `VIEWS` with what it asks. There the module
global ``torch`` is replaced by a `TorchView`, which answers for the CPU and passes everything else
on to torch. torch itself is left alone: ``torch.cuda.is_available()`` stays False, and other
libraries see no change. What a view cannot reach (methods of a tensor, helpers that call C
functions) is listed in `FUNCTIONS`.

Why not a TorchFunctionMode that rewrites ``device="cuda"``: it runs Python on every torch call.
Measured on one training step (4 layers of width 64, 4 microbatches of 64 tokens, distributed
optimizer, one thread of a busy machine, 60 steps each in turn): median 90 ms with the views, 112 ms
with such a mode around the step; a second run gave the same ratio, 1.24. The views themselves cost
455 reads of 0.7 us, 0.3 ms of the 90. A mode is also local to a thread, so it misses whatever
runs in another one.

A patched place carries its original, so no state is kept here: `disable_cpu_mode` walks the same
tables backwards. Streams and events become objects that do nothing; what they would show on a GPU
(ordering, overlap, races) cannot be seen in this mode.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megatron_fsdp_adapter.megatron.seams import releases
from megatron_fsdp_adapter.megatron.seams.module_view import ModuleView

_CORE = "megatron.core"


@dataclass(frozen=True)
class View:
    """A module of core whose global ``torch`` is replaced.

    asks: the reason, over all releases: names of ``torch.cuda``, "cuda" for the literal device,
    "pin_memory" for host memory that is locked. may_be_absent: some release has no such module.
    """

    module: str
    asks: frozenset[str]
    may_be_absent: bool = False


@dataclass(frozen=True)
class Function:
    """An attribute that is replaced by ``make(original)``.

    ``owner`` is a dotted path of a module or of a class in one. ``make`` gets None when the
    attribute does not exist, which is allowed only with ``may_be_absent``.
    """

    owner: str
    attribute: str
    make: Callable[[Any], Any]
    reason: str
    may_be_absent: bool = False


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

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def record_event(self, event: object = None) -> NullStream:
        return NullStream()

    def synchronize(self) -> None:
        pass

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


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


class TorchView(ModuleView):
    """Stands for torch or torch.cuda and answers for the CPU."""


CUDA_ANSWERS: dict[str, Any] = {
    "current_device": lambda: _HOST,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": _manual_seed,
    "get_rng_state": _get_host_rng_state,
    "set_rng_state": _set_host_rng_state,
    "Stream": NullStream,
    "Event": NullStream,
    "stream": _only_stream,
    "current_stream": _only_stream,
    "default_stream": _only_stream,
    "nvtx": TorchView(
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


def make_view() -> TorchView:
    """A view of torch that answers for the CPU."""
    answers: dict[str, Any] = {name: _on_host(getattr(torch, name)) for name in FACTORIES}
    answers["cuda"] = TorchView(torch.cuda, CUDA_ANSWERS)
    return TorchView(torch, answers)


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

VIEWS = tuple(
    View(f"{_CORE}.{module}", frozenset(asks.split()), may_be_absent=module in _LATER)
    for module, asks in _VIEW_ROWS
)


def _for_callers_in(package: str, answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace a method of tensors for callers whose module is inside ``package`` only.

    ``answer(original, tensor, *args, **kwargs)`` gives the value for those callers.
    """

    def make(original: Any) -> Any:
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


def _splits_as_numpy(original: Any) -> Any:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _replaced_by(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A row's ``make`` for a replacement that does not use the original."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs)

        return call

    return make


FUNCTIONS = (
    Function(
        "torch.Tensor",
        "type",
        _for_callers_in(f"{_CORE}.optimizer", _type_as_on_cuda),
        "compared with 'torch.cuda.*' in optimizer: distrib_optimizer, optimizer, clip_grads",
    ),
    Function(
        "torch.Tensor",
        "cuda",
        _for_callers_in(_CORE, _stay_on_host),
        "in models.common (language_module, rope_utils), tensor_parallel.data, "
        "optimizer.optimizer, dist_checkpointing.exchange_utils",
    ),
    Function(
        f"{_CORE}.tensor_parallel.random",
        "_get_cuda_rng_state",
        _replaced_by(_get_host_rng_state),
        "reads torch.cuda's generators",
    ),
    Function(
        f"{_CORE}.tensor_parallel.random",
        "_set_cuda_rng_state",
        _replaced_by(_set_host_rng_state),
        "calls torch._C's CUDA functions",
    ),
    Function(
        f"{_CORE}.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        "makes the split sizes numpy arrays only if is_cuda",
    ),
    Function(
        f"{_CORE}.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: original,
        "bound only where Transformer Engine is, and read everywhere",
        may_be_absent=True,
    ),
)


class _OneGeneratorFilter(logging.Filter):
    """Drops core's warning that the CPU generator moved inside a CUDA RNG context.

    In this mode both are one generator, so it always has.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_RANDOM_LOGGER = f"{_CORE}.tensor_parallel.random"

# --------------------------------------------------------------------------------------------
# On and off


def _resolve(dotted: str) -> Any:
    """A module, or a class inside one, by its dotted path."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        parent, _, name = dotted.rpartition(".")
        if error.name != dotted or not parent:
            raise
        return getattr(importlib.import_module(parent), name)


def _replacements() -> Iterator[tuple[Any, str, Any, bool, str]]:
    """(owner, attribute, make, may be absent, reason) for every row of both tables."""
    view = make_view()
    for row in VIEWS:
        try:
            module = importlib.import_module(row.module)
        except ModuleNotFoundError as error:
            if row.may_be_absent and f"{row.module}.".startswith(f"{error.name}."):
                continue
            raise
        reason = f"it asks for {', '.join(sorted(row.asks))}"
        yield module, "torch", lambda original: view, False, reason
    for function in FUNCTIONS:
        owner = _resolve(function.owner)
        yield owner, function.attribute, function.make, function.may_be_absent, function.reason


_MARK = "__cpu_mode_original__"


def _original_of(value: Any) -> Any:
    """The original that a patched value carries, or None when the value is not patched."""
    if isinstance(value, TorchView):
        return value.__dict__["target"]
    return getattr(value, _MARK, None) if callable(value) else None


def _missing() -> str:
    import megatron.core

    return (
        f"CPU mode does not know megatron-core {megatron.core.__version__}: {releases.remedy()}"
    )


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
    rows = list(_replacements())
    for owner, attribute, _, may_be_absent, reason in rows:
        if not may_be_absent and not hasattr(owner, attribute):
            name = getattr(owner, "__name__", owner)
            raise RuntimeError(f"{_missing()} ({name} has no {attribute!r}; {reason})")
    for owner, attribute, make, _, _ in rows:
        current = getattr(owner, attribute, None)
        if _original_of(current) is not None:
            continue
        replacement = make(current)
        if replacement is not current and not isinstance(replacement, TorchView):
            setattr(replacement, _MARK, current)
        setattr(owner, attribute, replacement)
    logger = logging.getLogger(_RANDOM_LOGGER)
    if not any(isinstance(item, _OneGeneratorFilter) for item in logger.filters):
        logger.addFilter(_OneGeneratorFilter())


def disable_cpu_mode() -> None:
    """Undo `enable_cpu_mode`: every patched place gets its original back. Harmless when off."""
    for owner, attribute, _, may_be_absent, _ in _replacements():
        current = getattr(owner, attribute, None)
        original = _original_of(current)
        if original is not None:
            delattr(owner, attribute)
            if getattr(owner, attribute, None) is not original:  # not inherited: put it back
                setattr(owner, attribute, original)
        elif may_be_absent and current is None and attribute in vars(owner):
            delattr(owner, attribute)
    logger = logging.getLogger(_RANDOM_LOGGER)
    for item in list(logger.filters):
        if isinstance(item, _OneGeneratorFilter):
            logger.removeFilter(item)


def cpu_mode_enabled() -> bool:
    """Whether CPU mode is on in this process."""
    module = sys.modules.get(VIEWS[0].module)
    return isinstance(module, ModuleType) and isinstance(vars(module).get("torch"), TorchView)


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
