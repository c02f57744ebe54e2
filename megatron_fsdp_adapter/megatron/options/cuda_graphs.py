"""Options of CUDA graphs. Two kinds are supported: of a whole iteration
(`graphs/full_iteration.py`), `cuda_graph_impl="full_iteration"`, which before megatron-core 0.18
was `"local"` with the scope `full_iteration`; and of single layers (`layer_graphs.py`), `"local"`
with other scopes, which are called modules from 0.18 on.
"""

from __future__ import annotations

from typing import Any

from .rules import Rule, above_one, is_on, off, within
from .staging_options import slots_wanted
from .table import ITERATION, LAYERS, excluded, strategy_of

LOCAL, FULL_ITERATION = "local", "full_iteration"


def captures_iteration(config: Any) -> bool:
    """Whether the model config asks for full-iteration graphs, and for no others."""
    impl = getattr(config, "cuda_graph_impl", "none")
    return impl == FULL_ITERATION or (
        impl == LOCAL and modules_asked_for(config) == {FULL_ITERATION}
    )


def captures_layers(config: Any) -> bool:
    """Whether the model config asks for graphs of layers, by core's own capture."""
    return getattr(config, "cuda_graph_impl", "none") == LOCAL and not captures_iteration(config)


def modules_asked_for(config: Any) -> set[str]:
    """Names of the parts of layers that are to be captured; empty for whole layers."""
    for field in ("cuda_graph_modules", "cuda_graph_scope"):
        asked = getattr(config, field, None)
        if asked is not None:
            several = asked if isinstance(asked, (list, tuple, set)) else [asked]
            return {str(getattr(one, "name", one)) for one in several} - {"full"}
    return set()


CAPTURED_PARTS = frozenset({"attn", "mlp", "mamba"})
"""Names of parts of layers that can be captured. Those of experts run eagerly: their dispatch reads
on the host how many tokens each one got."""


def _name_of(value: Any) -> Any:
    return getattr(value, "value", value)


def _recomputes(part: str, config: Any) -> bool:
    """Whether a part of layers is recomputed by itself."""
    selective = _name_of(getattr(config, "recompute_granularity", None)) == "selective"
    return selective and part in (getattr(config, "recompute_modules", None) or ())


def _adds_to_kept_gradients(config: Any) -> bool:
    row = strategy_of(config)
    return row is not None and not row.shard_grads


_NO_GPU = Rule(
    "cuda_graph_impl",
    lambda config: config.device.type != "cuda",
    "there are no CUDA graphs; use 'none'",
    "the model on {0.device}",
)
_ON_HOOKS = "a replay calls no hooks on what autograd saves; switch it off"
_LOGITS = "a replay notes no largest logits; switch it off"

GRAPH_RULES: tuple[Rule, ...] = (
    *within(
        captures_iteration, ITERATION,
        _NO_GPU,
        Rule(
            "calculate_per_token_loss",
            lambda config: is_on(config, "calculate_per_token_loss") and config.asks_tokens,
            "this megatron-core asks on the host how many tokens there were, in the middle of the "
            "step; set it to False, or use 0.18 or later",
        ),
        *excluded(ITERATION),
    ),
    *within(
        captures_layers, LAYERS,
        _NO_GPU,
        Rule(
            "cuda_graph_modules",
            lambda config: modules_asked_for(config) - CAPTURED_PARTS,
            f"(cuda_graph_scope) of layers {sorted(CAPTURED_PARTS)} can be captured, or, left "
            "empty, all but the experts; leave the others out, they run eagerly",
        ),
        Rule(
            "data_parallel_sharding_strategy",
            _adds_to_kept_gradients,
            "a graph writes a fresh bucket in every backward, and this strategy adds to kept "
            "gradients; use 'optim_grads' or 'optim_grads_params', or "
            "cuda_graph_impl='full_iteration'",
        ),
        Rule(
            "fsdp_double_buffer",
            lambda config: not (
                slots_wanted(config)["weight_slots"] and slots_wanted(config)["bucket_slots"]
            ),
            "a graph reads weights and writes gradients at fixed addresses; set it to True",
        ),
        Rule(
            "recompute_granularity",
            lambda config: _name_of(getattr(config, "recompute_granularity", None)) == "full",
            "layers that are recomputed run eagerly; use 'selective', or "
            "cuda_graph_impl='full_iteration'",
        ),
        Rule(
            "fp8_recipe",
            lambda config: is_on(config, "fp8")
            and _name_of(getattr(config, "fp8_recipe", None)) == "delayed",
            "its scales are updated from a list that modules enter when they are called; use "
            "'tensorwise', 'blockwise' or 'mxfp8'",
        ),
        Rule(
            "attention_dropout",
            lambda config: is_on(config, "attention_dropout") and _recomputes("core_attn", config),
            "random states that graphs can use are not set back, so that recomputed 'core_attn' "
            "would drop others; leave it out of recompute_modules, or set attention_dropout to 0.0",
        ),
        Rule(
            "recompute_modules",
            lambda config: _recomputes("moe", config),
            "core leaves 'moe' to its own graphs, which are not used; leave it out",
        ),
        Rule(
            "context_parallel_size",
            lambda config: above_one(config, "context_parallel_size"),
            "attention works on streams of its own; use 1, or cuda_graph_impl='full_iteration'",
        ),
        *(
            off(option, reason)
            for option, reason in {
                "qk_clip": _LOGITS,
                "log_max_attention_logit": _LOGITS,
                "cpu_offloading": _ON_HOOKS,
                "fine_grained_activation_offloading": _ON_HOOKS,
                "delay_wgrad_compute":
                    "weight gradients would come after their unit's bucket is reduced; switch it "
                    "off",
                "overlap_moe_expert_parallel_comm":
                    "parts of layers are called by a schedule; switch it off",
                "tp_comm_overlap": "its buffers are not followed across graphs; switch it off",
            }.items()
        ),
        *excluded(LAYERS),
    ),
)  # fmt: skip
"""What CUDA graphs exclude, of a model config and a DDP config as one, which has the `device` of
the wrapper, and `asks_tokens`: core waits in mid-step for the number of tokens
(`core_api.asks_tokens_on_the_host`)."""
