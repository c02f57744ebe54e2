"""Stock Megatron DDP goes on from a converted checkpoint with the same losses, and ours from one of
stock's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib.gpt.checkpoints import loaded, saved, stock_state
from tests.lib.gpt.checks import check_same_bits
from tests.lib.ranks.launch import run_ranks

CHECKS = (
    "checkpoint/convert/conversion.py",
    "checkpoint/convert/torch_dist.py",
    "checkpoint/convert/param_groups.py",
)

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, gated, tied": {"bf16": True, "swiglu": True, "tied": True, "bias": False},
}
STEPS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Of a loss, relative: ranks are added up in another order, and weights rounded, once a step."""


def _save_stock(trainer: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    trainer.wrapper.start_param_sync(force_sync=True)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    case = trainer.case
    args = Namespace(transformer_impl="local", swiglu=case.swiglu, bf16=case.bf16)
    state = {**stock_state(trainer, is_loading=False), "iteration": STEPS, "args": args}
    dist_checkpointing.save(state, str(folder))
    dist.barrier()


def _load_stock(trainer: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    state = dist_checkpointing.load(stock_state(trainer, is_loading=True), str(folder))
    assert state["iteration"] == STEPS
    unwrap_model(trainer.wrapper).load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def _on_first(action: Any) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _steps(trainer: Any, case: Any, first: int, rank: int, device: Any) -> list[float]:
    from tests.lib.gpt import gpt

    trainer.case = case
    data = (gpt.batches(case, step, rank, device) for step in range(first, first + STEPS))
    return [gpt.train_step(trainer, batch)[0] for batch in data]


def _resume(rank: int, size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from tests.lib.gpt import gpt, torch_adam

    root = Path(folder)
    device = gpt.init_megatron()
    torch_adam.make_loadable()
    case = gpt.Case(num_layers=3, microbatches=2, **options)
    other = case.but(seed=4321)

    ours = gpt.build_trainer(case, "optim_grads_params", device)
    _steps(ours, case, 0, rank, device)
    saved(ours, root / "ours", STEPS, iteration=STEPS)
    kept = gpt.full_weights(ours)
    source = root / "ours"
    plain = root / "td"
    _on_first(lambda: convert(source, plain, "torch_dist", block_bytes=1000))
    expected = _steps(ours, case, STEPS, rank, device)

    # In one bucket: saving `fully_reshardable`, core 0.16.1 leaves out the padding between buckets,
    # but not in the places at which it then looks for parameters (distrib_optimizer.py:1118).
    stock = gpt.build_trainer(other, None, device, ddp={"bucket_size": None})
    _load_stock(stock, root / "td" / "iter_0000002")
    check_same_bits(gpt.full_weights(stock), kept, "stock")
    # What stock saves of it is what was converted, so the moments are too.
    _save_stock(stock, root / "again" / "iter_0000002")
    losses = _steps(stock, case, STEPS, rank, device)

    _on_first(lambda: convert(root / "again", root / "back", "fsdp_dtensor"))
    second = gpt.build_trainer(other, "optim_grads", device)
    assert loaded(second, root / "back", iteration=0, args=None)["iteration"] == STEPS
    check_same_bits(gpt.full_weights(second), kept, "back")
    back = _steps(second, case, STEPS, rank, device)
    return {"expected": expected, "stock": losses, "back": back}


@pytest.mark.parametrize("name", [pytest.param("fp32", marks=pytest.mark.full), *list(CASES)[1:]])
def test_stock_and_ours_go_on_from_each_others_checkpoints(tmp_path: Path, name: str) -> None:
    from tests.lib.checkpoint.convert_cases import differences, load_all

    found = run_ranks(_resume, 2, str(tmp_path), CASES[name], timeout=400)[0]
    bound = TOLERANCE[torch.bfloat16 if CASES[name].get("bf16") else torch.float32]
    for losses in (found["stock"], found["back"]):
        assert losses[0] == found["expected"][0], found
        assert losses[1] == pytest.approx(found["expected"][1], rel=bound), found
    # Through stock and back, optimizer state and all but what stock's groups add is the same.
    first, last = (load_all(tmp_path / part / "iter_0000002") for part in ("ours", "back"))
    tensors = []
    for each in (first, last):
        tensors.append({k: v for k, v in each.items() if isinstance(v, torch.Tensor)})
    assert len(tensors[0]) > 50
    assert differences(*tensors) == []
    assert any(bool(value.any()) for key, value in tensors[0].items() if "exp_avg" in key)
