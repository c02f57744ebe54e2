"""Rules about the options of mixture-of-experts models: rows for the tables of `check.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# As in `check.py`, where `o` are Options and `m` is the Machine. Any, because it imports this.
DERIVED: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("moe_ffn_hidden_size", lambda o, m: o.ffn_hidden_size),
    ("expert_tensor_parallel_size", lambda o, m: o.tensor_model_parallel_size),
)

CHOICES = {
    "moe_router_load_balancing_type": (
        "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none",
    ),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
}  # fmt: skip

AT_LEAST: dict[str, float] = {
    "num_experts": 1,
    "moe_ffn_hidden_size": 1,
    "moe_router_topk": 1,
    "moe_aux_loss_coeff": 0,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}


def _expert_ranks(o: Any) -> int:
    """Ranks that hold one copy of all experts."""
    return int(o.expert_model_parallel_size * o.expert_tensor_parallel_size)


ROWS: tuple[tuple[Callable[[Any, Any], bool], str], ...] = (
    # when it is broken, what is said then
    (
        lambda o, m: o.num_experts is None and o.expert_model_parallel_size > 1,
        "--expert-model-parallel-size {o.expert_model_parallel_size} without --num-experts: give "
        "the number of experts, or leave it out",
    ),
    (
        lambda o, m: (o.num_experts or 0) % o.expert_model_parallel_size != 0,
        "--expert-model-parallel-size {o.expert_model_parallel_size} does not divide "
        "--num-experts {o.num_experts}: change one of them",
    ),
    (
        lambda o, m: o.num_experts is not None and m.world_size % _expert_ranks(o) != 0,
        "--expert-model-parallel-size {o.expert_model_parallel_size} x "
        "--expert-tensor-parallel-size {o.expert_tensor_parallel_size} does not divide the number "
        "of processes {m.world_size}: change one of them",
    ),
    (
        lambda o, m: o.num_experts is not None and o.moe_router_topk > o.num_experts,
        "--moe-router-topk {o.moe_router_topk} is more than --num-experts {o.num_experts}: lower "
        "it",
    ),
    (
        lambda o, m: (
            o.num_experts is not None
            and o.tensor_model_parallel_size > 1
            and not o.sequence_parallel
        ),
        "--num-experts with --tensor-model-parallel-size {o.tensor_model_parallel_size} needs "
        "--sequence-parallel",
    ),
    (
        lambda o, m: o.moe_grouped_gemm and o.transformer_impl != "transformer_engine",
        "--moe-grouped-gemm needs --transformer-impl transformer_engine: leave it out",
    ),
    (
        lambda o, m: o.moe_permute_fusion and not (m.cuda and m.transformer_engine),
        "--moe-permute-fusion needs a GPU and an installed Transformer Engine: leave it out",
    ),
    (
        lambda o, m: (
            o.overlap_moe_expert_parallel_comm
            and (o.expert_model_parallel_size == 1 or o.moe_token_dispatcher_type != "alltoall")
        ),
        "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size above 1 and "
        "--moe-token-dispatcher-type alltoall: give both, or leave it out",
    ),
    (
        lambda o, m: o.overlap_moe_expert_parallel_comm and not o.bf16,
        "--overlap-moe-expert-parallel-comm needs --bf16: core refuses it otherwise",
    ),
    (
        lambda o, m: o.delay_wgrad_compute and not o.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm: give both, or leave it "
        "out",
    ),
    (
        lambda o, m: o.separate_all_gather_groups and not o.use_megatron_fsdp,
        "--separate-all-gather-groups without --use-megatron-fsdp: stock DDP has one group; leave "
        "it out",
    ),
)
