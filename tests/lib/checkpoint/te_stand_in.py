"""Stand-ins on the CPU for packages whose modules core's specs name: Transformer Engine, mamba_ssm
and fla.

Their modules have the parameters, the names and the extra states of the real ones, and compute
nothing. So core builds every layer that its specs describe, and saves it by its own code. Install
them before anything of `megatron` is imported, in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tests.lib.integration.absent_packages import Empty

VERSION = "2.9.0"
OPTIMIZERS = "transformer_engine.pytorch.optimizers"
"""Cannot be imported: core takes torch's Adam then."""
PACKAGES = ("transformer_engine", "mamba_ssm", "fla")


def _parameter(*shape: int, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype or torch.float32))


class _Module(nn.Module):
    """What all modules of Transformer Engine have: an extra state, and where they are split."""

    def __init__(self, parallel_mode: str | None = None, **options: Any) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = False
        self.fp8_calibration = False

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing is stored without FP8."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """There is none."""


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.use_bias = bias
        self.weight = _parameter(out_features, in_features, dtype=params_dtype)
        if bias:
            self.bias = _parameter(out_features, dtype=params_dtype)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)
        if normalization == "LayerNorm":
            self.layer_norm_bias = _parameter(in_features, dtype=params_dtype)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_gemms = num_gemms
        self.use_bias = bias
        for i in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", _parameter(out_features, dtype=params_dtype))


class RMSNorm(_Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = normalized_shape or hidden_size  # renamed between releases
        self.weight = _parameter(int(size or 0), dtype=params_dtype)


class LayerNorm(RMSNorm):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.bias = nn.Parameter(torch.randn_like(self.weight))


def _without_extra_state(module: nn.Module, keys: Any) -> None:
    # As the real one, whose extra state older checkpoints do not have.
    for key in [key for key in keys.missing_keys if "core_attention._extra_state" in key]:
        keys.missing_keys.remove(key)


class DotProductAttention(_Module):
    def __init__(
        self, num_attention_heads: int, softmax_type: str = "vanilla", **options: Any
    ) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_without_extra_state)
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.randn(num_attention_heads))


class GatedNorm(nn.Module):
    """mamba_ssm's norm with a gate."""

    def __init__(self, hidden_size: int, device: Any = None, dtype: Any = None, **options: Any):
        super().__init__()
        self.weight = _parameter(hidden_size, dtype=dtype)


_NAMES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.pytorch": {
        made.__name__: made
        for made in (
            Linear,
            LayerNormLinear,
            GroupedLinear,
            LayerNorm,
            RMSNorm,
            DotProductAttention,
        )
    },
    "transformer_engine.pytorch.cpu_offload": {
        "get_cpu_offload_context": lambda *options: (nullcontext(), None)
    },
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
}
"""What the modules of these packages have. Every other name is a class that does nothing."""


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []
        vars(module).update(_NAMES.get(module.__name__, {}))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.packages and name != OPTIMIZERS:
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


def install() -> None:
    """Puts the stand-ins before all other packages."""
    sys.meta_path.insert(0, _Finder(PACKAGES))


@contextmanager
def with_triton() -> Iterator[None]:
    """Inside, triton can be imported, as modules of core do that define kernels with it. Not
    longer: torch would take it for the real one."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    finder = _Finder(("triton",))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
