"""`fully_shard` beside torch's: one loop, written for FSDP2, run with either. Losses, weights and
checkpoints are the same, bit for bit."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_fsdp_adapter import MixedPrecisionPolicy as OurPolicy
from megatron_fsdp_adapter import (
    export_weights,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter.plain.casts import cast
from megatron_fsdp_adapter.plain.fsdp2 import HINTS, FSDP2Module
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.gpt import full, full_all
from tests.lib.plain.fsdp2_shapes import (
    BLOCKS,
    CASES,
    FP32,
    Features,
    checkpointed,
    compiled,
    hooked,
    in_host_memory,
    model,
    sharded,
    with_spare_layer,
    wrapped_whole,
)
from tests.lib.plain.later_torch import DataParallelMeshDims
from tests.lib.plain.plain import Block, Net, tokens
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/fsdp2.py",
    "plain/call_problems.py",
    "plain/fsdp2_model.py",
    "plain/casts.py",
    "plain/optimizer_rows.py",
    "plain/registered_methods.py",
)

BF16 = torch.bfloat16
STEPS = 3
MICROBATCHES = 2


def train(
    made: Any,
    optimizer: Any,
    rank: int,
    accumulate: bool = False,
    first: int = 0,
    most: float = 100.0,
) -> tuple[list[float], list[float]]:
    """Losses, and norms of gradients, which are scaled to at most `most`."""
    losses = []
    norms = []
    for step in range(first, first + STEPS):
        for microbatch in range(MICROBATCHES if accumulate else 1):
            made.set_requires_gradient_sync(not accumulate or microbatch == MICROBATCHES - 1)
            output = made(tokens(step, microbatch, rank))
            assert output.dtype == FP32
            loss = output.mean()
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(made.parameters(), most)
        norms.append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def named(made: Any) -> dict[str, Any]:
    """Parameters by the names that they have in modules that are not compiled or wrapped."""
    found = {}
    for name, param in made.named_parameters():
        found[name.replace("_orig_mod.", "").removeprefix("module.")] = param
    return found


def whole(made: Any) -> dict[str, torch.Tensor]:
    return full_all(named(made))


def adam(made: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(made.parameters(), lr=1e-2)


def near(found: Any, expected: Any, say: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda text: say + text)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_loops_written_for_fsdp2_give_its_numbers(rank: int, name: str) -> None:
    shape, options = CASES[name]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one = shape(theirs, model(), **options)
    other = shape(ours, model(), **options)
    sides = [(one, adam(one)), (other, adam(other))]
    if shape is in_host_memory:
        sides[1] = (other, fully_shard_optimizer(sides[1][1]))
    expected, found = (train(made, optimizer, rank) for made, optimizer in sides)
    assert found[0] == expected[0]
    if shape is wrapped_whole:  # its rows are packed, so that each rank sums others
        near(found[1], expected[1], "norms")
    else:
        assert found[1] == expected[1]
    check_same_bits(whole(other), whole(one), name)
    if shape is wrapped_whole:
        check_same_bits(dict(export_weights(other, dtype=FP32)), whole(one), "exported")
    known, all_of_ours = (moments_of(*side) for side in sides)
    check_same_bits({name: all_of_ours[name] for name in known}, known, "moments")
    # Torch's accumulates no gradients in bfloat16 beside those that a pass leaves in float32.
    accumulates = () if shape is in_host_memory else ((True, 100.0),)
    for accumulate, most in (*accumulates, (False, 0.5)):
        expected, found = (
            train(made, optimizer, rank, accumulate, 7, most) for made, optimizer in sides
        )
        if shape is wrapped_whole:
            near(found, expected, f"{accumulate=}, {most=}")
        else:
            assert found == expected, f"{accumulate=}, {most=}"
    # In host memory there are moments of what no step has read, too.
    same = moments_of(*sides[1]).keys() == moments_of(*sides[0]).keys()
    assert same or shape is in_host_memory
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (shape is compiled), "all layers have one graph"


@on_ranks(2)
def test_parameters_and_gradients_are_the_dtensors_of_torch(rank: int) -> None:
    one, other = (sharded(shard, model()) for shard in (theirs, ours))
    expected, found = named(one), named(other)
    optimizers = [adam(one), adam(other)]
    train(one, optimizers[0], rank)
    train(other, optimizers[1], rank)
    for made in (one, other):
        made(tokens(5, 0, rank)).backward()
    for name, param in expected.items():
        for like, value in ((param, found[name]), (param.grad, found[name].grad)):
            assert type(value) is DTensor
            assert value.placements == like.placements
            assert value.device_mesh == like.device_mesh
            assert value.data_ptr() == 0
            check_same_bits({name: value.to_local()}, {name: like.to_local()}, name)
        copied = copy.deepcopy(found[name])
        check_same_bits({name: full(copied)}, {name: full(param)}, "copy")


@on_ranks(2)
def test_a_gradient_that_is_kept_keeps_its_values(rank: int) -> None:
    made = sharded(ours, model())
    optimizer = adam(made)
    made(tokens(0, 0, rank)).backward()
    kept = made.head.weight.grad
    expected = full(kept).clone()
    optimizer.zero_grad()
    train(made, optimizer, rank, first=1)
    assert torch.equal(full(kept), expected)
    made(tokens(9, 0, rank)).backward()
    assert made.head.weight.grad is not kept


@on_ranks(2)
def test_averaged_weights_are_evaluated_in_the_place_of_trained_ones(rank: int) -> None:
    """A program keeps them as copies of the parameters, and writes them in two ways."""

    def evaluated(shard: Any, writes: Any) -> list[float]:
        made = sharded(shard, model())
        optimizer = adam(made)
        params = list(made.parameters())
        averages = [param.detach().clone() for param in params]
        losses = []
        for first in (0, STEPS):
            losses += train(made, optimizer, rank, first=first)[0]
            trained = [param.detach().clone() for param in params]
            with torch.no_grad():
                torch._foreach_lerp_(averages, params, 0.1)
                for values in (averages, trained):
                    for param, value in zip(params, values, strict=True):
                        writes(param, value)
                    losses.append(made(tokens(first, 0, rank)).mean().item())
                    if shard is theirs:  # the root's weights would stay those that it has gathered
                        made.reshard()
        return losses

    for writes in (torch.Tensor.copy_, lambda param, value: param.data.copy_(value)):
        expected, found = (evaluated(shard, writes) for shard in (theirs, ours))
        assert found == expected


def _mesh(sizes: tuple[int, ...], *names: str) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names or None)


def _replicas() -> dict[str, Any]:
    return {"mesh": _mesh((2, 2), "r", "s")}


def _held(made: Any) -> float:
    """The part of all elements that this rank has."""
    params = list(made.parameters())
    return sum(p._local_tensor.numel() for p in params) / sum(p.numel() for p in params)


MESHES: tuple[tuple[tuple[int, ...], str, dict[str, Any], tuple[str, ...]], ...] = (
    ((2, 2), "r s", {}, ("r", "s")),
    ((2, 2), "dp tp", {}, ("dp", "tp")),  # names say nothing
)
"""Sizes and names of the dims of a mesh, options, and the dims that parameters show."""
if DataParallelMeshDims is not None:
    MESHES += (
        ((2, 2, 1), "r s tp", {"dp_mesh_dims": DataParallelMeshDims(("r", "s"))}, ("r_s",)),
        ((2, 2, 1), "r s tp", {"dp_mesh_dims": DataParallelMeshDims("s", "r")}, ("r", "s")),
    )


@on_ranks(4)
def test_meshes_of_fsdp2(rank: int) -> None:
    """The numbers of four shards, or of two by two, are the same but for the order of sums."""
    one = sharded(theirs, model())
    expected = train(one, adam(one), rank)
    for sizes, names, options, dims in MESHES:
        mesh = _mesh(sizes, *names.split())
        other = sharded(ours, model(), mesh=mesh, **options)
        shown = next(other.parameters()).device_mesh
        assert shown.mesh_dim_names == dims, names
        assert len(dims) == 1 or shown == mesh[dims], names
        near(train(other, adam(other), rank), expected, names)
        assert _held(other) < 0.7, names
    for wrapped, sizes, names, message in (
        (fully_shard_model, (2, 2), "dp tp", "its dim 'tp' has 2 ranks.*Pass the data-parallel"),
        (
            fully_shard_model,
            (2, 2),
            "",
            "its dims have no names.*Give init_device_mesh mesh_dim_na",
        ),
        (ours, (2, 2), "", "its dims have no names.*Give init_device_mesh mesh_dim_names"),
        (ours, (4, 1, 1), "dp pp tp", "3 dims for data parallelism.*Pass one dim"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapped(model(), mesh=_mesh(sizes, *names.split()))
    mesh = _mesh((4, 1), "dp", "tp")
    fully_shard_model(made := model(), mesh=mesh)
    assert _held(made) < 0.7


AS_REPLICAS = (
    (("dp_shard", "cp"), "'dp_shard' is one of replicas"),
    (("dp_replicate", "cp"), ""),
    (("dp", "tp"), "'dp' as replicas and 'tp' as shards, but 'tp' is a name of model"),
)


@pytest.mark.parametrize(("names", "said_of_it"), AS_REPLICAS)
@on_ranks(2)
def test_names_of_dims_that_are_read_by_position(
    rank: int, names: tuple[str, str], said_of_it: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours(nn.Linear(2, 2), mesh=mesh)
    texts = [str(one.message) for one in said]
    found = [text for text in texts if "of replicas" in text or "as replicas" in text]
    assert len(found) == (1 if said_of_it and rank == 0 else 0)
    assert all(said_of_it in text for text in found)


@on_ranks(4)
def test_gradients_of_several_backwards_are_summed_over_replicas(rank: int) -> None:
    one = sharded(theirs, model())
    held_back, repeated = (sharded(ours, model(), **_replicas()) for _ in range(2))
    for microbatch in range(2):
        held_back.set_requires_all_reduce(microbatch == 1)
        for made in (one, held_back, repeated):
            made(tokens(0, microbatch, rank)).backward()
        assert (held_back.head.weight.grad is not None) == microbatch
    both = [hooked(shard, model(), **_replicas()) for shard in (theirs, ours)]
    for microbatch in range(2):
        for made in both:
            made(tokens(0, microbatch, rank)).backward()
    for found, expected in ((held_back, one), (repeated, one), reversed(both)):
        grads = [made.head.weight.grad.full_tensor() for made in (found, expected)]
        near(*grads, "sums over replicas")


def _cut_by_hand(made: Any, optimizer: Any, moments: Any, options: StateDictOptions) -> None:
    """Loads unsharded moments as torch's FSDP2 tutorial does: by `distribute_tensor`."""
    state = {}
    for number, (name, param) in enumerate(made.named_parameters()):
        state[number] = {}
        for key, value in moments["state"][name].items():
            if key != "step":
                value = distribute_tensor(value, param.device_mesh, param.placements)
            state[number][key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"param_groups": groups, "state": state})


@on_ranks(2)
def test_what_either_has_after_some_steps_goes_on_in_the_other(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True)
    for first, second, load in (
        (theirs, ours, set_optimizer_state_dict),
        (theirs, ours, _cut_by_hand),
        (ours, theirs, set_optimizer_state_dict),
    ):
        made = sharded(first, model())
        optimizer = adam(made)
        train(made, optimizer, rank)
        # Copies: torch's functions change what they are given, and share step counts.
        weights, moments = copy.deepcopy(
            (
                get_model_state_dict(made, options=options),
                get_optimizer_state_dict(made, optimizer, options=options),
            )
        )
        other = sharded(second, model())
        resumed = adam(other)
        set_model_state_dict(other, dict(weights), options=options)
        load(other, resumed, moments, options=options)
        say = f"resumed with {second.__module__}"
        check_same_bits(whole(other), weights, say)
        check_same_bits(moments_of(other, resumed), moments_of(made, optimizer), say)
        found, expected = (
            train(*side, rank, first=9)[0] for side in ((other, resumed), (made, optimizer))
        )
        assert found == expected, say
        check_same_bits(whole(other), whole(made), say)


@on_ranks(2)
def test_a_save_in_the_background_of_what_is_trained_meanwhile(rank: int, root: Path) -> None:
    folder = root / "saved"
    made = sharded(ours, model())
    optimizer = adam(made)
    train(made, optimizer, rank)
    expected = whole(made)
    expected_moments = moments_of(made, optimizer)
    weights, moments = get_state_dict(made, optimizer)
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        {"weights": weights, "moments": moments}, checkpoint_id=folder, process_group=group
    )
    train(made, optimizer, rank, first=5)
    saving.result()
    dist.barrier()
    for shard in (theirs, ours):
        other = sharded(shard, model())
        resumed = adam(other)
        weights, moments = get_state_dict(other, resumed)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=moments)
        check_same_bits(whole(other), expected, shard.__module__)
        check_same_bits(moments_of(other, resumed), expected_moments, shard.__module__)


def moments_of(made: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in named(made).items():
        for key, value in optimizer.state[param].items():
            found[f"{name}.{key}"] = full(value)
    return found


def _read_in_inference_mode(made: Any) -> None:
    with torch.inference_mode():
        assert sum(param.numel() for param in made.parameters())


def _run_in_inference_mode(made: Any) -> None:
    with torch.inference_mode():
        made(tokens(0, 0, 0))


def _run_in_vmap(made: Any) -> None:
    inputs = torch.rand(3, 2, 10)
    with torch.no_grad():
        expected = torch.stack([model().blocks(x) for x in inputs])
        torch.testing.assert_close(torch.func.vmap(made.blocks)(inputs), expected)


@pytest.mark.parametrize("use", (_read_in_inference_mode, _run_in_inference_mode, _run_in_vmap))
@on_ranks(2)
def test_a_first_use_where_tensors_are_not_for_training(rank: int, use: Use) -> None:
    expected, found = (sharded(theirs, model()), sharded(ours, model()))
    use(found)
    losses = [train(made, adam(made), rank)[0] for made in (expected, found)]
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_start_on_the_meta_device(rank: int) -> None:
    """Parameters there are DTensors, which `to_empty` or a load makes the sharded ones: the same
    objects, frozen or trained as they were."""
    values = model().state_dict()
    one = sharded(theirs, model(), frozen="embedding")
    expected = train(one, adam(one), rank)[0]
    for empties in (True, False):
        with torch.device("meta"):
            made = Features()
            made.temperature = nn.Parameter(torch.empty(1))
        sharded(lambda module: _read(ours(module)), made)
        shown = list(made.parameters())
        made.bfloat16().float()
        optimizer = adam(made)
        assert isinstance(made.embedding.weight, DTensor)
        made.embedding.weight.requires_grad = False
        for param in shown:
            assert param.is_meta and param.dtype == FP32
        if empties:
            made.to_empty(device="cpu")
            assert made.head.weight.device.type == "cpu"  # no rank had all of it
            nn.init.ones_(made.head.weight)
            assert whole(made)["head.weight"].eq(1).all()
        set_model_state_dict(
            made,
            dict(values) if rank == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        check_same_bits(whole(made), values, "loaded")
        for param, read in zip(shown, made.parameters(), strict=True):
            assert param is read
        assert train(made, optimizer, rank)[0] == expected, f"{empties=}"


@on_ranks(4)
def test_modules_of_which_replicas_keep_sums(rank: int) -> None:
    """Of one block each replica keeps its sums in all microbatches but the last, of the others in
    the second one alone. A further backward of the whole model is summed at once, and so is one
    after `set_requires_gradient_sync`, which is for both axes."""
    found = []
    for shard in (theirs, ours):
        made = sharded(shard, model(), **_replicas())
        block = made.blocks[1]
        seen = []
        for step in range(2):
            for microbatch in range(4):
                made.set_requires_all_reduce(microbatch not in (1, 2))
                block.set_requires_all_reduce(microbatch == 3)
                made(tokens(step, microbatch, rank)).mean().backward()
                seen.append([param.grad is None for param in made.parameters()])
                grads = [param.grad for param in made.parameters() if param.grad is not None]
                seen += [grad.full_tensor().clone() for grad in grads]
                if microbatch == step == 0:
                    made.zero_grad()
            norm = nn.utils.clip_grad_norm_(made.parameters(), 100.0)
            seen += [full(norm), *(param.grad.full_tensor() for param in made.parameters())]
            made.zero_grad()
            made.set_requires_all_reduce(True)
            for module in (made, *made.blocks):
                module.set_requires_all_reduce(module is not block, recurse=False)
            made(tokens(step, 9, rank)).mean().backward()
            seen.append([param.grad is None for param in made.parameters()])
            made.zero_grad()
            made.set_requires_gradient_sync(step == 0)
            made.set_requires_all_reduce(step == 1)
            block.set_requires_gradient_sync(True)
            made(tokens(step, 10, rank)).mean().backward()
            seen.append([param.grad is None for param in made.parameters()])
            made.set_requires_gradient_sync(True)
            made(tokens(step, 11, rank)).mean().backward()
            seen += [param.grad.full_tensor() for param in made.parameters()]
            made.zero_grad()
        found.append(seen)
    for own, of_torch in zip(found[1], found[0], strict=True):
        near(own, of_torch, "sums of replicas") if torch.is_tensor(own) else None
        assert torch.is_tensor(own) or own == of_torch


@on_ranks(2)
def test_backwards_inside_of_a_pass(rank: int) -> None:
    """The head's, chunk by chunk, before that of the features that it was given. One block keeps
    its gradients on each rank in the first microbatch."""
    found = []
    for shard in (theirs, ours):
        made = checkpointed(shard, model(), forward="hidden")
        for microbatch in range(MICROBATCHES):
            made.blocks[0].set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            features = made(tokens(0, microbatch, rank))
            chunks = [chunk.detach().requires_grad_() for chunk in features.chunk(2)]
            for chunk in chunks:
                made.head(chunk).square().mean().backward()
            features.backward(torch.cat([chunk.grad for chunk in chunks]))
            kept = made.blocks[0].norm.weight.grad is None
            assert kept == (microbatch < MICROBATCHES - 1)
        used = {name: param for name, param in made.named_parameters() if name != "temperature"}
        found.append({name: param.grad.full_tensor() for name, param in used.items()})
    near(found[1], found[0], "chunks")


@on_ranks(2)
def test_a_unit_that_keeps_gradients_for_a_later_backward(rank: int) -> None:
    """The head adds up those of the chunks of a microbatch, of which the last one is reduced,
    beside reduced ones of the microbatch before."""
    found = []
    for shard in (theirs, ours):
        made = sharded(shard, model(), (*BLOCKS, "head"), forward="hidden")
        optimizer = adam(made)
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                features = made(tokens(step, microbatch, rank))
                chunks = [chunk.detach().requires_grad_() for chunk in features.chunk(2)]
                for number, chunk in enumerate(chunks):
                    made.head.set_requires_gradient_sync(number == len(chunks) - 1)
                    made.head(chunk).square().mean().backward()
                    is_missing = made.head.weight.grad is None
                    assert is_missing == (number == microbatch == 0)
                features.backward(torch.cat([chunk.grad for chunk in chunks]))
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(made))
    del found[0]["temperature"], found[1]["temperature"]
    near(*reversed(found), "chunks")


@on_ranks(2)
def test_a_model_of_which_nothing_is_trained(rank: int) -> None:
    """As a reference model of preferences is."""
    made = sharded(ours, model().requires_grad_(False).eval())
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(made(tokens(0, 0, rank)), model()(tokens(0, 0, rank)))
    check_same_bits(whole(made), model().state_dict(), "frozen")
    assert _held(made) < 0.6


@pytest.mark.parametrize("world", (1, 2, 4))
@on_ranks()
def test_a_parameter_that_some_ranks_read_has_a_gradient_on_all(rank: int, world: int) -> None:
    """And one that none reads has none: or zeros, as of torch's, where that is asked for."""
    made = with_spare_layer(ours, model(), **(_replicas() if world == 4 else {}))
    one = model()
    one.features(tokens(0, 0, 0)).mean().backward()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            return made.features(tokens)
        return made.head(made.hidden(tokens)).square()

    made.forward = forward
    for zeroed in (False, True):
        made.set_reduce_scatter_unused_params(zeroed)
        made(tokens(0, 0, 0)).mean().backward()
        near(made.temperature.grad.full_tensor() * world, one.temperature.grad, "read by one rank")
        assert (made.spare.weight.grad is not None) == zeroed
        made.zero_grad()


@pytest.mark.parametrize("world", (1, 2))
@on_ranks()
def test_gradients_are_divided_by_a_factor_of_the_module(rank: int, world: int) -> None:
    """Set before the model is sharded, after the optimizer was made, and between steps."""
    found = []
    for shard in (theirs, ours):
        made = sharded(shard, model())
        for module in (made, *made.blocks) if world > 1 else ():
            module.set_force_sum_reduction_for_comms(True)  # of torch's, on gloo
        made.blocks[1].set_gradient_divide_factor(3.0)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for step in range(2):
            made.set_gradient_divide_factor(5.0 - step)
            made.blocks[0].set_gradient_divide_factor(7.0 + step)
            for microbatch in range(2):
                made(tokens(step, microbatch, rank)).mean().backward()
            found.append([param.grad.full_tensor().clone() for param in made.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(found[2:], found[:2])


def _sharded_between_passes(made: Any) -> bool:
    return all(isinstance(param, DTensor) for param in made.parameters())


@on_ranks(2)
def test_methods_of_fsdp2(rank: int, world: int) -> None:
    made, one, x = sharded(ours, model()), sharded(theirs, model()), tokens(0, 0, rank)
    block = made.blocks[1]
    for module, own in ((made, Net), (block, Block)):
        assert isinstance(module, FSDPModule)
        assert isinstance(module, own)
    assert type(block).__name__ == "FSDPBlock"
    assert type(ours(nn.Sequential(nn.Linear(2, 2), nn.GELU()))[:1]) is nn.Sequential
    for module in (made, *made.blocks):
        module.set_gradient_divide_factor(4.0 * world)
    first, again = ([p._local_tensor.data_ptr() for p in made.parameters()] for _ in range(2))
    assert first == again, "empty shards have places, too"
    assert len({*first}) == len(first), "empty shards have places, too"
    for name in HINTS:
        getattr(made, name)(True)
    theirs_alone = [name for name in vars(FSDPModule) if name not in vars(FSDP2Module)]
    assert all(name.startswith("_") for name in theirs_alone), "they would run on our module"
    made.set_keep_unsharded_storage(False)
    made.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="set_keep_unsharded_storage.*Leave the call out"):
        made.set_keep_unsharded_storage(True)
    for calls in (lambda: made.set_manual_backward_finalization(True), made.finalize_backward):
        with pytest.raises(RuntimeError, match="finalize_backward.*Leave the calls out"):
            calls()
    before = model().get_parameter("blocks.1.up.weight")
    assert _sharded_between_passes(made)
    block.unshard(async_op=True).wait()
    kept = block.up.weight
    assert torch.equal(kept, before)
    made(x)  # its forward ends that
    with pytest.raises(RuntimeError, match="not gathered"):
        kept.sum()
    assert _sharded_between_passes(made)
    for _ in range(2):
        block.reshard()
    block.unshard()
    made.reset_iter_state()
    block.reshard()
    assert _sharded_between_passes(block)
    for each in (made, one):
        each(x).mean().backward()
    found, whole_ones = ([p.grad.full_tensor() for p in m.parameters()] for m in (made, one))
    assert all(map(torch.equal, found, (grad / 4 for grad in whole_ones)))
    share_comm_ctx([made, block])
    made.zero_grad()
    made.set_reshard_after_forward(False)
    bare = sharded(ours, model(), (), "features")  # no hooks of units see its passes
    for each, raises, trains in ((made, "__call__", "features"), (bare, "features", "__call__")):
        register_fsdp_forward_method(each, "features")
        hook = each.head.register_forward_pre_hook(lambda *_: {}["a pass that raises"])
        with pytest.raises(KeyError):
            getattr(each, raises)(x)
        hook.remove()
        found = getattr(each, trains)(x)
        expected = model().features(x)
        assert torch.equal(found, expected)
        assert each.blocks[0].up.weight.untyped_storage().nbytes() > 0, "stays, also after an error"
        found.mean().backward()
        for param in each.parameters():
            assert isinstance(param.grad, DTensor)
    made.set_reshard_after_forward(True)
    made.chosen = lambda of: made(of).detach().argmax()
    register_fsdp_forward_method(made, "chosen")
    made.chosen(x)
    assert _sharded_between_passes(made)
    adam(made).step()
    made(x)


Use = Callable[[Any], Any]
REFUSED: dict[str, tuple[str, Use]] = {}
"""What the error says, and what raises it on a model."""


def refused(name: str, said: str) -> Callable[[Use], Use]:
    """Adds a function to the table."""

    def add(use: Use) -> Use:
        REFUSED[name] = (said, use)
        return use

    return add


@refused("twice", "called with it before")
def _twice(made: Any) -> None:
    ours(ours(made))


@refused("a list", "no forward")
def _a_list(made: Any) -> None:
    ours(nn.ModuleList([made]))


@refused("columns", r"Shard\(1\) for parameter blocks.0.norm.weight, which has 1 dims")
def _columns(made: Any) -> None:
    ours(made, shard_placement_fn=lambda param: Shard(1))


@refused("late", "modules in it have run already")
def _late(made: Any) -> None:
    ours(made.blocks[0])(torch.ones(1, 10))
    ours(made)


@refused("from outside in", "a part of a FSDPFeatures .*inner modules first")
def _from_outside_in(made: Any) -> None:
    ours(ours(made).blocks[0])


@refused("policies", "offload_policy=True: another call")
def _policies(made: Any) -> None:
    ours(made.blocks[0], offload_policy=CPUOffloadPolicy())
    ours(made)(tokens(0, 0, 0))


@refused(
    "on the meta device",
    "21 parameters are still on the meta device: .*'embedding.weight'.*call to_empty",
)
def _on_the_meta_device(made: Any) -> None:
    empty = sharded(ours, made.to("meta"))
    empty(tokens(0, 0, 0))


@refused("gather", "set_custom_all_gather")
def _gather(made: Any) -> None:
    ours(made).set_custom_all_gather(print)


@refused("stream", "stream=.*Leave stream out")
def _stream(made: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s"))
    ours(made, mesh=mesh).set_all_reduce_hook(print, stream=torch.cpu.Stream())


@refused("policy of another function", "mp_policy=.*from torch.distributed.fsdp")
def _policy_of_another_function(made: Any) -> None:
    ours(made, mp_policy=OurPolicy())


@refused("fields of torch's policy", "param_dtype=torch.bfloat16: .*from torch.distributed.fsdp")
def _fields_of_torchs_policy(made: Any) -> None:
    ours(made, mp_policy=OurPolicy(param_dtype=BF16))  # type: ignore[call-arg]


@refused("deepcopy", "deepcopy")
def _deepcopy(made: Any) -> None:
    copy.deepcopy(ours(made))


@refused("optimizer of before", "from before the model was sharded")
def _optimizer_of_before(made: Any) -> None:
    _step(adam(made), ours(made))


@refused("optimizer that reads norms", "optimizer=Adafactor: .*Use AdamW")
def _optimizer_that_reads_norms(made: Any) -> None:
    params = ours(made).parameters()
    _step(torch.optim.Adafactor(params), made)


@refused(
    "gradients of another dtype",
    "in torch.bfloat16 and its gradients accumulate in torch.float32.*fully_shard_optimizer",
)
def _gradients_of_another_dtype(made: Any) -> None:
    whole = fully_shard_model(made.to(BF16), mixed_precision_policy=OurPolicy(None))
    _step(adam(whole), whole)


@refused("data assigned", "data of parameter head.weight was assigned.*copy_")
def _data_assigned(made: Any) -> None:
    param = _read(ours(made)).head.weight
    param.data = param.data * 2
    made(tokens(0, 0, 0))


@refused("data assigned before a step", "grad.data of parameter head.weight was assigned.*copy_")
def _data_of_a_gradient_assigned(made: Any) -> None:
    optimizer = adam(ours(made))
    made(tokens(0, 0, 0)).backward()
    grad = made.head.weight.grad
    grad.data = grad.data * 2
    optimizer.step()


class Layers(nn.ModuleList):
    """A list that is a layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def _read(made: Any) -> Any:
    list(made.parameters())
    return made


def _step(optimizer: Any, made: Any) -> None:
    made(tokens(0, 0, 0)).mean().backward()
    optimizer.step()


@dataclass
class Given:
    x: torch.Tensor
    cache: Any


def test_inputs_in_dataclasses_are_cast_and_other_objects_stay() -> None:
    given = Given(torch.ones(1), types.SimpleNamespace(keys=torch.ones(1)))
    (found,), options = cast(BF16, ((given,), {"mask": torch.ones(1, dtype=torch.int64)}))
    assert (found.x.dtype, options["mask"].dtype) == (BF16, torch.int64)
    assert found.cache is given.cache
    assert given.x.dtype == FP32


def test_the_dim_to_shard_is_asked_for_each_parameter_of_a_call(one_rank: None) -> None:
    made = model()
    expected = [param for name, param in made.named_parameters() if "blocks" not in name]
    asked: list[Any] = []
    for block in made.blocks:
        ours(block)

    def last(param: nn.Parameter) -> Shard:
        asked.append(param)
        return Shard(-1)

    ours(made, shard_placement_fn=last)
    assert list(map(id, asked)) == list(map(id, expected))
    for name, param in made.named_parameters():
        dim = 0 if "blocks" in name else max(param.ndim - 1, 0)
        assert param.placements == (Shard(dim),), name


def test_a_list_with_a_forward_is_a_module(one_rank: None) -> None:
    x = torch.ones(2, 2)
    made = Layers([nn.Linear(2, 2)])
    assert torch.equal(made(x), ours(made)(x))


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_does_and_this_does_not_is_an_early_error(one_rank: None, name: str) -> None:
    said, use = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=said):
        use(model())
