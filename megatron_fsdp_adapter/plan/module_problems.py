"""Problems of a module that is to be sharded, or of what is asked for it.

Each function returns one line for each problem, so that a caller can raise all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..quantized.params import kind_of
from ..quantized.start import outdated_values
from .unit_classes import unit_problems

TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that can be trained: none is more precise than float32 sums of gradients."""


def module_problems(
    module: nn.Module,
    unit_classes: Sequence[type[nn.Module] | str] | None,
    main_params_dtype: torch.dtype | None,
    is_managed: Callable[[str], bool] = lambda fqn: True,
    may_be_frozen: bool = False,
    trained_dtypes: Collection[torch.dtype] = TRAINED_DTYPES,
) -> list[str]:
    """Problems of the model, and of what is asked for it.

    Args:
        unit_classes: the classes of units; None: nothing to check.
        main_params_dtype: dtype of main weights; None: each parameter's own.
        is_managed: False for the name of a parameter that is not to be sharded. Its type and
            format are not checked.
        may_be_frozen: a model without trainable parameters is no problem.
        trained_dtypes: dtypes of parameters that can be trained.
    """
    found = _sharded_already(module)
    if not may_be_frozen:
        found += _frozen(module)
    found += parameter_problems(module, is_managed, trained_dtypes)
    found += _sparse_gradients(module)
    found += _tables_that_forwards_write(module, is_managed)
    if main_params_dtype is not None:
        found += _main_weights_that_lose_bits(module, main_params_dtype)
    found += outdated_values(module, is_managed)
    found += unit_problems(module, unit_classes or ())
    return found


SHARDED_ALREADY = ("fsdp_layout_ref", "_fsdp_label")
"""Attributes of sharded parameters (the first) and of unsharded ones (the second) of a wrapped
module, which shows either."""


def _sharded_already(module: nn.Module) -> list[str]:
    if not any(hasattr(p, mark) for p in module.parameters() for mark in SHARDED_ALREADY):
        return []
    return [
        f"module={type(module).__name__}: its parameters are sharded already. Wrap a module once, "
        "with FullyShardedDataParallel or with fully_shard_model"
    ]


def _main_weights_that_lose_bits(module: nn.Module, main: torch.dtype) -> list[str]:
    """A problem if `main` cannot represent the values of a trained parameter; of the first one."""
    for name, param in module.named_parameters():
        dtype = param.dtype
        if not param.requires_grad or dtype not in TRAINED_DTYPES:
            continue
        if torch.promote_types(main, dtype) != main:
            return [
                f"main_params_dtype={main} (megatron_fsdp_main_params_dtype): parameter {name} is "
                f"{dtype}, which has more bits. Use torch.float32, or None for main weights in "
                "each parameter's dtype"
            ]
    return []


def parameter_problems(
    module: nn.Module,
    is_managed: Callable[[str], bool],
    trained_dtypes: Collection[torch.dtype] = TRAINED_DTYPES,
) -> list[str]:
    """Problems of the parameters for whose names `is_managed` is true: the first 8."""
    found = []
    for name, param in module.named_parameters():
        problem = _parameter(param, trained_dtypes) if is_managed(name) else ""
        if problem:
            found.append(f"parameter {name} ({tuple(param.shape)}, {param.dtype}): {problem}")
    return found[:8]


def computes_itself(param: torch.Tensor) -> bool:
    """True for a tensor whose class has a `__torch_dispatch__`, so that its values may be in other
    tensors; but not for Transformer Engine's quantized weights."""
    dispatch = getattr(type(param), "__torch_dispatch__", None)
    is_plain = dispatch in (None, torch.Tensor.__torch_dispatch__)
    return not is_plain and kind_of(type(param)) is None


def _parameter(param: nn.Parameter, trained_dtypes: Collection[torch.dtype]) -> str:
    """The reason why a flat buffer cannot hold `param`, and what to do; empty if it can."""
    if any(hasattr(param, mark) for mark in SHARDED_ALREADY):
        return ""  # reported for the whole module
    if isinstance(param, DTensor):
        return (
            f"it is a DTensor, {param.placements} over {param.device_mesh} (parallelize_module, or "
            "sharded by another library), but flat buffers hold plain tensors. Use Megatron's "
            "tensor-parallel layers, or torch's fully_shard for this model"
        )
    if computes_itself(param):
        return (
            f"its class {type(param).__name__} computes by a __torch_dispatch__ of its own "
            "(torchao's float8 and quantized weights), but flat buffers hold plain tensors: it "
            "would never be trained. Use plain weights (enable_fsdp_float8_all_gather=False), "
            "pass it in ignored_params, or use torch's fully_shard for this model"
        )
    if param.layout is not torch.strided:
        return f"its layout is {param.layout}, but buffers are dense. Use param.to_dense()"
    if any(step == 0 and size > 1 for step, size in zip(param.stride(), param.shape, strict=True)):
        return (
            "it is an expanded tensor (a stride of 0): its elements share memory, which a buffer "
            "cannot represent. Make it of .contiguous(), or keep the small tensor and expand it "
            "in forward"
        )
    if param.dtype.is_complex:
        return (
            "it is complex, but buffers and gradients are real. Keep torch.view_as_real(...) as "
            "the parameter and use torch.view_as_complex(...) in forward"
        )
    if param.dtype.is_floating_point and param.dtype.itemsize == 1:
        return (
            "not every process group carries 8-bit floats. Convert it to torch.bfloat16, or keep "
            "its .view(torch.uint8) as the parameter and view that as 8-bit floats in forward"
        )
    if param.requires_grad and param.dtype not in trained_dtypes:
        return (
            "its gradients would be summed in float32, which is less precise. Train it in one of "
            f"{[str(dtype) for dtype in trained_dtypes]}, or freeze it"
        )
    return ""


def _sparse_gradients(module: nn.Module) -> list[str]:
    found = []
    for name, child in _tables(module):
        if child.sparse and child.weight.requires_grad:
            found.append(
                f"module {name or type(child).__name__}: sparse=True makes sparse gradients, but "
                "gradients are reduced in dense buffers. Use sparse=False"
            )
    return found


def _tables_that_forwards_write(module: nn.Module, is_managed: Callable[[str], bool]) -> list[str]:
    found = []
    for name, child in _tables(module):
        weight = f"{name}.weight" if name else "weight"
        if child.max_norm is not None and is_managed(weight):
            found.append(
                f"module {name or type(child).__name__}: max_norm={child.max_norm} writes its "
                "weight in each forward, but writes to gathered weights are lost. Use "
                "max_norm=None and scale the rows that were looked up, or clamp the weight between "
                "steps"
            )
    return found


def _tables(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """The embeddings in `module`, with their names."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            yield name, child


def _frozen(module: nn.Module) -> list[str]:
    if any(param.requires_grad for param in module.parameters()):
        return []
    return [
        f"module={type(module).__name__} has no trainable parameter: nothing can be sharded or "
        "trained. Set requires_grad on at least one parameter, or do not wrap the module"
    ]


def place_problems(module: nn.Module, device: torch.device | str | None) -> list[str]:
    """Problems of where the model is.

    device: where it is to be; None: on any one device."""
    devices = sorted({str(param.device) for param in module.parameters() if not param.is_meta})
    if len(devices) > 1:
        return [
            f"module: its parameters are on several devices {devices}. Move it to one before "
            "wrapping it"
        ]
    if device is not None and devices and str(torch.device(device)) != devices[0]:
        return [
            f"device={device}: the module's parameters are on {devices[0]}. Move the module there "
            "before wrapping it, or leave the argument out"
        ]
    return []
