"""All problems of a configuration at once, for every entry point.

The rules of the wrapper are in `table.py` and `support.py`. Here they are applied to the arguments
of Megatron-LM, a `ConfigContainer` of Megatron-Bridge and environment variables, together with
rules for whole training runs. Nothing here imports Megatron, so that a configuration can be checked
before anything is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .checkpoint_flags import (
    CHECKPOINT_RULES,
    async_save_at_address,
    async_save_lacks_strategy,
)
from .cuda_graphs import GRAPH_RULES
from .elastic_rules import ELASTIC_RULES
from .load_folders import LOAD_ARGUMENTS, load_problems, newest_problems
from .option import DTYPES
from .rules import Joined, Rule, Rules, is_on, off, problems, unset
from .settings import CKPT_FORMAT
from .support import (
    EMERGING,
    MODEL_CONFIG_RULES,
    MUON_CHOICES,
    OPTIMIZER_CONFIG_RULES,
    SCHEDULE_RULES,
)
from .table import (
    DDP_CONFIG_RULES,
    FP32_SUMS,
    GRAD_COMM,
    MAIN_GRADS,
    MAIN_PARAMS,
    strategies_of,
)

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

PLAIN_OPTIONS: Mapping[str, Any] = {
    "use_megatron_fsdp": True,
    "use_distributed_optimizer": True,
    "ckpt_format": CKPT_FORMAT,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "outer_dp_sharding_strategy": "no_shard",
    "num_distributed_optimizer_instances": 1,
    "optimizer": "adam",
    "num_experts": None,
}
"""A valid configuration, as a base for single options."""

ARGUMENT_OF: Mapping[str, str] = {
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "average_in_collective": "ddp_average_in_collective",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "num_moe_experts": "num_experts",
    FP32_SUMS: f"ddp_{FP32_SUMS}",
}
"""Field of Megatron's configs -> Megatron-LM's argument, if the names differ."""

DTYPE_OPTIONS = (MAIN_PARAMS, MAIN_GRADS, GRAD_COMM, "exp_avg_dtype", "exp_avg_sq_dtype")

SIGN_OF_EMERGING = "muon_nesterov"
"""An argument of Megatron-LM that shows its release: those that have it make every optimizer as
they make Adam. Older ones call another function for Muon, and have no config for
Lion."""

WEIGHT_HASH = "check_weight_hash_across_dp_replicas_interval"


def _hashes_sharded_weights(config: Any) -> bool:
    if not any(row.shard_weights for row in strategies_of(config)):
        return False
    return getattr(config, WEIGHT_HASH, None) is not None


_NO_WEIGHT_HASH = "with 'optim_grads_params' no rank has whole weights to hash. Leave it out"


LAUNCH_RULES: Rules = (
    Rule(
        "optimizer",
        lambda args: args.optimizer in EMERGING and not hasattr(args, SIGN_OF_EMERGING),
        "this Megatron-LM creates Muon by a function that needs full matrices, and has no Lion. "
        "Use 'adam', or a release from 0.18 on",
    ),
    off(
        "use_torch_fsdp2",
        "it selects another wrapper than use_megatron_fsdp. Leave one of them out",
    ),
    *CHECKPOINT_RULES,
    *ELASTIC_RULES,
    Rule(WEIGHT_HASH, _hashes_sharded_weights, _NO_WEIGHT_HASH),
    off(
        "enable_full_sharding_in_hsdp",
        "Megatron parses it but does not use it. Leave it out, and use "
        "outer_dp_sharding_strategy='optim'",
    ),
    off(
        "use_legacy_models",
        "the wrapper supports only models of megatron-core. Leave it out",
    ),
    off(
        "moe_use_upcycling",
        "it rewrites the state of a wrapped model. Upcycle without use_megatron_fsdp, and convert "
        "the checkpoint",
    ),
    unset(
        "dump_param_to_param_group_map",
        "megatron-core writes this map only for its own DDP. Leave it out: a checkpoint has the "
        "options of each parameter's group by name (`megatron-fsdp-adapter inspect`)",
    ),
    off(
        "perform_rl_step",
        "it passes whole weights to the inference model, which no rank has. Leave it out",
    ),
)
"""Rules for a training run of Megatron-LM, beside those for its configs."""


def _reorders_rows(option: str) -> Rule:
    """A rule: `option`, a path of two names, must not be set in the model config."""
    name = option.split(".")[1]
    return Rule(
        option,
        lambda cfg: bool(getattr(cfg.model, name, None)),
        "Megatron-Bridge reorders gate and linear rows in checkpoints, but checkpoints of this "
        "wrapper have them as two tensors. Leave it unset",
    )


_NVRX = "nvidia_resiliency_ext"


def _saves_in_other_format(cfg: Any) -> bool:
    checkpoint = cfg.checkpoint
    is_used = checkpoint.save is not None or checkpoint.load is not None
    return is_used and checkpoint.ckpt_format != CKPT_FORMAT


def _cannot_save_decentralized(cfg: Any) -> bool:
    is_decentralized = is_on(cfg.dist, "use_decentralized_pg")
    return is_decentralized and not hasattr(cfg.checkpoint, "async_strategy")


def _has_adapters(cfg: Any) -> bool:
    return getattr(cfg, "peft", None) is not None


def _loads_base_weights_on_meta(cfg: Any) -> bool:
    return _has_adapters(cfg) and is_on(cfg.model, "init_model_with_meta_device")


BRIDGE_RULES: Rules = (
    Rule(
        "optimizer.optimizer",
        lambda cfg: cfg.optimizer.optimizer in EMERGING,
        "Muon and Lion were not tested with recipes of Megatron-Bridge. Use 'adam'",
    ),
    Rule(
        "dist.use_torch_fsdp2",
        lambda cfg: cfg.dist.use_torch_fsdp2,
        "it selects another wrapper than use_megatron_fsdp. Set it to False",
    ),
    Rule(
        "dist.use_megatron_fsdp",
        lambda cfg: bool(cfg.dist.use_megatron_fsdp) != bool(cfg.ddp.use_megatron_fsdp),
        "it contradicts ddp.use_megatron_fsdp. Call apply_fsdp_overrides, which sets both",
    ),
    Rule(
        "dist.use_tp_pp_dp_mapping",
        lambda cfg: cfg.dist.use_tp_pp_dp_mapping,
        "Megatron-Bridge rejects this order of ranks with use_megatron_fsdp. Set it to False",
    ),
    Rule(
        "dist.use_decentralized_pg",
        _cannot_save_decentralized,
        "this Megatron-Bridge cannot save sharded weights with it. Set it to False, or use a "
        "release from 0.6 on",
    ),
    Rule(
        "checkpoint.ckpt_format",
        _saves_in_other_format,
        f"sharded weights are saved and loaded as {CKPT_FORMAT!r}. Call apply_fsdp_overrides, "
        "which sets it; to start from a checkpoint in another format, convert it first",
    ),
    Rule(
        "checkpoint.async_save",
        lambda cfg: async_save_lacks_strategy(cfg.checkpoint),
        "this Megatron-Bridge saves asynchronously only in the torch_dist format. Set it to False, "
        "or use a release from 0.6 on",
    ),
    Rule(
        "checkpoint.async_save",
        lambda cfg: cfg.checkpoint.async_save and importlib.util.find_spec(_NVRX) is None,
        f"Megatron-Bridge saves asynchronously only if {_NVRX} is installed, even with this "
        "wrapper's writer. Install it, or set the option to False",
    ),
    Rule(
        "checkpoint.async_save",
        lambda cfg: async_save_at_address(cfg.checkpoint),
        "storage at an address cannot rename a folder, which asynchronous saves need. Set it to "
        "False, or save to a folder",
    ),
    Rule(
        "model.init_model_with_meta_device",
        _loads_base_weights_on_meta,
        "with adapters, base weights are loaded before the model is wrapped, but on the meta "
        "device it has no memory until then. Set it to False",
    ),
    Rule(
        "checkpoint.also_save_hf_checkpoint",
        lambda cfg: is_on(cfg.checkpoint, "also_save_hf_checkpoint"),
        f"Megatron-Bridge rejects it with {CKPT_FORMAT!r}. Set it to False, and convert the "
        "checkpoint",
    ),
    Rule(
        f"train.{WEIGHT_HASH}",
        lambda cfg: _hashes_sharded_weights(Joined(cfg.train, cfg.ddp)),
        _NO_WEIGHT_HASH,
    ),
    _reorders_rows("model.moe_mlp_glu_interleave_size"),
    _reorders_rows("model.moe_shared_expert_glu_interleave_size"),
)
"""Rules for a `ConfigContainer`, beside those for the configs in it. Options are paths in it."""


_OF_OVERLAP = ("defer_embedding_wgrad_compute", "overlap_param_gather_with_optimizer_step")
OVERLAP_RULES: Rules = tuple(
    rule for rule in (*MODEL_CONFIG_RULES, *OPTIMIZER_CONFIG_RULES) if rule.option in _OF_OVERLAP
)
"""Options that Megatron-Bridge copies from `comm_overlap` to other configs when training starts."""


def connections_problems(environment: Mapping[str, str]) -> list[str]:
    """A problem with `CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron's launch scripts export for
    tensor parallelism."""
    if environment.get(CONNECTIONS) != "1":
        return []
    return [
        f"{CONNECTIONS}='1': with one hardware queue, gathers and reductions wait for compute "
        "instead of running beside it. Unset it, or set it to 8 or more"
    ]


def launch_options(args: Any) -> SimpleNamespace:
    """Megatron-LM's parsed arguments by the names of its configs."""
    values = dict(vars(args))
    for field, argument in ARGUMENT_OF.items():
        if argument not in values:
            continue
        # An argument that is None does not replace a value under the config's name.
        if values[argument] is not None or field not in values:
            values[field] = values[argument]
    if values.get("expert_tensor_parallel_size") is None:
        values["expert_tensor_parallel_size"] = values.get("tensor_model_parallel_size", 1)
    for name in DTYPE_OPTIONS:
        value = values.get(name)
        if isinstance(value, str):  # Megatron's parsers keep the names
            values[name] = DTYPES.get(value, value)
    return SimpleNamespace(**values)


def known_arguments() -> set[str]:
    """Names of Megatron-LM's arguments that the tables here name, and their fields in configs."""
    rules = (*LAUNCH_RULES, *DDP_CONFIG_RULES, *MODEL_CONFIG_RULES, *OPTIMIZER_CONFIG_RULES)
    names = {rule.option for rule in rules}
    names.update(PLAIN_OPTIONS, ARGUMENT_OF, ARGUMENT_OF.values(), DTYPE_OPTIONS, MUON_CHOICES)
    return names | LOAD_ARGUMENTS


def launch_problems(args: Any, environment: Mapping[str, str]) -> list[str]:
    """All problems of Megatron-LM's arguments (parsed, not yet validated by Megatron) and the
    environment of a run with `--use-megatron-fsdp`, one line each."""
    options = launch_options(args)
    return _unique(
        connections_problems(environment),
        problems(options, LAUNCH_RULES),
        problems(options, (*DDP_CONFIG_RULES, *MODEL_CONFIG_RULES, *OPTIMIZER_CONFIG_RULES)),
        load_problems(args),
    )


def bridge_problems(cfg: Any, environment: Mapping[str, str]) -> list[str]:
    """All problems of a `ConfigContainer` with `use_megatron_fsdp` and of the environment, one line
    each, with the path of the option in the container."""
    groups = [
        connections_problems(environment),
        problems(cfg, BRIDGE_RULES),
        _below("ddp", cfg.ddp, DDP_CONFIG_RULES),
        _below("model", Joined(cfg.model, cfg.ddp), MODEL_CONFIG_RULES),
        _below("optimizer", Joined(cfg.ddp, cfg.optimizer), OPTIMIZER_CONFIG_RULES),
    ]
    overlap = getattr(cfg, "comm_overlap", None)
    if overlap is not None:
        groups.append(_below("comm_overlap", overlap, OVERLAP_RULES))
    groups.append(newest_problems("checkpoint.load", cfg.checkpoint.load))
    if not _has_adapters(cfg):  # with adapters, base weights may be in either format
        folder = getattr(cfg.checkpoint, "pretrained_checkpoint", None)
        groups.append(newest_problems("checkpoint.pretrained_checkpoint", folder))
    return _unique(*groups)


def wrapper_problems(config: Any, ddp_config: Any, device: Any, asks_tokens: bool) -> list[str]:
    """All problems of the configs passed to the wrapper, on `device`. asks_tokens: True if core
    reads the number of tokens on the host (`core_api.asks_tokens_on_the_host`)."""
    place = SimpleNamespace(device=device, asks_tokens=asks_tokens)
    ddp = Joined(ddp_config, config, place)
    model = Joined(config, ddp_config, place)
    return _unique(
        problems(ddp, (*DDP_CONFIG_RULES, *GRAPH_RULES, *SCHEDULE_RULES)),
        problems(model, (*MODEL_CONFIG_RULES, *GRAPH_RULES, *SCHEDULE_RULES)),
    )


def _below(path: str, config: Any, rules: Rules) -> list[str]:
    """The problems of a config that is at `path` in the container."""
    return [f"{path}.{line}" for line in problems(config, rules)]


def _unique(*groups: list[str]) -> list[str]:
    """All lines in order, without duplicates, which arise because rules for several configs read
    the same arguments of Megatron-LM."""
    return list(dict.fromkeys(line for group in groups for line in group))
