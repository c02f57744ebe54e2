"""What `--spec` names when Megatron-LM's pretrain_hybrid.py runs on a CPU: a stack without Mamba
layers, whose kernels are CUDA only, and without Transformer Engine's."""

from __future__ import annotations

from hybrid_stack import stack_of
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_fsdp_adapter.tools.models.local_spec import TorchNorm

EXPERTS = 4


def _layer(with_experts: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if with_experts else None, moe_grouped_gemm=False
    )
    spec.submodules.input_layernorm = TorchNorm
    spec.submodules.pre_mlp_layernorm = TorchNorm
    return spec


hybrid_block.TENorm = TorchNorm
"""The stack's last norm, which no spec names."""

STACK = stack_of(_layer)
