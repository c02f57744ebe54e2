"""`fully_shard` of parameters with gather extensions gives the bits of torch's function; those that
cannot be gathered are refused by name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter import fully_shard as ours
from megatron_fsdp_adapter import fully_shard_optimizer
from megatron_fsdp_adapter.plain.fsdp2_model import engine_of
from tests.lib.gpt.checks import check_same_bits
from tests.lib.plain.beside_torch import check_alike, trained
from tests.lib.plain.carried_over import carried_over
from tests.lib.plain.gathered import Halved, Rounded, RoundedWeight, Wrapper, wrap
from tests.lib.plain.later_torch import IS_OLDEST
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/extensions.py", "plain/extended.py")

WIDTH = 6
Shards = Callable[..., Any]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    recomputes = False

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.out(x)


def made(
    shard: Shards,
    kind: type[Wrapper] = Rounded,
    width: int = WIDTH,
    on_meta: bool = False,
    frozen: str = "",
    recomputes: bool = False,
    **options: Any,
) -> Any:
    """A sharded net whose matrices are of `kind`; those with `frozen` in their names are frozen."""
    torch.manual_seed(3)
    net = Net(width)
    values = net.state_dict()
    if on_meta:
        with torch.device("meta"):
            net = Net(width)
    net.recomputes = recomputes
    for name, param in net.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    wrap(net.layers, kind)
    for module in (*net.layers, net):
        shard(module, **options)
    if on_meta:
        net.to_empty(device="cpu")
        mesh = options.get("mesh")
        size = dist.get_world_size() if mesh is None else mesh.size(-1)
        rank = dist.get_rank() % size
        for name, param in net.named_parameters():
            rows = values[name].chunk(size)
            if rank < len(rows):
                param._local_tensor.detach().copy_(rows[rank])
    return net


def local(param: Any) -> torch.Tensor:
    """This rank's values of a parameter."""
    rows = getattr(param, "_local_tensor", param).detach()
    return rows.inner if isinstance(rows, Wrapper) else rows


def precompute(net: nn.Module) -> None:
    """Computes the scales of all matrices once, as a program does after a step."""
    for param in net.parameters():
        rows: Any = param._local_tensor  # type: ignore[attr-defined]
        if isinstance(rows, Rounded):
            scale = rows.inner.abs().max()
            dist.all_reduce(scale, dist.ReduceOp.MAX)
            rows.scale = scale


def train(
    net: Any,
    rank: int,
    accumulate: bool = False,
    ahead: bool = False,
    evaluates: bool = False,
    offloads: bool = False,
) -> tuple[torch.optim.Optimizer, list[float]]:
    """The optimizer, and all losses and norms."""
    width = net.out.weight.shape[1]

    def loss_of(step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
        hooks = torch.autograd.graph.save_on_cpu() if offloads else contextlib.nullcontext()
        with hooks:
            return net(torch.randn(5, width, generator=generator)).float().square().mean()

    def after() -> list[float]:
        if ahead:
            precompute(net)
        if not evaluates:
            return []
        with torch.no_grad():
            found = net(torch.ones(2, width)).float().sum().item()
        for module in (*net.layers, net):
            module.reshard()
        return [found]

    return trained(net, loss_of, 2 if accumulate else 1, after=after)


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
ROWS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"reshard_after_forward": False}, {"accumulate": True, "ahead": True}),
    (BF16, {"ahead": True, "evaluates": True}),
    ({"on_meta": True, "recomputes": True}, {}),
    ({"frozen": "up"}, {"accumulate": True, "offloads": True}),
    ({"kind": Halved, "width": 5}, {"evaluates": True}),
    ({"kind": Halved, "width": 5, "on_meta": True, "reshard_after_forward": False}, {}),
    ({"kind": Halved, **BF16}, {"accumulate": True}),
)


@on_ranks(2)
def test_numbers_are_those_of_torchs_function(rank: int) -> None:
    for options, program in ROWS:
        sides = [made(shard, **options) for shard in (theirs, ours)]
        expected, found = (train(side, rank, **program)[1] for side in sides)
        say = f"{options}, {program}"
        assert found == expected, say
        check_alike(sides[1], sides[0], say)


@on_ranks(4)
def test_with_replicas_the_functions_get_the_mesh_of_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(output_dtype=torch.float32)
    net = made(ours, Halved, mesh=mesh, mp_policy=policy)
    expected = train(made(theirs, Halved, mesh=mesh, mp_policy=policy), rank)[1]
    assert train(net, rank)[1] == pytest.approx(expected, rel=1e-6)  # sums of another order
    dims, size, shape, stride, module, given = Halved.seen
    assert (dims, size, given) == (1, 2, policy)
    assert shape == module.weight.shape
    assert stride == module.weight.stride()


@on_ranks(2)
def test_functions_run_at_each_gather(rank: int) -> None:
    for keeps, in_a_step in ((True, 6), (False, 12 - 2)):  # the last layer stays for its backward
        net = made(ours, reshard_after_forward=not keeps)
        for _ in range(2):
            before = Rounded.calls
            net(torch.ones(2, WIDTH)).sum().backward()
            assert Rounded.calls - before == in_a_step
            torch.optim.SGD(net.parameters(), lr=1e-2).step()
    given = net.layers[0].up.weight
    layer = net.layers[0]
    layer.unshard()
    whole = layer.up.weight
    assert type(whole) is RoundedWeight
    assert whole is not given
    assert whole.shape == (2 * WIDTH, WIDTH)
    layer.reshard()
    assert layer.up.weight is given
    with pytest.raises(RuntimeError, match=r"values reads parameter layers.0.up.weight"):
        print(whole.values)
    with pytest.raises(RuntimeError, match=r"layers.0.up.weight of unit .*not gathered"):
        whole + 1


@pytest.mark.skipif(IS_OLDEST, reason="torch 2.11 cannot print what it compiles")
@on_ranks(2)
def test_compiled_layers_have_the_numbers_of_others(rank: int) -> None:
    expected = train(made(ours), rank)[1]
    net = made(ours)
    for layer in net.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert train(net, rank)[1] == expected


@on_ranks(2)
def test_weights_may_first_be_gathered_under_inference_mode(rank: int) -> None:
    for kind in (Rounded, Halved):
        expected = train(made(ours, kind), rank)[1]
        net = made(ours, kind)
        with torch.inference_mode():
            net(torch.ones(2, WIDTH))
        assert train(net, rank)[1] == expected


@on_ranks(2)
def test_what_a_program_does_to_such_parameters(rank: int) -> None:
    sides = [made(shard, frozen="layers.1.up") for shard in (theirs, ours)]
    found: list[list[float]] = []
    for net in sides:
        losses = train(net, rank)[1]
        param: Any = dict(net.named_parameters())["layers.0.up.weight"]
        param.requires_grad_(False)
        before = local(param).clone()
        losses += train(net, rank)[1]
        assert param.grad is None
        assert torch.equal(local(param), before)
        net.requires_grad_(True)
        found.append([*losses, *train(net, rank)[1]])
        assert not torch.equal(local(param), before)
    assert found[0] == found[1]
    # A layer that is not called shows the sharded weight, also before anything was gathered.
    for other in (sides[1], made(ours, reshard_after_forward=False)):
        given = other.layers[1].up.weight
        shown = []
        see = lambda *_, of=other, shown=shown: shown.append(of.layers[1].up.weight)  # noqa: E731
        other.layers[0].register_forward_hook(see)
        other(torch.ones(2, WIDTH))
        assert shown[0] is given


@on_ranks(2)
def test_memory_of_gathered_weights_goes(rank: int) -> None:
    for kind in (Rounded, Halved):
        net = made(ours, kind)
        train(net, rank)
        layer = net.layers[1]
        layer.unshard()
        whole = layer.up.weight
        inner = whole.values if kind is Rounded else whole
        assert inner.untyped_storage().nbytes() > 0
        layer.reshard()
        assert inner.untyped_storage().nbytes() == 0


@on_ranks(2)
def test_a_checkpoint_of_either_goes_on_in_the_other(rank: int, root: Path) -> None:
    torch.serialization.add_safe_globals([Halved])
    for number, (first, second) in enumerate(itertools.permutations((theirs, ours))):
        folder = root / str(number)
        one, other = made(first, Halved), made(second, Halved)
        optimizer, _ = train(one, rank)
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
        carried_over(one, optimizer, other, resumed, folder)
        check_alike(other, one, "loaded")
        for param, like in zip(other.parameters(), one.parameters(), strict=True):
            for key, value in optimizer.state[like].items():
                found = resumed.state[param][key]
                check_same_bits({key: local(found)}, {key: local(value)}, key)


@on_ranks(2)
def test_functions_may_be_set_later_and_are_missed_by_name(rank: int) -> None:
    class Bare(Wrapper):
        pass

    nets = [made(shard, Bare) for shard in (theirs, ours)]
    for net in nets:
        for param in net.parameters():
            rows: Any = param._local_tensor
            if isinstance(rows, Bare):
                rows.fsdp_pre_all_gather = Halved.fsdp_pre_all_gather.__get__(rows)
                rows.fsdp_post_all_gather = Halved.fsdp_post_all_gather.__get__(rows)
    expected, found = (train(net, rank)[1] for net in nets)
    assert found == expected
    match = r"layers.0.up.weight \(class Bare\) .*no fsdp_pre_all_gather and no fsdp_post.*ignored"
    with pytest.raises(RuntimeError, match=match):
        made(ours, Bare)(torch.ones(2, WIDTH))


@on_ranks(2)
def test_what_cannot_be_done_is_refused_by_name(rank: int) -> None:
    class Odd(Halved):
        def fsdp_pre_all_gather(self, mesh: Any, more: Any) -> Any:  # type: ignore[override]
            return (self.inner,), None

    class Whole(Wrapper):
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.split.Tensor:
                raise NotImplementedError
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Short(Halved):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (self.inner,), None

    with pytest.raises(TypeError, match=r"fsdp_pre_all_gather\(.*one of these signatures"):
        made(ours, Odd)(torch.ones(2, WIDTH))
    uneven = nn.Linear(4, 5, bias=False)
    wrap(uneven, Short)
    ours(uneven)
    engine_of(uneven)
    if rank == 1:  # rank 0 has the most rows
        with pytest.raises(ValueError, match=r"weight .class Short.*with padding behind"):
            uneven(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"up.weight .*Leave offload_policy out"):
        made(ours, offload_policy=CPUOffloadPolicy())
    rows = nn.Linear(4, 4, bias=False)
    wrap(rows, Whole)
    with pytest.raises(ValueError, match=r"weight .class Whole.* into rows: NotImpl.*in ignored_p"):
        ours(rows)
    rows = nn.Linear(4, 4, bias=False)
    wrap(rows, Whole)
    ours(rows, ignored_params={rows.weight})
    packed = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    packed.weight.quant_state = None
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight .* packed bits .*cast to param_dtype=torch.flo"):
        ours(packed, mp_policy=policy)
    net = made(ours)
    with pytest.raises(ValueError, match=r"gathered by functions of their own.*as it is"):
        fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1e-2))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 4, bias=False)
    value = DTensor.from_local(Rounded(torch.zeros(4, 4)), mesh["tp"], [Replicate()])
    module.weight = nn.Parameter(value)
    with pytest.raises(ValueError, match=r"weight .*DTensor over a Rounded"):
        ours(module, mesh=mesh["dp"])
    dist.barrier()
