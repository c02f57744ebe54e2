"""The gate and value halves of first MLP weights, `<key>_w` and `<key>_v`, which are views of the
sharded values (a load writes through them), and the functions that Megatron's checkpoint code calls
by name.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter import install
from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef
from megatron_fsdp_adapter.core.dtensor.uneven import own_chunks, whole_tensor
from megatron_fsdp_adapter.megatron.checkpoint import megatron_names
from megatron_fsdp_adapter.state.names import HALVES
from tests.lib.checkpoint.checkpoint_cases import data_mesh, plan, shard, whole
from tests.lib.gpt.gpt import full_all
from tests.lib.gpt.topologies import CASE, Topology, build_topology_trainer, init_topology
from tests.lib.ranks.launch import run_ranks

CHECKS = ("core/dtensor/parts.py", "megatron/checkpoint/megatron_names.py", "state/names.py")


def _halves_of_the_wrapper(rank: int, size: int, tp: int) -> list[tuple[Any, ...]]:
    from megatron.core.transformer import fsdp_dtensor_checkpoint as core

    topology = Topology("", tp=tp, sp=tp > 1)
    init_topology(topology)
    install()
    case = CASE.but(swiglu=True, ffn=20)
    trainer = build_topology_trainer(topology, case, "optim_grads_params")
    inner = trainer.chunks[0].module
    saved = inner.state_dict_for_save_checkpoint()
    params = inner.state_dict()
    forbidden = Mock(side_effect=AssertionError("the split communicates"))
    with patch.multiple(dist, all_gather_object=forbidden, all_gather=forbidden):
        found, _ = core.handle_swiglu_in_state_dict(inner, saved, None)
    assert found.keys() == saved.keys()
    places = []
    for number, suffix in enumerate(HALVES):
        halves = {key: half for key, half in saved.items() if key.endswith(suffix)}
        assert len(halves) == 2 * case.num_layers
        for key, half in halves.items():
            param = params[key.removesuffix(suffix)]
            rows = whole_tensor(param).unflatten(0, (tp, len(HALVES), -1))[:, number]
            assert torch.equal(whole_tensor(half), rows.flatten(0, 1)), key
            own = param._local_tensor.untyped_storage()
            assert half._local_tensor.untyped_storage()._cdata == own._cdata, key
            places.append(own_chunks(half).boxes)
    param: Any = next(inner.parameters())
    for split in (core.make_fsdp_dtensor, param.megatron_fsdp_dist_index.get_submesh):
        with pytest.raises(ValueError, match=r"state_dict_for_save_checkpoint\(\)"):
            split(param, None, dist_index=None)
    if tp == 1:
        _check_loads(inner)
    return places


def _check_loads(inner: Any) -> None:
    """Of copies in that form, each rank's rows or whole, by a model that has other values."""
    state = inner.state_dict_for_save_checkpoint()
    params = list(inner.parameters())
    own = {key: v for key, v in state.items() if isinstance(v, DTensor)}
    expected = [param._local_tensor.clone() for param in params]
    for given in ({key: value.clone() for key, value in own.items()}, full_all(own)):
        for param in params:
            param._local_tensor.detach().fill_(0.5)
        inner.load_state_dict(given)
        assert all(map(torch.equal, [param._local_tensor for param in params], expected))


@pytest.mark.parametrize(("size", "tp"), [(3, 1), (4, 2)])
def test_the_wrapper_gives_halves_and_core_has_nothing_to_split(size: int, tp: int) -> None:
    """Of three shards one holds the end of one half and the start of the other."""
    ranks = run_ranks(_halves_of_the_wrapper, size, tp)
    each = [rank[at :: len(rank) // 2] for rank in ranks for at in range(len(rank) // 2)]
    assert tp > 1 or any(map(all, each))


def _sharded() -> DTensor:
    ref = LayoutRef(plan(1, {"w": (10, 4)}), 0, 0)
    return shard(ref, data_mesh(1), torch.arange(40.0).view(10, 4))


def test_preprocess_names_what_has_no_chunks(one_rank: None) -> None:
    good = _sharded()
    lost = DTensor(good._local_tensor[1:], good._spec, requires_grad=False)
    state = {"model": {"good": good, "lost": lost, "plain": torch.zeros(2)}}
    with pytest.raises(ValueError, match=r"1 sharded DTensors carry no chunks: model\.lost\. Take"):
        megatron_names.preprocess_state_dict_for_uneven_dtensor(state)
    del state["model"]["lost"]
    assert megatron_names.preprocess_state_dict_for_uneven_dtensor(state) is state


def _gather_all(rank: int, size: int) -> None:
    line = data_mesh(size)
    for dtype in (torch.bfloat16, torch.bool, torch.int16):
        layout = plan(size)
        for index, spec in enumerate(layout.specs):
            ref = LayoutRef(layout, index, rank)
            full = whole(spec.fqns[0], spec.shape, dtype)
            sharded = shard(ref, line, full)
            result = megatron_names.gather_uneven_dtensor_to_full_tensor(sharded)
            assert torch.equal(result.to_local(), full), spec
            for placement in result.placements:
                assert placement.is_replicate()
            later_name = megatron_names.redistribute_uneven_dtensor_to_replicated(sharded)
            assert torch.equal(later_name.to_local(), full)
            assert torch.equal(megatron_names.uneven_dtensor_to_full_tensor(sharded), full)
    # Split evenly by torch itself, and bits that an addition of floats would lose.
    odd = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45, 3.0])
    even = torch.distributed.tensor.distribute_tensor(odd, line, [Shard(0)])
    result = megatron_names.gather_uneven_dtensor_to_full_tensor(even).to_local()
    assert torch.equal(result.view(torch.int32), odd.view(torch.int32))
    rows = 3 if rank == 0 else 1
    shape = (size + 2, 2)
    lost = DTensor.from_local(torch.zeros(rows, 2), line, [Shard(0)], shape=shape, stride=(2, 1))
    if rank == 0:
        with pytest.raises(ValueError, match="carries no chunks"):
            megatron_names.gather_uneven_dtensor_to_full_tensor(lost)


def test_gather_uneven_dtensor_to_full_tensor() -> None:
    run_ranks(_gather_all, 4)


def test_gather_refuses_another_device(one_rank: None) -> None:
    with pytest.raises(ValueError, match="target_device=meta"):
        megatron_names.gather_uneven_dtensor_to_full_tensor(_sharded(), torch.device("meta"))
    for gather in (
        megatron_names.gather_uneven_dtensor_to_full_tensor,
        megatron_names.uneven_dtensor_to_full_tensor,
    ):
        with pytest.raises(ValueError, match="not a DTensor"):
            gather(torch.zeros(2))
