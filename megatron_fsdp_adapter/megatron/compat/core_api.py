"""Differences between the releases of megatron-core that the package runs with: a constant or a
small function for each. All other modules ask here.

What exists decides: a name, a parameter, a field. Version numbers were rejected: a user's own build
may have either side of a change, and a later release may have undone it. Core's functions that the
package replaces are checked in `patches.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import optimizer as optimizer_package
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import MLATransformerConfig

# Gradient norms. 0.19 has norms of their own for groups of parameters (`mtp_detach_heads`), and
# has another name for the method that gathers gradients for a norm.

_NEWER = "get_grads_for_grad_norm"
_OLDER = "get_main_grads_for_grad_norm"
_HAS_OLDER = hasattr(DistributedOptimizer, _OLDER) and not hasattr(DistributedOptimizer, _NEWER)
NORM_GRADIENTS = _OLDER if _HAS_OLDER else _NEWER
"""Name of the optimizer's method that returns the gradients of a norm. If there is neither, it is
the newer one, which is then reported as missing."""

SEPARATE_NORMS: tuple[str, ...] = tuple(getattr(core_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()))
"""Names of the groups of parameters that have a norm of their own."""


def norm_group(param: Any) -> str | None:
    """The group whose norm the parameter's gradient is part of; None for the model's norm."""
    group = getattr(param, "grad_norm_group", None)
    return group if group in SEPARATE_NORMS else None


def present_norm_groups(optimizer: Any) -> list[str]:
    """The groups of `SEPARATE_NORMS` of which any rank of the optimizer has parameters. The first
    call for an optimizer is collective over its ranks."""
    return [name for name in SEPARATE_NORMS if optimizer.has_grad_norm_group(name)]


def has_separate_all_gather_group() -> bool:
    """True if `parallel_state` has a second dense group for gathers. From 0.18 on such groups are
    in a ProcessGroupCollection alone."""
    asked = getattr(parallel_state, "has_separate_all_gather_group", None)
    return asked is not None and asked()


# Data-parallel groups. From 0.19 on weights can also be sharded over an axis of "remat" ranks, each
# with another part of them. Core's data-parallel groups contain those ranks unless a caller asks
# for groups without them.


def without_remat(function: Callable[..., Any], **options: Any) -> Any:
    """The group that a getter of `parallel_state` returns with these options, without "remat"
    ranks: its ranks hold the same weights."""
    if "with_gtp_remat" in inspect.signature(function).parameters:
        options["with_gtp_remat"] = False
    return function(**options)


# Full-iteration CUDA graphs.


def asks_tokens_on_the_host() -> bool:
    """True if `finalize_model_grads` compares the number of tokens with zero on the host, which
    waits for the device. From 0.18 on it uses `clamp`, on the device."""
    return "clamp" not in inspect.unwrap(finalize_model_grads).__code__.co_names


# Steps that are left out.


def norm_threshold(config: Any) -> float:
    """The gradient norm above which an optimizer's step is left out; infinite where core has no
    such option."""
    return float(getattr(config, "grad_norm_skip_threshold", math.inf))


# Batches.


def batch_of_context_rank(batch: Mapping[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's part of each tensor of `batch`; shapes are (batch, sequence,
    ...).

    From 0.18 on core's function has a further parameter, and without a group it splits over all
    ranks."""
    function = core_utils.get_batch_on_this_cp_rank
    options: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(function).parameters:
        options["is_hybrid_cp"] = False
    return function(dict(batch), **options)


def marks_whole_weights(linear: type) -> bool:
    """True if the constructor of core's TELinear marks a weight as not split if every
    tensor-parallel rank has the whole weight (0.19).

    Older releases keep Transformer Engine's mark, which calls each weight split. The norm then
    counts such a weight once on each rank."""
    return "tensor_model_parallel" in linear.__init__.__code__.co_consts  # type: ignore[misc]


HAS_EMERGING_FUNCTION = hasattr(optimizer_package, "_get_megatron_emerging_optimizer")
"""True if core makes all optimizers but Adam and SGD by one function of their own (from 0.18)."""


def config_fields() -> set[str]:
    """Names of the fields of core's configs of models and optimizers."""
    of_model = dataclasses.fields(MLATransformerConfig)
    of_optimizer = dataclasses.fields(optimizer_config.OptimizerConfig)
    return {field.name for field in (*of_model, *of_optimizer)}


def optimizer_defaults() -> dict[str, Any]:
    """Defaults of the fields of core's optimizer config, by name, for fields with a default.
    Megatron-LM fills the fields from its arguments of the same names."""
    fields = dataclasses.fields(optimizer_config.OptimizerConfig)
    return {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
