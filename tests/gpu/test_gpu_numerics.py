"""The numerics of tests/megatron/wrapper on NCCL: the same functions, on two GPUs.

Stream order is tested here too, which no CPU run can show: with streams that are slow on purpose
every number must stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_fsdp_adapter.core.runtime.device import COMPUTE, GATHER, REDUCE
from tests.lib.gpt import numerics as numerics
from tests.lib.gpt.checks import check_run_bits, check_same_bits, free_run
from tests.lib.gpt.gpt import STRATEGIES, Case, Trainer, build_trainer, init_megatron
from tests.lib.gpt.random_cases import fresh_seed
from tests.lib.gpt.variants import check_row
from tests.lib.gpu.gpu_ranks import Check, Outcomes, expecting
from tests.lib.gpu.runs import run_of

CHECKS = ("core/engine/engine.py", "core/runtime/device.py", "megatron/optimizer/optimizer.py")

WIDE = Case(
    num_layers=3, hidden=256, heads=4, ffn=640, vocab=1000, seq=128, batch=2, swiglu=True, bf16=True
)
"""Kernels long enough for streams to run beside each other."""

SLEEP_CYCLES = 3_000_000
"""About 1.5 ms on a GPU at 2 GHz: longer than any kernel of `WIDE`."""


def _slow(trainer: Trainer, roles: Sequence[str]) -> None:
    """Every task of `roles` waits on its stream before it does anything."""
    runtime = trainer.wrapper.engine.runtime
    submit = runtime.submit

    def slow_submit(role: str, *tasks: Any) -> None:
        for task in tasks:

            def slow_task(task: Any = task) -> Any:
                torch.cuda._sleep(SLEEP_CYCLES)
                return task()

            submit(role, slow_task if role in roles else task)

    runtime.submit = slow_submit
    if COMPUTE in roles:
        for module in trainer.wrapper.module.modules():
            if not list(module.children()):
                module.register_forward_pre_hook(_sleep_before)
                module.register_full_backward_pre_hook(_sleep_before)


def _sleep_before(*unused: Any) -> None:
    torch.cuda._sleep(SLEEP_CYCLES // 4)


def slow_streams(rank: int, world: int, strategy: str, roles: Sequence[str]) -> str:
    """A slow stream changes no bit: nothing is read before it is there or freed before it is
    used."""
    device = init_megatron()
    plain = free_run(build_trainer(WIDE, strategy, device), rank, 3, device)
    trainer = build_trainer(WIDE, strategy, device)
    _slow(trainer, roles)
    check_run_bits(free_run(trainer, rank, 3, device), plain, f"{strategy}, slow {roles}")
    return f"loss {plain[-1].loss:.6f}"


def same_run_twice(rank: int, world: int, strategy: str) -> str:
    """Two runs are equal bit for bit."""
    runs = [run_of(WIDE, strategy, rank, 5)[0] for _ in range(2)]
    check_run_bits(runs[0], runs[1], strategy)
    return f"loss {runs[0][-1].loss:.6f}"


def strategies_agree(rank: int, world: int) -> None:
    """One microbatch on two ranks: all strategies add the same two numbers, so all agree."""
    case = WIDE.but(microbatches=1, clip=0.0)
    first, *others = (run_of(case, strategy, rank, 3)[0][-1].weights for strategy in STRATEGIES)
    for strategy, weights in zip(STRATEGIES[1:], others, strict=True):
        check_same_bits(weights, first, strategy)


def _checks() -> dict[str, Check]:
    seed = fresh_seed()
    return {
        **{
            row.name: Check(check_row, (numerics.__name__, "ROWS", row.name, seed))
            for row in numerics.ROWS
            if row.world == 2
        },
        **{
            f"twice, {strategy}": Check(same_run_twice, (strategy,))
            for strategy in ("optim", "optim_grads_params")
        },
        "strategies agree": Check(strategies_agree),
        **{
            f"slow {'+'.join(roles)}, {strategy}": Check(slow_streams, (strategy, roles))
            for strategy in ("optim", "optim_grads_params")
            for roles in ((GATHER,), (REDUCE,), (COMPUTE,))
        },
    }


DEVICE_CHECKS = _checks()
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=170.0)

test_on_two_gpus = expecting(OUTCOMES)
