"""Megatron-Bridge, unmodified, fine-tunes with adapters (LoRA) on the weights of a checkpoint.

Opt-in: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.convert.dcp_files import DcpFolder
from megatron_fsdp_adapter.tools.cli import convert
from tests.lib.integration import lm_log
from tests.lib.integration.bridge_runs import EXAMPLE, need_bridge
from tests.lib.integration.lm_runs import HARNESSES, train_recipe

CHECKS = ("megatron/frameworks/peft_base_weights.py", "launch/bridge.py")

pytestmark = pytest.mark.full
LORA = HARNESSES / "bridge_lora.py"


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    need_bridge("b.importlib.import_module('megatron.bridge.training.finetune')")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of equal weights, by format."""
    root = tmp_path_factory.mktemp("bases")
    sharded = root / "fsdp_dtensor"
    plain = root / "torch_dist"
    train_recipe(EXAMPLE, [f"checkpoint.save={sharded}", "train.train_iters=1", "rng.seed=7"])
    assert convert.main([str(sharded), str(plain), "--to", "torch_dist", "--weights-only"]) == 0
    return {"fsdp_dtensor": str(sharded), "torch_dist": str(plain)}


def start(base: str, *overrides: str, options: tuple[str, ...] = ()) -> lm_log.Values:
    chosen = [*options, f"checkpoint.pretrained_checkpoint={base}", *overrides]
    return train_recipe(LORA, chosen).values


@pytest.fixture(scope="module")
def stock(bases: dict[str, str]) -> lm_log.Values:
    """With Megatron's own DDP, which reads its own format."""
    return start(bases["torch_dist"], options=("--ddp",))


@pytest.mark.parametrize("strategy", ("optim_grads_params", "optim"))
def test_adapters_are_trained_as_with_ddp(
    bases: dict[str, str], stock: lm_log.Values, strategy: str
) -> None:
    """From either format; to a unit of the last printed digit, and between formats in each."""
    asked = ("--strategy", strategy)
    first = start(bases["fsdp_dtensor"], options=asked)
    assert lm_log.differences(stock, first, last_digit=1) == []
    assert lm_log.differences(first, start(bases["torch_dist"], options=asked)) == []


def test_base_weights_are_read_where_tensor_parallelism_splits_them(
    bases: dict[str, str], stock: lm_log.Values
) -> None:
    """Adapters begin at nothing: the first loss is that of the base."""
    split = start(bases["fsdp_dtensor"], "model.tensor_model_parallel_size=2")
    assert abs(float(split[1, "lm loss"]) - float(stock[1, "lm loss"])) < 2e-5


def test_adapters_alone_are_saved_and_resumed(bases: dict[str, str], tmp_path: Path) -> None:
    """In every printed digit, and under another split with losses of the same model; in the
    checkpoint are weights and moments of adapters alone."""
    saved = tmp_path / "saved"
    common = [f"checkpoint.save={saved}", "checkpoint.save_interval=2"]
    whole = start(bases["fsdp_dtensor"], *common)
    keys = DcpFolder.open(folders.final_folder(saved, 2)).tensor_keys
    weights = [key for key in keys if not key.startswith(("opt_param_scheduler", "rng_state"))]
    assert weights, weights
    for key in weights:
        assert ".adapter." in key, weights
    assert any(key.startswith("optimizer.") for key in weights)
    resumed = start(bases["fsdp_dtensor"], f"checkpoint.load={saved}", "checkpoint.ckpt_step=2")
    assert (2, "grad norm") not in resumed
    assert lm_log.differences(whole, resumed, start=3) == []
    split = start(
        bases["fsdp_dtensor"],
        f"checkpoint.load={saved}",
        "checkpoint.ckpt_step=2",
        "model.tensor_model_parallel_size=2",
    )
    assert (2, "grad norm") not in split
    for step in (3, 4):
        assert abs(float(split[step, "lm loss"]) - float(whole[step, "lm loss"])) < 2e-5
