"""Copies of units for an export, under the recording runtime: every access is ordered behind the
one before it, and both orders are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_fsdp_adapter.core.config import STRATEGIES
from megatron_fsdp_adapter.core.runtime.device import COMPUTE
from megatron_fsdp_adapter.sharding import unit_copies
from tests.engine.engine_cases import Rig, Setup, build
from tests.engine.engine_scenarios import VARIANTS, variant_cells
from tests.engine.pretended import pretended_world
from tests.engine.recording import RaceError

COVERED = ("untied", "tied", "frozen", "no_overlap", "two_domains", "two_instances", "slots",
           "shared_instances")  # fmt: skip


@contextmanager
def rig_of(setup: Setup) -> Iterator[Rig]:
    with pretended_world(setup.world, setup.rank):
        rig = build(setup)
        for axis in (rig.engine.gather.communicators, rig.engine.gather.outer):
            for communicator in axis.values():
                communicator.initial = lambda output: rig.initial.get(  # type: ignore[attr-defined]
                    id(output), torch.zeros(output.shape, dtype=output.dtype)
                )
        with rig.watch():
            yield rig


def exported(rig: Rig, dtype: torch.dtype | None, units: int | None = None) -> None:
    """Reads every tensor of the first units, and keeps none."""
    wanted = unit_copies.Wanted(lambda group: True, dtype, False)
    copies = unit_copies.unit_copies(rig.engine, wanted)
    for number, unit in enumerate(copies):
        while unit:
            _, planes = unit.pop()
            planes.pop(unit_copies.WEIGHT).sum()
        if number + 1 == units:
            copies.close()


def exports(rig: Rig) -> None:
    """After a step, with gathers in flight; with gradients; behind an evaluation; not to the end.
    """
    rig.step()
    exported(rig, torch.bfloat16)
    rig.step(sync=False)
    exported(rig, None)
    rig.zero()
    rig.forward_backward(2)
    exported(rig, torch.bfloat16, units=2)
    rig.finish()
    exported(rig, torch.float32)
    rig.optimizer_step()
    exported(rig, torch.bfloat16, units=1)
    rig.evaluate()
    exported(rig, torch.bfloat16)
    rig.load()
    exported(rig, torch.bfloat16)
    rig.step()


@pytest.mark.parametrize(("strategy", "variant"), variant_cells(COVERED))
def test_every_access_is_ordered(strategy: str, variant: str) -> None:
    with rig_of(Setup(strategy, **VARIANTS[variant])) as rig:
        exports(rig)


@pytest.mark.parametrize("recipe", ["current", "block128", "mxfp8"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_access_to_bytes_is_ordered(strategy: str, recipe: str) -> None:
    with rig_of(Setup(strategy, recipe=recipe)) as rig:
        for sync in (True, False):
            rig.step(sync=sync)
            wanted = unit_copies.Wanted(lambda group: True, torch.bfloat16, True)
            for unit in unit_copies.unit_copies(rig.engine, wanted):
                for _, planes in unit:
                    for tensor in planes.values():
                        tensor.max()
        rig.step()


def test_gathers_have_to_wait_for_main_weights_and_for_the_memory_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig_of(Setup("optim_grads_params")) as rig:
        rig.step(sync=False)
        monkeypatch.setattr(rig.engine.gather, "follow_compute", lambda: None)
        with pytest.raises(RaceError):
            exported(rig, torch.bfloat16)


def test_the_caller_has_to_wait_for_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RaceError), rig_of(Setup("optim_grads_params")) as rig:
        rig.step(sync=False)
        wait = rig.runtime.wait

        def without(role: str, event: Any) -> None:
            if role != COMPUTE:
                wait(role, event)

        monkeypatch.setattr(rig.runtime, "wait", without)
        exported(rig, torch.bfloat16)


def test_an_export_that_is_not_run_to_its_end_waits_for_what_it_has_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig_of(Setup("optim_grads_params")) as rig:
        rig.step()
        wanted = unit_copies.Wanted(lambda group: True, None, False)
        copies = unit_copies.unit_copies(rig.engine, wanted)
        next(copies)
        waited: list[str] = []
        wait = rig.runtime.wait
        monkeypatch.setattr(
            rig.runtime, "wait", lambda role, event: (waited.append(role), wait(role, event))
        )
        copies.close()
        assert waited == [COMPUTE]
