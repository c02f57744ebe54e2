"""Stand-ins for the methods of Megatron-Bridge's conversion that are wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.megatron.compat.table import BRIDGE_WEIGHTS, CONVERSION
from tests.lib.megatron.stand_ins import stand_ins


@dataclass(frozen=True)
class Task:
    name: str
    param_weight: Any
    weight_dtype: torch.dtype | None = None


class Adapters:
    def materialize_adapter_weights(self, adapter_tasks: Any) -> Any:
        return adapter_tasks


class MegatronModelBridge(Adapters):
    """As the real one: it takes what the modules hold, and copies whole tensors into that."""

    def load_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any) -> Any:
        for task in self.build_conversion_tasks(hf_pretrained, megatron_model):
            assert not isinstance(task.param_weight, DTensor)
            with torch.no_grad():
                task.param_weight.copy_(hf_pretrained(task.name, task.param_weight.shape))
        self._broadcast_shared_embeddings(megatron_model)

    def build_export_fp8_tasks(self, hf_pretrained: Any, megatron_model: Any) -> Any:
        return "its own"

    def _broadcast_shared_embeddings(self, megatron_model: Any) -> None:
        pass

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: Any, weight_dtype: Any = None
    ) -> Any:
        for model in megatron_model:
            assert not hasattr(model, "module")
        found = []
        for m in megatron_model:
            for n, p in m.named_parameters():
                found.append(Task(n, p, weight_dtype))
        return found

    def stream_weights_megatron_to_hf(
        self,
        megatron_model: Any,
        hf_pretrained: Any,
        conversion_tasks: Any = None,
        weight_dtype: Any = None,
    ) -> Any:
        assert weight_dtype is None or conversion_tasks is None
        assert len(conversion_tasks) > 0
        for task in conversion_tasks:
            yield task.name, task.param_weight


@contextmanager
def standing_in() -> Iterator[ModuleType]:
    """Inside, the stand-in is the Megatron-Bridge that is loaded, and wrapped."""
    names = {CONVERSION: {"MegatronModelBridge": MegatronModelBridge}}
    with stand_ins(names, BRIDGE_WEIGHTS) as modules:
        yield modules[CONVERSION]
