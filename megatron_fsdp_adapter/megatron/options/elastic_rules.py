"""Rules of a run whose jobs are replicas that may die and come back (`--fsdp-elastic`)."""

from __future__ import annotations

from .rules import Rule, Rules, above_one, is_on, within
from .support import CORES_OFFLOAD
from .table import ELASTIC, EXPERT_INSTANCES, INSTANCES, OFFLOAD, REPLICAS

_PER_REPLICA = "each replica would compute it of its own samples, so that their weights differ"
_ONE_LIST = "replicas take consecutive samples of one list, and this would move their place in it"


def _set(option: str, message: str) -> Rule:
    """A rule: `option` must be None, empty or off."""
    return Rule(option, lambda args: is_on(args, option), f"{message}. Leave it out")


def _several(option: str, message: str) -> Rule:
    """A rule: `option`, a number, must be 1 or unset."""
    return Rule(option, lambda args: above_one(args, option), message)


_OWN_REPLICAS = (
    "the replicas inside of one job die together, and with outer_dp_sharding_strategy='optim' a "
    "replica that dies takes a part of the optimizer state along. Set it to 1, and start a job for "
    "each replica"
)
_IN_HOST_MEMORY = (
    "a step moves main weights and optimizer state, which a replica that joins reads meanwhile"
)

ELASTIC_RULES: Rules = (
    Rule(
        REPLICAS,
        lambda args: is_on(args, ELASTIC) and (getattr(args, REPLICAS, None) or 0) < 1,
        "datasets are made for this number of replicas. Set it to the largest number that will "
        "train together",
        ELASTIC,
    ),
    *within(
        lambda args: is_on(args, ELASTIC),
        f"{ELASTIC}={{0.{ELASTIC}}}",
        _several(INSTANCES, _OWN_REPLICAS),
        _several(EXPERT_INSTANCES, _OWN_REPLICAS),
        _set(
            "calculate_per_token_loss",
            "gradients are divided by the number of tokens of one replica after their mean over "
            "replicas, so that weights differ",
        ),
        _set("moe_router_enable_expert_bias", _PER_REPLICA),
        Rule(
            "cuda_graph_impl",
            lambda args: getattr(args, "cuda_graph_impl", None) not in (None, "none"),
            "a captured step cannot be left out, nor reduce over other replicas. Set it to 'none'",
        ),
        _set("te_rng_tracker", "its generators cannot be sent to a replica that joins"),
        _set(OFFLOAD, _IN_HOST_MEMORY),
        _set(CORES_OFFLOAD, _IN_HOST_MEMORY),
        Rule(
            "dataloader_type",
            lambda args: getattr(args, "dataloader_type", None) not in (None, "single"),
            "only Megatron-LM's 'single' loader can go on at another sample. Use that, or leave it "
            "unset",
        ),
        _set("rampup_batch_size", _ONE_LIST),
        _set("step_batch_size_schedule", _ONE_LIST),
        _set("phase_transition_iterations", _ONE_LIST),
        _set("iterations_to_skip", _ONE_LIST),
        _set("enable_ft_package", "a loop that begins again would not close its sections"),
        _set("inprocess_restart", "torchft and a new launch restart a replica"),
    ),
)  # fmt: skip
"""Rules for Megatron-LM's arguments."""
