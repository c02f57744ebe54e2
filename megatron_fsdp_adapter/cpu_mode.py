"""CPU mode: lets megatron-core 0.16.1 train on a CPU with gloo.

megatron-core asks CUDA for things without looking whether there is any: the current device, a
stream, a zero on ``device="cuda"``. `enable_cpu_mode` answers these questions for the CPU. Neither
the engine nor the adapter of this package needs it; only megatron-core does. Nothing is switched
on by an import, and it refuses where CUDA is present.

How. Each module of core that asks is listed in `VIEWS` with the lines that do so. There the module
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

from megatron_fsdp_adapter.module_view import ModuleView

_CORE = "megatron.core"


@dataclass(frozen=True)
class View:
    """A module of core whose global ``torch`` is replaced, and the lines that are the reason."""

    module: str
    reason: str


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
# The tables (lines of megatron-core 0.16.1)

_VIEW_ROWS = (
    # Parallel state and utilities
    ("parallel_state", "current_device, synchronize: :198, :931, :1317"),
    ("utils", "current_device: :631; 'cuda': :656, :1207, :2117; nvtx: :2186, :2215"),
    ("timers", "synchronize: :152, :165; current_device: :303"),
    ("energy_monitor", "current_device: :41; 'cuda': :78, :88"),
    ("rerun_state_machine", "'cuda': :261; current_device: :525, :660; RNG state: :957, :970"),
    # Schedules
    ("pipeline_parallel.schedules", "'cuda': :596, :983, :2138"),
    ("pipeline_parallel.p2p_communication", "current_device: :190-202, :313; synchronize: :242"),
    ("pipeline_parallel.utils", "streams: :332, :334; nvtx: :212"),
    ("pipeline_parallel.combined_1f1b", "current_stream: :408"),
    ("models.common.model_chunk_schedule_plan", "streams and events: :310, :376; nvtx: :476"),
    ("models.gpt.fine_grained_callables", "nvtx: :319; current_stream: :576"),
    # Data parallelism and optimizer
    ("distributed.distributed_data_parallel", "Stream: :230; synchronize, empty_cache: :588-611"),
    ("distributed.param_and_grad_buffer", "streams: :417, :422, :529; current_device: :783-806"),
    ("optimizer.optimizer", "'cuda': :473-485, :907; empty_cache: :362; current_device: :1141"),
    ("optimizer.distrib_optimizer", "current_device: :791, :1077"),
    ("optimizer.clip_grads", "'cuda': :90, :103, :115, :174, :207"),
    ("optimizer.grad_scaler", "'cuda': :15, :88-94; current_device: :140"),
    # Tensor parallelism
    ("tensor_parallel.layers", "current_device: :261, :552-607, :873, :899, :1197, :1218"),
    ("tensor_parallel.mappings", "current_device: :91, :141, :148, :181, :442"),
    ("tensor_parallel.utils", "current_device: :70, :91"),
    ("tensor_parallel.data", "'cuda': :37; current_device: :86"),
    ("tensor_parallel.random", "RNG: :235-238, :422"),
    # Layers
    ("models.common.embeddings.rope_utils", "pin_memory: :63"),
    ("models.common.embeddings.rotary_pos_embedding", "current_device: :78, :162, :297"),
    ("models.common.embeddings.yarn_rotary_pos_embedding", "current_device: :76, :122, :126"),
    ("models.gpt.gpt_model", "current_device: :415"),
    ("transformer.module", "current_device: :249"),
    ("transformer.mlp", "empty_cache: :346"),
    ("transformer.attention", "current_device: :430"),
    ("transformer.dot_product_attention", "current_device: :123, :132"),
    ("transformer.transformer_layer", "current_device: :936, :1147"),
    ("transformer.multi_token_prediction", "current_device: :179, :337"),
    ("transformer.utils", "'cuda': :35, :40"),
    ("transformer.moe.experts", "current_device: :184, :192"),
    ("transformer.moe.router", "current_device: :90, :92, :169-198"),
    ("transformer.moe.moe_utils", "'cuda': :998; current_stream: :1098"),
    ("transformer.moe.shared_experts", "streams: :123-277"),
    ("transformer.moe.token_dispatcher", "streams: :445, :871-874"),
    ("transformer.experimental_attention_variant.dsa", "current_device: :77"),
    # Checkpoints
    ("dist_checkpointing.tensor_aware_state_dict", "synchronize: :304"),
    ("dist_checkpointing.exchange_utils", "'cuda': :104, :110, :326"),
    ("dist_checkpointing.strategies.filesystem_async", "synchronize: :230"),
    ("dist_checkpointing.strategies.fully_parallel", "synchronize: :272, :281"),
    ("dist_checkpointing.strategies.state_dict_saver", "'cuda': :204; current_device: :252"),
    ("dist_checkpointing.strategies.async_utils", "current_device: :165, :604; synchronize: :212"),
)
VIEWS = tuple(View(f"{_CORE}.{module}", reason) for module, reason in _VIEW_ROWS)


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
        "compared with 'torch.cuda.*': optimizer/distrib_optimizer.py:361, :420, :582; "
        "optimizer/optimizer.py:671, :690; optimizer/clip_grads.py:167",
    ),
    Function(
        "torch.Tensor",
        "cuda",
        _for_callers_in(_CORE, _stay_on_host),
        "models/common/language_module/language_module.py:244; "
        "models/common/embeddings/rope_utils.py:64; tensor_parallel/data.py:84; "
        "optimizer/optimizer.py:375; dist_checkpointing/exchange_utils.py:336, :499",
    ),
    Function(
        f"{_CORE}.tensor_parallel.random",
        "_get_cuda_rng_state",
        _replaced_by(_get_host_rng_state),
        "tensor_parallel/random.py:44 reads torch.cuda's generators",
    ),
    Function(
        f"{_CORE}.tensor_parallel.random",
        "_set_cuda_rng_state",
        _replaced_by(_set_host_rng_state),
        "tensor_parallel/random.py:72 calls torch._C's CUDA functions",
    ),
    Function(
        f"{_CORE}.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        "transformer/moe/moe_utils.py:1093 makes the split sizes numpy arrays only if is_cuda",
    ),
    Function(
        f"{_CORE}.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: original,
        "read at transformer/moe/moe_utils.py:1192, :1225, bound only where Transformer Engine is",
        may_be_absent=True,
    ),
)


class _OneGeneratorFilter(logging.Filter):
    """Drops core's warning that the CPU generator moved inside a CUDA RNG context.

    tensor_parallel/random.py:265. In this mode both are one generator, so it always has.
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
        yield _resolve(row.module), "torch", lambda original: view, False, row.reason
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
        f"CPU mode is written for megatron-core 0.16.1, installed is {megatron.core.__version__}: "
        "install megatron-core==0.16.1"
    )


def enable_cpu_mode() -> None:
    """Make megatron-core 0.16.1 usable on a CPU, for this process. Calling it again does nothing.

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
