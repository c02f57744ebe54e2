"""Options of CUDA graphs. Two kinds are supported: of a whole iteration
(`full_iteration_graphs.py`),
`cuda_graph_impl="full_iteration"`, which before megatron-core 0.18 was `"local"` with the scope
`full_iteration`; and of single layers (`layer_graphs.py`), `"local"` with other scopes, which are
called modules from 0.18 on.
"""

from __future__ import annotations

from typing import Any

import torch

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


def problems(
    config: Any, ddp_config: Any, device: torch.device, asks_tokens: bool = True
) -> list[str]:
    """One line for each option that full-iteration graphs exclude. `asks_tokens`: core waits in
    mid-step for the number of tokens (`core_api.asks_tokens_on_the_host`)."""
    if not captures_iteration(config):
        return []
    found = []
    if device.type != "cuda":
        found.append(
            f"cuda_graph_impl={config.cuda_graph_impl!r}: the model is on {device}, where there "
            "are no CUDA graphs; use 'none'"
        )
    if asks_tokens and getattr(config, "calculate_per_token_loss", False):
        found.append(
            "calculate_per_token_loss=True with full-iteration CUDA graphs: this megatron-core "
            "asks on the host how many tokens there were, in the middle of the step; set it to "
            "False, or use 0.18 or later"
        )
    if getattr(ddp_config, "check_for_nan_in_grad", False):
        found.append(
            "check_for_nan_in_grad=True with full-iteration CUDA graphs: a captured step cannot "
            "raise; set it to False (--no-check-for-nan-in-loss-and-grad)"
        )
    if getattr(ddp_config, "check_for_large_grads", False):
        found.append(
            "check_for_large_grads=True with full-iteration CUDA graphs: a captured step reads no "
            "norms on the host; set it to False"
        )
    if getattr(ddp_config, "chunked_optimizer_state_offload", False):
        found.append(
            "chunked_optimizer_state_offload=True with full-iteration CUDA graphs: a replay does "
            "not see that weights in host memory were loaded; set it to False"
        )
    return found
