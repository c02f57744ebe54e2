"""What follows from --use-megatron-fsdp, what the user says goes first, and what is refused."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fsdp_adapter.launch import megatron_lm
from megatron_fsdp_adapter.megatron.options import validation
from megatron_fsdp_adapter.megatron.options.examples import EXAMPLES, not_followed
from megatron_fsdp_adapter.megatron.options.support import EMERGING
from megatron_fsdp_adapter.megatron.options.table import GRAD_COMM, MAIN_GRADS
from tests.lib.megatron.launch_cases import parsed_arguments

CHECKS = (
    "launch/megatron_lm.py",
    "megatron/options/settings.py",
    "megatron/options/examples.py",
)

FSDP = ["--use-megatron-fsdp"]


def _complete(**changed: Any) -> argparse.Namespace:
    args = parsed_arguments(**changed)
    written = [f"--{name.replace('_', '-')}" for name in changed]
    megatron_lm.complete(args, [*FSDP, *written])
    return args


def test_one_flag_gives_sharded_weights_and_nothing_is_refused() -> None:
    args = parsed_arguments()
    changes = megatron_lm.complete(args, FSDP)
    assert {change.option for change in changes} >= {
        "--use-distributed-optimizer",
        "--ckpt-format",
        "--data-parallel-sharding-strategy",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    }
    assert args.data_parallel_sharding_strategy == "optim_grads_params"
    assert args.ckpt_format == "fsdp_dtensor"
    assert args.use_distributed_optimizer
    assert args.overlap_grad_reduce
    assert args.overlap_param_gather
    assert validation.launch_problems(args, {}) == []


UNSET = {
    "calculate_per_token_loss": False,
    "init_model_with_meta_device": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    MAIN_GRADS: "auto",
    GRAD_COMM: "auto",
}


def test_a_run_that_adds_one_flag_prints_those_of_megatron_lms_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    megatron_lm.finish(parsed_arguments(**UNSET), FSDP, ())
    printed = capsys.readouterr().out
    assert [one.flags for one in EXAMPLES if f"  {one.flags}  " in printed] == [
        one.flags for one in EXAMPLES
    ]
    assert not_followed(parsed_arguments(**UNSET)) in printed
    # This Megatron-LM knows some of them.
    known = not_followed(parsed_arguments())
    assert [line.split()[0] for line in known.split("\n")[1:]] == [
        "--no-gradient-accumulation-fusion"
    ]


@pytest.mark.parametrize(
    "chosen", ({"nccl_ub": True}, {GRAD_COMM: "bf16"}, {"gradient_accumulation_fusion": False})
)
def test_a_run_that_has_flags_of_the_examples_prints_none(chosen: dict[str, Any]) -> None:
    assert not_followed(parsed_arguments(**{**UNSET, **chosen})) == ""


def test_options_of_the_examples_are_cores() -> None:
    fields = {**vars(TransformerConfig)["__dataclass_fields__"], **{MAIN_GRADS: 0, GRAD_COMM: 0}}
    fields.update(DistributedDataParallelConfig.__dataclass_fields__)
    for one in EXAMPLES:
        assert fields.keys() >= {*one.options}, one.flags


@pytest.mark.parametrize("written", (["--ckpt-format", "torch_dist"], ["--ckpt-format=torch_dist"]))
def test_what_the_user_wrote_is_refused_and_not_overwritten(written: list[str]) -> None:
    args = parsed_arguments()
    megatron_lm.complete(args, [*FSDP, *written])
    [problem] = validation.launch_problems(args, {})
    assert problem.startswith("ckpt_format='torch_dist': ")


OFFLOAD = {
    "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True,
    "use_torch_optimizer_for_cpu_offload": True,
}  # fmt: skip
"""As a user of Megatron-LM gives it, with what Megatron-LM asks for beside it."""
SET_RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16 reduction is the dtype on the wire": (
        {"grad_reduce_in_bf16": True},
        {"megatron_fsdp_grad_comm_dtype": torch.bfloat16},
    ),
    # With --bf16 Megatron otherwise asks the DDP config for gradients in float32. Of the flag that
    # is added, and of 0.17's own.
    **{
        f"gradients in bf16 are told to Megatron too, {option} {given}": (
            {"bf16": True, f"megatron_fsdp_{option}_dtype": given},
            {"grad_reduce_in_bf16": True},
        )
        for option in ("grad_comm", "main_grads")
        for given in (torch.bfloat16, "bf16")
    },
    "core's flag for offload of the optimizer is ours": (
        {**OFFLOAD, "optimizer_offload_fraction": 1.0},
        {"chunked_optimizer_state_offload": True, **dict.fromkeys(OFFLOAD, False)},
    ),
    "version 2 of Megatron's wrapper, beside which Megatron-LM refuses the distributed optimizer": (
        {"megatron_fsdp_version": 2},
        {"megatron_fsdp_version": 1, "use_distributed_optimizer": True},
    ),
    "split models may be saved": (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "save": "x"},
        {},
    ),
    # 0.19 fills these fields with the tensor-parallel sizes.
    "weights that tensor parallelism alone splits": (
        {
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "tensor_parallel_num_weight_shards": 2,
            "expert_tensor_parallel_num_weight_shards": 1,
        },
        {},
    ),
}
"""What is given, and what arguments are then."""


@pytest.mark.parametrize("name", SET_RIGHT)
def test_what_is_given_is_set_right_and_accepted(name: str) -> None:
    changed, expected = SET_RIGHT[name]
    args = _complete(**changed)
    assert {option: getattr(args, option) for option in expected} == expected
    assert validation.launch_problems(args, {}) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fp4": "e2m1", "fp4_recipe": "custom"}, "fp4_recipe='custom'"),
        ({"fp4": "e2m1", "fp4_param": True}, "fp4_param=True"),
        ({"exp_avg_dtype": "fp8"}, "exp_avg_dtype='fp8'"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
         "optimizer_offload_fraction=0.5"),
        ({"optimizer": "soap"}, "optimizer='soap'"),
        ({"tensor_parallel_num_weight_shards": 4}, "tensor_parallel_num_weight_shards=4"),
        ({"expert_tensor_parallel_num_weight_shards": 4},
         "expert_tensor_parallel_num_weight_shards=4"),
        ({"ddp_reduce_scatter_with_fp32_accumulation": True},
         "reduce_scatter_with_fp32_accumulation=True"),
        ({"ddp_param_name_patterns_for_fp32_local_accumulation": ["all"],
          "megatron_fsdp_main_grads_dtype": "bf16"},
         "param_name_patterns_for_fp32_local_accumulation=['all']"),
        ({"megatron_fsdp_grad_comm_dtype": "fp16"},
         "megatron_fsdp_grad_comm_dtype=torch.float16"),
        ({"megatron_fsdp_grad_comm_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True},
         "grad_reduce_in_fp32=True"),
    ],
)  # fmt: skip
def test_rules_of_the_configs_apply_to_arguments(changed: dict[str, Any], named: str) -> None:
    """Under the names that arguments have, or their values: the rules themselves are of configs."""
    found = validation.launch_problems(_complete(**changed), {})
    assert any(line.startswith(f"{named}: ") for line in found), found


def test_a_checkpoint_in_another_format_is_refused(tmp_path: Path) -> None:
    """What else is wrong with it: tests/megatron/options/test_load_folders.py."""
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert validation.launch_problems(_complete(load=str(tmp_path)), {}) == []
    (folder / "metadata.json").write_text("{}")
    [problem] = validation.launch_problems(_complete(load=str(tmp_path)), {})
    assert problem.startswith(f"load={str(tmp_path)!r}: iter_0000005 ")


def test_asynchronous_saves_are_kept_and_need_no_package() -> None:
    """0.19 drops them without the flag for a process that is not needed here, and asks for a
    package with its default strategy. 0.16.1 cannot save so."""
    given = {"async_save": True, "save": "there"}
    later = {"async_strategy": "nvrx", "use_persistent_ckpt_worker": False}
    args = parsed_arguments(**given, **later)
    changes = megatron_lm.complete(args, [*FSDP, "--async-save"])
    assert {"--use-persistent-ckpt-worker", "--async-strategy"} <= {c.option for c in changes}
    assert args.use_persistent_ckpt_worker
    assert args.async_strategy == "mcore"
    assert validation.launch_problems(args, {}) == []
    args.async_strategy = "nvrx"
    megatron_lm.complete(args, [*FSDP, "--async-save", "--async-strategy", "nvrx"])
    assert args.async_strategy == "nvrx"
    [problem] = validation.launch_problems(_complete(**given), {})
    assert problem.startswith("async_save=True: ")
    assert "0.17" in problem


def test_one_hardware_queue_is_set_right_or_refused() -> None:
    environment: dict[str, str] = {}
    [change] = megatron_lm.complete_environment(environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert change.before is None
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert megatron_lm.complete_environment(environment) == []
    [problem] = validation.launch_problems(_complete(), environment)
    assert problem.startswith("CUDA_DEVICE_MAX_CONNECTIONS='1': ")


def test_a_megatron_lm_that_cannot_be_hooked_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("megatron.training.arguments")
    module.parse_args = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match=r"no megatron\.training\.arguments\.add_megatron_arg"):
        megatron_lm.hook_arguments([], [], lambda: None, lambda: None)


@pytest.mark.parametrize("name", EMERGING)
def test_muon_and_lion_are_asked_for_where_this_megatron_lm_makes_them(name: str) -> None:
    assert not validation.launch_problems(_complete(optimizer=name, muon_nesterov=False), {})
    [problem] = validation.launch_problems(_complete(optimizer=name), {})
    assert problem.startswith(f"optimizer={name!r}: this Megatron-LM creates Muon by a function")


@pytest.mark.parametrize("use_megatron_fsdp", [True, False])
def test_validation_is_shown_adam_in_the_place_of_what_it_refuses(
    use_megatron_fsdp: bool,
) -> None:
    """Megatron-LM asserts that there is no such optimizer with sharded weights; the one that is
    made then has them."""

    def validate_args(args: Any, defaults: Any) -> Any:
        if use_megatron_fsdp:
            assert args.optimizer == "adam"
        else:
            assert args.optimizer == "muon"
        if defaults == "wrong":
            raise ValueError(defaults)
        return args

    args = argparse.Namespace(optimizer="muon", use_megatron_fsdp=use_megatron_fsdp)
    validate = functools.partial(megatron_lm.validate, validate_args)
    assert validate(args, {}) is args
    assert args.optimizer == "muon"
    with pytest.raises(ValueError, match="wrong"):
        validate(args, defaults="wrong")
    assert args.optimizer == "muon"
