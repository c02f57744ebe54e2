"""The schedule of a command line beside that of the checkpoint from which it would resume."""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fsdp_adapter.checkpoint.dcp import save_checkpoint
from megatron_fsdp_adapter.checkpoint.folders import TRACKER
from megatron_fsdp_adapter.megatron.checkpoint import resume_check
from megatron_fsdp_adapter.megatron.checkpoint.resume_check import (
    loaded_by,
    loaded_by_ddp,
    schedule_of,
)
from megatron_fsdp_adapter.megatron.options import validation
from megatron_fsdp_adapter.tools.cli import doctor
from megatron_fsdp_adapter.tools.cli.named_options import optimizer_options
from tests.lib.ranks.one_rank import world_of_one

CHECKS = ("megatron/checkpoint/resume_check.py",)

PARSED: dict[str, Any] = {
    "load": None,
    "ckpt_step": None,
    "finetune": False,
    "strict_fsdp_dtensor_load": True,
    "no_load_optim": False,
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "cosine",
    "lr_warmup_init": 0.0,
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
    "start_weight_decay": None,
    "end_weight_decay": None,
    "train_iters": 100,
    "train_samples": None,
    "micro_batch_size": 2,
    "global_batch_size": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
}
"""Arguments as Megatron-LM parses them, before its validation."""
RAMP = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.2}
SAMPLES = {"train_iters": None, "train_samples": 1000}
SCHEDULES = (
    {},
    {"global_batch_size": 12},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"lr_warmup_iters": 10, "lr_decay_iters": 80},
    {"lr_warmup_fraction": 0.1},
    RAMP,
    {**SAMPLES, "lr_warmup_samples": 50},
    {**SAMPLES, "lr_decay_samples": 800, "lr_warmup_fraction": 0.25},
)
RANKS = 8


def arguments(**changed: Any) -> Any:
    return SimpleNamespace(**{**PARSED, **changed})


def schedule_problems(args: Any, ranks: int) -> list[str]:
    """Of the checkpoint that a run with these arguments would load."""
    return resume_check.schedule_problems(args, ranks, loaded_by(args).schedule)


def remarks(args: Any, ranks: int) -> list[str]:
    """Of the checkpoint that a run with these arguments would load."""
    return resume_check.remarks(args, ranks, loaded_by(args).schedule)


def megatrons_schedule(args: Any) -> Any:
    """The state of the scheduler that the installed Megatron-LM makes: its function alone is run,
    because its module asks for CUDA."""
    package = importlib.util.find_spec("megatron.training")
    if package is None or package.origin is None:
        pytest.skip("this megatron-core comes without Megatron-LM's modules")
    tree = ast.parse((Path(package.origin).parent / "training.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_optimizer_param_scheduler":
            function = ast.Module([node], [])
    names: dict[str, Any] = {
        "get_args": lambda: args,
        "update_train_iters": lambda _: None,
        "OptimizerParamScheduler": OptimizerParamScheduler,
    }
    exec(compile(function, "training.py", "exec"), names)
    optimizer = SimpleNamespace(param_groups=[{"max_lr": args.lr, "min_lr": args.min_lr}])
    return names["get_optimizer_param_scheduler"](optimizer).state_dict()


@pytest.mark.parametrize("changed", SCHEDULES, ids=str)
def test_values_are_those_of_megatrons_scheduler(changed: dict[str, Any]) -> None:
    args = arguments(**changed)
    ours = schedule_of(args, RANKS)
    # As `validate_args` does it.
    replicas = RANKS // args.tensor_model_parallel_size // args.context_parallel_size
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * replicas
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    of_megatron = megatrons_schedule(args)
    assert ours == {name: of_megatron[name] for name in ours}
    assert set(of_megatron) - set(ours) == {"num_steps"}


def test_lengths_of_an_unknown_number_of_ranks_are_left_out() -> None:
    known = schedule_of(arguments(), RANKS)
    assert set(known) - set(schedule_of(arguments(), None)) == {
        "wd_incr_steps",
        "lr_decay_steps",
        "lr_warmup_steps",
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    schedule = {**schedule_of(arguments(), RANKS), "num_steps": 16}
    with world_of_one():
        save_checkpoint(tmp_path / "saved", 7, {"opt_param_scheduler": schedule, "args": None})
    return tmp_path / "saved"


LENGTHS = ["lr_decay_steps=3200", "wd_incr_steps=3200"]
JUDGED = {
    "the same": ({}, []),
    "another rate": ({"lr": 5e-4}, ["max_lr=0.0005"]),
    "another length": ({"train_iters": 200}, LENGTHS),
    "override": ({"train_iters": 200, "override_opt_param_scheduler": True}, []),
    "checkpoint's": ({"train_iters": 200, "use_checkpoint_opt_param_scheduler": True}, []),
    "finetune": ({"train_iters": 200, "finetune": True}, []),
    "without optimizer": ({"train_iters": 200, "no_load_optim": True}, []),
    "that iteration": ({"train_iters": 200, "ckpt_step": 7}, LENGTHS),
    "another iteration": ({"train_iters": 200, "ckpt_step": 8}, []),
    # Megatron-LM loads weights alone then.
    "evaluation": ({"train_iters": 200, "skip_train": True}, []),
    "upcycling": ({"train_iters": 200, "moe_use_upcycling": True}, []),
    "frozen": ({"train_iters": 200, "freeze_all_layers": True}, []),
    # Values that are not the command line's.
    "no rate": ({"lr": None, "min_lr": None, "train_iters": None}, []),
    "a file": ({"lr": None, "train_iters": 200, "yaml_cfg": "run.yaml"}, []),
    "axes": ({"micro_batch_size": 1, "use_mp_args_from_checkpoint_args": True}, []),
    "an address": ({"train_iters": 200, "load": "msc://bucket/saved"}, []),
    "no folder": ({"train_iters": 200, "load": "absent"}, []),
}
"""What is changed, and the values that differ then."""


def test_the_newest_of_non_persistent_checkpoints_is_compared(saved: Path) -> None:
    beside = saved / "non_persistent"
    kept = {"load": str(saved), "non_persistent_ckpt_type": "global", "train_iters": 200}
    schedule = schedule_of(arguments(train_iters=200), RANKS)
    with world_of_one():
        save_checkpoint(beside, 5, {"opt_param_scheduler": schedule})
        assert len(schedule_problems(arguments(**kept), RANKS)) == len(LENGTHS)
        save_checkpoint(beside, 9, {"opt_param_scheduler": schedule})
    assert schedule_problems(arguments(**kept), RANKS) == []


def test_the_weights_of_another_checkpoint_have_no_schedule(saved: Path) -> None:
    (saved / TRACKER).unlink()
    wanted = {"load": str(saved), "ckpt_step": 7, "train_iters": 200}
    assert len(schedule_problems(arguments(**wanted), RANKS)) == len(LENGTHS)
    assert schedule_problems(arguments(**wanted, pretrained_checkpoint="weights"), RANKS) == []


def _no_place(folder: Path) -> None:
    """A `.metadata` that lists a value without its place."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.storage_data[MetadataIndex("opt_param_scheduler.max_lr")]
    path.write_bytes(pickle.dumps(metadata))


def _no_bytes(folder: Path) -> None:
    """Files of the right length that hold nothing."""
    for path in folder.glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))


def _cut(folder: Path) -> None:
    for path in folder.glob("*.distcp"):
        path.write_bytes(b"")


def _no_pickle(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"no pickle")


def _released(folder: Path) -> None:
    (folder.parent / TRACKER).write_text("release")
    folder.rename(folder.with_name("release"))


def _legacy(folder: Path) -> None:
    (folder / "mp_rank_00").mkdir()


@pytest.mark.parametrize("change", (_no_place, _no_bytes, _cut, _no_pickle, _released, _legacy))
def test_a_folder_that_is_not_read_is_left_to_the_load(
    change: Callable[[Path], None], saved: Path
) -> None:
    change(saved / "iter_0000007")
    assert schedule_problems(arguments(load=str(saved), lr=5e-4), RANKS) == []


def test_values_of_another_kind_are_not_compared(tmp_path: Path) -> None:
    schedule = {**schedule_of(arguments(), RANKS), "max_lr": Fraction(1, 1000)}
    with world_of_one():
        save_checkpoint(tmp_path, 7, {"opt_param_scheduler": schedule})
    assert schedule_problems(arguments(load=str(tmp_path)), RANKS) == []


@pytest.mark.parametrize("case", JUDGED)
def test_a_schedule_that_differs_is_found(case: str, saved: Path) -> None:
    changed, expected = JUDGED[case]
    found = schedule_problems(arguments(**{"load": str(saved), **changed}), RANKS)
    assert [line.partition(" ")[0] for line in found] == expected


def test_doctor_refuses_it(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    options = {**validation.PLAIN_OPTIONS, **optimizer_options(), **PARSED}
    options |= {"use_megatron_fsdp": True, "load": str(saved), "lr": 5e-4}
    monkeypatch.setattr(doctor.runner, "parse_arguments", lambda *_: SimpleNamespace(**options))
    monkeypatch.setattr(doctor.megatron_lm, "complete", lambda *_: [])
    assert doctor.main(["--json", "--world-size", str(RANKS), "train.py"]) == 1
    report = json.loads(capsys.readouterr().out)["configuration"]
    found = report["refuses"]
    assert found[0].startswith("max_lr=0.0005 (--lr): the checkpoint has 0.001.")
    assert len(found) == 1
    assert report["loads"].startswith(f"iteration 7 of {saved}. ")


def test_the_taken_values_are_listed(saved: Path) -> None:
    options = {"load": str(saved), "lr": 5e-4}
    [own] = remarks(arguments(**options, override_opt_param_scheduler=True), RANKS)
    [stored] = remarks(arguments(**options, use_checkpoint_opt_param_scheduler=True), RANKS)
    assert own.startswith("max_lr=0.0005 of this run, not 0.001 of the checkpoint")
    assert stored.startswith("max_lr=0.001 of the checkpoint, not 0.0005 of this run")
    assert remarks(arguments(**options), RANKS) == []


LOADED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "newest": ({}, "iteration 7 of ", []),
    "no flag": ({"load": None}, "", []),
    "absent": ({"load": "absent"}, "nothing, because absent does not exist", []),
    "must be there": (
        {"load": "absent", "exit_on_missing_checkpoint": True},
        "nothing",
        ["exit_on_missing_checkpoint=True: absent does not exist."],
    ),
    "address": ({"load": "msc://bucket/saved"}, "msc://bucket/saved, which is an address", []),
    "other weights": ({"load": "absent", "pretrained_checkpoint": "weights"}, "", []),
}
"""Changed arguments, how the line begins, and how problems begin."""


@pytest.mark.parametrize("case", LOADED)
def test_a_line_says_what_is_loaded(case: str, saved: Path) -> None:
    changed, begin, problems = LOADED[case]
    loaded = loaded_by(arguments(**{"load": str(saved), **changed}))
    line, found = loaded.line, loaded.problems
    assert line.startswith(begin)
    assert bool(line) == bool(begin)
    for problem, start in zip(found, problems, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("change", (_cut, _no_pickle))
def test_a_damaged_folder_is_a_problem(change: Callable[[Path], None], saved: Path) -> None:
    change(saved / "iter_0000007")
    loaded = loaded_by(arguments(load=str(saved)))
    line, [problem] = loaded.line, loaded.problems
    assert line == f"a checkpoint of {saved} that cannot be read"
    assert problem.startswith(f"load='{saved}': {saved / 'iter_0000007'} is ")


def test_a_checkpoint_in_another_format_is_refused_with_the_other_arguments(saved: Path) -> None:
    _legacy(saved / "iter_0000007")
    loaded = loaded_by(arguments(load=str(saved)))
    assert loaded.line == f"a checkpoint of {saved} that is refused"
    assert loaded.problems == ()


def test_a_run_of_ddp_hears_of_a_checkpoint_that_it_cannot_read(saved: Path) -> None:
    remark = loaded_by_ddp(arguments(load=str(saved)))
    assert f"--load {saved} is in the format fsdp_dtensor" in remark
    assert loaded_by_ddp(arguments(load="absent")) == ""
    assert loaded_by_ddp(arguments()) == ""


def test_a_checkpoint_of_another_program_is_a_problem(tmp_path: Path) -> None:
    with world_of_one():
        save_checkpoint(tmp_path, 7, {"world_size": 2})
    loaded = loaded_by(arguments(load=str(tmp_path)))
    line, [problem] = loaded.line, loaded.problems
    assert line == f"a checkpoint of {tmp_path} that is refused"
    assert problem.startswith(f"load='{tmp_path}': iter_0000007 has no arguments of Megatron-LM")
    assert loaded_by(arguments(load=str(tmp_path), strict_fsdp_dtensor_load=False)).problems == ()
