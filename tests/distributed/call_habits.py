"""Habits of calling: in which order, how often and whether at all parts of a model are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from .checks import check_weights
from .gpt import Case, Trainer, batches, build_trainer, forward_step, init_megatron
from .habits import (
    Habit,
    Report,
    _check_report,
    backward_of,
    checkpoint_layers,
    finish_step,
    freeze,
    inner_model,
    start_step,
)


class Rearranged(nn.Module):
    """A layer list of one that calls its layers by turns: in another order in each forward, without
    some of them, or as its input says. The same on all ranks, which have to call alike."""

    def __init__(self, layers: nn.ModuleList, way: str) -> None:
        super().__init__()
        self.layers, self.way, self.calls = layers, way, 0

    def order(self) -> list[int]:
        count = len(self.layers)
        turn = self.calls % count
        if self.way == "rotated":
            return [(turn + number) % count for number in range(count)]
        if self.way == "reversed every second time":
            return list(range(count))[:: -1 if self.calls % 2 else 1]
        return [number for number in range(count) if number != turn]

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        context = None
        for number in self.order():
            hidden_states, context = self.layers[number](hidden_states=hidden_states, **kwargs)
        self.calls += 1
        return hidden_states, context


def rearrange(way: str) -> Any:
    def change(model: nn.Module) -> None:
        decoder = inner_model(model).decoder
        decoder.layers = nn.ModuleList([Rearranged(decoder.layers, way)])

    return change


class Choosing(nn.Module):
    """One of two layers, by the data: a sum over all ranks decides, so that all choose alike."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        total = hidden_states.detach().double().sum()
        torch.distributed.all_reduce(total)
        return self.layers[int(total > 0)](hidden_states=hidden_states, **kwargs)


def choose_by_data(model: nn.Module) -> None:
    decoder = inner_model(model).decoder
    decoder.layers = nn.ModuleList([decoder.layers[0], Choosing(decoder.layers[1:])])


class Mixer(nn.Module):
    """In the place of core's Mamba mixer, whose kernels are CUDA only: like that one it reads its
    convolution's weight and never calls the convolution."""

    def __init__(self, config: Any, d_model: int, **unused: Any) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(d_model, d_model, 3, groups=d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, hidden: torch.Tensor, **unused: Any) -> Any:
        mixed = nn.functional.conv1d(
            hidden.permute(1, 2, 0), self.conv1d.weight, self.conv1d.bias, padding=2,
            groups=hidden.size(-1),
        )  # fmt: skip
        return self.out_proj(mixed[..., : hidden.size(0)].permute(2, 0, 1)), None


class HybridLayer(nn.Module):
    """A Mamba layer of core behind a transformer layer."""

    def __init__(self, config: Any, layer: nn.Module) -> None:
        super().__init__()
        submodules = MambaLayerSubmodules(mixer=Mixer, mamba_bda=get_bias_dropout_add)
        self.layer = layer
        self.mamba = MambaLayer(config, submodules, pg_collection=ProcessGroupCollection())

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        hidden_states, context = self.layer(hidden_states=hidden_states, **kwargs)
        return self.mamba(hidden_states), context


def add_mamba_layers(model: nn.Module) -> None:
    decoder = inner_model(model).decoder
    layers = [HybridLayer(decoder.config, layer) for layer in decoder.layers]
    decoder.layers = nn.ModuleList(layers)


def forwards_before_backwards(
    trainer: Trainer, number: int, rank: int, device: torch.device
) -> Report:
    """Three forwards, and then their backwards, the first one first."""
    data = batches(trainer.case, number, rank, device)
    start_step(trainer)
    losses = []
    for tokens in data:
        output, loss_func = forward_step(trainer.case, iter([tokens]), trainer.wrapper)
        losses.append(loss_func(output)[0])
    with trainer.wrapper.no_sync():
        for loss in losses[:-1]:
            (loss / len(data)).backward()
    (losses[-1] / len(data)).backward()
    return {"loss": sum(loss.item() for loss in losses), "norm": finish_step(trainer)}


def one_backward_of_all(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """Of the sum of three forwards: each unit is over after three of its calls."""
    data = batches(trainer.case, number, rank, device)
    start_step(trainer)
    total: Any = 0.0
    for tokens in data:
        output, loss_func = forward_step(trainer.case, iter([tokens]), trainer.wrapper)
        total = total + loss_func(output)[0] / len(data)
    total.backward()
    return {"loss": float(total), "norm": finish_step(trainer)}


def generate(trainer: Trainer, tokens: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Appends the likeliest token, again and again: inputs of another length in each forward."""
    for _ in range(steps):
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        logits = trainer.wrapper(tokens, positions, mask[None, None])
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


def generating(context: Any) -> Any:
    """Generation before each step and, with accumulated gradients, in the middle of it."""

    def drive(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
        data = batches(trainer.case, number, rank, device)
        with context():
            before = generate(trainer, data[0][:, :2])
        start_step(trainer)
        with trainer.wrapper.no_sync():
            loss = backward_of(trainer, trainer.wrapper, data[0])
        with context():
            between = generate(trainer, data[1][:, :2])
        loss += backward_of(trainer, trainer.wrapper, data[1])
        # Tokens are whole numbers: one that differs is seen in the loss's bound.
        made = float(before.sum() + between.sum())
        return {"loss": loss + made, "norm": finish_step(trainer)}

    return drive


class NestedHabit(Habit):
    """With layers as units, and their MLPs as units inside them. Core's MLP returns its bias for
    others to add, which a unit cannot: its weights are gone by then, and reading them raises."""


LAYERS: Mapping[str, Any] = {"num_layers": 3}
NO_BIAS: Mapping[str, Any] = {"bias": False}
CALL_HABITS: Mapping[str, Habit] = {
    "layers in another order in each forward": Habit(rearrange("rotated"), case=LAYERS),
    "layers reversed every second time": Habit(
        rearrange("reversed every second time"), case=LAYERS
    ),
    "a layer skipped in each forward": Habit(rearrange("skipped"), case=LAYERS),
    "a layer chosen by the data": Habit(choose_by_data, case=LAYERS),
    "hybrid of transformer and Mamba layers": Habit(add_mamba_layers),
    "several forwards, then their backwards": Habit(drive=forwards_before_backwards),
    "one backward of several forwards": Habit(drive=one_backward_of_all),
    "generation without grad": Habit(drive=generating(torch.no_grad)),
    "generation in inference mode": Habit(drive=generating(torch.inference_mode)),
    "units inside units": NestedHabit(case=NO_BIAS),
    "units inside units, full recompute": NestedHabit(case={**NO_BIAS, "recompute": "full-1"}),
    "units inside units, checkpoint around layers": NestedHabit(
        checkpoint_layers(use_reentrant=False), case=NO_BIAS
    ),
    "units inside units, part frozen": NestedHabit(freeze("decoder.layers.0.mlp."), case=NO_BIAS),
}
STEPS = 3


def check_call_habits(
    rank: int, world: int, case: Case, names: list[str], strategies: tuple[str, ...]
) -> int:
    """Like `check_habit`, all of them in one set of processes."""
    device = init_megatron()
    for name in names:
        habit = CALL_HABITS[name]
        own = case.but(**habit.case)
        options = {}
        if isinstance(habit, NestedHabit):
            options["fsdp_unit_modules"] = [TransformerLayer, MLP]
        reference = build_trainer(own.but(overlap=False), None, device, habit.change)
        expected = [habit.drive(reference, n, rank, device) for n in range(STEPS)]
        weights = reference.params()
        for strategy in strategies:
            trainer = build_trainer(own, strategy, device, habit.change, **options)
            label = f"{name}: {strategy} on {world} ranks, {own}"
            for number, theirs in enumerate(expected):
                _check_report(habit.drive(trainer, number, rank, device), theirs, label)
            check_weights(trainer.params(), weights, label)
    return len(names)
