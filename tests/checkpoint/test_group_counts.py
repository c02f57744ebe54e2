"""A fused Adam's count of steps, which is one number for each parameter group, where a rank holds
nothing of a group: Transformer Engine's (2.11) and apex's count no step of a group without
parameters, newer ones do."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from test_wrapper_roundtrip import _load, _poison, _preprocessed, _save, _sharded_state

from megatron_fsdp_adapter.checkpoint.dcp import save_checkpoint

KEPT = "layers.0.input_layernorm.weight"
"""The one parameter without weight decay that is trained: rows of one rank of two."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_shard": ("no_shard", {}),
    "optim": ("optim", {}),
    "optim_grads_params": ("optim_grads_params", {}),
    "streamed": ("optim_grads_params", {"chunked_optimizer_state_offload": True}),
}
HYBRID = {
    "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"
}  # fmt: skip
STEPS = 3


def _freeze(model: torch.nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.dim() == 1 and not name.endswith(KEPT):
            param.requires_grad_(False)


def _trainer(name: str, device: torch.device, stack: ExitStack, seed: int = 1) -> Any:
    from tests.distributed.gpt import Case, build_trainer

    strategy, ddp = VARIANTS.get(name, ("optim_grads_params", HYBRID))
    case = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, microbatches=1, seed=seed)
    return build_trainer(case, strategy, device, _freeze, ddp)


def _counts(trainer: Any) -> list[Any]:
    """Of the groups of this rank, as they are and as they are saved; the same on all ranks."""
    from tests.distributed.gpt import distributed_optimizer

    trainer.wrapper.stop_communication()
    inner = distributed_optimizer(trainer).optimizer
    meta = _sharded_state(trainer, is_loading=False)["optimizer"]["param_to_group_meta"]
    found = [group.get("step") for group in inner.param_groups if group["params"]]
    found += [options["step"] for options in meta.values()]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    assert all(other == found for other in of_ranks), of_ranks
    return sorted(set(found))


def _holds_nothing_of_a_group(trainer: Any) -> bool:
    from tests.distributed.gpt import distributed_optimizer

    groups = distributed_optimizer(trainer).optimizer.param_groups
    empty = [not any(p._local_tensor.numel() for p in g["params"]) for g in groups if g["params"]]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, any(empty))
    return any(of_ranks)


def _save_as_before(trainer: Any, folder: str) -> None:
    """With the count that a rank had that holds nothing of the group."""
    state = _preprocessed(trainer, _sharded_state(trainer, is_loading=False))
    for name, options in state["optimizer"]["param_to_group_meta"].items():
        if name.endswith(KEPT) and dist.get_rank() > 0:
            options["step"] = 0
    save_checkpoint(folder, 2, state)


def _resumed(rank: int, size: int, root: str, names: tuple[str, ...], newer: bool) -> None:
    from megatron_fsdp_adapter import install
    from tests.distributed import gpt
    from tests.distributed.fused_adam import FusedAdam, transformer_engine_optimizer

    device = gpt.init_megatron(num_distributed_optimizer_instances=2 if "hybrid" in names else 1)
    install()
    for name in names:
        with ExitStack() as stack:
            stack.enter_context(transformer_engine_optimizer())
            stack.enter_context(mock.patch.object(FusedAdam, "COUNTS_EMPTY_GROUPS", newer))
            first = _trainer(name, device, stack)
            sharded = name != "no_shard"
            assert _holds_nothing_of_a_group(first) is sharded, name
            assert _counts(first) == [0], name
            data = [gpt.batches(first.case, step, rank, device) for step in range(STEPS + 2)]
            for batch in data[:STEPS]:
                gpt.train_step(first, batch)
            assert _counts(first) == [STEPS], name
            _save(first, f"{root}/{name}")
            _save_as_before(first, f"{root}/{name}-before")
            expected = [gpt.train_step(first, batch) for batch in data[STEPS:]]
            for folder in (name, f"{name}-before"):
                second = _trainer(name, device, stack, seed=4321)
                _poison(second)
                _load(second, f"{root}/{folder}")
                assert _counts(second) == [STEPS], folder
                second.case = first.case
                assert [gpt.train_step(second, one) for one in data[STEPS:]] == expected, folder


@pytest.mark.parametrize("newer", [False, True])
def test_every_rank_counts_the_steps_of_every_group_and_a_resumed_run_goes_on(
    tmp_path: Path, newer: bool
) -> None:
    names = tuple(VARIANTS) if not newer else ("optim", "streamed")
    run_ranks(_resumed, 2, str(tmp_path), names, newer, timeout=300)


def _plain(rank: int, size: int) -> None:
    from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
    from tests.distributed.fused_adam import FusedAdam
    from tests.distributed.plain import Block, Net, tokens

    model = fully_shard_model(Net(2), None, [Block])
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if (param.numel() == 1) is scalar]}
        for scalar in (False, True)
    ]
    with pytest.raises(ValueError, match="Make it with capturable=False"):
        fully_shard_optimizer(FusedAdam(groups, capturable=True))
    optimizer = fully_shard_optimizer(FusedAdam(groups, lr=1e-2))
    saved = optimizer.state_dict()
    for steps in (1, 2, 1):  # the last one begins with the state of before the first
        if steps == 1:
            optimizer.load_state_dict(saved)
        model(tokens(0, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [int(group["step"]) for group in optimizer.param_groups] == [steps] * 2
    held = torch.tensor([float(any(p._local_tensor.numel() for p in groups[1]["params"]))])
    dist.all_reduce(held)
    assert held.item() < size, "every rank holds something of each group"


def test_groups_of_a_plain_model_count_and_begin_anew_with_a_state_dict_without_a_count() -> None:
    run_ranks(_plain, 2)


@pytest.mark.full
def test_where_an_outer_axis_splits_shards_again(tmp_path: Path) -> None:
    run_ranks(_resumed, 4, str(tmp_path), ("hybrid",), False, timeout=300)
