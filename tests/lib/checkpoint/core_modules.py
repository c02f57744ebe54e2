"""Conversions of the models of `core_models.py`, and the modules that core's specs name.

    python -m tests.lib.checkpoint.core_modules            every model, and the list of modules
    python -m tests.lib.checkpoint.core_modules ROW ...    these models

Prints one line of JSON: {"trips": {row: what differs}, "skipped": {row: what core lacks},
"specs": {class: specs that name it}, "built": classes in the models}.
A process of its own: stand-ins take the place of packages before core is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import logging
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

WALK = "specs"
"""In place of rows: only the modules that specs name."""
FAMILIES = ("gpt", "hybrid", "mamba", "T5", "bert")


def spec_modules() -> Iterator[ModuleType]:
    """The modules of core's model families that define specs."""
    from tests.lib.checkpoint.te_stand_in import with_triton

    for family in FAMILIES:
        name = f"megatron.core.models.{family}"
        if importlib.util.find_spec(name) is None:
            continue
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if "spec" in found.name.rpartition(".")[2]:
                with with_triton():
                    module = importlib.import_module(found.name)
                yield module


def specs() -> Iterator[tuple[str, Any]]:
    """Name and spec: each constant of these modules, and what each of their functions returns for
    every choice of its arguments."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for module in spec_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleSpec):
                yield name, value
            is_own = inspect.isfunction(value) and value.__module__ == module.__name__
            if is_own and "spec" in name and not name.startswith("_"):
                yield from ((name, made) for made in _made(value))


def _made(function: Callable[..., Any]) -> Iterator[Any]:
    parameters = inspect.signature(function).parameters
    names = [n for n, p in parameters.items() if n in _choices() or p.default is p.empty]
    for values in itertools.product(*(_choices().get(name, (None,)) for name in names)):
        try:
            yield function(**dict(zip(names, values, strict=True)))
        except (AssertionError, AttributeError, ValueError, TypeError, NotImplementedError):
            continue  # choices that contradict each other


@functools.cache
def _choices() -> Mapping[str, tuple[Any, ...]]:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from tests.lib.checkpoint.core_models import MODELS

    both = (False, True)
    rows = ("TE", "TE, grouped experts, shared", "TE, MLA", "TE, gated delta net", "local")
    rows += ("TE, sparse attention",)
    return {
        "num_experts": (None, 4),
        "moe_grouped_gemm": both,
        "qk_layernorm": both,
        "multi_latent_attention": both,
        "qk_l2_norm": both,
        "use_te_op_fuser": both,
        "mla_down_proj_fusion": both,
        "use_transformer_engine": both,
        "backend": (TESpecProvider(), LocalSpecProvider()),
        "config": tuple(MODELS[row].config() for row in rows if not MODELS[row].missing),
        "spec": (get_gpt_layer_local_spec(),),
        "num_layers": (2,),
    }


def classes_in(value: Any) -> set[type]:
    """The module classes that a spec names."""
    if inspect.isclass(value):
        return {value} if issubclass(value, nn.Module) else set()
    found: set[type] = set()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        parts = (value.__self__,)
    elif isinstance(value, (list, tuple)):
        parts = tuple(value)
    elif isinstance(value, dict):
        parts = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        parts = tuple(vars(value).values())
    else:
        parts = ()
    for part in parts:
        found |= classes_in(part)
    return found


def named_in_specs() -> dict[str, list[str]]:
    """Class -> names of the specs that have it."""
    found: dict[str, set[str]] = {}
    for name, spec in specs():
        for kind in classes_in(spec):
            found.setdefault(kind.__name__, set()).add(name)
    return {kind: sorted(names) for kind, names in sorted(found.items())}


def report(names: list[str]) -> dict[str, Any]:
    """What this module prints."""
    from tests.lib.checkpoint.core_models import MODELS
    from tests.lib.checkpoint.core_trips import trip, trip_of_weights
    from tests.lib.gpt import gpt, torch_adam
    from tests.lib.ranks.one_rank import as_one_of_many, world_of_one

    found: dict[str, Any] = {"trips": {}, "skipped": {}}
    built: set[str] = set()
    with world_of_one(), as_one_of_many():
        gpt.init_megatron()
        torch_adam.make_loadable()
        if names == [WALK]:
            return {"specs": named_in_specs()}
        for name in names or MODELS:
            row = MODELS[name]
            if row.missing:
                found["skipped"][name] = row.missing
                continue
            for module in row.build(0).modules():
                built |= {kind.__name__ for kind in type(module).__mro__}
            with tempfile.TemporaryDirectory() as folder:
                problems = trip(row, Path(folder)) + trip_of_weights(row, Path(folder))
            found["trips"][name] = problems
            print(name, "|", problems[:5] or "the same", file=sys.stderr, flush=True)
        if not names:
            found["specs"] = named_in_specs()
    return {**found, "built": sorted(built)}


def main(names: list[str]) -> None:
    """Runs the models, and prints the report."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from tests.lib.checkpoint import te_stand_in

    te_stand_in.install()
    print(json.dumps(report(names)))


if __name__ == "__main__":
    main(sys.argv[1:])
