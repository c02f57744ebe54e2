"""Plain PyTorch modules with weights in Transformer Engine's own classes, sharded without Megatron:
bit for bit one process whose whole weights TE's own function quantizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_adapter import fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.core.config import STRATEGIES
from tests.distributed.launch import run_ranks
from tests.quantized import test_te_engine
from tests.quantized.te_checks import own_group
from tests.quantized.te_extension import FOLDERS, RELEASES, standing_in
from tests.quantized.test_te_engine import RATE, Layer, Net, Whole, compare, loss_of, roll

RECIPES = ("current", "delayed", "blockwise", "mxfp8")
STEPS = 3

pytestmark = pytest.mark.skipif(
    not FOLDERS, reason="TRANSFORMER_ENGINE_PYTHON names no folder with Transformer Engine's files"
)


def _train(rank: int, world: int, folder: str, strategy: str) -> None:
    with standing_in(Path(folder)):
        test_te_engine.ALONE[:] = [own_group(rank, world)]
        for recipe in RECIPES:
            whole, label = Whole(recipe, world), f"{recipe}, {strategy}"
            model = fully_shard_model(
                Net(recipe), fsdp_unit_modules=[Layer], data_parallel_sharding_strategy=strategy
            )
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
            kinds = {group.key.quantized for group in model.engine.groups}
            assert len(kinds) == 2, "norms are not quantized"
            assert all(pair.sharded.dtype == torch.float32 for pair in model.engine.pairs)
            for step in range(STEPS):
                loss_of(model, step, rank).backward()
                roll([param for unit in model.engine.units for param in unit.quantized])
                optimizer.step()
                optimizer.zero_grad()
                whole.step(step)
            compare(model.engine, whole, f"{label}, trained")
            if recipe != "delayed":  # whose scale is nobody's here: there is no module of TE's
                other = fully_shard_model(
                    Net(recipe), fsdp_unit_modules=[Layer],
                    data_parallel_sharding_strategy="optim_grads_params",
                )
                weights = model.full_state_dict()
                assert all(type(value) is torch.Tensor for value in weights.values())
                other.load_state_dict(weights)
                compare(other.engine, whole, f"{label}, loaded")
        dist.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("folder", RELEASES)
def test_a_plain_model_trains_as_one_process_that_te_quantizes(folder: Path, strategy: str) -> None:
    run_ranks(_train, 2, str(folder), strategy, timeout=300)
