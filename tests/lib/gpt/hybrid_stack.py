"""A stack of HybridModel whose layers are the halves of GPT layers that run anywhere: core's own is
of Transformer Engine's. Imports nothing of these tests: training scripts import it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

_NO_MLP: dict[str, Any] = {
    "pre_mlp_layernorm": IdentityOp,
    "mlp": IdentityOp,
    "mlp_bda": IdentityFuncOp,
}
_NO_ATTENTION: dict[str, Any] = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": IdentityFuncOp,
}


def stack_of(layer_spec: Callable[[bool], ModuleSpec]) -> ModuleSpec:
    """Layers of attention (`*` in a pattern), of an MLP (`-`) and of experts (`E`), none of Mamba.
    layer_spec(with_experts): a whole GPT layer, dense or with experts."""

    def half(module: type, with_experts: bool, left_out: dict[str, Any]) -> ModuleSpec:
        whole = layer_spec(with_experts).submodules
        return ModuleSpec(module, submodules=dataclasses.replace(whole, **left_out))

    layers = HybridStackSubmodules(
        attention_layer=half(TransformerLayer, False, _NO_MLP),
        mlp_layer=half(MLPLayer, False, _NO_ATTENTION),
        moe_layer=half(MoETransformerLayer, True, _NO_ATTENTION),
    )
    return ModuleSpec(HybridStack, submodules=layers)
