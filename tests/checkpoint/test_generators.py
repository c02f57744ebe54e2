"""Generator states in checkpoints: under expert parallelism each rank resumes on its own stream."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed import checkpoint as dcp

from megatron_fsdp_adapter.checkpoint import training_state
from megatron_fsdp_adapter.megatron.checkpoint.generators import stored_place
from megatron_fsdp_adapter.megatron.compat.table import BRIDGE, DRIVERS, LM
from tests.lib.checkpoint import drivers
from tests.lib.checkpoint.checkpoint_cases import same
from tests.lib.checkpoint.drivers import CASE, asked_state, load_by_driver
from tests.lib.gpt.gpt import Trainer, build_trainer
from tests.lib.megatron.stand_ins import stand_ins

CHECKS = ("megatron/checkpoint/generators.py", "megatron/checkpoint/checkpoint_drivers.py")

driver = drivers.driver


@pytest.fixture
def trainer(device: torch.device) -> Trainer:
    return build_trainer(CASE, "optim_grads_params", device)


class _Group:
    """Stands for a process group: its size, and this rank's number."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def get_rng_state(
    data_parallel_random_init: bool, ckpt_format: str = "torch_dist", *, pg_collection: Any
) -> Any:
    """As Megatron-Bridge's function of this name (0.4.0), without the states themselves."""
    count = pg_collection.dp_cp.size() if data_parallel_random_init else 1
    if ckpt_format == "torch_dist":
        return "sharded object"
    return {f"({pg_collection.pp.rank()}, {pg_collection.tp.rank()})": [1] * count}


@pytest.mark.parametrize(
    ("expert_ranks", "of_each", "ckpt_format", "expected"),
    [
        (2, False, "fsdp_dtensor", {"(1, 0, 3)": [1]}),
        (1, False, "fsdp_dtensor", {"(1, 0)": [1]}),
        (2, True, "fsdp_dtensor", {"(1, 0)": [1] * 4}),
        (2, False, "torch_dist", "sharded object"),
    ],
)
def test_states_that_are_saved_have_a_place_for_each_expert_parallel_rank(
    expert_ranks: int, of_each: bool, ckpt_format: str, expected: Any
) -> None:
    groups = SimpleNamespace(
        pp=_Group(2, 1), tp=_Group(1, 0), ep=_Group(expert_ranks, 0), dp_cp=_Group(4, 3)
    )
    rows = [row for row in DRIVERS if row.name == "get_rng_state"]
    with stand_ins({BRIDGE: {"get_rng_state": get_rng_state}}, rows) as made:
        found = made[BRIDGE].get_rng_state(of_each, ckpt_format, pg_collection=groups)
    assert found == expected


def rng_state_of_lm(ckpt_format: str, tp_group: Any, pp_group: Any) -> Any:
    """As Megatron-LM's `get_rng_state` (core_v0.16.1), without the states themselves. Its
    `get_pg_rank` says 0 where a group is None."""
    pp_rank = 0 if pp_group is None else pp_group.rank()
    tp_rank = 0 if tp_group is None else tp_group.rank()
    return {f"({pp_rank}, {tp_rank})": [1]}


@pytest.mark.parametrize("groups", [(_Group(4, 3), _Group(2, 1)), (None, None)])
def test_a_load_without_groups_asks_for_the_states_of_its_own_rank(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[Any, Any]
) -> None:
    """Megatron-LM's load passes none. Its save passes them."""
    for name, rank in (
        ("get_tensor_model_parallel_rank", 3),
        ("get_pipeline_model_parallel_rank", 1),
        ("get_expert_model_parallel_world_size", 1),
        ("get_data_parallel_rank", 0),
    ):
        monkeypatch.setattr(parallel_state, name, lambda rank=rank, **_: rank)
    rows = [row for row in DRIVERS if row.name == "get_rng_state"]
    with stand_ins({LM: {"get_rng_state": rng_state_of_lm}}, rows) as made:
        assert made[LM].get_rng_state("fsdp_dtensor", *groups) == {"(1, 3)": [1]}


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("(0, 1, 2)", {"(0, 1, 0)", "(0, 1, 2)"}, "(0, 1, 2)"),
        ("(0, 1, 2)", {"(0, 1)"}, "(0, 1)"),  # of a release that had no place for each rank
        ("(0, 1, 2)", {"(0, 1, 0)", "(0, 1, 1)"}, None),  # more data-parallel ranks than before
        ("(0, 1)", {"(0, 1, 0)", "(0, 1, 1)"}, "(0, 1, 0)"),  # no expert parallelism any more
        ("(0, 1)", {"(0, 0)"}, None),
        ("of a script", {"of a script"}, "of a script"),
    ],
)
def test_the_place_that_is_read(asked: str, stored: set[str], expected: str | None) -> None:
    assert stored_place(asked, stored.__contains__) == expected


def _states(**values: float) -> dict[str, Any]:
    return {
        f"({', '.join(place)})": [{"torch_rng_state": torch.full((3,), value)}]
        for place, value in values.items()
    }


def _save(trainer: Trainer, folder: Path, stored: dict[str, float]) -> None:
    """Saves the trainer's state with these generator states."""
    state = training_state([trainer.wrapper], trainer.optimizer)
    dcp.save({**state, "rng_state": _states(**stored)}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"000": 1.0, "001": 2.0}, 2.0),
        ({"00": 1.0}, 1.0),
        ({"000": 1.0}, 0.0),
    ],
    ids=["of each rank", "of all ranks", "of fewer ranks"],
)
def test_states_come_to_the_place_where_megatron_looks(
    driver: ModuleType,
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: dict[str, float],
    expected: float,
) -> None:
    _save(trainer, tmp_path, stored)
    asked = asked_state(trainer, rng_state=_states(**{"001": 0.0}))
    found = load_by_driver(driver, tmp_path, asked)["rng_state"]
    assert same(found, _states(**{"00": expected}))
    assert ("generators keep their seeds" in capsys.readouterr().out) is (expected == 0.0)


@pytest.mark.parametrize(
    ("stored", "expected", "said"),
    [
        ({"00": 1.0}, 1.0, ""),
        ({"10": 1.0}, 0.0, "of another split"),
        ({}, 0.0, "has no RNG states"),
    ],
    ids=["stored", "of another rank", "not stored"],
)
def test_a_run_that_saves_no_states_goes_on_with_stored_ones(
    driver: ModuleType,
    trainer: Trainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stored: dict[str, float],
    expected: float,
    said: str,
) -> None:
    """With `--no-save-rng` Megatron asks for none, and would stop behind the load."""
    _save(trainer, tmp_path, stored)
    driver.get_rng_state = lambda *unused: _states(**{"00": 0.0})
    run = {"no_save_rng": True, "ckpt_format": "fsdp_dtensor"}
    found = load_by_driver(driver, tmp_path, asked_state(trainer), **run)
    assert same(found["rng_state"], _states(**{"00": expected}))
    assert said in capsys.readouterr().out
    found = load_by_driver(driver, tmp_path, asked_state(trainer), **run, no_load_rng=True)
    assert "rng_state" not in found
