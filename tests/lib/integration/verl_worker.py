"""verl's own functions on sharded models: it builds one, moves its memory, and sends what a step
has changed. Two ranks.

    cd tests/lib/integration; python bridge_on_cpu.py verl_worker.py FOLDER CASE ...

CASE is "FAMILY TP EP PP STRATEGY" or such with an outer axis: the number of instances behind it. A
line for each case that was checked; an AssertionError where something is not equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.megatron_utils as verl_utils
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.utils import prime_delta_snapshots

import megatron_fsdp_adapter
from megatron_fsdp_adapter.core.runtime.device import storage_bytes
from megatron_fsdp_adapter.rollout.release import storages
from tests.lib.integration.bridge_hf_worker import CONFIGS, hf_model, logits, provider_of

transformer_impl.get_device_id = lambda: "cpu"  # verl has no platform for CPUs

Weights = dict[str, torch.Tensor]


class Engine(transformer_impl.MegatronEngine):
    """verl's engine, of what its exports read alone."""

    __abstractmethods__: frozenset[str] = frozenset()  # type: ignore[assignment]

    def __init__(self, bridge: Any, module: list[Any]) -> None:
        self.bridge = bridge
        self.module = module
        self.vanilla_bridge = False
        self.peft_cls = None


def build(bridge: Any, family: str, strategy: str, sizes: Iterable[int], instances: int) -> Any:
    """By verl, with nothing but its flag: its plugins have been loaded."""
    tp, ep, pp = sizes
    provider = provider_of(bridge, tp, ep, pp, num_distributed_optimizer_instances=instances)
    options = {"data_parallel_sharding_strategy": strategy}
    [model], _ = verl_utils.make_megatron_module(
        verl_utils.McoreModuleWrapperConfig(use_megatron_fsdp=True),
        None,
        CONFIGS[family],
        bridge=bridge,
        provider=provider,
        override_ddp_config=options,
    )
    assert type(model).__module__.startswith("megatron_fsdp_adapter."), type(model)
    assert verl_utils.unwrap_model(model) is verl_utils.unwrap_model([model])[0]
    assert not hasattr(verl_utils.unwrap_model(model), "module")
    return model


def check_memory(model: Any) -> None:
    before = logits(model)
    verl_utils.offload_megatron_model_to_cpu([model])
    assert verl_utils.get_megatron_module_device([model]) == "cpu"
    held = [one for kind in storages(model.engine).values() for one, _ in kind]
    assert not any(map(storage_bytes, held))
    verl_utils.load_megatron_model_to_gpu([model], load_grad=False)
    assert torch.equal(logits(model), before)
    verl_utils.load_megatron_model_to_gpu([model])


@torch.no_grad()
def change(model: Any, every: int) -> None:
    """As a step does: some elements of each rank's rows, the same of those that several have."""
    for pair in model.engine.pairs:
        pair.sharded._local_tensor.view(-1)[::every] *= 1.5
    model.engine.main_weights_changed()


def whole(bridge: Any, model: Any) -> Weights:
    exported = bridge.export_hf_weights([model], show_progress=False)
    return {name: value.bfloat16() for name, value in exported}


def apply(found: Weights, entries: Iterable[Any]) -> int:
    """Writes verl's entries, gathered to the first rank as its engine does; how many elements."""
    written = 0
    for slots, _, counts, indices, values, group in entries:
        merged = gather_slot_entries_to_rank0(indices, values, counts, group)
        for (name, _), (at, new) in zip(slots, merged or (), strict=False):
            assert at.unique().numel() == at.numel(), f"{name}: an element comes twice"
            found[name].view(-1)[at.long()] = new
            written += at.numel()
    return written


def check_export(bridge: Any, model: Any) -> int:
    """What changed, on top of what was, is what a whole export gives."""
    engine = Engine(bridge, [model])
    snapshots = {}
    shards, _ = engine.get_per_tensor_param_shard()
    prime_delta_snapshots(shards, snapshots, False)
    engine._delta_shard_snap = snapshots
    rollout = whole(bridge, model)
    written = 0
    for every in (3, 1):
        change(model, every)
        entries, _ = engine.get_per_tensor_param_delta_shard()
        written = apply(rollout, entries)
        new = whole(bridge, model)
        unlike = [name for name, value in new.items() if not torch.equal(value, rollout[name])]
        assert dist.get_rank() > 0 or not unlike, unlike
    return written


def check(folder: Path, case: str) -> None:
    family, tp, ep, pp, strategy, *instances = case.split()
    hf_model(family, folder)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    count = int(instances[0]) if instances else 1
    model = build(bridge, family, strategy, map(int, (tp, ep, pp)), count)
    bridge.load_hf_weights([model])
    check_memory(model)
    print(f"checked {case}: {check_export(bridge, model)} elements sent", flush=True)


def main(folder: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    for case in cases:
        check(Path(folder) / case.replace(" ", "-"), case)
        parallel_state.destroy_model_parallel()
    megatron_fsdp_adapter.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
