"""Muon in cells and in their references.

Stock DDP's optimizer is Adam. In the reference its step finds no gradients of Muon's matrices: they
have been updated by `muon_reference.py`, which has whole matrices, with the gradients that Adam
would have been given, clipped. One Newton-Schulz step is made: more would multiply the errors of
gradients, which cells have more of than Muon's own tests, by hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.lib.gpt.gather_full import main_piece, optimizers_of, pieces_of, put_together
from tests.lib.gpt.muon_reference import QUINTIC, Reference, is_muons
from tests.lib.gpt.topologies import TopologyTrainer

from .table import Cell

FACTOR = 0.2
"""On updates, which then have the size of Adam's."""


def muon_options(cell: Cell) -> dict[str, Any]:
    """Of the optimizer config; none for Adam."""
    if cell["optimizer"] != "muon":
        return {}
    return {
        "optimizer": "muon",
        "muon_num_ns_steps": 1,
        "muon_extra_scale_factor": FACTOR,
        "muon_fp32_matmul_prec": "highest" if cell["precision"] == "fp32" else "medium",
    }


def steps_by_hand(trainer: TopologyTrainer, cell: Cell, is_split: bool) -> Mapping[str, float]:
    """Makes Muon's steps in the reference, if the cell has any; `is_split`: main weights are the
    distributed optimizer's. What is returned is filled in by the steps: by name, how many times an
    error of the gradient, relative to it, may be in the update."""
    if cell["optimizer"] != "muon":
        return {}
    case = trainer.case
    reference = Reference(
        trainer.chunks[0].config,
        case.lr,
        case.weight_decay,
        case.adam_eps,
        case.clip,
        scale=lambda rows, columns: FACTOR * max(rows, columns) ** 0.5,
        coefficients=QUINTIC[:1],
    )
    first = next(o.optimizer for o in optimizers_of(trainer.optimizer) if o.optimizer is not None)
    # By then core has clipped the gradients of all chained optimizers.
    first.register_step_pre_hook(
        lambda *unused: _step_split(trainer, reference) if is_split else _step(trainer, reference)
    )
    return reference.gains


def _matrices(trainer: TopologyTrainer) -> list[tuple[str, Any]]:
    found = []
    for name, param in trainer.named_parameters():
        if param.requires_grad and is_muons(name, param):
            found.append((name, param))
    return found


@torch.no_grad()
def _step(trainer: TopologyTrainer, reference: Reference) -> None:
    for name, param in _matrices(trainer):
        main = getattr(param, "main_param", param)
        main.copy_(reference.muon(name, param, main.clone(), main.grad))
        main.grad = None


@torch.no_grad()
def _step_split(trainer: TopologyTrainer, reference: Reference) -> None:
    """The distributed optimizer has pieces of main weights; collective."""
    weights, gradients = (
        put_together(trainer.named_parameters(), trainer.optimizer, piece)
        for piece in (main_piece, lambda param, rows: param.main_param.grad)
    )
    pieces = pieces_of(trainer.optimizer)
    for name, param in _matrices(trainer):
        updated = reference.muon(name, param, weights[name], gradients[name])
        rows = pieces.get(id(param))
        if rows is not None:
            main = main_piece(param, rows)
            main.copy_(updated.view(-1)[rows].view_as(main))
            param.main_param.grad = None
