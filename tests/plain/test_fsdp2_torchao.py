"""Weights of torchao and of bitsandbytes train with the bits of torch's `fully_shard`. Rows of a
package that is not installed are skipped; their mechanism is in test_fsdp2_extensions.py."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as theirs
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_adapter import fully_shard as ours
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = ("core/engine/extensions.py", "plain/extended.py")

WIDTH = 32
STEPS = 3
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def needs(package: str) -> Any:
    is_absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_absent, reason=f"needs {package}")


class Layer(nn.Module):
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)  # gloo gathers no 8-bit floats alone for torch
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(nn.Module):
    """A frozen linear layer with a trainable adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.into = nn.Linear(WIDTH, 4, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(4, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.out(self.into(x))


class Float4(nn.Module):
    """A linear layer of torchao's NF4 weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.nf4 = importlib.import_module(
            "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
        )
        made = self.nf4.to_nf4(weight.detach().bfloat16(), 64, 1)
        self.weight = nn.Parameter(made, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nf4.linear_nf4(x, self.weight)


def layers(wrap: Callable[[nn.Module], Any] = lambda layer: None) -> nn.Sequential:
    torch.manual_seed(5)
    net = nn.Sequential(*[Layer() for _ in range(3)], nn.Linear(WIDTH, 4))
    for layer in net[:-1]:
        wrap(layer)
    return net


def adapted(base_of: Callable[[torch.Tensor], nn.Module]) -> nn.Sequential:
    """Layers with frozen bases, which `base_of` makes of a weight, and adapters."""
    torch.manual_seed(5)
    bases = [base_of(torch.randn(WIDTH, WIDTH) / 6) for _ in range(3)]
    head = nn.Linear(WIDTH, 4, dtype=torch.bfloat16)
    return nn.Sequential(*[Adapted(base) for base in bases], head)


def float8(layer: nn.Module) -> None:
    ao = importlib.import_module("torchao.float8")
    config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    ao.convert_to_float8_training(layer, config=config)


def by_config(module: str, name: str) -> Callable[[nn.Module], None]:
    """A function that makes weights by torchao's `quantize_` with a config."""

    def wrap(layer: nn.Module) -> None:
        config = getattr(importlib.import_module(f"torchao.prototype.{module}"), name)()
        importlib.import_module("torchao.quantization").quantize_(layer, config)

    return wrap


def bits4(weight: torch.Tensor) -> nn.Module:
    """bitsandbytes' 4-bit layer."""
    bnb = importlib.import_module("bitsandbytes")
    made = bnb.nn.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16)
    made.weight = bnb.nn.Params4bit(weight.bfloat16(), requires_grad=False, module=made)
    return made.to("cpu")  # type: ignore[no-any-return]


def shard(net: nn.Sequential, by: Callable[..., Any], **options: Any) -> Any:
    for layer in net[:-1]:
        by(layer, **options)
    return by(net, **options)


def train(net: Any, rank: int, after: Callable[[Any], None] = lambda net: None) -> list[float]:
    """All losses and norms; two microbatches a step. after: called after each step."""
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for step in range(STEPS):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
            x = torch.randn(8, WIDTH, generator=generator).to(trained[0].dtype)
            loss = net(x).float().square().mean()
            loss.backward()
            found.append(loss.item())
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        found.append(norm.full_tensor().item())  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        after(net)
    return found


def scales_ahead(net: nn.Module) -> None:
    importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(net)


ROWS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    (BF16, {"after": scales_ahead}),
    ({"reshard_after_forward": False, **BF16}, {"after": scales_ahead}),
)


@needs("torchao")
@on_ranks(2)
def test_float8_gathers_train_as_under_torchs_function(rank: int) -> None:
    for options, program in ROWS:
        expected, found = (
            train(shard(layers(float8), by, **options), rank, **program) for by in (theirs, ours)
        )
        assert found == expected, (options, program)


@needs("torchao")
@on_ranks(2)
def test_float8_from_meta_with_frozen_and_recomputed_layers(rank: int) -> None:
    values = layers().state_dict()
    found = []
    for by in (theirs, ours):
        with torch.device("meta"):
            net = layers(float8)
        net[0].requires_grad_(False)
        for layer in net[:-1]:
            layer.recomputes = True
        shard(net, by)
        net.to_empty(device="cpu")
        set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True))
        found.append(train(net, rank, scales_ahead))
    assert found[0] == found[1]


WEIGHTS: dict[str, Callable[[], nn.Sequential]] = {
    "bitnet": lambda: layers(by_config("quantized_training.bitnet", "BitNetTrainingConfig")),
    "int8": lambda: layers(
        by_config("quantized_training.int8_mixed_precision", "Int8MixedPrecisionTrainingConfig")
    ),
    "nf4": lambda: adapted(Float4),
}


@needs("torchao")
@pytest.mark.parametrize("name", WEIGHTS)
@on_ranks(2)
def test_other_weights_train_as_under_torchs_function(rank: int, name: str) -> None:
    options = {} if name == "nf4" else BF16
    expected, found = (train(shard(WEIGHTS[name](), by, **options), rank) for by in (theirs, ours))
    assert found == expected


@needs("bitsandbytes")
@on_ranks(2)
def test_4_bit_bases_train_adapters_as_under_torchs_function(rank: int) -> None:
    expected, found = (train(shard(adapted(bits4), by), rank) for by in (theirs, ours))
    assert found == expected
