"""What users do to models and with wrappers beside the plain loop, a row each: changes of a model,
ways to drive a step, and in which order, how often and whether at all parts of a model are called.
What is frozen, tied or recomputed and nothing more is a cell of the matrix.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.utils.checkpoint import checkpoint

from .checks import Step
from .gpt import Trainer, batches, forward_backward, forward_step
from .variants import STRATEGIES, ZERO_3, Drive, Variant, train


def inner_model(wrapper: Any) -> Any:
    """The GPTModel under any depth of wrappers."""
    while not hasattr(wrapper, "decoder"):
        wrapper = wrapper.module
    return wrapper


# Changes of the model, before it is wrapped.


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


def checkpoint_forwards(model: nn.Module) -> None:
    """Recomputes what is inside the layers' hooks."""
    for layer in inner_model(model).decoder.layers:
        original = layer.forward

        def forward(hidden_states: Any, _original: Any = original, **kwargs: Any) -> Any:
            def run(hidden: torch.Tensor) -> Any:
                return _original(hidden_states=hidden, **kwargs)

            return checkpoint(run, hidden_states, use_reentrant=False)

        layer.forward = forward


class Rearranged(nn.Module):
    """A layer list of one that calls its layers by turns: in another order in each forward, or
    without one of them. The same on all ranks, which have to call alike."""

    def __init__(self, layers: nn.ModuleList, skips: bool) -> None:
        super().__init__()
        self.layers, self.skips, self.calls = layers, skips, 0

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        count, context = len(self.layers), None
        order = [(self.calls + number) % count for number in range(count)]
        for number in sorted(order[1:]) if self.skips else order:
            hidden_states, context = self.layers[number](hidden_states=hidden_states, **kwargs)
        self.calls += 1
        return hidden_states, context


def rearrange(skips: bool) -> Any:
    def change(model: nn.Module) -> None:
        decoder = inner_model(model).decoder
        decoder.layers = nn.ModuleList([Rearranged(decoder.layers, skips)])

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
        mamba = MambaLayer(config, submodules, pg_collection=ProcessGroupCollection())
        self.mamba = mamba.to(next(layer.parameters()).device)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        hidden_states, context = self.layer(hidden_states=hidden_states, **kwargs)
        return self.mamba(hidden_states), context


def add_mamba_layers(model: nn.Module) -> None:
    decoder = inner_model(model).decoder
    layers = [HybridLayer(decoder.config, layer) for layer in decoder.layers]
    decoder.layers = nn.ModuleList(layers)


# Ways to drive a step.


def data_of(trainer: Trainer, number: int, rank: int) -> list[torch.Tensor]:
    device = next(trainer.wrapper.parameters()).device
    return batches(trainer.case, number, rank, device)


def _evaluating(evaluate: Callable[[Trainer, list[torch.Tensor]], float]) -> Drive:
    """Before the step and after it; the loss is the sum of all."""

    def drive(trainer: Trainer, number: int, rank: int) -> Step:
        data = data_of(trainer, 100 + number, rank)
        trainer.wrapper.eval()
        before = evaluate(trainer, data)
        trainer.wrapper.train()
        step = train(trainer, number, rank)
        trainer.wrapper.eval()
        loss = step.loss + before + evaluate(trainer, data)
        trainer.wrapper.train()
        return replace(step, loss=loss)

    return drive


def _evaluate_with_graph(trainer: Trainer, data: list[torch.Tensor]) -> float:
    """Forward passes whose backward never comes."""
    return forward_backward(trainer, data, forward_only=True)


def _evaluate_in_inference_mode(trainer: Trainer, data: list[torch.Tensor]) -> float:
    with torch.inference_mode():
        outputs = [forward_step(trainer.case, iter([d]), trainer.wrapper)[0] for d in data]
    return sum(output.float().mean().item() for output in outputs)


def start_step(trainer: Trainer) -> None:
    trainer.wrapper.zero_grad_buffer()
    trainer.optimizer.zero_grad()


def finished(trainer: Trainer, loss: float, **inputs: torch.Tensor) -> Step:
    """The step after its backwards; its gradients are those of `inputs`."""
    gradients = {name: tensor.grad.cpu() for name, tensor in inputs.items()}  # type: ignore[union-attr]
    trainer.wrapper.finish_grad_sync()
    success, norm, _ = trainer.optimizer.step()
    assert success
    return Step(loss, float(norm), gradients, trainer.params())


def loss_of(trainer: Trainer, callee: Any, tokens: torch.Tensor) -> torch.Tensor:
    output, loss_func = forward_step(trainer.case, iter([tokens]), callee)
    loss: torch.Tensor = loss_func(output)[0]
    return loss


def backward_of(trainer: Trainer, callee: Any, tokens: torch.Tensor) -> float:
    loss = loss_of(trainer, callee, tokens)
    (loss / trainer.case.microbatches).backward()
    return loss.item()


def no_sync_by_hand(trainer: Trainer, number: int, rank: int) -> Step:
    """The user's own loop; another context for every microbatch but the last."""
    data = data_of(trainer, number, rank)
    start_step(trainer)
    loss = 0.0
    for tokens in data[:-1]:
        with trainer.wrapper.no_sync():
            loss += backward_of(trainer, trainer.wrapper, tokens)
    return finished(trainer, loss + backward_of(trainer, trainer.wrapper, data[-1]))


def inner_model_called(trainer: Trainer, number: int, rank: int) -> Step:
    """The GPTModel itself, and the wrapper in turn."""
    first, second, third = data_of(trainer, number, rank)
    start_step(trainer)
    with trainer.wrapper.no_sync():
        loss = backward_of(trainer, inner_model(trainer.wrapper), first)
        loss += backward_of(trainer, trainer.wrapper, second)
    return finished(trainer, loss + backward_of(trainer, inner_model(trainer.wrapper), third))


def _hidden_and_mask(trainer: Trainer, number: int, rank: int) -> tuple[torch.Tensor, Any]:
    case, device = trainer.case, next(trainer.wrapper.parameters()).device
    generator = torch.Generator().manual_seed(case.seed + 31 * number + rank)
    values = torch.randn(case.seq, case.batch, case.hidden, generator=generator).to(device)
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool, device=device).triu(1)
    return values.requires_grad_(), mask[None, None]


def layer_called(trainer: Trainer, number: int, rank: int) -> Step:
    """One layer without the model around it; the other parameters get no gradient."""
    hidden, mask = _hidden_and_mask(trainer, number, rank)
    start_step(trainer)
    layer = inner_model(trainer.wrapper).decoder.layers[1]
    output, _ = layer(hidden_states=hidden, attention_mask=mask)
    loss = output.square().mean()
    loss.backward()
    return finished(trainer, loss.item(), hidden=hidden)


def input_gradients(trainer: Trainer, number: int, rank: int) -> Step:
    """Embedded inputs given from outside, and their gradient."""
    hidden, mask = _hidden_and_mask(trainer, number, rank)
    start_step(trainer)
    tokens = data_of(trainer, number, rank)[0]
    losses = trainer.wrapper(
        tokens[:, :-1], None, mask, decoder_input=hidden, labels=tokens[:, 1:]
    )
    loss = losses.float().mean()
    loss.backward()
    return finished(trainer, loss.item(), hidden=hidden)


def forwards_before_backwards(trainer: Trainer, number: int, rank: int) -> Step:
    """Three forwards, and then their backwards, the first one first."""
    data = data_of(trainer, number, rank)
    start_step(trainer)
    losses = [loss_of(trainer, trainer.wrapper, tokens) for tokens in data]
    with trainer.wrapper.no_sync():
        for loss in losses[:-1]:
            (loss / len(data)).backward()
    (losses[-1] / len(data)).backward()
    return finished(trainer, sum(loss.item() for loss in losses))


def one_backward_of_all(trainer: Trainer, number: int, rank: int) -> Step:
    """Of the sum of three forwards: each unit is over after three of its calls."""
    data = data_of(trainer, number, rank)
    start_step(trainer)
    total = torch.stack([loss_of(trainer, trainer.wrapper, tokens) for tokens in data]).mean()
    total.backward()
    return finished(trainer, total.item())


def generate(trainer: Trainer, tokens: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Appends the likeliest token, again and again: inputs of another length in each forward."""
    for _ in range(steps):
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        logits = trainer.wrapper(tokens, positions, mask[None, None])
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


def generating(trainer: Trainer, number: int, rank: int) -> Step:
    """Generation before each step and, with accumulated gradients, in the middle of it. Tokens are
    whole numbers, added to the loss: one that differs is seen in its bound."""
    data = data_of(trainer, number, rank)
    with torch.inference_mode():
        before = generate(trainer, data[0][:, :2])
    start_step(trainer)
    with trainer.wrapper.no_sync():
        loss = backward_of(trainer, trainer.wrapper, data[0])
    with torch.inference_mode():
        between = generate(trainer, data[1][:, :2])
    loss += backward_of(trainer, trainer.wrapper, data[1])
    return finished(trainer, loss + float(before.sum() + between.sum()))


def _habit(
    name: str, change: Any = Variant.change, case: Any = None, drive: Drive = train,
    compare: str = "free", **more: Any,
) -> Variant:
    sizes = {"num_layers": 2, "tied": False, "positions": "rope", "batch": 1, **(case or {})}
    return Variant(
        name, random=True, case=sizes, change=change, drive=drive, compare=compare, **more
    )


def _evaluation(name: str, evaluate: Callable[..., float]) -> Variant:
    return _habit(name, drive=_evaluating(evaluate), compare="loosely")


LAYERS, NO_BIAS = {"num_layers": 3}, {"bias": False}
NESTED = {"fsdp_unit_modules": [TransformerLayer, MLP]}
"""Layers as units, and their MLPs as units inside them. Core's MLP returns its bias for others to
add, which a unit cannot: its weights are gone by then, and reading them raises."""
HAS_TE = importlib.util.find_spec("transformer_engine") is not None

BESIDE_THE_LOOP: tuple[Variant, ...] = (
    _habit("frozen tied embedding", freeze("embedding."), {"tied": True}),
    _habit("part of a layer frozen", freeze("decoder.layers.0.mlp.linear_fc1")),
    _habit("parameters without a gradient", add_unused_params),
    _habit(
        "full recompute, layers used three times", use_layers_twice,
        {"num_layers": 4, "recompute": "full-1"},
    ),
    _habit(
        "full recompute, tied, frozen first layer", freeze("decoder.layers.0."),
        {"tied": True, "recompute": "full-1"},
    ),
    *(
        # Core runs it only where Transformer Engine is installed.
        _habit(name, case={"recompute": "selective-layernorm"})
        for name in ("selective recompute of norms",) if HAS_TE
    ),
    _habit("reentrant checkpoint around layers", checkpoint_layers(use_reentrant=True)),
    _habit("checkpoint inside layers", checkpoint_forwards),
    _evaluation("evaluation that builds a graph", _evaluate_with_graph),
    _evaluation("evaluation in inference mode", _evaluate_in_inference_mode),
    _habit("no_sync by hand", drive=no_sync_by_hand),
    _habit("inner model called", drive=inner_model_called),
    _habit("layer called", drive=layer_called),
    _habit("gradient of inputs", drive=input_gradients),
)  # fmt: skip

OF_CALLING: tuple[Variant, ...] = (
    _habit("layers in another order in each forward", rearrange(skips=False), LAYERS),
    _habit("a layer skipped in each forward", rearrange(skips=True), LAYERS),
    _habit("a layer chosen by the data", choose_by_data, LAYERS),
    _habit("hybrid of transformer and Mamba layers", add_mamba_layers),
    _habit("several forwards, then their backwards", drive=forwards_before_backwards),
    _habit("one backward of several forwards", drive=one_backward_of_all),
    _habit("generation in inference mode", drive=generating),
    _habit(
        "units inside units, full recompute", case={**NO_BIAS, "recompute": "full-1"},
        wrapper=NESTED,
    ),
    _habit(
        "units inside units, checkpoint around layers", checkpoint_layers(use_reentrant=False),
        NO_BIAS, wrapper=NESTED,
    ),
    _habit(
        "units inside units, part frozen", freeze("decoder.layers.0.mlp."), NO_BIAS,
        wrapper=NESTED,
    ),
)  # fmt: skip

HABITS = (
    *(
        replace(row, strategies=(STRATEGIES[position % 3], ZERO_3))
        for position, row in enumerate(BESIDE_THE_LOOP)
    ),
    *(replace(row, strategies=(ZERO_3,)) for row in OF_CALLING),
)
"""With ZeRO-3, and what is beside the loop with one of the other strategies."""
