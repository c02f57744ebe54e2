"""Training steps in every mixture of dtypes, against sums in float64.

The bound of a gradient element follows from the roundings on its way (`exact.gamma`): it is put
into the main-gradient or the communication dtype, summed over microbatches in the former and over
ranks in the latter, and scaled. In every strategy that is at most

    world              roundings in the communication dtype (one cast, world - 1 additions)
    microbatches + 2   in the main-gradient dtype (microbatches - 1 additions, casts, the scale)

With sums in float32 of what was sent in bf16, the additions over ranks round in float32. Over an
outer axis, which is reduced in the main-gradient dtype, that dtype rounds once more for each rank
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.lib.gpt.checks import check_same_bits
from tests.lib.gpt.exact import gamma
from tests.lib.gpt.gpt import full_all
from tests.lib.matrix.cover import Space, covering_array
from tests.lib.matrix.table import Rule
from tests.lib.plain.plain import Block, device, net, tokens

FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
UNIT = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}


@dataclass(frozen=True)
class Cell:
    """One mixture. None of a dtype is what it means in the policy."""

    strategy: str = "optim_grads_params"
    params: torch.dtype = BF16
    main_params: torch.dtype | None = FP32
    main_grads: torch.dtype | None = None
    comm: torch.dtype | None = None
    microbatches: int = 1
    world: int = 2
    fp32_accumulation: bool = False
    outer: int = 1
    shard_outer: bool = False

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(self.main_params, self.main_grads, self.comm)

    @property
    def main_dtype(self) -> torch.dtype:
        return self.params if self.main_params is None else self.main_params

    def __str__(self) -> str:
        return " ".join(str(value).removeprefix("torch.") for value in astuple(self))


FACTORS: Mapping[str, tuple[Any, ...]] = {
    "strategy": tuple(STRATEGIES),
    "params": (FP32, BF16, FP16),
    "main_params": (FP32, BF16, None),
    "main_grads": (None, FP32, BF16),
    "comm": (None, FP32, BF16),
    "microbatches": (1, 4),
    "world": (1, 2, 4),
}


def _cannot_hold(params: torch.dtype, main_params: torch.dtype | None) -> bool:
    if main_params is None:
        return False
    return torch.promote_types(main_params, params) != main_params


NARROW = Rule(
    "main weights", "they cannot hold what the parameters do, which is refused", _cannot_hold
)
SPACE = Space(FACTORS, (NARROW,), {})


def pairwise() -> list[Cell]:
    """Cells in which every two values of two factors occur together; the same each time."""
    return [Cell(**row) for row in covering_array(SPACE)]  # type: ignore[arg-type]


WITH_FP32_ACCUMULATION = []
for _strategy in list(STRATEGIES)[1:]:
    for _microbatches, _world in ((4, 1), (1, 2), (4, 4)):
        WITH_FP32_ACCUMULATION.append(
            Cell(_strategy, BF16, FP32, None, BF16, _microbatches, _world, True)
        )
OVER_TWO_AXES = [
    Cell("no_shard", BF16, FP32, BF16, FP32, 4, 4, outer=2),
    Cell("optim", BF16, FP32, None, BF16, 4, 4, outer=2, shard_outer=True),
    Cell("optim", BF16, FP32, None, BF16, 4, 4, True, outer=2, shard_outer=True),
    Cell("optim_grads", BF16, FP32, BF16, None, 1, 4, outer=2, shard_outer=True),
    Cell("optim_grads_params", BF16, FP32, None, BF16, 4, 4, outer=2),
    Cell("optim_grads_params", BF16, FP32, BF16, FP32, 1, 4, outer=2, shard_outer=True),
]
"""Four ranks in two instances, which hold the same or share main weights out."""


def build(cell: Cell) -> Any:
    sizes = (cell.outer, cell.world // cell.outer)
    names = ("outer", "shard")
    mesh = None
    if cell.outer > 1:
        mesh = init_device_mesh(device().type, sizes, mesh_dim_names=names)
    return fully_shard_model(
        net(cell.params),
        mesh,
        [Block, nn.Embedding],
        outer_dp_sharding_strategy="optim" if cell.shard_outer else "no_shard",
        data_parallel_sharding_strategy=cell.strategy,
        mixed_precision_policy=cell.policy,
        reduce_scatter_with_fp32_accumulation=cell.fp32_accumulation,
    )


def full_params(model: Any) -> dict[str, torch.Tensor]:
    """Main weights by the module's own names; collective."""
    return full_all({n.removeprefix("module."): v for n, v in model.state_dict().items()})


def exact_gradients(
    cell: Cell, weights: dict[str, torch.Tensor], step: int, rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(mean over ranks of the sum over microbatches, the same of absolute values) in float64, from
    a model that nothing wraps and that computes in the cell's dtype; collective."""
    model = net(cell.params)
    for name, param in model.named_parameters():
        param.data.copy_(weights[name].view(param.shape))
    params = dict(model.named_parameters())
    losses = (model(tokens(step, number, rank)) for number in range(cell.microbatches))
    grads = [torch.autograd.grad(loss, [*params.values()]) for loss in losses]
    means = []
    for of in (torch.Tensor.double, lambda grad: grad.double().abs()):
        sums = [sum(map(of, each)) for each in zip(*grads, strict=True)]
        for value in sums:
            dist.all_reduce(value)
        means.append({n: v.cpu() / cell.world for n, v in zip(params, sums, strict=True)})
    return means[0], means[1]


def allowed_relative(cell: Cell) -> float:
    """Of an element's mean absolute gradient; see the module's text."""
    grads = UNIT[cell.policy.grads_dtype]
    comm = UNIT[cell.policy.comm_dtype]
    inner = cell.world // cell.outer
    over_ranks = gamma(inner, comm)
    if cell.fp32_accumulation:
        over_ranks = (1 + gamma(1, comm)) * (1 + gamma(inner, UNIT[FP32])) - 1
    in_grads = gamma(cell.microbatches + 1 + cell.outer, grads)
    return (1 + over_ranks) * (1 + in_grads) - 1


def check_gradients(model: Any, cell: Cell, exact: Any, absolute: Any) -> float:
    """All within their bounds; returns the largest error as a part of the mean of absolutes."""
    dtypes = {(param.grad.dtype, param.dtype) for param in model.parameters()}
    assert dtypes == {(cell.policy.grads_dtype, cell.main_dtype)}, f"{cell}: {dtypes}"
    named = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    worst = 0.0
    for name, grad in full_all(named).items():
        expected = exact[name].view(grad.shape)
        size = absolute[name].view(grad.shape) + 1e-37
        error = ((grad.double() - expected).abs() / size).max().item()
        assert error <= allowed_relative(cell), (
            f"{cell}: gradient of {name} is off by {error:.3e} of its mean absolute value; "
            f"allowed {allowed_relative(cell):.3e}"
        )
        worst = max(worst, error)
    return worst


def adamw(params: Any) -> torch.optim.Optimizer:
    """With an epsilon that float16 main weights do not lose."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def check_update(model: Any, optimizer: Any, cell: Cell) -> None:
    """The step on shards is the step on whole tensors, bit for bit."""
    named = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    grads = full_all(named)
    whole = full_params(model)
    plain = {name: nn.Parameter(value.clone().to(device())) for name, value in whole.items()}
    for name, param in plain.items():
        param.grad = grads[name].to(device(), param.dtype)
    adamw(plain.values()).step()
    optimizer.step()
    whole = {name: param.cpu() for name, param in plain.items()}
    check_same_bits(full_params(model), whole, f"{cell}: weights")


def check_cell(cell: Cell, rank: int, steps: int = 2) -> float:
    """The largest error of a gradient in any step; collective."""
    model = build(cell)
    worst = 0.0
    for step in range(steps):
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        exact, absolute = exact_gradients(cell, full_params(model), step, rank)
        for microbatch in range(cell.microbatches):
            model.engine.microbatch(last=microbatch == cell.microbatches - 1)
            model(tokens(step, microbatch, rank)).backward()
        worst = max(worst, check_gradients(model, cell, exact, absolute))
        check_update(model, optimizer, cell)
        optimizer.zero_grad()
    return worst
