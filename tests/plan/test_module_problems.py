"""Parameters that flat buffers cannot hold: known from the module alone, before anything is built.
No process group is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._pytree import tree_map_only

from megatron_fsdp_adapter import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp_adapter.plan.module_problems import module_problems, place_problems
from megatron_fsdp_adapter.plan.unit_classes import classes_of, repeated_layers

CHECKS = ("plan/module_problems.py", "plan/unit_classes.py")


class Odd(nn.Module):
    """A good parameter and `value`."""

    def __init__(self, value: torch.Tensor, trained: bool = True) -> None:
        super().__init__()
        self.good = nn.Linear(3, 3)
        self.odd = nn.Parameter(value, requires_grad=trained)


def _complex():
    return Odd(torch.ones(3, 2, dtype=torch.complex64))


def _complex_and_frozen():
    return Odd(torch.ones(2, dtype=torch.complex64), trained=False)


def _float64():
    return nn.Linear(3, 3, dtype=torch.float64)


def _expanded():
    return Odd(torch.ones(1, 3).expand(4, 3))


def _of_8_bit_floats_frozen():
    return Odd(torch.ones(4).to(torch.float8_e4m3fn), trained=False)


def _sparse():
    return Odd(torch.ones(3, 3).to_sparse())


def _sparse_gradients():
    return nn.Sequential(nn.Embedding(7, 3, sparse=True))


def _a_table_that_each_forward_writes():
    return nn.Sequential(nn.Embedding(7, 3, max_norm=1.0))


def _a_frozen_bag_that_each_forward_writes():
    return nn.Sequential(nn.Linear(3, 3), nn.EmbeddingBag(7, 3, max_norm=2.0).requires_grad_(False))


def _sparse_gradients_of_a_bag():
    return nn.EmbeddingBag(7, 3, sparse=True)


BAD = {
    "complex": (
        _complex,
        ("parameter odd ((3, 2), torch.complex64)", "view_as_real"),
    ),
    "complex and frozen": (
        _complex_and_frozen,
        ("parameter odd ((2,), torch.complex64)", "view_as_real"),
    ),
    "float64": (
        _float64,
        ("parameter weight ((3, 3), torch.float64)", "less precise", "torch.bfloat16"),
    ),
    "expanded": (
        _expanded,
        ("parameter odd ((4, 3), torch.float32)", "stride of 0", ".contiguous()"),
    ),
    "8-bit floats, frozen": (
        _of_8_bit_floats_frozen,
        ("parameter odd ((4,), torch.float8_e4m3fn)", "torch.bfloat16", "torch.uint8"),
    ),
    "sparse": (
        _sparse,
        ("parameter odd ((3, 3), torch.float32)", "torch.sparse_coo", "to_dense()"),
    ),
    "sparse gradients": (
        _sparse_gradients,
        ("module 0", "sparse=True", "Use sparse=False"),
    ),
    "a table that each forward writes": (
        _a_table_that_each_forward_writes,
        ("module 0: max_norm=1.0", "Use max_norm=None"),
    ),
    "a frozen bag that each forward writes": (
        _a_frozen_bag_that_each_forward_writes,
        ("module 1: max_norm=2.0", "between steps"),
    ),
    "sparse gradients of a bag": (
        _sparse_gradients_of_a_bag,
        ("module EmbeddingBag", "Use sparse=False"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_parameter_that_no_buffer_can_hold_is_an_early_error(name: str) -> None:
    """Before: cast warnings and wrong weights (complex), an error in the first backward (sparse),
    or one that names another rank as the one that failed."""
    make, says = BAD[name]
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_params_dtype=None)):
        with pytest.raises(ValueError) as caught:
            fully_shard_model(make(), mixed_precision_policy=policy)
        for fragment in says:
            assert fragment in str(caught.value), (fragment, str(caught.value))
        assert str(caught.value).count("\n  - ") <= 2


def test_a_parameter_that_is_a_dtensor_is_an_early_error(two_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Odd(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
    for shards in (fully_shard_model, fully_shard):
        with pytest.raises(ValueError, match=r"parameter odd .* it is a DTensor"):
            shards(model)


class Wrapper(torch.Tensor):
    """As torchao's weights, which gather in float8."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda one: one.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, *given: Any) -> Any:
        return (self.inner,), None


def test_a_parameter_whose_values_are_in_another_tensor_is_an_early_error(one_rank: None) -> None:
    model = Odd(Wrapper(torch.ones(4, 3)))
    with pytest.raises(ValueError, match=r"parameter odd .* its class Wrapper .*never be trained"):
        fully_shard_model(model)
    with pytest.raises(ValueError, match=r"odd .* its class Wrapper has no fsdp_post_all_gather"):
        fully_shard(model)
    fully_shard(model, ignored_params={model.odd})


def test_a_class_of_another_library_is_not_that_of_transformer_engine(one_rank: None) -> None:
    for name in ("Float8Tensor", "NVFP4Tensor"):  # as torchao names classes, too
        model = Odd(Wrapper(torch.ones(4, 3)))
        model.odd.__class__ = type(name, (Wrapper,), {})
        with pytest.raises(ValueError, match=rf"parameter odd .* its class {name} computes by"):
            fully_shard_model(model)


def _float64_frozen():
    return Odd(torch.ones(2, dtype=torch.float64), trained=False)


def _integers_frozen():
    return Odd(torch.ones(2, dtype=torch.int32), trained=False)


def _float16():
    return nn.Linear(3, 3, dtype=torch.float16)


def _a_dim_of_one_with_a_stride_of_0():
    return Odd(torch.ones(3).as_strided((1, 3), (0, 1)))


def _transposed():
    return Odd(torch.ones(3, 5).t())


def _sparse_gradients_of_a_frozen_table():
    return nn.Sequential(nn.Linear(3, 3), nn.Embedding(7, 3, sparse=True).requires_grad_(False))


GOOD = {
    "float64, frozen": _float64_frozen,
    "integers, frozen": _integers_frozen,
    "float16": _float16,
    "a dim of one with a stride of 0": _a_dim_of_one_with_a_stride_of_0,
    "transposed": _transposed,
    "sparse gradients of a frozen table": _sparse_gradients_of_a_frozen_table,
}


@pytest.mark.parametrize("name", GOOD)
def test_others_are_no_problem(name: str) -> None:
    assert module_problems(GOOD[name](), None, torch.float32) == []


def test_what_is_not_sharded_may_be_anything() -> None:
    odd = Odd(torch.ones(4).to(torch.float8_e4m3fn), trained=False)
    assert module_problems(odd, None, torch.float32, lambda fqn: fqn != "odd") == []


class OnDevices(nn.Module):
    """A module with a parameter on each of some devices, which need not exist."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = devices  # names

    def parameters(self, recurse: bool = True) -> Any:
        return [SimpleNamespace(device=name, is_meta=name == "meta") for name in self.devices]


def test_a_model_is_on_one_device() -> None:
    """`fully_shard` does not ask: it moves each parameter, and its calls move a model in parts."""
    assert place_problems(OnDevices("cpu", "meta", "cpu"), None) == []
    [found] = place_problems(OnDevices("cuda:1", "cpu"), None)
    assert found.startswith("module: its parameters are on several devices ['cpu', 'cuda:1']")
    [found] = place_problems(OnDevices("cpu"), "cuda:1")
    assert found.startswith("device=cuda:1: the module's parameters are on cpu")
    assert place_problems(OnDevices("cuda:1"), torch.device("cuda", 1)) == []


class DecoderLayer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))


class LateDecoderLayer(DecoderLayer):
    """Of a subclass, as models with other attention have."""


def _model(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in modules.items():
        model.add_module(name, child)
    return model


def _named_layers() -> nn.Module:
    inner = _model(layers=nn.ModuleList([DecoderLayer(), LateDecoderLayer()]), head=nn.Linear(4, 4))
    inner._no_split_modules = ["DecoderLayer"]  # type: ignore[assignment]
    return _model(base=inner, heads=nn.ModuleList(nn.Linear(90, 90) for _ in range(2)))


def _layers(count: int, width: int = 4) -> list[nn.Module]:
    return [DecoderLayer(width) for _ in range(count)]


def _a_list_and_not_the_experts_in_it_nor_a_few():
    return _model(
        layers=nn.ModuleList(_layers(2, 30)),
        head=nn.Linear(4, 4),
        heads=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
    )


def _two_towers():
    return _model(
        encoder=nn.ModuleList(_layers(2)),
        decoder=nn.ModuleDict({"a": DecoderLayer(), "b": DecoderLayer()}),
    )


def _a_sequential_of_layers():
    return _model(layers=nn.Sequential(*_layers(2), nn.ReLU()))


def _no_layer_a_sequential_of_operations():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def _no_layer_one_of_each_class():
    return _model(parts=nn.ModuleList([nn.Linear(3, 3), nn.LayerNorm(3)]))


REPEATED = {
    "classes that the model names, also inside of another": (
        _named_layers,
        ["base.layers.0", "base.layers.1"],
    ),
    "a list, and not the experts in it, nor a few small heads": (
        _a_list_and_not_the_experts_in_it_nor_a_few,
        ["layers.0", "layers.1"],
    ),
    "two towers": (
        _two_towers,
        ["encoder.0", "encoder.1", "decoder.a", "decoder.b"],
    ),
    "a Sequential of layers": (
        _a_sequential_of_layers,
        ["layers.0", "layers.1"],
    ),
    "no layer: a Sequential of operations": (
        _no_layer_a_sequential_of_operations,
        [],
    ),
    "no layer: one of each class": (
        _no_layer_one_of_each_class,
        [],
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_layers_are_found(name: str) -> None:
    make, expected = REPEATED[name]
    module = make()
    names = {id(child): name for name, child in module.named_modules()}
    assert [names[id(child)] for child in repeated_layers(module)] == expected


CLASSES = {
    "a class": (DecoderLayer, (DecoderLayer,)),
    "a name": ("DecoderLayer", (DecoderLayer,)),
    "a name of a base class": ("LateDecoderLayer", (LateDecoderLayer,)),
    "a path": (f"{__name__}.DecoderLayer", (DecoderLayer,)),
    "a path where the class is not defined": ("torch.nn.Linear", (nn.Linear,)),
}


@pytest.mark.parametrize("name", CLASSES)
def test_unit_classes_may_be_named(name: str) -> None:
    named, expected = CLASSES[name]
    module = _named_layers()
    assert classes_of(module, [named]) == expected
    assert module_problems(module, [named], torch.float32) == []


NO_CLASS = {
    "misspelt": (["DecoderLayr"], "no module of Module is a DecoderLayr (near it: DecoderLayer, "),
    "a misspelt path": (["torch.nn.Liner"], "is a torch.nn.Liner (near it: Linear"),
    "of no module": ([nn.Conv2d], "fsdp_unit_modules=['Conv2d']: no module of Module is a Conv2d."),
    "a path of no module": (["torch.nn.Conv2d"], "no module of Module is a torch.nn.Conv2d. Name"),
    "no class": ([3], "fsdp_unit_modules=['3']: 3 is neither a class nor the name of a class"),
    "a string and no list": ("DecoderLayer", "a class, not a list. Put it into a list"),
    "a class and no list": (nn.Linear, "a class, not a list. Put it into a list"),
}


@pytest.mark.parametrize("name", NO_CLASS)
def test_a_unit_class_that_matches_nothing_is_one_error(name: str) -> None:
    named, says = NO_CLASS[name]
    with pytest.raises(ValueError) as caught:
        fully_shard_model(_named_layers(), None, named)
    assert says in str(caught.value)
    assert str(caught.value).count("\n  - ") == 1
