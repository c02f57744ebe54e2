"""Which tests run once more with another release of megatron-core, by `pytest --again`: of what
differs between releases. The rest says the same with each of them.

`scripts/test.sh` runs all tests with one release and these with another. So does what the first run
skips, for lack of a field or of a class: it leaves the names in a file (`--skips`), and the second
run reads them there. With `--full` both run everything.
"""

from __future__ import annotations

from collections.abc import Iterable

OF_LATER_FIELDS = (
    "hybrid model, ep1", "hybrid model, ep2", "prediction heads that are detached, tied False",
    "prediction heads that are detached, tied True",
    "one prediction layer called for every token", "MuP", "MLPs in chunks",
    "a norm that is too large, clip 1.0",
)  # fmt: skip
OF_DISPATCHERS = (
    "HybridEP",
    "expert bias",
    "flex dispatcher beside shared experts",
    "shared experts overlapped",
)
OF_AXES = ("tp2-sp", "cp2 swiglu=True", "ep2-etp2", "pp2-vpp2")
AGAIN = (
    # What is asked of core, replaced in it, and read of its configs and arguments.
    "launch/test_arguments.py",
    "launch/test_bridge_overrides.py",
    "launch/test_runner.py",
    "megatron/checkpoint",
    "megatron/compat",
    "megatron/frameworks",
    "megatron/layers/test_cuda_graphs.py",
    "megatron/optimizer/test_adapter_optimizer.py",
    "megatron/optimizer/test_muon_rules.py",
    "megatron/options",
    "megatron/wrapper/test_adapter_bad_input.py",
    "megatron/wrapper/test_adapter_contract.py",
    "megatron/wrapper/test_adapter_state_dict.py",
    "megatron/wrapper/test_process_groups.py",
    "megatron/wrapper/test_tensor_parallel.py",
    "plan/test_module_problems.py",
    "tools/models/test_local_spec.py",
    "integration/test_flags.py",
    "integration/test_install.py",
    # Checkpoints: core's own functions around ours, torch's format, and the other release's files.
    "checkpoint/test_across_releases.py",
    "checkpoint/test_checkpoint_drivers.py",
    "checkpoint/test_checkpoint_swiglu.py",
    "checkpoint/convert/test_convert_resume.py",
    "checkpoint/test_metadata.py",
    "checkpoint/test_resume.py::test_a_run_is_resumed_bit_for_bit_and_read_elsewhere[2 ranks]",
    # Training beside stock DDP: each strategy and axis, and what core's loop or optimizer calls.
    "megatron/wrapper/test_adapter_ranks.py",
    "megatron/wrapper/test_experts.py::test_biases_of_experts_are_in_the_norm",
    "megatron/wrapper/test_experts.py::test_fewer_expert_tensor_ranks_train_like_stock_ddp_or_are_refused",
    *(f"megatron/wrapper/test_experts.py::test_options_of_experts_train_like_stock_ddp[{row}]"
      for row in OF_DISPATCHERS),
    "megatron/wrapper/test_experts.py"
    "::test_parts_of_core_train_like_stock_ddp[parts, 1 microbatches]",
    "build/test_found_budget.py::test_trains_like_its_reference[found, weights]",
    "megatron/layers/test_fused_wgrad.py",
    "build/test_meta.py",
    *(f"megatron/wrapper/test_models.py::test_trains_like_stock_ddp[{row}]"
      for row in OF_LATER_FIELDS),
    "megatron/wrapper/test_numerics.py::test_trains_like_stock_ddp[each step, 2 ranks]",
    "megatron/wrapper/test_numerics.py::test_trains_like_stock_ddp[fp16, one microbatch]",
    "megatron/optimizer/test_precision_aware.py::test_gradients_moments_and_main_weights_in_bf16",
    "rollout/test_release_memory.py::test_training_of_a_gpt_goes_on_bit_for_bit",
    *(f"megatron/wrapper/test_topologies.py::test_topology[{row}]" for row in OF_AXES),
    "graphs/test_whole_graphs.py",
    # Torch's own fully_shard beside ours: its releases differ in the dtypes of gradients.
    "plain/test_fsdp2.py::test_methods_of_fsdp2",
    "plain/test_fsdp2_dtypes.py",
    "plain/test_fsdp2_dims.py",
    "plain/test_fsdp2_tensor_parallel.py",
)  # fmt: skip
"""Files and folders below tests/, tests in them, and cases of these."""


def names_it(entry: str, test: str) -> bool:
    """Whether the id of a test is that of a file, folder, test or case, or of something in it."""
    return test == entry or test.startswith((f"{entry}/", f"{entry}::", f"{entry}["))


def is_again(test: str, skipped: Iterable[str] = ()) -> bool:
    """Whether a test, by its id, runs with another release. skipped: what the first run skipped."""
    for name in AGAIN:
        if names_it(f"tests/{name}", test):
            return True
    return any(names_it(entry, test) for entry in skipped)
