"""Units on two GPUs: neighboring layers as one, units that stay unsharded over the microbatches of
a step, ranks that use different ones, and weights that another stream is still making when a model
is wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter import fully_shard_model
from megatron_fsdp_adapter.megatron.options.table import UNIT_NUMEL
from megatron_fsdp_adapter.sharding.unsharded_budget import GIB, OPTION
from tests.distributed.checks import check_run_bits
from tests.distributed.gpt import STRATEGIES, Case, Trainer
from tests.distributed.launch import settle_ranks
from tests.distributed.test_launches import HANGS, LIKE, UNLIKE, loss_of, sharded
from tests.gpu.gpu_ranks import WORLD, Check, Outcomes
from tests.gpu.runs import COPY_ENGINES, SLOTS, ZERO_1, ZERO_3, Fields, run_of

CASE = Case(
    num_layers=5, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True,
    bf16=True, microbatches=3,
)  # fmt: skip
OPTIONS: dict[str, Fields] = {
    "plain": {}, "slots": SLOTS, "copy engines": COPY_ENGINES,
    "copy engines, all registered": {"fsdp_copy_engine_all_gather": True, "nccl_ub": True},
}  # fmt: skip


# Neighboring layers as one unit have the bits of units of their own. Norms are sums over other
# rows, so that nothing may be clipped by them.

JOINED = CASE.but(microbatches=2, clip=1e9)
TWO_LAYERS = 1_000_000
"""Elements: more than one layer has, fewer than two."""
MANY = JOINED.but(num_layers=16, microbatches=1)
"""Of so many layers two are joined to one unit where no option says how many."""
SIZES: dict[str, tuple[Case, tuple[int | None, int | None], int]] = {
    "plain": (JOINED, (TWO_LAYERS, None), 2), "by default": (MANY, (None, 0), 8),
    "slots": (JOINED, (TWO_LAYERS, None), 2), "copy engines": (JOINED, (TWO_LAYERS, None), 2),
}  # fmt: skip
"""Of a check: the case, the two sizes, and how many units more there are by the second."""


def joined_train_alike(rank: int, world: int, name: str) -> str:
    """Two ranks' sums are the same in either order."""
    case, numels, fewer = SIZES[name]
    options = OPTIONS.get(name, {})
    (one, joined), (other, single) = (
        run_of(case, ZERO_3, rank, 3, {**options, UNIT_NUMEL: numel}, look=count_of_units)
        for numel in numels
    )
    assert joined == single - fewer, (joined, single)
    check_run_bits(one, other, name)
    return f"{joined} and {single} units, last loss {one[-1].loss:.4f}"


def count_of_units(trainer: Trainer) -> int:
    return len(trainer.wrapper.engine.units)


# Units that stay unsharded: kept weights change no bit, kept gradients have the bits of `optim`.


def bytes_and_kept(trainer: Trainer) -> tuple[int, Any]:
    """Of all gathered weights; what was kept."""
    groups = trainer.wrapper.engine.groups
    nbytes = sum(full.nbytes for group in groups for full in group.weights)
    return nbytes, trainer.wrapper._built.plan.kept


def kept_train_alike(rank: int, world: int, name: str) -> str:
    """Two ranks' sums are the same in either order."""

    def run(strategy: str, options: Fields) -> Any:
        return run_of(CASE, strategy, rank, 3, options, look=bytes_and_kept)

    options = OPTIONS[name]
    sharded, (nbytes, none) = run(ZERO_3, options)
    weights, (_, kept) = run(ZERO_3, {**options, OPTION: nbytes / GIB})
    assert (none.weights, kept.weights, kept.grads) == (0, len(kept.rows), 0), kept
    check_run_bits(weights, sharded, f"{name}, weights kept")
    some, (_, kept) = run(ZERO_3, {**options, OPTION: 1.5 * nbytes / GIB})
    assert 0 < kept.grads < kept.weights == len(kept.rows), kept
    assert some[0].loss == sharded[0].loss and some[-1].norm > 0
    everything, (_, kept) = run(ZERO_3, {**options, OPTION: 1.0})
    assert kept.grads == len(kept.rows)
    whole, _ = run(ZERO_1, {})
    check_run_bits(everything, whole, f"{name}, everything kept")
    return f"{kept.weights} units, last loss {whole[-1].loss:.4f}"


# Ranks that use different units: said a step later, since no host waits for a device. Gathers have
# a communicator of their own, as in Megatron's wrapper.

STEPS = 6


def _step(model: Any, optimizer: Any, step: int, rank: int, path: Any) -> None:
    loss_of(model, step, rank, path(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def like_ranks_train(rank: int, world: int, strategy: str) -> str:
    for path in LIKE.values():
        model, optimizer = sharded(strategy, device="cuda")
        for step in range(STEPS):
            _step(model, optimizer, step, rank, path)
        torch.cuda.synchronize()
    return f"{len(LIKE)} habits, {STEPS} steps each"


CYCLES = 10**9
"""What the other stream is busy with: about half a second."""


def waits(rank: int, world: int) -> None:
    model = nn.Linear(512, 512, device=torch.device("cuda", rank))
    expected = {name: value + 1 for name, value in model.state_dict().items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(CYCLES)
        for param in model.parameters():
            param.add_(1)
    found = fully_shard_model(model).full_state_dict(cpu_offload=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value.cpu()), name


CHECKS = {
    **{f"joined, {name}": Check(joined_train_alike, (name,)) for name in SIZES},
    **{f"kept, {name}": Check(kept_train_alike, (name,)) for name in OPTIONS},
}
LIKE_RANKS = {f"like ranks, {s}": Check(like_ranks_train, (s,)) for s in STRATEGIES}
OUTCOMES = Outcomes({**CHECKS, **LIKE_RANKS}, timeout_s=350.0)
STREAM_OUTCOMES = Outcomes({"waits": Check(waits)}, timeout_s=120.0, world=1)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_gpus(name: str) -> None:
    OUTCOMES.expect(name)


@pytest.mark.parametrize("name", LIKE_RANKS)
def test_ranks_that_use_the_same_units_are_not_disturbed(name: str) -> None:
    OUTCOMES.expect(name)


def test_weights_of_another_stream_are_waited_for() -> None:
    STREAM_OUTCOMES.expect("waits")


def _unlike(rank: int, world: int, strategy: str, name: str) -> int:
    """The step in which the error comes."""
    model, optimizer = sharded(strategy, device="cuda")
    for step in range(STEPS):
        try:
            _step(model, optimizer, step, rank, UNLIKE[name])
        except RuntimeError as error:
            assert "launched different collectives" in str(error), error
            assert "  - ranks [0]: " in str(error) and "  - ranks [1]: " in str(error), error
            return step
    raise AssertionError(f"no error in {STEPS} steps")


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in UNLIKE for s in ("optim", "optim_grads") if (n, s) not in HANGS],
)
def test_ranks_that_use_other_units_are_told_at_the_end_of_the_next_step(
    name: str, strategy: str
) -> None:
    found = settle_ranks(_unlike, WORLD, strategy, name, timeout=120.0, backend="nccl")
    assert found == [(True, 1), (True, 1)], found
