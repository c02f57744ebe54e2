"""Ways to train, a row each, and the runner that compares every row with its reference.

    ROWS = (
        Variant("fixed slots", ddp={"fsdp_double_buffer": True}),
        Variant("units kept", ("optim_grads_params",), ddp={BUDGET: 1.0}, compare="bits",
                reference={"strategy": "optim"}),
    )

    @pytest.mark.parametrize("row", marked(ROWS))
    @on_ranks()
    def test_trains_like_its_reference(row: Variant, rank: int, seed: int) -> None:
        compare(row, rank, seed)

A row is a small GPT of core with options. By default the reference is stock DDP of the same model,
without our options; `reference` says what else it is. `compare` says how near they are to be.
All rows of a session with one number of ranks share one start of processes (`shared_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_fsdp_adapter.megatron.compat import patches
from megatron_fsdp_adapter.megatron.compat.table import FUSED_WGRAD
from tests.lib.gpt import checks
from tests.lib.ranks.groups import use_groups

from .checks import Step, recorded_step
from .gpt import (
    STRATEGIES,
    Case,
    OptimizerOptions,
    Trainer,
    batches,
    build_model,
    init_megatron,
    make_trainer,
)
from .random_cases import random_case
from .topologies import (
    Topology,
    TopologyTrainer,
    build_topology_trainer,
    case_for,
    init_topology,
    run_schedule,
    topology_step,
)

ZERO_0, ZERO_1, ZERO_2, ZERO_3, *_ = STRATEGIES
Options = Mapping[str, Any]
AnyTrainer = Trainer | TopologyTrainer
Change = Callable[[Any], None]
"""Of a bare model, before it is wrapped."""
Drive = Callable[[Any, int, int], Step]
"""A training step of (trainer, its number, rank)."""


def unchanged(model: nn.Module) -> None:
    """Changes nothing."""


def differ_by_rank(model: nn.Module) -> None:
    """Ranks begin differently: the first one's weights count."""
    for param in model.parameters():
        param.data.add_(torch.distributed.get_rank())


def train(trainer: AnyTrainer, number: int, rank: int) -> Step:
    """A step by core's schedule, on the data of that number; collective."""
    if isinstance(trainer, TopologyTrainer):
        return topology_step(trainer, number)
    device = next(trainer.wrapper.parameters()).device
    return recorded_step(trainer, batches(trainer.case, number, rank, device))


def train_and_evaluate(trainer: AnyTrainer, number: int, rank: int) -> Step:
    """`train`, and an evaluation, whose loss is added to the step's; collective."""
    step = train(trainer, number, rank)
    for chunk in trainer.chunks:
        chunk.eval()
    evaluated = run_schedule(trainer, 90 + number, forward_only=True)
    for chunk in trainer.chunks:
        chunk.train()
    return replace(step, loss=step.loss + evaluated)


def nothing_more(ours: Any, reference: Any, strategy: str) -> None:
    """Expects nothing beside the numbers."""


@dataclass(frozen=True)
class Variant:
    """One row: a small GPT and how it is trained; what it is compared with, and how."""

    name: str
    strategies: tuple[str, ...] = STRATEGIES
    world: int = 2
    topology: Topology | None = None
    """Parallel axes beside the data-parallel one."""
    instances: int = 1
    """Of the optimizer, with an outer axis between them."""
    random: bool = False
    """Sizes of the model are drawn from the test's seed."""
    case: Options = field(default_factory=dict)
    """Changes of the case."""
    ddp: Options = field(default_factory=dict)
    """Fields of our DDP config; the reference has none of them."""
    fields: Options = field(default_factory=dict)
    """Fields of the model's config, with a topology."""
    optimizer: OptimizerOptions = field(default_factory=dict)
    """Fields of the optimizer's config."""
    wrapper: Options = field(default_factory=dict)
    """Arguments of our wrapper; the reference has none of them."""
    build: Callable[[Case, torch.device], nn.Module] = build_model
    """Makes the bare model, without a topology."""
    change: Change = unchanged
    """What is done to the bare model, of the reference too."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Is entered around all that the row does."""
    begin: Change = unchanged
    """What is done to our trainers."""
    drive: Drive = train
    steps: int = 3
    compare: str | Comparison = "each step"
    """A key of `COMPARE`, or how."""
    reference: Options = field(default_factory=dict)
    """Fields of the row that the reference has otherwise, and its "strategy": None, stock DDP; one
    of ours; or "own", that of the trainer that is compared with it."""
    expect: Callable[[Any, Any, str], None] = nothing_more
    """What else is asserted in the end, of (our trainer, reference, strategy); collective."""
    needs: tuple[str, ...] = ()
    """Fields of core's configs, and modules of core, that not all releases have."""
    full: bool = False

    def but(self, name: str, **changes: Any) -> Variant:
        return replace(self, name=name, **changes)

    @property
    def plain(self) -> Variant:
        """The reference's row."""
        changes = {name: value for name, value in self.reference.items() if name != "strategy"}
        case = {**self.case, **changes.pop("case", {})}
        return replace(self, **{"ddp": {}, "wrapper": {}, "case": case, **changes})

    def case_of(self, seed: int) -> Case:
        if self.topology:
            return case_for(self.topology, **self.case)
        case = random_case(seed) if self.random else Case()
        return case.but(**self.case)

    def start(self) -> torch.device:
        """Makes the groups; collective."""
        if self.topology:
            return init_topology(self.topology, self.instances)
        device = init_megatron()
        use_groups(num_distributed_optimizer_instances=self.instances)
        return device

    def trainer(self, strategy: str | None, case: Case, device: torch.device) -> AnyTrainer:
        """Strategy None is stock DDP, without overlap: it asserts that every parameter has a
        gradient otherwise."""
        ours = strategy is not None
        ddp: Options = {}
        wrapper: Options = {}
        if ours:
            ddp = self.ddp
            wrapper = self.wrapper
        if self.instances > 1:
            ddp = {"num_distributed_optimizer_instances": self.instances, **ddp}
        if self.topology:
            return build_topology_trainer(
                self.topology,
                case,
                strategy,
                self.change,
                ddp if ours else {},
                self.fields,
                self.optimizer,
                **wrapper,
            )
        if not ours:
            case = case.but(overlap=False)
        model = self.build(case, device)
        self.change(model)
        return make_trainer(model, case, strategy, ddp, self.optimizer, **wrapper)


def marked(rows: Sequence[Variant]) -> list[Any]:
    """Values for `parametrize`, by name; rows that the installed core lacks fields for are
    skipped."""
    assert len({row.name for row in rows}) == len(rows)
    known = TransformerConfig.__dataclass_fields__ | OptimizerConfig.__dataclass_fields__
    found = []
    for row in rows:
        lacks = ", ".join(
            n for n in row.needs if n not in known and not ("." in n and find_spec(n))
        )
        marks = [pytest.mark.skipif(bool(lacks), reason=f"this megatron-core has no {lacks}")]
        found.append(pytest.param(row, id=row.name, marks=marks + [pytest.mark.full] * row.full))
    return found


def _free(ours: Step, reference: Step, label: str) -> None:
    checks.check_numbers(ours, reference, label)
    checks.check_weights(ours.weights, reference.weights, label)


def _bits(ours: Step, reference: Step, label: str, of_norm: float = 0.0) -> None:
    checks.check_run_bits([ours], [reference], label)
    checks.check_number(ours.norm, reference.norm, f"{label}: norm", of_norm)


@dataclass(frozen=True)
class Comparison:
    """How a row's first step is compared with the reference's, both from the same weights, and how
    the later ones. each_step: all begin with the reference's weights; else they run free."""

    first: Callable[[Step, Step, str], None]
    later: Callable[[Step, Step, str], None]
    each_step: bool = False


COMPARE: Mapping[str, Comparison] = {
    "each step": Comparison(checks.check_step, checks.check_step, each_step=True),
    "free": Comparison(checks.check_step, _free),
    "loosely": Comparison(_free, _free),
    "bits": Comparison(_bits, _bits),
    "bits but norm": Comparison(
        partial(_bits, of_norm=checks.NORM), partial(_bits, of_norm=checks.NORM)
    ),
}
"""Bounds of `checks`: of gradients, norm and loss in each step; or of the first step, and of loss,
norm and weights in the others; or of these alone. Bits are those of losses, gradients and weights,
and of the norm of all gradients, where both are sharded alike. It is a sum over tensors, which are
cut and ordered by how they are sharded: "bits but norm" has a bound for it."""


def compare(row: Variant, rank: int, seed: int) -> None:
    """Trains the row under its strategies, and its reference; collective."""
    found = problems(row, rank, seed)
    assert not found, "\n".join(f"{row.name}, {strategy}, {text}" for strategy, text in found[:8])


def check_row(rank: int, world: int, module: str, table: str, name: str, seed: int) -> None:
    """`compare` of the row with this name, for processes that tests are sent to."""
    [row] = [row for row in getattr(import_module(module), table) if row.name == name]
    compare(row, rank, seed)


def problems(row: Variant, rank: int, seed: int) -> list[tuple[str, str]]:
    """(strategy, what differs on this rank); collective."""
    with row.around():
        if row.case_of(seed).fused:
            patches.install(FUSED_WGRAD)
        return list(_problems(row, rank, seed))


def _problems(row: Variant, rank: int, seed: int) -> Iterator[tuple[str, str]]:
    plain = row.plain
    of = row.reference.get("strategy")
    together = [row.strategies]
    if of == "own":
        together = [(one,) for one in row.strategies]
    for strategies in together:
        theirs = strategies[0] if of == "own" else of
        device = plain.start()
        reference = plain.trainer(theirs, plain.case_of(seed), device)
        row.start()
        ours = {name: row.trainer(name, row.case_of(seed), device) for name in strategies}
        for trainer in ours.values():
            row.begin(trainer)
        for number in range(row.steps):
            yield from _step_problems(row, reference, ours, number, rank)
        for strategy, trainer in ours.items():
            row.expect(trainer, reference, strategy)


def _step_problems(
    row: Variant, reference: AnyTrainer, ours: Mapping[str, AnyTrainer], number: int, rank: int
) -> Iterator[tuple[str, str]]:
    if isinstance(row.compare, str):
        how = COMPARE[row.compare]
    else:
        how = row.compare
    row.plain.start()
    weights = reference.params() if how.each_step else {}
    expected = row.drive(reference, number, rank)
    row.start()
    for strategy, trainer in ours.items():
        if weights:
            trainer.load(weights)
        found = row.drive(trainer, number, rank)
        try:
            compared = how.later if number else how.first
            compared(found, expected, f"step {number}")
        except AssertionError as error:  # on one rank, perhaps: the others go on
            yield strategy, f"{error} ({trainer.case})"
