"""The dtypes of a sharded model, and Transformer Engine's context for quantized parameters."""

import contextlib
import importlib
from typing import Any

from megatron_fsdp_adapter.plain.megatron_fsdp import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy", "get_quantized_model_init_context_cls"]


def get_quantized_model_init_context_cls() -> Any:
    """Transformer Engine's context for quantized parameters. RuntimeError without one."""
    with contextlib.suppress(ImportError):
        engine = importlib.import_module("transformer_engine.pytorch")
        for name in ("quantized_model_init", "fp8_model_init"):
            if hasattr(engine, name):
                return getattr(engine, name)
    raise RuntimeError(
        "get_quantized_model_init_context_cls: transformer_engine.pytorch cannot be imported or "
        "has no quantized_model_init. Install Transformer Engine, or build the model without it"
    )
