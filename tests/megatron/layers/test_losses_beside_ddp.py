"""Twenty steps beside Megatron's DDP on ranks of the host: eager, in graphs of layers, and in these
with a budget for all units, with 1 and 4 microbatches. CUDA graphs have a stand-in, and core's
layers are in the place of Transformer Engine's. On GPUs: tests/gpu/test_gpu_losses.py."""

from __future__ import annotations

import pytest

from megatron_fsdp_adapter.plan.unsharded_budget import GIB
from tests.lib.engine.fake_graphs import FakeGraphs, put_graphs_into
from tests.lib.gpt.gpt import Case, Trainer, build_trainer, init_megatron
from tests.lib.gpu.losses import KINDS, LEAST, ZERO_3, Kind, Numbers, beside_ddp, compare
from tests.lib.ranks.shared_ranks import on_ranks
from tests.lib.ranks.spare_memory import agree_on, spare

CHECKS = ("graphs/layer_graphs.py", "build/auto_budget.py")

CASE = Case(
    num_layers=2,
    hidden=16,
    heads=2,
    ffn=24,
    vocab=24,
    seq=6,
    bias=False,
    swiglu=True,
    bf16=True,
    fused=True,
    lr=1e-2,
)


@pytest.mark.parametrize("microbatches", (1, pytest.param(4, marks=pytest.mark.full)))
@on_ranks(2)
def test_losses_of_twenty_steps_are_those_of_stock_ddp(rank: int, microbatches: int) -> None:
    device = init_megatron()

    def make(case: Case, kind: Kind | None) -> Trainer:
        ddp = {} if kind is None else kind.ddp
        trainer = build_trainer(case, None if kind is None else ZERO_3, device, ddp=ddp)
        if kind is not None and kind.finds_budget:
            agree_on([trainer.wrapper], GIB)
        if kind is not None and kind.captures:
            put_graphs_into(trainer.wrapper, FakeGraphs())
        return trainer

    case = CASE.but(microbatches=microbatches)
    for name, kind in KINDS.items():
        with spare(GIB):
            beside_ddp(rank, make, case, kind, "bf16", f"{name}, {microbatches} microbatches")


def test_losses_that_rounding_does_not_explain_are_wrong() -> None:
    exact = Numbers([4.0, 3.0, 2.0], [1.0, 1.0, 1.0])
    rounded = Numbers([4.0, 3.003, 2.0], [1.0, 1.0, 1.0])
    assert "loss 4.0000 to 2.0000" in compare(exact, (exact, rounded), "")
    near = exact._replace(losses=[4.0, 3.0, 2.007])
    compare(near, (exact, rounded), "")
    for wrong in (
        exact._replace(losses=[4.0, 3.0, 2.009]),
        exact._replace(norms=[1.0, 1.0, 1.0 + 2 * LEAST]),
    ):
        with pytest.raises(AssertionError, match="a row: "):
            compare(wrong, (exact, rounded), "a row")
