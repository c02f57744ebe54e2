"""Options of CUDA graphs.

Two kinds are supported: full-iteration graphs (`graphs/full_iteration.py`), with
`cuda_graph_impl="full_iteration"` (before megatron-core 0.18 `"local"` with the scope
`full_iteration`), and layer graphs (`layer_graphs.py`), with `"local"` and other scopes (called
modules from 0.18 on).
"""

from __future__ import annotations

from typing import Any

from ...plan.unsharded_budget import AUTO
from ...plan.unsharded_budget import BUDGET_OPTION as BUDGET
from .rules import Rule, Rules, above_one, is_on, off, within
from .staging_options import slots_wanted
from .table import ITERATION, LAYERS, excluded, read, strategies_of

LOCAL = "local"
FULL_ITERATION = "full_iteration"


def captures_iteration(config: Any) -> bool:
    """True if the model config selects full-iteration graphs and no others."""
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl == LOCAL:
        return modules_asked_for(config) == {FULL_ITERATION}
    return impl == FULL_ITERATION


def captures_layers(config: Any) -> bool:
    """True if the model config selects layer graphs, by core's capture."""
    return getattr(config, "cuda_graph_impl", "none") == LOCAL and not captures_iteration(config)


def modules_asked_for(config: Any) -> set[str]:
    """Names of the parts of layers to capture; empty for whole layers. The newer of core's two
    fields comes first."""
    for field in ("cuda_graph_modules", "cuda_graph_scope"):
        asked = getattr(config, field, None)
        if asked is None:
            continue
        if not isinstance(asked, (list, tuple, set)):
            asked = [asked]
        return {str(getattr(one, "name", one)) for one in asked} - {"full"}
    return set()


CAPTURED_PARTS = frozenset({"attn", "mlp", "mamba"})
"""Names of parts of layers that can be captured. Experts run eagerly, because their dispatch reads
token counts on the host."""


def _name_of(value: Any) -> Any:
    """The name that a member of one of core's enums stands for; any other value itself."""
    return getattr(value, "value", value)


def _granularity(config: Any) -> Any:
    return _name_of(getattr(config, "recompute_granularity", None))


def _recomputes(part: str, config: Any) -> bool:
    """True if `part` of layers is recomputed selectively."""
    parts = getattr(config, "recompute_modules", None) or ()
    return part in parts and _granularity(config) == "selective"


def scales_by_delayed_recipe(config: Any) -> bool:
    """True if the model config selects FP8 with delayed scaling."""
    recipe = _name_of(getattr(config, "fp8_recipe", None))
    return is_on(config, "fp8") and recipe == "delayed"


def _has_no_fixed_buffers(config: Any) -> bool:
    """True if weights or buckets come and go, at changing addresses. With a budget that is found
    only units are captured that stay unsharded."""
    if read(config, BUDGET) == AUTO:
        return False
    wanted = slots_wanted(config)
    for row in strategies_of(config):
        if row.shard_weights and not wanted["weight_slots"]:
            return True
        if row.shard_grads and not wanted["bucket_slots"]:
            return True
    return False


_NO_GPU = Rule(
    "cuda_graph_impl",
    lambda config: config.device.type != "cuda",
    "CUDA graphs require a GPU. Use 'none'",
    "the model on {0.device}",
)
_ON_HOOKS = "a replay calls no saved-tensor hooks. Switch it off"

GRAPH_RULES: Rules = (
    *within(
        captures_iteration,
        ITERATION,
        _NO_GPU,
        Rule(
            "calculate_per_token_loss",
            lambda config: is_on(config, "calculate_per_token_loss") and config.asks_tokens,
            "this megatron-core reads the number of tokens on the host, in the middle of the "
            "step. Set it to False, or use 0.18 or later",
        ),
        Rule(
            BUDGET,
            lambda config: read(config, BUDGET) == AUTO,
            "'auto' finds the budget in the first steps, but the graph is captured in these. Use a "
            "number of GiB",
        ),
        *excluded(ITERATION),
    ),
    *within(
        captures_layers,
        LAYERS,
        _NO_GPU,
        Rule(
            "cuda_graph_modules",
            lambda config: modules_asked_for(config) - CAPTURED_PARTS,
            f"(cuda_graph_scope) only {sorted(CAPTURED_PARTS)} can be captured; if the option is "
            "empty, all parts except experts are. Leave the others out; they run eagerly",
        ),
        Rule(
            "fsdp_double_buffer",
            _has_no_fixed_buffers,
            "a graph reads weights and writes gradients at fixed addresses. Set it to True, or use "
            "'optim', 'no_shard', or a budget of 'auto'",
        ),
        Rule(
            "recompute_granularity",
            lambda config: _granularity(config) == "full",
            "recomputed layers run eagerly. Use 'selective', or cuda_graph_impl='full_iteration'",
        ),
        Rule(
            "fp8_recipe",
            scales_by_delayed_recipe,
            "'delayed' updates scales only of modules that were called, but a replay calls none. "
            "Use 'tensorwise', 'blockwise' or 'mxfp8'",
        ),
        Rule(
            "attention_dropout",
            lambda config: is_on(config, "attention_dropout") and _recomputes("core_attn", config),
            "RNG states of graphs are not restored, so recomputed 'core_attn' would drop other "
            "elements. Leave 'core_attn' out of recompute_modules, or set attention_dropout to "
            "0.0",
        ),
        Rule(
            "recompute_modules",
            lambda config: _recomputes("moe", config),
            "core recomputes 'moe' only with graphs that are not used here. Leave 'moe' out",
        ),
        Rule(
            "context_parallel_size",
            lambda config: above_one(config, "context_parallel_size"),
            "attention uses additional streams. Use 1, or cuda_graph_impl='full_iteration'",
        ),
        off("cpu_offloading", _ON_HOOKS),
        off("fine_grained_activation_offloading", _ON_HOOKS),
        off(
            "delay_wgrad_compute",
            "weight gradients would come after their unit's bucket is reduced. Switch it off",
        ),
        off(
            "overlap_moe_expert_parallel_comm",
            "core's schedule then calls parts of layers instead of layers. Switch it off",
        ),
        off("tp_comm_overlap", "its buffers are not tracked across graphs. Switch it off"),
        *excluded(LAYERS),
    ),
)
"""Rules of CUDA graphs for the joined model and DDP config, with two more fields: `device` of the
wrapper, and `asks_tokens`, True if core reads the number of tokens in mid-step
(`core_api.asks_tokens_on_the_host`)."""
