"""FP8 compute of Transformer Engine with parameters in bf16.

TE quantizes a weight when a layer is called and, given which microbatch is the first of a step,
keeps the result for the others. With sharded weights that would keep an FP8 copy of the whole
model on every rank, so the keeping is switched off: each call quantizes what was gathered for it.
Core has an option for that, `disable_parameter_transpose_cache`, which its TE layers copy from the
config when they are made.

The same switch decides whether a fused weight gradient is overwritten: in the first microbatch
TE overwrites `main_grad`, in others it adds, whatever other flags are. A module that is
called twice in the first microbatch would lose its second call's gradient (backward comes to that
one first), and a bucket that every microbatch fills afresh would be added to. Without the flag it
does what `wgrad_probe` has seen. So with fused gradients the cache is off under every strategy, at
the price of quantizing kept weights once for each microbatch.

What autograd saves of one call stays: the quantized weights of layers between their forward and
their backward. Recomputing activations frees those too.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fp8_utils import get_fp8_recipe
from torch import nn

from ...quantized.scaling import begin_scaling

CACHE_OPTION = "disable_parameter_transpose_cache"


def switch_off_weight_cache(module: nn.Module) -> bool:
    """Makes every TE layer below `module` quantize its weights at each call. Whether there was one
    that did not."""
    layers = [child for child in module.modules() if getattr(child, CACHE_OPTION, None) is False]
    for layer in layers:
        setattr(layer, CACHE_OPTION, True)
    return bool(layers)


def begin_delayed_scaling(module: nn.Module, config: Any) -> None:
    """Makes the state that a checkpoint of delayed scaling is loaded into, also where weights are
    not quantized: TE's layers make theirs in their first forward."""
    if config.fp8 and config.fp8_recipe == "delayed":
        recipe = get_fp8_recipe(config)
        if recipe is not None:  # without TE there are no such layers
            begin_scaling(module, recipe)
