"""Megatron's wrapper over a GPT whose layers' weights are in Transformer Engine's own classes:
after every step bytes and scales are what TE's function makes of the whole main weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.quantization import Quantization
from megatron_fsdp_adapter.megatron.full_iteration_graphs import FullIterationGraphs
from tests.adapter.test_cuda_graphs import Capturing
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
    train_step,
)
from tests.distributed.launch import run_ranks
from tests.quantized.te_checks import own_group, same
from tests.quantized.te_extension import FOLDERS, RELEASES, standing_in
from tests.quantized.te_modules import KNOWS
from tests.quantized.te_weights import RECIPES, quantizer, te_quantize

CASE = Case(hidden=64, heads=2, ffn=192, bf16=True, microbatches=2, lr=3e-3)

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def made(recipe: str, param: nn.Parameter, group: Any) -> Any:
    """A quantized parameter in the place of `param`, as TE makes it."""
    value = param.detach().clone()
    wants = quantizer(recipe, torch.tensor([100.0, 0.0]))
    found: Any = nn.Parameter(wants.make_empty(value.shape, dtype=value.dtype, device="cpu"))
    te_quantize([found], [value.view(-1)], [0], group)
    found.__dict__.update(param.__dict__)
    found._high_precision_init_val = value
    return found


def quantize_layers(model: nn.Module, recipe: str, group: Any) -> None:
    for name, module in model.named_modules():
        if ".linear_" in f".{name}" and "decoder" in name:
            module._parameters["weight"] = made(recipe, module._parameters["weight"], group)


def check_weights(trainer: Trainer, recipe: str, group: Any, label: str) -> int:
    """Gathered bytes and scales, against TE's function over whole main weights."""
    engine, checked = trainer.wrapper.engine, 0
    mains = {name.removeprefix("module."): value for name, value in trainer.params().items()}
    engine.to_unsharded()
    for unit in engine.units:
        engine.gather.need(unit)
        entries = [entry for g in unit.groups if g.key.quantized for entry in g.managed]
        for entry in entries:
            name, param = entry.fqns[0], entry.param
            main = next(value for other, value in mains.items() if name.endswith(other))
            slots = torch.tensor([100.0, 0.0])
            other: Any = quantizer(recipe, slots).make_empty(
                param.shape, dtype=param.dtype, device="cpu"
            )
            te_quantize([other], [main.reshape(-1)], [0], group)
            mine, theirs = KNOWS.fields(param), KNOWS.fields(other)
            for plane in mine:
                same(mine[plane], theirs[plane], f"{label}, {plane} of {name}")
            for one, two in zip(KNOWS.scales(param), KNOWS.scales(other), strict=True):
                same(one, two, f"{label}, scales of {name}")
            # cuBLAS refuses a scale that begins elsewhere.
            for one in KNOWS.scales(param):
                assert one.data_ptr() % 16 == 0, f"{label}, scales of {name}"
            checked += 1
        engine.gather.release(unit)
    return checked


def _step_after_capture(trainer: Trainer, rank: int) -> None:
    """The optimizer's step behind an iteration that was captured: what follows may be a replay,
    in which nothing of Python runs."""
    flag = Capturing()
    trainer.wrapper.captures = FullIterationGraphs(trainer.wrapper.engine, flag)
    flag.now = True
    trainer.wrapper.zero_grad_buffer()
    forward_backward(trainer, batches(CASE, 1, rank, torch.device("cpu")))
    flag.now = False
    before = _bytes(trainer)
    trainer.optimizer.step()
    with mock.patch.object(Quantization, "catch_up", side_effect=AssertionError("runs Python")):
        now = _bytes(trainer)
    changed = [not torch.equal(now[name], before[name]) for name in before]
    assert all(changed), f"{sum(changed)} of {len(changed)} weights have changed"


def _bytes(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of every quantized weight, as a replay gathers them."""
    engine, found = trainer.wrapper.engine, {}
    engine.gather.release_all()
    for unit in engine.units:
        engine.gather.need(unit)
        for group in unit.groups:
            for index, entry in enumerate(group.managed if group.key.quantized else ()):
                planes = [plane.items[index].flatten() for plane in group.planes]
                found[entry.fqns[0]] = torch.cat(planes).clone()
        engine.gather.release(unit)
    return found


def _train(rank: int, world: int, folder: str, strategy: str) -> None:
    device = init_megatron()
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        for recipe in RECIPES:
            def change(model: nn.Module, recipe: str = recipe) -> None:
                quantize_layers(model, recipe, group)

            trainer = build_trainer(CASE, strategy, device, change)
            assert check_weights(trainer, recipe, group, "made") == 4 * CASE.num_layers
            losses = []
            for step in range(3):
                loss, norm = train_step(trainer, batches(CASE, 0, rank, device))
                losses.append(loss)
                assert norm > 0
                check_weights(trainer, recipe, group, f"{recipe}, {strategy}, step {step}")
            assert losses[2] < losses[1] < losses[0], losses
            _step_after_capture(trainer, rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("folder", RELEASES)
def test_a_gpt_in_megatrons_wrapper(folder: Path, strategy: str) -> None:
    run_ranks(_train, 2, str(folder), strategy, timeout=300)


def _mains_of_steps(rank: int, world: int, folder: str, recipe: str) -> list[tuple[float, str]]:
    """Of each step the loss, and a digest of all main weights. Microbatches of the ranks of two
    are those of one process."""
    device, case = init_megatron(), CASE.but(microbatches=1, clip=0.0)
    with standing_in(Path(folder)):
        group = own_group(rank, world)
        trainer = build_trainer(
            case, "optim_grads_params", device, lambda model: quantize_layers(model, recipe, group)
        )
        found = []
        for step in range(3):
            ranks = [rank] if world == 2 else [0, 1]
            data = [batch for one in ranks for batch in batches(case, step, one, device)]
            loss, _ = train_step(trainer, data)
            mains = b"".join(value.numpy().tobytes() for value in trainer.params().values())
            found.append((loss, hashlib.sha256(mains).hexdigest()))
    return found


@pytest.mark.parametrize("folder", FOLDERS[:1], ids=lambda folder: folder.name)
def test_two_ranks_are_one_process(folder: Path) -> None:
    one, two = (run_ranks(_mains_of_steps, n, str(folder), "mxfp8", timeout=300) for n in (1, 2))
    assert one[0] == two[0] == two[1]
    assert len({digest for _, digest in one[0]}) == 3
