"""What users do to models and with wrappers, as changes of a model and ways to drive a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .checks import check_gradients, check_loss, check_norm, check_weights
from .gpt import (
    STRATEGIES,
    Case,
    Trainer,
    batches,
    build_trainer,
    forward_backward,
    forward_step,
    init_megatron,
    train_step,
)

Report = dict[str, Any]
"""What a driven step gave: "loss", "norm", and gradients of inputs by name under "inputs"."""
Drive = Callable[[Trainer, int, int, torch.device], Report]
"""One training step of (trainer, number of the step, rank, device)."""


def inner_model(wrapper: Any) -> Any:
    """The GPTModel under any depth of wrappers."""
    while not hasattr(wrapper, "decoder"):
        wrapper = wrapper.module
    return wrapper


# Changes of the model, before it is wrapped.


def nothing(model: nn.Module) -> None:
    pass


def freeze(*prefixes: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        frozen = [p for n, p in model.named_parameters() if n.startswith(prefixes)]
        assert frozen, prefixes
        for param in frozen:
            param.requires_grad_(False)

    return change


def add_unused_params(model: nn.Module) -> None:
    """One in a layer, larger than the layer's norms, and one outside all layers."""
    first: Any = inner_model(model).decoder.layers[0]
    device = next(model.parameters()).device
    first.never_used = nn.Parameter(torch.linspace(-1, 1, 35, device=device).view(7, 5))
    inner_model(model).never_used = nn.Parameter(torch.linspace(-1, 1, 3, device=device))


def use_layers_twice(model: nn.Module) -> None:
    """The first layer runs again after the second, and then once more."""
    layers = inner_model(model).decoder.layers
    layers[2] = layers[0]
    layers[3] = layers[0]


class Checkpointed(nn.Module):
    """A layer that is recomputed in backward, its hooks included."""

    def __init__(self, layer: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        def run(hidden: torch.Tensor) -> Any:
            return self.layer(hidden_states=hidden, **kwargs)

        return checkpoint(run, hidden_states, use_reentrant=self.use_reentrant)


def checkpoint_layers(use_reentrant: bool) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        layers = inner_model(model).decoder.layers
        for index, layer in enumerate(layers):
            layers[index] = Checkpointed(layer, use_reentrant)

    return change


def checkpoint_forwards(use_reentrant: bool) -> Callable[[nn.Module], None]:
    """Recomputes what is inside the layers' hooks."""

    def change(model: nn.Module) -> None:
        for layer in inner_model(model).decoder.layers:
            original = layer.forward

            def forward(hidden_states: Any, _original: Any = original, **kwargs: Any) -> Any:
                def run(hidden: torch.Tensor) -> Any:
                    return _original(hidden_states=hidden, **kwargs)

                return checkpoint(run, hidden_states, use_reentrant=use_reentrant)

            layer.forward = forward

    return change


# Ways to drive a step.


def scheduled(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """Megatron's schedule."""
    loss, norm = train_step(trainer, batches(trainer.case, number, rank, device))
    return {"loss": loss, "norm": norm}


def _evaluating(evaluate: Callable[[Trainer, list[torch.Tensor]], float]) -> Drive:
    def drive(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
        data = batches(trainer.case, 100 + number, rank, device)
        trainer.wrapper.eval()
        before = evaluate(trainer, data)
        trainer.wrapper.train()
        report = scheduled(trainer, number, rank, device)
        trainer.wrapper.eval()
        report["loss"] += before + evaluate(trainer, data)
        trainer.wrapper.train()
        return report

    return drive


def _evaluate_by_schedule(trainer: Trainer, data: list[torch.Tensor]) -> float:
    """As Megatron's training loop does."""
    with torch.no_grad():
        return forward_backward(trainer, data, forward_only=True)


def _evaluate_with_graph(trainer: Trainer, data: list[torch.Tensor]) -> float:
    """Forward passes whose backward never comes."""
    return forward_backward(trainer, data, forward_only=True)


def _evaluate_in(context: Callable[[], AbstractContextManager[Any]]) -> Any:
    def evaluate(trainer: Trainer, data: list[torch.Tensor]) -> float:
        with context():
            outputs = [forward_step(trainer.case, iter([d]), trainer.wrapper)[0] for d in data]
        return sum(output.float().mean().item() for output in outputs)

    return evaluate


evaluation_by_schedule = _evaluating(_evaluate_by_schedule)
evaluation_with_graph = _evaluating(_evaluate_with_graph)
evaluation_without_grad = _evaluating(_evaluate_in(torch.no_grad))
evaluation_in_inference_mode = _evaluating(_evaluate_in(torch.inference_mode))


def start_step(trainer: Trainer) -> None:
    trainer.wrapper.zero_grad_buffer()
    trainer.optimizer.zero_grad()


def finish_step(trainer: Trainer) -> float:
    trainer.wrapper.finish_grad_sync()
    success, norm, _ = trainer.optimizer.step()
    assert success
    return float(norm)


def backward_of(trainer: Trainer, callee: Any, tokens: torch.Tensor) -> float:
    output, loss_func = forward_step(trainer.case, iter([tokens]), callee)
    loss = loss_func(output)[0]
    (loss / trainer.case.microbatches).backward()
    return loss.item()


def no_sync_by_hand(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """The user's own loop; another context for every microbatch but the last."""
    data = batches(trainer.case, number, rank, device)
    start_step(trainer)
    loss = 0.0
    for tokens in data[:-1]:
        with trainer.wrapper.no_sync():
            loss += backward_of(trainer, trainer.wrapper, tokens)
    loss += backward_of(trainer, trainer.wrapper, data[-1])
    return {"loss": loss, "norm": finish_step(trainer)}


def inner_model_called(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """The GPTModel itself, and the wrapper in turn."""
    data = batches(trainer.case, number, rank, device)
    start_step(trainer)
    with trainer.wrapper.no_sync():
        loss = backward_of(trainer, inner_model(trainer.wrapper), data[0])
        loss += backward_of(trainer, trainer.wrapper, data[1])
    loss += backward_of(trainer, inner_model(trainer.wrapper), data[2])
    return {"loss": loss, "norm": finish_step(trainer)}


def _hidden(case: Case, number: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + 31 * number + rank)
    values = torch.randn(case.seq, case.batch, case.hidden, generator=generator).to(device)
    return values.requires_grad_()


def layer_called(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """One layer without the model around it; the other parameters get no gradient."""
    case = trainer.case
    hidden = _hidden(case, number, rank, device)
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool, device=device).triu(1)
    start_step(trainer)
    layer = inner_model(trainer.wrapper).decoder.layers[1]
    output, _ = layer(hidden_states=hidden, attention_mask=mask[None, None])
    loss = output.square().mean()
    loss.backward()
    assert hidden.grad is not None
    norm = finish_step(trainer)
    return {"loss": loss.item(), "norm": norm, "inputs": {"hidden": hidden.grad.cpu()}}


def input_gradients(trainer: Trainer, number: int, rank: int, device: torch.device) -> Report:
    """Embedded inputs given from outside, and their gradient."""
    case, data = trainer.case, batches(trainer.case, number, rank, device)
    hidden = _hidden(case, number, rank, device)
    start_step(trainer)
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool, device=device).triu(1)
    tokens = data[0]
    losses = trainer.wrapper(
        tokens[:, :-1], None, mask[None, None], decoder_input=hidden, labels=tokens[:, 1:]
    )
    loss = losses.float().mean()
    loss.backward()
    assert hidden.grad is not None
    norm = finish_step(trainer)
    return {"loss": loss.item(), "norm": norm, "inputs": {"decoder_input": hidden.grad.cpu()}}


@dataclass(frozen=True)
class Habit:
    """A change of the model, a way to drive it, and the case it needs. `needs_te`: core runs it
    only where Transformer Engine is installed."""

    change: Callable[[nn.Module], None] = nothing
    drive: Drive = scheduled
    case: Mapping[str, Any] = field(default_factory=dict)
    needs_te: bool = False


HABITS: Mapping[str, Habit] = {
    "tied embeddings": Habit(case={"tied": True}),
    "tied embeddings, learned positions": Habit(
        case={"tied": True, "positions": "learned_absolute"}
    ),
    "frozen first layer": Habit(freeze("decoder.layers.0.")),
    "frozen last layer": Habit(freeze("decoder.layers.1.")),
    "frozen embedding": Habit(freeze("embedding.")),
    "frozen embedding and first layer": Habit(freeze("embedding.", "decoder.layers.0.")),
    "frozen tied embedding": Habit(freeze("embedding."), case={"tied": True}),
    "part of a layer frozen": Habit(freeze("decoder.layers.0.mlp.linear_fc1")),
    "parameters without a gradient": Habit(add_unused_params),
    "a layer used three times": Habit(use_layers_twice, case={"num_layers": 4}),
    "full recompute": Habit(case={"recompute": "full-1"}),
    "full recompute in chunks of two layers": Habit(case={"recompute": "full-2", "num_layers": 4}),
    "full recompute, layers used three times": Habit(
        use_layers_twice, case={"num_layers": 4, "recompute": "full-1"}
    ),
    "full recompute, tied, frozen first layer": Habit(
        freeze("decoder.layers.0."), case={"tied": True, "recompute": "full-1"}
    ),
    "selective recompute of attention": Habit(case={"recompute": "selective-core_attn"}),
    # With biases core 0.16.1 recurses without end: its checkpoint makes the returned bias non-leaf.
    "selective recompute of MLPs": Habit(case={"recompute": "selective-mlp", "bias": False}),
    "selective recompute of norms": Habit(case={"recompute": "selective-layernorm"}, needs_te=True),
    "reentrant checkpoint around layers": Habit(checkpoint_layers(use_reentrant=True)),
    "checkpoint around layers": Habit(checkpoint_layers(use_reentrant=False)),
    "reentrant checkpoint inside layers": Habit(checkpoint_forwards(use_reentrant=True)),
    "checkpoint inside layers": Habit(checkpoint_forwards(use_reentrant=False)),
    "evaluation by the schedule": Habit(drive=evaluation_by_schedule),
    "evaluation that builds a graph": Habit(drive=evaluation_with_graph),
    "evaluation without grad": Habit(drive=evaluation_without_grad),
    "evaluation in inference mode": Habit(drive=evaluation_in_inference_mode),
    "no_sync by hand": Habit(drive=no_sync_by_hand),
    "inner model called": Habit(drive=inner_model_called),
    "layer called": Habit(drive=layer_called),
    "gradient of inputs": Habit(drive=input_gradients),
}

STEPS = 3


def check_habit(
    rank: int, world: int, case: Case, names: list[str], strategies: tuple[str, ...] | None
) -> None:
    """Trains with each habit under some strategies (None: the last and one of the others, in turn)
    and under stock DDP without overlap, which asserts when a parameter has no gradient, and
    compares losses, norms, gradients of inputs and weights."""
    device = init_megatron()
    for position, name in enumerate(names):
        habit = HABITS[name]
        own = case.but(**habit.case)
        reference = build_trainer(own.but(overlap=False), None, device, habit.change)
        expected = [habit.drive(reference, n, rank, device) for n in range(STEPS)]
        weights = reference.params()
        for strategy in strategies or (STRATEGIES[position % 3], STRATEGIES[3]):
            trainer = build_trainer(own, strategy, device, habit.change)
            label = f"{name}: {strategy} on {world} ranks, {own}"
            for number, theirs in enumerate(expected):
                _check_report(habit.drive(trainer, number, rank, device), theirs, label)
            check_weights(trainer.params(), weights, label)


def _check_report(ours: Report, reference: Report, label: str) -> None:
    check_loss(ours["loss"], reference["loss"], label)
    check_norm(ours["norm"], reference["norm"], label, 1e-5)
    check_gradients(ours.get("inputs", {}), reference.get("inputs", {}), label, 1e-5)
