"""Checkpoints of runs whose weights are in Transformer Engine's classes: what is in them, and that
a resume makes the bytes, and takes the steps, of a run that was not stopped. One weight is frozen:
its bytes keep the scale that they were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import (
    load_checkpoint,
    load_training_state,
    save_checkpoint,
    training_state,
)
from megatron_fsdp_adapter.checkpoint.names import FP8_SCALING
from tests.distributed.gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    init_megatron,
)
from tests.distributed.launch import run_ranks
from tests.quantized.te_checks import same
from tests.quantized.te_extension import FOLDERS, RELEASES, standing_in
from tests.quantized.te_modules import KNOWS
from tests.quantized.te_scaling import LENGTH, roll, scale_layers

CASE = Case(hidden=32, heads=2, ffn=64, bf16=True, microbatches=2, lr=3e-3)
SAVED = "optim_grads_params"
Bits = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def bits_of(trainer: Trainer) -> Bits:
    """Of every quantized weight the gathered bytes and scales; every main weight, whole; and what
    delayed scaling knows."""
    found = trainer.params()
    engine = trainer.wrapper.engine
    engine.to_unsharded()
    for unit in engine.units:
        engine.gather.need(unit)
        for entry in [entry for g in unit.groups if g.key.quantized for entry in g.managed]:
            found[f"{entry.fqns[0]}, bytes"] = KNOWS.fields(entry.param)["rowwise"].clone()
            for scale in KNOWS.scales(entry.param)[:1]:
                found[f"{entry.fqns[0]}, scale"] = scale.clone()
        engine.gather.release(unit)
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    return found | {key: value for key, value in state.items() if key.endswith(FP8_SCALING)}


def compare(mine: Bits, other: Bits, where: str) -> None:
    assert mine.keys() == other.keys(), (where, mine.keys() ^ other.keys())
    for name, value in other.items():
        same(mine[name], value, f"{where}, {name}")


def saved(trainer: Trainer, root: str) -> None:
    save_checkpoint(root, 1, training_state([trainer.wrapper], trainer.optimizer))


def loaded(trainer: Trainer, root: str) -> None:
    state = training_state([trainer.wrapper], trainer.optimizer, is_loading=True)
    _, state = load_checkpoint(root, state)
    load_training_state([trainer.wrapper], state, trainer.optimizer)


def steps(trainer: Trainer, first: int, rank: int, device: Any) -> list[Any]:
    """Two of them, with delayed scaling's updates."""
    found = []
    for step in (first, first + 1):
        loss = forward_backward(trainer, batches(CASE, step, rank, device))
        roll(trainer.wrapper)
        assert trainer.optimizer.step()[0]
        found.append(loss)
    return found


def _resume(rank: int, world: int, folder: str, root: str) -> None:
    device = init_megatron()
    with standing_in(Path(folder)):

        def made(strategy: str, seed: int = CASE.seed, length: int = LENGTH) -> Trainer:
            def change(model: Any) -> None:
                scale_layers(model, rank, world, length)
                frozen = model.module.decoder.layers[0].self_attention.linear_proj
                frozen.requires_grad_(False)

            trainer = build_trainer(CASE.but(seed=seed), strategy, device, change)
            trainer.case = CASE
            return trainer

        if world == 2:
            first = made(SAVED)
            steps(first, 0, rank, device)
            # Bytes are made when they are needed: here a save comes before that, there after.
            saved(first, f"{root}/before")
            bits = bits_of(first)
            saved(first, f"{root}/after")
            losses = steps(first, 2, rank, device)
            end = bits_of(first)
            # A step that is left out: the bytes have an older scale than the next ones.
            forward_backward(first, batches(CASE, 4, rank, device))
            roll(first.wrapper)
            first.wrapper.stop_communication()
            saved(first, f"{root}/left out")
            torch.save((bits, losses, end, bits_of(first)), f"{root}/{rank}.pt")
            dist.barrier()
        bits, losses, end, left_out = torch.load(f"{root}/0.pt", weights_only=False)
        made_with = [value[0, 1] for name, value in bits.items() if name.endswith(FP8_SCALING)]
        assert len(made_with) == 4 * CASE.num_layers and all(scale > 100 for scale in made_with)
        for strategy in STRATEGIES if world == 2 else (SAVED,):
            for when, expected in (("before", bits), ("after", bits), ("left out", left_out)):
                second = made(strategy, seed=4321)
                loaded(second, f"{root}/{when}")
                found = bits_of(second)
                compare(found, expected, f"{strategy}, {when}")
                if world == 2 and strategy == SAVED and when != "left out":
                    assert steps(second, 2, rank, device) == losses, when
                    compare(bits_of(second), end, f"two steps after {when}")
        longer = made(SAVED, seed=4321, length=LENGTH + 2)
        loaded(longer, f"{root}/after")
        for name, value in bits_of(longer).items():
            if name.endswith(FP8_SCALING):
                same(value[: LENGTH + 2], bits[name], f"longer, {name}")
                assert not value[LENGTH + 2 :].any()
        dist.barrier()


@pytest.mark.parametrize("folder", RELEASES)
def test_a_resume_with_delayed_scaling_goes_on_as_if_never_stopped(
    folder: Path, tmp_path: Path
) -> None:
    """Two ranks, four strategies; then one rank reads what two have saved."""
    run_ranks(_resume, 2, str(folder), str(tmp_path), timeout=300)
    run_ranks(_resume, 1, str(folder), str(tmp_path), timeout=300)
