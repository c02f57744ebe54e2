"""State dicts under the module's names and under a checkpoint's, their pieces, and how a load
tells them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_adapter.checkpoint import load_model_state, model_state
from megatron_fsdp_adapter.checkpoint.fitting import fit, renamed_like
from megatron_fsdp_adapter.checkpoint.state import flatten
from megatron_fsdp_adapter.core.dtensor.chunks import LayoutRef
from megatron_fsdp_adapter.core.dtensor.parts import first_rows, join_parts, part_of
from megatron_fsdp_adapter.megatron.optimizer.optimizer_state import (
    join_halves,
    split_halves,
)
from megatron_fsdp_adapter.state.model_state import checkpoint_form, chosen_form, module_form
from megatron_fsdp_adapter.state.names import GlobalNames, split_depth
from tests.lib.checkpoint.checkpoint_cases import SHAPES, data_mesh, plan, shard, whole
from tests.lib.gpt.gpt import Case, Trainer, build_trainer

CHECKS = (
    "state/model_state.py",
    "state/names.py",
    "checkpoint/fitting.py",
    "core/dtensor/parts.py",
    "megatron/optimizer/optimizer_state.py",
)

CASE = Case(num_layers=2, hidden=12, heads=2, ffn=20, vocab=23, swiglu=True)
# As on the second of two pipeline stages with a layer each.
LAST = GlobalNames(renumbered={"layers.0": "1"})
TWO = GlobalNames(renumbered={"layers.0": "1", "layers.1": "2"})
KEYS = ["layers.0.a", "layers.0.b"]
BOTH = ["layers.0.a", "layers.1.a"]


@pytest.fixture
def trainer(device: torch.device) -> Trainer:
    """Compute weights of their own, which stay until they are refreshed."""
    return build_trainer(CASE.but(bf16=True), "no_shard", device)


FORMS: dict[str, tuple[Any, list[str], list[str], int | None]] = {
    "of the module": (LAST, KEYS, KEYS, 0),
    "of a checkpoint": (LAST, KEYS, ["layers.1.a", "layers.1.b"], 1),
    # Layers 1 and 2 of the model are 0 and 1 here: key 1 is in both forms.
    "all keys decide, of a checkpoint": (TWO, BOTH, ["layers.1.a", "layers.2.a"], 1),
    "all keys decide, of the module": (TWO, BOTH, BOTH, 0),
    "either": (TWO, BOTH, ["layers.1.a"], None),
    "a key that means the same in both is no question": (
        LAST,
        ["layers.0.a", "embedding"],
        ["embedding"],
        0,
    ),
}
"""Names of a checkpoint, the module's keys, those that are given, and which form they are of."""


@pytest.mark.parametrize("depth", ["", "module."])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_known_by_its_keys(name: str, depth: str) -> None:
    names, own, given, number = FORMS[name]
    forms = (module_form(own), checkpoint_form(own, names))
    asked = [depth + key for key in given]
    if number is None:
        with pytest.raises(ValueError, match="fit both names"):
            chosen_form(forms, asked)
    else:
        chosen, keys = chosen_form(forms, asked)
        assert chosen == forms[number]
        assert keys == dict(zip(asked, given, strict=True))


INNER = "mtp.layers.0.{}.mlp.linear_fc1.weight"
NEWER, OLDER = INNER.format("mtp_model_layer"), INNER.format("transformer_layer")
ONE, TWO_DEEP = "module.", "module.module."
BY_RELEASE = {
    # The name in the model, in the optimizer's state and in the options of parameter groups.
    "0.16": (ONE + OLDER, TWO_DEEP + OLDER, TWO_DEEP + OLDER),
    "0.17": (ONE + NEWER, TWO_DEEP + NEWER, TWO_DEEP + NEWER),
    "0.20, the bundled engine": (ONE + OLDER, TWO_DEEP + OLDER, TWO_DEEP + NEWER),
    "0.20, version 2 of the bundled engine": (OLDER, ONE + OLDER, ONE + NEWER),
}


def _named(model: str, moments: str, options: str) -> dict[str, Any]:
    moment = {"exp_avg": 2, "step": 3}
    optimizer = {"state": {moments: moment}, "param_to_group_meta": {options: {"lr": 4}}}
    other = split_depth(model)[0] + "decoder.weight"
    return {"model": {model: 1, other: 0}, "optimizer": optimizer, "iteration": 5}


@pytest.mark.parametrize("stored", BY_RELEASE)
@pytest.mark.parametrize("own", BY_RELEASE)
def test_each_part_of_a_state_gets_the_names_that_the_checkpoint_has_there(
    own: str, stored: str
) -> None:
    wanted = _named(*BY_RELEASE[stored])
    assert renamed_like(_named(*BY_RELEASE[own]), flatten(wanted)) == wanted


def test_a_half_that_is_missing_or_misshaped_is_named(trainer: Trainer) -> None:
    name = "module.decoder.layers.1.mlp.linear_fc1.weight"
    state = trainer.wrapper.state_dict_for_save_checkpoint()
    del state[f"{name}_w"]
    state[f"{name}_v"] = torch.zeros(21, 12)
    with pytest.raises(ValueError) as caught:
        trainer.wrapper.load_state_dict(state)
    assert f"missing: {name}_w" in str(caught.value)
    assert f"{name}_v: shape (21, 12), expected (20, 12)" in str(caught.value)


@pytest.mark.parametrize(
    "mixer", ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer", "derived")
)
def test_a_layer_whose_slices_do_not_join_is_refused_under_tensor_parallelism(
    trainer: Trainer, mixer: str
) -> None:
    mlp = next(m for n, m in trainer.wrapper.named_modules() if n.endswith("layers.0.mlp"))
    mixers = {"derived": ("Own", "MambaMixer")}.get(mixer, (mixer,))
    for name in reversed(mixers):
        mlp.__class__ = type(name, (type(mlp),), {})
    trainer.wrapper.state_dict_for_save_checkpoint()
    param = mlp.linear_fc2.weight
    object.__setattr__(param.fsdp_layout_ref, "tp_offset", (0, 0))
    with pytest.raises(ValueError, match=r"linear_fc2\.weight.*tensor_model_parallel_size=1"):
        trainer.wrapper.state_dict_for_save_checkpoint()


def _chunk(*keys: str) -> Any:
    return mock.Mock(
        **{
            "state_dict_for_save_checkpoint.return_value": dict.fromkeys(keys, 0),
            "checkpoint_keys.return_value": frozenset(keys),
        }
    )


def test_keys_of_no_chunk_or_of_several_are_refused() -> None:
    """Of what each chunk is given: test_reshard.py."""
    chunks = [_chunk("a", "b"), _chunk("c")]
    with pytest.raises(ValueError, match="no model chunk of this rank has d, e"):
        load_model_state(chunks, {"a": 1, "b": 2, "c": 3, "e": 4, "d": 5})
    with pytest.raises(ValueError, match="several model chunks of this rank have b"):
        model_state([chunks[0], _chunk("b")])


# Pieces of one tensor.


def _fc(rank: int, size: int = 3) -> tuple[Any, LayoutRef]:
    shapes = {**SHAPES, "fc": (8, 5)}
    layout = plan(size, shapes)
    ref = LayoutRef(layout, list(shapes).index("fc"), rank)
    return shard(ref, data_mesh(1), whole("fc", (8, 5), torch.float32)), ref


def test_pieces_of_another_sharding_and_uneven_cuts_are_refused(one_rank: None) -> None:
    value, ref = _fc(0, size=1)
    short = part_of(*_fc(0, size=3), 0, 2)
    with pytest.raises(ValueError, match="their shardings differ"):
        join_parts(value, ref, (short, short))
    with pytest.raises(ValueError, match="into 3 equal pieces"):
        part_of(value, ref, 0, 3)
    with pytest.raises(ValueError, match="carries no chunks"):
        part_of(DTensor(value._local_tensor[1:], value._spec, requires_grad=False), ref, 0, 1)


def test_a_vocabulary_has_a_size_and_no_more_rows_than_its_table(one_rank: None) -> None:
    with pytest.raises(ValueError, match="vocab_size=0"):
        fit({}, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9 rows of 8"):
        first_rows(_fc(0)[0], 9, 20)


# Optimizer state.


def test_halves_of_optimizer_state_are_both_there_and_sharded(one_rank: None) -> None:
    value, ref = _fc(0)
    params = {"fc": SimpleNamespace(fsdp_layout_ref=ref)}
    own = {"fc": {"exp_avg": value}}
    halved = frozenset({"fc"})
    cut = split_halves(own, params, halved)
    assert list(cut) == ["fc_w", "fc_v"]
    assert join_halves(cut, own, params, halved)["fc"]["exp_avg"] is value
    for half in cut:
        uneven = {name: dict(entry) for name, entry in cut.items()}
        uneven[half]["exp_avg_sq"] = uneven[half]["exp_avg"]
        with pytest.raises(ValueError, match=r"of \('_w', '_v'\) has no \['exp_avg_sq'\]"):
            join_halves(uneven, own, params, halved)
    del cut["fc_v"]
    with pytest.raises(ValueError, match=r"fc: one of \('_w', '_v'\) is missing"):
        join_halves(cut, own, params, halved)
    plain = {"exp_avg": torch.zeros(4, 5)}
    with pytest.raises(ValueError, match="halves must be DTensors"):
        join_halves({"fc_w": plain, "fc_v": plain}, own, params, halved)
