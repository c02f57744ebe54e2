"""Models that the matrix has none of, and fields that later releases brought, train like stock DDP
without overlap and recompute (traps R1, R2, R3, R5, R6, S1, S3, M7, E3, I4).

Fields are skipped where the installed release lacks them (docs/contributing/fields.md says since
when they are).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from megatron_fsdp_adapter.tools.models.local_spec import TorchNorm
from tests.lib.gpt import gpt, models, topologies
from tests.lib.gpt.checks import Step, check_number
from tests.lib.gpt.gpt import Case, batches, distributed_optimizer, forward_backward
from tests.lib.gpt.models import (
    ALONE,
    ATTENTION,
    BLOCK,
    CASE,
    SIZES,
    freeze_part,
    towers,
    varied,
)
from tests.lib.gpt.topologies import Topology, model_config
from tests.lib.gpt.variants import (
    ZERO_1,
    ZERO_2,
    ZERO_3,
    Variant,
    compare,
    marked,
    train,
    unchanged,
)
from tests.lib.ranks.shared_ranks import on_ranks

CHECKS = (
    "megatron/wrapper/units.py",
    "megatron/optimizer/clipping.py",
    "megatron/optimizer/optimizer.py",
)


def _row(name: str, strategy: str, recompute: Any, tied: bool, change: Any) -> Variant:
    build = partial(towers, tied=tied, change=change)
    return Variant(
        f"two towers, {name}",
        (strategy,),
        random=True,
        case=SIZES,
        build=partial(build, recompute=recompute),
        steps=2,
        compare="free",
        reference={"build": partial(build, recompute={})},
    )


# Core's HybridModel (0.18 on): layers of attention, of an MLP and of experts are units. Mamba
# layers, whose kernels are CUDA only, are in `changed_models.py`.

PATTERN = "*-*E"
"""Attention, MLP, attention, experts: each a layer, one a unit."""


def _hybrid(config: Any, block: Any, **options: Any) -> nn.Module:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from tests.lib.gpt.hybrid_stack import stack_of

    experts = Topology("", experts=config.num_moe_experts)
    stack = stack_of(partial(topologies._layer_spec, experts))
    return HybridModel(config, stack, hybrid_layer_pattern=PATTERN, **options)


@contextmanager
def hybrid_models() -> Iterator[None]:
    """Inside, chunks of topologies are hybrid models."""
    block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    with (
        mock.patch.object(topologies, "GPTModel", _hybrid),
        mock.patch.object(block, "TENorm", TorchNorm),
    ):
        yield


def layers_are_units(ours: Any, reference: Any, strategy: str) -> None:
    units = {unit.name for unit in ours.chunks[0].engine.units}
    assert units >= {f"decoder.layers.{i}" for i in range(len(PATTERN))}, units
    kinds = {"TransformerLayer", "MLPLayer", "MoETransformerLayer"}
    assert set(ours.chunks[0].fsdp_unit_modules) >= kinds


# Multi-token prediction on the last of two pipeline stages, where the embedding is called too.


def _predicting(config: Any, block: Any, **options: Any) -> GPTModel:
    spec = get_gpt_mtp_block_spec(
        config, get_gpt_layer_local_spec(), False, vp_stage=options["vp_stage"]
    )
    return GPTModel(config, block, mtp_block_spec=spec, **options)


def predicting_models() -> Any:
    """Inside, chunks of topologies predict several tokens."""
    return mock.patch.object(topologies, "GPTModel", _predicting)


# Fields of later releases.


def _with_fields(case: Case, device: torch.device, tied: bool, fields: Any) -> nn.Module:
    def build() -> nn.Module:
        config = model_config(ALONE, CASE, **fields)
        return models.gpt(config, tied)

    return varied(build, case.seed)


def heads_have_a_norm(ours: Any, reference: Any, strategy: str) -> None:
    """Stock DDP's optimizer is a chain, which keeps them."""
    norms = reference.optimizer.grad_norms_by_group
    assert set(norms) == {"mtp"}, norms
    assert norms["mtp"] > reference.case.clip, norms
    found = ours.optimizer.grad_norms_by_group
    for name, norm in norms.items():
        check_number(float(found[name]), float(norm), name, 1e-5)


@contextmanager
def mup_overrides() -> Iterator[None]:
    """Inside, optimizers are built with MuP's learning rates."""

    def built_with(config: OptimizerConfig, chunks: list[Any], **options: Any) -> Any:
        width = chunks[0].config.mup_width_mult
        overrides = {
            **core_optimizer.get_standard_config_overrides(config),
            **core_optimizer.get_mup_config_overrides(config, width),
        }
        return get_megatron_optimizer(config, chunks, config_overrides=overrides, **options)

    with mock.patch.object(gpt, "get_megatron_optimizer", built_with):
        yield


def at_learning_rates_of_groups(trainer: Any, number: int, rank: int) -> Step:
    for group in trainer.optimizer.param_groups:  # as OptimizerParamScheduler does
        group["lr"] = group.get("max_lr") or trainer.case.lr
    return train(trainer, number, rank)


def second_is_too_large(trainer: Any, number: int, rank: int) -> Step:
    """A step, whether it was taken in the place of its norm: that of the second one is above the
    bound, so that it is left out."""
    config = distributed_optimizer(trainer).config
    config.grad_norm_skip_threshold = 1e-9 if number == 1 else 1e9
    data = batches(trainer.case, number, rank, torch.device("cpu"))
    loss = forward_backward(trainer, data)
    taken = bool(trainer.optimizer.step()[0])
    assert taken == (number != 1), number
    return Step(loss, float(taken), {}, trainer.params())


def later(name: str, fields: dict[str, Any], tied: bool = False, **changes: Any) -> Variant:
    case = {**SIZES, **changes.pop("case", {})}
    needs = tuple(field for field in fields if field != "mtp_num_layers")
    build = partial(_with_fields, tied=tied, fields=fields)
    return Variant(
        name, random=True, case=case, build=build, compare="free", needs=needs[:1], **changes
    )


ROWS = [
    _row("blocks recomputed, tied", ZERO_3, BLOCK, True, unchanged),
    _row("attention recomputed, tied, frozen part", ZERO_2, ATTENTION, True, freeze_part),
    _row("frozen part", ZERO_1, {}, False, freeze_part),
]
for _ep in (1, 2):
    ROWS.append(
        Variant(
            f"hybrid model, ep{_ep}",
            topology=Topology(f"hybrid-ep{_ep}", ep=_ep, experts=4),
            case={"num_layers": len(PATTERN), "tied": False},
            fields={"is_hybrid_model": True},
            around=hybrid_models,
            compare="free",
            expect=layers_are_units,
            needs=("megatron.core.models.hybrid",),
        )
    )
for _tied in (False, True):
    ROWS.append(
        Variant(
            f"multi-token prediction in a pipeline, tied {_tied}",
            world=4,
            case={"tied": _tied},
            topology=Topology("pp2-mtp", pp=2),
            fields={"mtp_num_layers": 1},
            compare="free",
            around=predicting_models,
            steps=2,
            full=True,
        )
    )
for _tied in (False, True):
    ROWS.append(
        later(
            f"prediction heads that are detached, tied {_tied}",
            {"mtp_detach_heads": True, "mtp_num_layers": 2},
            _tied,
            case={"clip": 0.02},
            expect=heads_have_a_norm,
        )
    )
ROWS.append(
    later(
        "one prediction layer called for every token",
        {"mtp_use_repeated_layer": True, "mtp_num_layers": 2},
    )
)
ROWS.append(
    later(
        "MuP",
        {"use_mup": True, "mup_base_hidden_size": 8, "mup_embedding_mult": 2.0},
        around=mup_overrides,
        drive=at_learning_rates_of_groups,
    )
)
ROWS.append(later("MLPs in chunks", {"mlp_chunks_for_training": 2}))
for _clip in (1.0, 0.0):
    ROWS.append(
        Variant(
            f"a norm that is too large, clip {_clip}",
            random=True,
            case={**SIZES, "clip": _clip},
            drive=second_is_too_large,
            compare="loosely",
            needs=("grad_norm_skip_threshold",),
        )
    )


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_trains_like_stock_ddp(row: Variant, rank: int, seed: int) -> None:
    compare(row, rank, seed)
