"""`use_distributed_optimizer` may be left out: training and checkpoints are those with it, bit for
bit. As it was, the DDP config was refused without it, and an optimizer config without it gave an
optimizer that stepped on DTensors."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tests.distributed.checks import check_same_bits
from tests.distributed.gpt import full_all
from tests.distributed.shared_ranks import on_ranks
from tests.distributed.variants import ZERO_1, ZERO_3, Variant, compare, marked


def _moments(trainer: Any, metadata: dict[str, str]) -> dict[str, torch.Tensor]:
    """Whole moments by parameter and name, of what the optimizer gives a checkpoint."""
    state = trainer.optimizer.sharded_state_dict({}, metadata=metadata)["state"]
    found = {
        f"{name}.{kind}": value
        for name, kinds in state.items()
        for kind, value in kinds.items()
        if hasattr(value, "_local_tensor")
    }
    assert found
    return full_all(found)


def same_checkpoints(ours: Any, reference: Any, strategy: str) -> None:
    """The reference is told the form by Megatron-LM's argument, ours by nothing."""
    for trainer in (ours, reference):
        assert isinstance(trainer.optimizer, DistributedOptimizer)
        assert trainer.wrapper.ddp_config.use_distributed_optimizer
        assert trainer.optimizer.config.use_distributed_optimizer
    said = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    check_same_bits(_moments(ours, {}), _moments(reference, said), strategy)


WITHOUT = {"use_distributed_optimizer": False}
ROWS = tuple(
    Variant(
        name, (ZERO_1, ZERO_3), case=case, ddp=WITHOUT, optimizer=WITHOUT, compare="bits",
        expect=same_checkpoints, reference={"strategy": "own", "optimizer": {}},
    )
    for name, case in (
        ("fp32", {"seed": 77, "clip": 0.3}),
        ("bf16", {"seed": 78, "bf16": True, "overlap": False, "microbatches": 2}),
    )
)  # fmt: skip


@pytest.mark.parametrize("row", marked(ROWS))
@on_ranks()
def test_without_use_distributed_optimizer_training_is_the_same_bit_for_bit(
    row: Variant, rank: int, seed: int
) -> None:
    compare(row, rank, seed)


@on_ranks(2)
def test_what_is_set_is_printed_once_by_one_rank(rank: int, seed: int) -> None:
    """What two wrappers print, of which the second has nothing to set, and the optimizer."""
    row = ROWS[0].but("", case={"num_layers": 1})
    device, case = row.start(), row.case_of(seed)
    with redirect_stdout(io.StringIO()) as spoken:
        row.trainer("optim", case, device)
        row.plain.trainer("optim", case, device)
    starts = ("FullyShardedDataParallel: strategy", "Megatron's optimizer with")
    found = [line for line in spoken.getvalue().splitlines() if line.startswith(starts)]
    if rank:
        assert found == []
        return
    assert len(found) == 3
    assert found[0].endswith("torch.float32; set by the wrapper: use_distributed_optimizer=True")
    assert found[1].startswith(
        "Megatron's optimizer with FullyShardedDataParallel: enabled automatically"
    )
    assert found[2].endswith("gradients reduced in torch.float32"), "what was set before is no news"
