"""Names that programs use, and how they run: whole on each rank, or sharded.

`Unsharded` is the reference: the same statements without a wrapper. Its gradients are averaged over
ranks by the `backward` of torch, which is replaced while it runs.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import megatron_fsdp_adapter as package
from tests.lib.hunt import models

Shown = list[tuple[str, Any]]
"""Everything that a program showed, in order: names, and whole tensors, numbers or texts."""


class _Raises(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise models.Stop("in backward")


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Catches what a program raises on purpose, and nothing else."""
    with contextlib.suppress(models.Stop):
        yield


def full(value: Any) -> Any:
    """The whole tensor of a DTensor, detached and copied; other values as they are. Collective."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.clone().float()
    return value


def features(seed: int, rows: int = 4) -> torch.Tensor:
    """Inputs of this rank: the same numbers on every kind of device."""
    generator = torch.Generator("cpu").manual_seed(97 * seed + dist.get_rank())
    inputs = torch.randn(rows, models.INPUTS, generator=generator, device="cpu")
    return inputs.to(torch.get_default_device())


def tensor_of(output: Any) -> torch.Tensor:
    return models.parts_of(output)[0]


class Side:
    """One way to run programs."""

    def __init__(self) -> None:
        self.shown: Shown = []
        self.folders: list[Path] = []

    def names(self) -> dict[str, Any]:
        """All that a program's text may name."""
        blocks = {name: value for name, value in vars(models).items() if isinstance(value, type)}
        states = {name: getattr(torch_states, name) for name in torch_states.__all__}
        return {
            **blocks,
            **states,
            "torch": torch,
            "nn": nn,
            "dcp": dcp,
            "checkpoint": checkpoint,
            "MixedPrecisionPolicy": MixedPrecisionPolicy,
            "OurPolicy": package.MixedPrecisionPolicy,
            "rank": dist.get_rank(),
            "device": torch.get_default_device().type,
            "x": features,
            "tensor_of": tensor_of,
            "caught": caught,
            "raises": _Raises.apply,
            "full": full,
            "folder": self.folder,
            "show": self.show,
            "show_grads": self.show_grads,
            "show_weights": self.show_weights,
            **self.doors(),
        }

    def doors(self) -> dict[str, Callable[..., Any]]:
        """What shards models and optimizers."""
        raise NotImplementedError

    def folder(self) -> str:
        """A new folder, the same on all ranks."""
        made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(made)
        self.folders.append(Path(made[0]))
        return made[0]

    def show(self, name: str, value: Any) -> None:
        """Notes a value that has to be the same on each side."""
        self.shown.append((name, full(value)))

    def show_weights(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.show(f"weight {plain(name)}", param)

    def show_grads(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.show(f"grad {plain(name)}", param.grad)

    def show_end(self, names: dict[str, Any]) -> None:
        """Notes all weights, gradients and moments that a program leaves."""
        model = names["model"]
        self.show_grads(model)
        self.show_weights(model)
        for name, buffer in model.named_buffers():
            self.show(f"buffer {plain(name)}", buffer)
        state = names["optimizer"].state if "optimizer" in names else {}
        for name, param in model.named_parameters():
            for key, value in sorted(state.get(param, {}).items()):
                self.show(f"state {plain(name)} {key}", value)

    def run(self, text: str, end: bool = True) -> Shown:
        """What a program shows; end: also all that it leaves."""
        torch.manual_seed(3)
        names = self.names()
        try:
            exec(compile(text, "program", "exec"), names)
            if end and "model" in names:
                self.show_end(names)
        finally:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)
        return self.shown


def plain(name: str) -> str:
    """The name that a parameter has without wrappers."""
    return name.removeprefix("module.")


class Ours(Side):
    """Sharded by this package."""

    def doors(self) -> dict[str, Callable[..., Any]]:
        names = ("fully_shard", "fully_shard_model", "fully_shard_optimizer")
        return {name: getattr(package, name) for name in names}


class Torch(Side):
    """Sharded by torch's FSDP2, which has one of the doors."""

    def doors(self) -> dict[str, Callable[..., Any]]:
        return {"fully_shard": torch_fully_shard, "fully_shard_optimizer": lambda one: one}


class WholeModule:
    """What `fully_shard` gives a module: methods that do nothing for a module that is whole."""

    def _nothing(self, *args: Any, **options: Any) -> None:
        return None

    set_requires_gradient_sync = set_is_last_backward = _nothing
    set_reshard_after_forward = set_reshard_after_backward = _nothing
    set_reduce_scatter_unused_params = unshard = reshard = _nothing


class WholeModel(nn.Module):
    """What `fully_shard_model` gives, for a module that is whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)


class Unsharded(Side):
    """The reference: whole parameters on each rank, and gradients averaged after a backward."""

    def __init__(self) -> None:
        super().__init__()
        # Modules that would be sharded.
        self.roots: list[nn.Module] = []
        # True while a backward runs: a reentrant checkpoint runs another in it.
        self.running = False
        # Parameters and their hooks, which run when the mean is in `.grad`.
        self.hooks: list[tuple[torch.Tensor, Callable[[Any], None]]] = []

    def doors(self) -> dict[str, Callable[..., Any]]:
        return {
            "fully_shard": self.keep_whole,
            "fully_shard_model": self.keep_whole_model,
            "fully_shard_optimizer": lambda optimizer: optimizer,
        }

    def keep_whole(self, module: Any, **options: Any) -> Any:
        """Stands for `fully_shard`."""
        for one in module if isinstance(module, list) else [module]:
            one.__class__ = type(one.__class__.__name__, (WholeModule, one.__class__), {})
            self.roots.append(one)
        return module

    def keep_whole_model(self, module: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Stands for `fully_shard_model`."""
        self.roots.append(module)
        return WholeModel(module)

    def run(self, text: str, end: bool = True) -> Shown:
        replaced = (
            (torch.Tensor, "backward", self.averaging(torch.Tensor.backward)),
            (torch.autograd, "backward", self.averaging(torch.autograd.backward)),
            (torch.Tensor, "register_post_accumulate_grad_hook", self.keep_hook),
        )
        with contextlib.ExitStack() as stack:
            for owner, name, function in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)
            return super().run(text, end)

    @property
    def keep_hook(self) -> Callable[..., None]:
        """A method of tensors: keeps a hook that would see the gradient of this rank alone."""
        return lambda tensor, hook: self.hooks.append((tensor, hook))

    def averaging(self, backward: Callable[..., None]) -> Callable[..., None]:
        """`backward`, after which gradients are the mean over ranks."""

        def run(*args: Any, **options: Any) -> None:
            if self.running:
                return backward(*args, **options)
            params = list({p: None for root in self.roots for p in root.parameters()})
            before = [param.grad for param in params]
            for param in params:
                param.grad = None
            self.running = True
            added = False
            try:
                backward(*args, **options)
                added = True
            finally:
                self.running = False
                found = [param.grad if added else None for param in params]
                for param, grad in zip(params, before, strict=True):
                    param.grad = grad
            given = add_means(params, found)
            for param, hook in self.hooks:
                if any(param is one for one in given):
                    hook(param)

        return run


def add_means(params: list[nn.Parameter], grads: list[torch.Tensor | None]) -> list[nn.Parameter]:
    """Adds the mean over ranks of `grads` to `.grad`, where any rank has one. Returns those
    parameters. Collective."""
    numbers = [float(grad is not None) for grad in grads]
    parts = [torch.tensor(numbers)]
    for param, grad in zip(params, grads, strict=True):
        part = torch.zeros_like(param) if grad is None else grad.detach()
        parts.append(part.float().flatten())
    everything = torch.cat(parts)
    dist.all_reduce(everything)
    sums = everything.split([part.numel() for part in parts])
    given = []
    for param, ranks, total in zip(params, sums[0].tolist(), sums[1:], strict=True):
        if not ranks:
            continue
        mean = (total / dist.get_world_size()).to(param.dtype).view_as(param)
        with torch.no_grad():
            param.grad = mean if param.grad is None else param.grad.add_(mean)
        given.append(param)
    return given


SIDES: dict[str, type[Side]] = {"unsharded": Unsharded, "torch": Torch, "ours": Ours}
