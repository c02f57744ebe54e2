"""The bytes of a model with experts between two steps, beside the formula of `estimate`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_fsdp_adapter.core.config import OUTER_STRATEGIES, STRATEGIES
from megatron_fsdp_adapter.core.engine.engine import FsdpEngine
from megatron_fsdp_adapter.core.topology import DENSE, EXPERT
from megatron_fsdp_adapter.megatron.options.staging_options import NO_SLOTS
from megatron_fsdp_adapter.megatron.options.table import (
    EXPERT_OUTER,
    EXPERT_STRATEGY,
    INSTANCES,
    OUTER,
    expert_instances_of,
    read,
)
from megatron_fsdp_adapter.plan.memory import Precision, bytes_between_steps
from megatron_fsdp_adapter.plan.unit_grouping import default_unit_numel
from megatron_fsdp_adapter.tools.models.sources import from_options
from megatron_fsdp_adapter.tools.models.spec import Parallel
from megatron_fsdp_adapter.tools.planning.planned import (
    PlannedModel,
    Replicas,
    layer_numels,
    planned_units,
)
from tests.lib.engine.engine_cases import buffers_of

from .topologies import TopologyTrainer


def holds_what_is_estimated(ours: TopologyTrainer, strategy: str, budget: int = 0) -> None:
    """Between two steps; budget: bytes for what units keep."""
    [chunk] = ours.chunks
    engine = chunk.engine
    chunk.zero_grad_buffer()
    for unit in engine.units:
        engine.gather.reshard(unit)
    engine.runtime.synchronize()  # memory is given back behind what has used it
    held = between_steps(engine)
    for pair in engine.trained:
        held += Precision().state_bytes * pair.sharded._local_tensor.numel()  # type: ignore[attr-defined]
    expected = estimated(ours, strategy, budget)
    assert held == expected, (held, expected)


def between_steps(engine: FsdpEngine) -> int:
    """Bytes of this rank's flat buffers."""
    found = {}
    for _, tensor in buffers_of(engine):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def estimated(ours: TopologyTrainer, dense: str, budget: int) -> int:
    """The same by the formula of `estimate`, from sizes of the model alone."""
    case = ours.case
    spec = from_options(
        {
            "num_layers": case.num_layers,
            "hidden_size": case.hidden,
            "num_attention_heads": case.heads,
            "ffn_hidden_size": case.ffn,
            "moe_ffn_hidden_size": case.ffn,
            "padded_vocab_size": case.vocab,
            "num_experts": ours.topology.experts,
            "moe_layer_freq": [0, 1],
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        },
        "a model of the tests",
    )
    split = Parallel(expert=ours.topology.ep)
    ddp = ours.chunks[0].ddp_config
    ranks = dist.get_world_size()
    alike = ranks // ours.topology.ep
    outer = read(ddp, OUTER)
    of_experts = read(ddp, EXPERT_OUTER) or outer
    replicas = {
        DENSE: Replicas(read(ddp, INSTANCES), OUTER_STRATEGIES[outer]),
        EXPERT: Replicas(expert_instances_of(ddp), OUTER_STRATEGIES[of_experts]),
    }
    units = planned_units(
        spec,
        replicas[DENSE].shards(ranks),
        replicas[EXPERT].shards(alike),
        torch.float32,
        unit_numel=default_unit_numel(layer_numels(spec, split)),
        split=split,
    )
    experts = STRATEGIES.get(read(ddp, EXPERT_STRATEGY) or dense)
    model = PlannedModel(units, NO_SLOTS, budget=budget, of_experts=experts, replicas=replicas)
    held = model.bytes_held(STRATEGIES[dense], Precision(), dist.get_rank())
    return bytes_between_steps(held)
