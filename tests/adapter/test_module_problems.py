"""Parameters that flat buffers cannot hold: known from the module alone, before anything is built.
No process group is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp_adapter.sharding.module_problems import module_problems


class Odd(nn.Module):
    """A good parameter and `value`."""

    def __init__(self, value: torch.Tensor, trained: bool = True) -> None:
        super().__init__()
        self.good = nn.Linear(3, 3)
        self.odd = nn.Parameter(value, requires_grad=trained)


BAD: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "complex": (
        lambda: Odd(torch.ones(3, 2, dtype=torch.complex64)),
        ("parameter odd ((3, 2), torch.complex64)", "view_as_real"),
    ),
    "complex and frozen": (
        lambda: Odd(torch.ones(2, dtype=torch.complex64), trained=False),
        ("parameter odd ((2,), torch.complex64)", "view_as_real"),
    ),
    "float64": (
        lambda: nn.Linear(3, 3, dtype=torch.float64),
        ("parameter weight ((3, 3), torch.float64)", "float32 at most", "torch.bfloat16"),
    ),
    "expanded": (
        lambda: Odd(torch.ones(1, 3).expand(4, 3)),
        ("parameter odd ((4, 3), torch.float32)", "stride of 0", ".contiguous()"),
    ),
    "8-bit floats, frozen": (
        lambda: Odd(torch.ones(4).to(torch.float8_e4m3fn), trained=False),
        ("parameter odd ((4,), torch.float8_e4m3fn)", "torch.bfloat16", "torch.uint8"),
    ),
    "sparse": (
        lambda: Odd(torch.ones(3, 3).to_sparse()),
        ("parameter odd ((3, 3), torch.float32)", "torch.sparse_coo", "to_dense()"),
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(7, 3, sparse=True)),
        ("module 0", "sparse=True", "use sparse=False"),
    ),
    "sparse gradients of a bag": (
        lambda: nn.EmbeddingBag(7, 3, sparse=True), ("module EmbeddingBag", "use sparse=False")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_parameter_that_no_buffer_can_hold_is_an_early_error(name: str) -> None:
    """Before: cast warnings and wrong weights (complex), an error in the first backward (sparse),
    or one of another rank that is said to have failed."""
    make, says = BAD[name]
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_params_dtype=None)):
        with pytest.raises(ValueError) as caught:
            fully_shard_model(make(), mixed_precision_policy=policy)
        for fragment in says:
            assert fragment in str(caught.value), (fragment, str(caught.value))
        assert str(caught.value).count("\n  - ") <= 2


def test_a_parameter_that_is_a_dtensor_is_an_early_error() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = Odd(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
        with pytest.raises(ValueError, match=r"parameter odd .* it is a DTensor.* Wrap the module"):
            fully_shard_model(model)
    finally:
        dist.destroy_process_group()


GOOD: dict[str, Callable[[], nn.Module]] = {
    "float64, frozen": lambda: Odd(torch.ones(2, dtype=torch.float64), trained=False),
    "integers, frozen": lambda: Odd(torch.ones(2, dtype=torch.int32), trained=False),
    "float16": lambda: nn.Linear(3, 3, dtype=torch.float16),
    "a dim of one with a stride of 0": lambda: Odd(torch.ones(3).as_strided((1, 3), (0, 1))),
    "transposed": lambda: Odd(torch.ones(3, 5).t()),
    "sparse gradients of a frozen table": lambda: nn.Sequential(
        nn.Linear(3, 3), nn.Embedding(7, 3, sparse=True).requires_grad_(False)
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_others_are_no_problem(name: str) -> None:
    assert module_problems(GOOD[name](), None, None, torch.float32) == []


def test_what_is_not_sharded_may_be_anything() -> None:
    odd = Odd(torch.ones(4).to(torch.float8_e4m3fn), trained=False)
    assert module_problems(odd, None, None, torch.float32, lambda fqn: fqn != "odd") == []
