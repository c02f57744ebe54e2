"""What CUDA graphs of layers reserve beside the flat buffers: the activations of layers lie in a
pool for each pass in flight, which keeps its memory between steps.

Other activations do not depend on the wrapper and are not counted. What is eager can use none of
a pool, so that it is memory on top of a step's other peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp_adapter.core.config import Strategy

from .gpt import GptConfig

OPTION, IN_FLIGHT = "cuda_graph_impl", "passes_in_flight"


def asks_for_pools(options: Mapping[str, Any]) -> bool:
    return options.get(OPTION) == "local"


def layer_pool_bytes(config: GptConfig, options: Mapping[str, Any], itemsize: int) -> int:
    """Of one layer, in the pools of all passes in flight; 0 without graphs of layers. itemsize: of
    the compute dtype. ValueError if the number of tokens is not known."""
    if not asks_for_pools(options):
        return 0
    batch, passes = options.get("micro_batch_size", 1), options.get(IN_FLIGHT, 1)
    if config.seq_length is None:
        raise ValueError("--cuda-graph-impl local: the pools of graphs need --seq-length")
    if min(batch, passes) < 1:
        raise ValueError(
            f"--micro-batch-size {batch}, --passes-in-flight {passes}: they must be at least 1"
        )
    return int(passes * batch * config.seq_length * config.saved_numel(config.ffn) * itemsize)


def captured(
    strategies: list[Strategy], slots: Mapping[str, bool], options: Mapping[str, Any]
) -> list[Strategy]:
    """Those that can have what is asked for. ValueError if there is none."""
    if not asks_for_pools(options):
        return strategies
    if not (slots["weight_slots"] and slots["bucket_slots"]):
        raise ValueError("--cuda-graph-impl local needs fixed slots: give --fsdp-double-buffer")
    found = [one for one in strategies if one.shard_grads]
    if not found:
        raise ValueError(
            f"--cuda-graph-impl local with --data-parallel-sharding-strategy {strategies[0].name}: "
            "use optim_grads or optim_grads_params"
        )
    return found
