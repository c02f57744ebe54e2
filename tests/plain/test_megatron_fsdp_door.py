"""The API of `megatron_fsdp` on our engine: numbers against one process without sharding, what its
loops call, checkpoints by torch DCP, and what is refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.plain import megatron_fsdp as door
from megatron_fsdp_adapter.plain import uneven_dtensor
from tests.lib.gpt.checks import check_same_bits
from tests.lib.plain.plain import STEPS, Block, Side, net, tokens
from tests.lib.plain.plain_loops import microbatched
from tests.lib.ranks.groups import everyones
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "plain/megatron_fsdp.py",
    "plain/named_dims.py",
    "plain/uneven_dtensor.py",
    "plain/as_megatron_fsdp/__init__.py",
    "plain/as_megatron_fsdp/megatron_fsdp/__init__.py",
    "plain/as_megatron_fsdp/megatron_fsdp/distributed_data_parallel_config.py",
    "plain/as_megatron_fsdp/megatron_fsdp/fully_shard.py",
    "plain/as_megatron_fsdp/megatron_fsdp/megatron_fsdp.py",
    "plain/as_megatron_fsdp/megatron_fsdp/mixed_precision.py",
    "plain/as_megatron_fsdp/megatron_fsdp/package_info.py",
    "plain/as_megatron_fsdp/megatron_fsdp/uneven_dtensor.py",
    "plain/as_megatron_fsdp/megatron_fsdp/utils.py",
)

BF16 = torch.bfloat16
MICROBATCHES = 2
UNITS = [Block, "torch.nn.Embedding", nn.Conv2d]
"""A class, an import path, and a class that the model has none of."""


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Two groups, of one weight decay each."""
    params = list(params)
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.3},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def sharded(world: int, module: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    module = module or net(blocks=2)
    given = {"dp_shard_dim": "dp_cp", "tp_dim": "tp", "fsdp_unit_modules": UNITS, **options}
    return door.fully_shard(module, adam(module.parameters()), mesh, **given)


Around = Callable[[Any, bool], AbstractContextManager[Any]]
"""What is around forward and backward of a microbatch: of (model, whether it is the last one)."""


def _last_syncs(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    model.set_model_auto_sync(is_last)
    return nullcontext()


def _never(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """The optimizer's step completes gradients."""
    return _last_syncs(model, False)


def _no_sync_but_last(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    if is_last:
        return nullcontext()
    return model.no_sync()


def train(model: Any, optimizer: Any, rank: int, around: Around, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            with around(model, is_last):
                loss = model(tokens(step, microbatch, rank)) / MICROBATCHES
                loss.backward()
            losses.append(loss.item())
            complete = all(param.grad is not None for param in model.parameters())
            assert complete == (is_last and around is not _never), microbatch
        optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
        optimizer.zero_grad(zero_grad_buffer=True)
    return losses


def whole(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        found[name.removeprefix("module.")] = uneven_dtensor.uneven_dtensor_to_full_tensor(value)
    return found


def near(found: Any, expected: Any, say: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, msg=lambda s: f"{say}: {s}")


@pytest.mark.parametrize(("number", "name"), [*enumerate(STRATEGIES)])
@on_ranks(2)
def test_loops_written_for_megatron_fsdp(rank: int, world: int, number: int, name: str) -> None:
    known = Side(rank, world, None)
    microbatched(known, adam, MICROBATCHES)
    for strategy, around in ((number, _last_syncs), (name, _never), (name, _no_sync_but_last)):
        model, optimizer = sharded(world, zero_dp_strategy=strategy)
        assert model.data_parallel_sharding_strategy == name
        losses = everyones(train(model, optimizer, rank, around))
        means = [sum(each) / world for each in zip(*losses, strict=True)]
        near(means, known.numbers, around)
        weights = {f"0 {key}": value for key, value in whole(model).items()}
        near(weights, known.weights(), around)


@on_ranks(2)
def test_sums_and_scales(rank: int, world: int) -> None:
    """The sum over ranks where losses are per token, and what `scale_gradients` makes of it."""
    grads = []
    for per_token in (False, True):
        model, _ = sharded(world, calculate_per_token_loss=per_token, zero_dp_strategy=1)
        model(tokens(0, 0, rank)).backward()
        if not per_token:
            model.scale_gradients(float(world))
        grads.append([param.grad.full_tensor() for param in model.parameters()])
        model.zero_grad_buffer()
        for param in model.parameters():
            assert param.grad is None
    near(*grads, "sums")


@on_ranks(2)
def test_dtypes_of_gradients(rank: int, world: int) -> None:
    """Gradients in the parameters' dtype, unless it is asked for another."""
    for module, grads, expected in (
        (net(), None, torch.float32),
        (net(BF16), None, BF16),
        (net(BF16), torch.float32, torch.float32),
    ):
        policy = door.MixedPrecisionPolicy(main_grads_dtype=grads)
        model, _ = sharded(world, module, mixed_precision_policy=policy)
        model(tokens(0, 0, rank)).backward()
        found = {param.grad.dtype for param in model.parameters()}
        assert found == {expected}
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@on_ranks(2)
def test_checkpoints_by_torch(rank: int, world: int, root: Path) -> None:
    """A fresh optimizer's state dict is what DCP loads into; training goes on bit for bit."""
    model, optimizer = sharded(world)
    untouched = whole(model)
    near(untouched["head.weight"], net(blocks=2).head.weight.detach(), "no step was taken")
    train(model, optimizer, rank, _last_syncs)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(states), checkpoint_id=root)
    expected = train(model, optimizer, rank, _last_syncs, first=7)
    other, resumed = sharded(world)
    states = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(states, checkpoint_id=root)
    other.load_state_dict(states["model"], strict=False)
    resumed.load_state_dict(states["optimizer"])
    assert train(other, resumed, rank, _last_syncs, first=7) == expected
    check_same_bits(whole(other), whole(model), "resumed")


OPTIMIZERS = (
    torch.optim.Adam,
    torch.optim.RAdam,
    torch.optim.NAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.Adagrad,
)


def _state_keys(optimizer: Any) -> list[set[str]]:
    """The names of what is kept of each parameter."""
    state = optimizer.state_dict()["state"]
    return [{*kept} for kept in state.values()]


@on_ranks(2)
def test_state_of_optimizers(rank: int, world: int) -> None:
    """State from the start, of all of torch's that step on rows."""
    for make in OPTIMIZERS:
        model = door.fully_shard_model(net(), fsdp_unit_modules=[Block])
        optimizer = door.fully_shard_optimizer(make(model.parameters(), lr=1e-2))
        kept = _state_keys(optimizer)
        assert len(kept) == len(list(model.parameters())), make
        model(tokens(0, 0, rank)).backward()
        optimizer.step()
        assert kept == _state_keys(optimizer), make


@on_ranks(1)
def test_dampened_momentum_begins_as_the_first_gradient(rank: int) -> None:
    """As torch's does: zeros made before it would dampen that gradient too."""
    found = []
    for strategy in (None, "optim_grads_params"):
        side = Side(rank, 1, strategy)
        model = side.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
        if strategy is not None:
            with pytest.warns(UserWarning, match="optimizer=SGD: state_dict"):
                optimizer = door.fully_shard_optimizer(optimizer)
            assert _state_keys(optimizer) == []
        for step in range(2):
            side.step(model, optimizer, step)
        found.append(side.weights())
    near(found[1], found[0], "dampened")


@on_ranks(2)
def test_members(rank: int, world: int) -> None:
    model, _ = sharded(world)
    assert door.find_megatron_fsdp(SimpleNamespace(module=model)) is model
    assert next(model.parameters())._megatron_fsdp_model is model
    assert model.model_auto_sync
    assert model.dist_index.get_fsdp_group().size() == world
    assert model.dist_index.get_submesh(("dp", "tp")).ndim == 2
    model.set_model_auto_sync(False)
    with model.sync():
        assert model.model_auto_sync
    assert not model.model_auto_sync
    assert not model.is_last_microbatch
    for name in (
        "start_param_sync",
        "start_grad_sync",
        "broadcast_params",
        "synchronize_param_gather",
        "install_optimized_model_weights",
    ):
        getattr(model, name)()
    with model.mixed_precision_context(door.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)):
        compiled = torch.compile(model, backend="eager")
        with pytest.warns(UserWarning, match="torch.compile") if rank == 0 else nullcontext():
            compiled(tokens(0, 0, rank)).backward()
    model.finish_grad_sync()
    for param in model.parameters():
        assert param.grad is not None
    weight = model.module.head.weight
    expected = weight.full_tensor().split([4, 15])
    for part, value in zip(uneven_dtensor.split_dtensor(weight, [4, 15]), expected, strict=True):
        assert isinstance(part, DTensor)
        assert torch.equal(part.full_tensor(), value)
    attention = nn.Sequential(nn.MultiheadAttention(8, 2, device="meta"))
    started = door.fully_shard_model(attention, init_model_with_meta_device=True)
    assert not any(value.isnan().any() for value in whole(started).values())


def _on(mesh_dims: tuple[str, ...] = ("dp",), **options: Any) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        mesh = init_device_mesh("cpu", (1,) * len(mesh_dims), mesh_dim_names=mesh_dims)
        return door.fully_shard_model(module, mesh, **{"dp_shard_dim": "dp", **options})

    return make


def _experts(module: Any) -> None:
    module.head.weight.allreduce = False
    door.fully_shard_model(module)


def _in_float64(module: Any) -> None:
    policy = door.MixedPrecisionPolicy(torch.float64)
    use = _on(mixed_precision_policy=policy)
    use(module)


def _foreign(module: Any) -> None:
    others = Block().up.parameters()
    door.fully_shard(module, adam(others))


def _buffer_is_kept(module: Any) -> None:
    _, optimizer = door.fully_shard(module, adam(module.parameters()))
    optimizer.zero_grad(zero_grad_buffer=False)


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "number": ("zero_dp_strategy=4", _on(zero_dp_strategy=4)),
    "name": ("zero_dp_strategy='zero3'", _on(zero_dp_strategy="zero3")),
    "outer": ("outer_dp_sharding_strategy=2", _on(outer_dp_sharding_strategy=2)),
    "dim": ("dp_shard_dim='cp'", _on(dp_shard_dim="cp")),
    "no dim": ("dp_shard_dim=None", _on(dp_shard_dim=None)),
    "tp": ("tp_dim='tp'", _on(tp_dim="tp")),
    "graph": ("cuda_graph_mode=True", _on(cuda_graph_mode=True)),
    "expert mesh": ("expt_device_mesh", _on(expt_device_mesh=object())),
    "hybrid group": ("hybrid_fsdp_group", _on(hybrid_fsdp_group=object())),
    "experts": ("experts", _experts),
    "unit": ("Blok", _on(fsdp_unit_modules=["Blok"])),
    "one unit": ("Put it into a list", _on(fsdp_unit_modules=Block)),
    "dtype": ("main_params_dtype", _in_float64),
    "foreign": ("2 of its parameters", _foreign),
    "buffer": ("zero_grad_buffer=False", _buffer_is_kept),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_an_early_error(one_rank: None, name: str) -> None:
    said, use = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        use(net())


def test_signatures_are_those_of_the_package() -> None:
    names = [*inspect.signature(door.fully_shard_model).parameters]
    assert names[:5] == ["module", "device_mesh", "dp_shard_dim", "dp_outer_dim", "tp_dim"]
    assert len(names) == 33
    assert {*door.HINTS} <= {*names}
    assert [*inspect.signature(door.fully_shard).parameters] == ["module", "optimizer", *names[1:]]


IMPORTS = """
from megatron_fsdp import DistributedDataParallelConfig, MegatronFSDP, fully_shard, __version__
from megatron_fsdp.fully_shard import fully_shard_model, ShardingStrategy
from megatron_fsdp.uneven_dtensor import gather_uneven_dtensor_to_full_tensor
from megatron_fsdp.utils import FSDPDistributedIndex
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.package_info import __version__ as version
import importlib.util, megatron_fsdp.utils
assert importlib.util.find_spec("megatron_fsdp") and version == __version__ == "0.6.1"
for one in (MegatronFSDP, fully_shard, fully_shard_model, MixedPrecisionPolicy):
    assert one.__module__.startswith("megatron_fsdp_adapter.")
try:
    import megatron_fsdp.experimental
except ModuleNotFoundError:
    print("done")
"""
FOLDER = Path(door.__file__).parent / "as_megatron_fsdp"
CALL = "import megatron_fsdp_adapter as a; a.use_as_megatron_fsdp(); a.use_as_megatron_fsdp()\n"


@pytest.mark.parametrize(
    ("program", "in_front", "said"),
    [
        (CALL + IMPORTS, "", "done"),
        (IMPORTS, str(FOLDER), "done"),
        (
            "import sys, types; sys.modules['megatron_fsdp'] = types.ModuleType('x')\n" + CALL,
            "",
            "RuntimeError: use_as_megatron_fsdp: megatron_fsdp was imported already",
        ),
    ],
)
def test_the_name_is_ours_when_asked_for(program: str, in_front: str, said: str) -> None:
    if in_front:
        begin = f"import sys; sys.path.insert(0, {in_front!r})\n"
    else:
        begin = ""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", begin + program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert said in done.stdout + done.stderr, done.stdout + done.stderr
