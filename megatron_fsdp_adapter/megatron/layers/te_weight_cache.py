"""Switches off Transformer Engine's cache of quantized weights (FP8 compute with bf16 parameters).

TE quantizes a weight when a layer is called. If it knows which microbatch is the first of a step,
it keeps the result for the others. With sharded weights every rank would so keep an FP8 copy of the
whole model. So this cache is switched off, and each call quantizes what was gathered for it. Core's
option for that is `disable_parameter_transpose_cache`, which its TE layers copy from the config
when they are made.

The same switch decides if a fused weight gradient is overwritten: with the cache TE overwrites
`main_grad` in the first microbatch and adds in others, whatever other flags say. Both can be wrong:

- A module that is called twice in the first microbatch loses its second call's gradient, because
  backward comes to that call first.
- A bucket that every microbatch fills afresh is added to.

Without the cache TE does what `wgrad_probe` has seen. So with fused gradients the cache is off
under every strategy. The price is that kept weights are quantized once for each microbatch.

Autograd still saves quantized weights between a layer's forward and its backward. Recomputing
activations frees those too.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fp8_utils import get_fp8_recipe
from torch import nn

from ...quantized.scaling import begin_scaling

CACHE_OPTION = "disable_parameter_transpose_cache"


def switch_off_weight_cache(module: nn.Module) -> bool:
    """Makes every TE layer below `module` quantize its weights at each call. True if any layer was
    changed."""
    layers = [child for child in module.modules() if getattr(child, CACHE_OPTION, None) is False]
    for layer in layers:
        setattr(layer, CACHE_OPTION, True)
    return bool(layers)


def begin_delayed_scaling(module: nn.Module, config: Any) -> None:
    """Makes the layers' state of delayed scaling, so that a checkpoint of it can be loaded. TE's
    layers would make it only in their first forward. Does nothing under other recipes."""
    if config.fp8 and config.fp8_recipe == "delayed":
        recipe = get_fp8_recipe(config)
        if recipe is not None:  # without TE there are no such layers
            begin_scaling(module, recipe)
