"""Quantizers of parameters in Transformer Engine's classes against TE's own functions, on any
device; and modules of TE that compute from the engine's memory, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron_fsdp_adapter.core.engine.partition import managed_params
from megatron_fsdp_adapter.core.layout.format import BLOCK128, MXFP8, PER_TENSOR
from megatron_fsdp_adapter.quantized import format_of
from megatron_fsdp_adapter.quantized.weights import QuantizedWeight
from tests.quantized.te_checks import place, same
from tests.quantized.te_weights import KNOWS, cut, data_of, derived, te_params, te_quantize

FORMATS = {"current": PER_TENSOR, "delayed": PER_TENSOR, "blockwise": BLOCK128, "mxfp8": MXFP8}


def weights_of(
    recipe: str, params: Sequence, mains: Sequence, ranges: Sequence
) -> list[QuantizedWeight]:
    """The rows of one rank, with memory for their planes."""
    found = []
    for param, main, (start, stop) in zip(params, mains, ranges, strict=True):
        rows, columns = (stop - start) // main.shape[1], main.shape[1]
        planes = {
            plane.name: torch.zeros(
                plane.shape((rows, columns)), dtype=torch.uint8, device=main.device
            )
            for plane in FORMATS[recipe].planes
        }
        own = main.view(-1)[start:stop].view(rows, columns)
        found.append(
            QuantizedWeight(param, "w", FORMATS[recipe], start if rows else 0, own, True, planes)
        )
    return found


def quantizers_are_te(rank: int, world: int, recipe: str) -> str:
    """Step after step. The ranks of a domain are played one after the other in each process, each
    with parameter objects of its own; the last has no rows."""
    device = place(rank)
    shapes, ranks, steps = [(128, 128), (256, 384)], 4, 3
    mains = [torch.randn(shape, device=device) * 0.1 for shape in shapes]
    ranges = [*cut(recipe, shapes, ranks - 1), [(0, 0)] * len(shapes)]
    slots = torch.tensor([[300.0, 0.0], [200.0, 0.0]], device=device)
    theirs = te_params(recipe, shapes, slots)
    own_slots = [slots.clone() for _ in range(ranks)]
    params = [te_params(recipe, shapes, own) for own in own_slots]
    weights = [weights_of(recipe, params[r], mains, ranges[r]) for r in range(ranks)]
    made = [KNOWS.quantizers(each)[0][0] for each in weights]
    amaxes = torch.full((ranks, made[0].amax_numel), 9.0, device=device)
    for one, vector in zip(made, amaxes, strict=True):
        if one.amax_numel:
            one.bind(vector)
    for step in range(steps):
        for main in mains:
            main.add_(torch.randn_like(main) * 0.02)
        te_quantize(theirs, mains)
        for one in made:
            one.begin()
        if amaxes.numel():
            amaxes.copy_(amaxes.amax(0).expand_as(amaxes).clone())
        for one in made:
            one.finish()
        for number in range(ranks):
            check_rank(recipe, weights[number], theirs, ranges[number])
            same(own_slots[number], slots, f"step {step}, slots of rank {number}")
        for own in (slots, *own_slots):  # as TE's update between steps
            own.copy_(torch.tensor([[310.0 + step, 0.0], [190.0 - step, 0.0]]))
    return f"{steps} steps of {ranks} ranks"


def check_rank(
    recipe: str, weights: Sequence[QuantizedWeight], theirs: Sequence, ranges: Sequence
) -> None:
    """Planes of these rows, and scales, against those of whole weights."""
    for weight, other, (start, stop) in zip(weights, theirs, ranges, strict=True):
        fields = KNOWS.fields(other) if recipe == "mxfp8" else {"rowwise": data_of(other)}
        for plane in FORMATS[recipe].planes:
            part = fields[plane.name].reshape(-1)[start // plane.elements : stop // plane.elements]
            same(weight.planes[plane.name].view(-1), part, f"{weight.name}, {plane.name}")
        for mine, their in zip(KNOWS.scales(weight.param), KNOWS.scales(other), strict=True):
            same(mine, their, f"{weight.name}, scales")


class Modules:
    """Modules of TE whose weights are quantized from the start, and how they are called."""

    def __init__(self, recipe: str) -> None:
        from transformer_engine.common import recipe as recipes

        self.recipe = {
            "current": recipes.Float8CurrentScaling,
            # Long: the end of any autocast moves the histories of all modules, here of two.
            "delayed": lambda: recipes.DelayedScaling(amax_history_len=64, reduce_amax=False),
            "blockwise": recipes.Float8BlockScaling,
        }[recipe]()

    def make(self, name: str, device: str = "cuda") -> nn.Module:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import quantized_model_init

        common = {"params_dtype": torch.bfloat16, "device": device, "bias": False}
        torch.manual_seed(3)
        with quantized_model_init(
            enabled=True, recipe=self.recipe, preserve_high_precision_init_val=True
        ):
            if name == "GroupedLinear":
                return te.GroupedLinear(2, 256, 512, **common)
            return getattr(te, name)(256, 512, **common)

    def call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        from transformer_engine.pytorch.quantization import autocast

        with autocast(enabled=True, recipe=self.recipe):
            if type(module).__name__ == "GroupedLinear":
                return module(x, [128, len(x) - 128])
            return module(x)


MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


class Pointed:
    """The quantized weights of a module in memory as the engine has it: one buffer of bytes, and
    main weights of all rows."""

    def __init__(self, module: nn.Module, recipe: str) -> None:
        found = [one for one in managed_params(module) if format_of(one) is not None]
        assert found and all(format_of(one) is FORMATS[recipe] for one in found)
        self.params: list[Any] = [one.param for one in found]
        sizes = [param.numel() for param in self.params]
        self.flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
        self.mains, weights = [], []
        for name, param, part in zip(found, self.params, self.flat.split(sizes), strict=True):
            value = KNOWS.high_precision(param)
            assert value is not None and not hasattr(param, "get_high_precision_init_val")
            main = value.float().cuda()
            view = part.view(param.shape)
            view.copy_(KNOWS.fields(param)["rowwise"])
            KNOWS.point(param, {"rowwise": view})
            weights.append(QuantizedWeight(
                param, name.fqns[0], FORMATS[recipe], 0, main, True, {"rowwise": view}
            ))  # fmt: skip
            self.mains.append(main)
        [(self.quantizer, _)] = KNOWS.quantizers(weights)
        self.quantizer.bind(torch.empty(self.quantizer.amax_numel, device="cuda"))

    def come_and_go(self) -> None:
        """As between two gathers; what was derived goes too."""
        kept, storage = self.flat.clone(), self.flat.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        poison = torch.full((nbytes,), 0x7F, dtype=torch.uint8, device="cuda")
        del poison
        storage.resize_(nbytes)
        self.flat.copy_(kept)
        for param in self.params:
            KNOWS.drop_derived(param)


def modules_compute_from_buffers(rank: int, world: int, recipe: str, name: str) -> str:
    """Outputs and gradients are those of a module that is left alone and quantized by TE's
    function, bit for bit and step after step; in forward nothing is derived from the bytes."""
    place(rank)
    modules = Modules(recipe)
    alone, ours = modules.make(name), modules.make(name)
    theirs = [one.param for one in managed_params(alone) if format_of(one) is not None]
    pointed = Pointed(ours, recipe)
    later = [one for one in managed_params(modules.make(name, "meta")) if format_of(one)]
    assert [tuple(one.param.shape) for one in later] == [tuple(p.shape) for p in theirs]
    assert {format_of(one) for one in later} == {FORMATS[recipe]}
    seen = []
    for step in range(3):
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for module in (alone, ours):
            if module is ours:
                for param in pointed.params:
                    KNOWS.prepare(param)
            given = x.clone().requires_grad_()
            out = modules.call(module, given)
            if module is ours:
                seen.append([derived(param) is None for param in pointed.params])
            out.float().pow(2).sum().backward()
            grads: list[Any] = [param.grad for param in module.parameters()]
            results.append([out, given.grad, *grads])
            for param in module.parameters():
                param.grad = None
        for number, (mine, other) in enumerate(zip(results[1], results[0], strict=True)):
            same(mine, other, f"{name}, step {step}, result {number}")
        for main in pointed.mains:
            main.add_(torch.randn_like(main) * 0.01)
        te_quantize(theirs, pointed.mains)
        for param in theirs:
            KNOWS.drop_derived(param)
        pointed.quantizer.begin()
        pointed.quantizer.finish()
        pointed.come_and_go()
    assert all(all(one) for one in seen), f"transposes in forward: {seen}"
    return f"{len(theirs)} weights, nothing derived in forward"
