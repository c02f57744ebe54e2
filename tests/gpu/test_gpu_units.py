"""Units on two GPUs: ranks that use different ones, weights that another stream is still making
when a model is wrapped, and models that begin on the host.
Joined and unsharded ones: test_gpu_matrix.py."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs

from megatron_fsdp_adapter import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp_adapter.build.auto_budget import failed_allocations
from megatron_fsdp_adapter.plan.unsharded_budget import AUTO, GIB
from megatron_fsdp_adapter.plan.unsharded_budget import BUDGET_OPTION as BUDGET
from tests.lib.gpt.gpt import STRATEGIES, Case, batches, build_trainer, init_megatron, train_step
from tests.lib.gpu.gpu_ranks import WORLD, Check, Outcomes, expecting
from tests.lib.gpu.runs import ZERO_3
from tests.lib.plain.launches import HANGS, LIKE, UNLIKE, loss_of, sharded
from tests.lib.ranks.launch import settle_ranks

CHECKS = ("core/engine/launches.py", "build/auto_budget.py", "build/materialize.py")

# Ranks that use different units: reported a step later, since no host waits for a device. Gathers
# have a communicator of their own, as in Megatron's wrapper.

STEPS = 6


def _step(model: Any, optimizer: Any, step: int, rank: int, path: Any) -> None:
    loss_of(model, step, rank, path(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def like_ranks_train(rank: int, world: int, strategy: str) -> str:
    for path in LIKE.values():
        model, optimizer = sharded(strategy, device="cuda")
        for step in range(STEPS):
            _step(model, optimizer, step, rank, path)
        torch.cuda.synchronize()
    return f"{len(LIKE)} habits, {STEPS} steps each"


CYCLES = 10**9
"""What the other stream is busy with: about half a second."""


def waits(rank: int, world: int) -> None:
    model = nn.Linear(512, 512, device=torch.device("cuda", rank))
    expected = {name: value + 1 for name, value in model.state_dict().items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(CYCLES)
        for param in model.parameters():
            param.add_(1)
    found = fully_shard_model(model).full_state_dict(cpu_offload=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value.cpu()), name


class Layers(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


def begins_on_the_host(rank: int, world: int) -> str:
    """A model on the host moves to the device unit by unit, and trains as torch's fully_shard."""
    losses: list[list[float]] = []
    for shard in (torchs, fully_shard):
        torch.manual_seed(0)
        model: Any = Layers()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for layer in model.layers:
            shard(layer)
        shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for t in (*model.parameters(), *model.buffers()):
            assert t.device.type == "cuda"
        taken = (torch.cuda.max_memory_allocated() - before) / (4 * 1024 * 1025)
        assert taken < 8 / world + 3, f"{taken} layers of 8 on {world} ranks"  # all of it is 8 more
        losses.append([])
        for step in range(STEPS):
            torch.manual_seed(step + rank)
            loss = model(torch.randn(16, 1024, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        del model, optimizer, loss
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    return str(losses[0])


WIDE = Case(
    num_layers=2,
    hidden=4096,
    heads=32,
    ffn=14336,
    vocab=8192,
    seq=4096,
    batch=1,
    swiglu=True,
    bias=False,
    bf16=True,
    lr=1e-5,
    microbatches=3,
)
KEPT = 6
"""Steps after which a budget that is found is in use."""
AGREED = 3
"""Steps after which an allocation that failed has changed it."""


def _take_all_memory(device: torch.device) -> None:
    """Asks for memory until there is none, in a process that may have no more than it has."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total)
    before = failed_allocations(device)
    taken = []
    try:
        while failed_allocations(device) == before:
            taken.append(torch.empty(GIB, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def gives_memory_back(rank: int, world: int) -> str:
    """Units are kept in memory that is free, until one rank has had too little of it: then half
    as much is kept on all ranks. Losses are those without a budget."""
    device = init_megatron()
    data = batches(WIDE, 0, rank, device)
    losses = {}
    used = []
    for budget in (0.0, AUTO):
        trainer = build_trainer(WIDE, ZERO_3, device, ddp={BUDGET: budget})
        losses[budget] = [train_step(trainer, data)[0] for _ in range(KEPT)]
        for taker in range(world):
            if budget:
                used.append(trainer.wrapper.engine.budget.used)
                if rank == taker:
                    _take_all_memory(device)
            losses[budget] += [train_step(trainer, data)[0] for _ in range(AGREED)]
        if budget:
            used.append(trainer.wrapper.engine.budget.used)
        del trainer
    assert used[0] > 0, used
    assert used[1] <= used[0] // 2, used
    assert used[2] <= used[1] // 2, used
    torch.testing.assert_close(*map(torch.tensor, losses.values()), rtol=1e-3, atol=0)
    return f"{[round(one / GIB, 3) for one in used]} GiB in use; losses {losses[AUTO]}"


JOINED = 3 * 1024 * 1024
"""Elements of three of the `Layers`."""


def keeps_and_joins_in_a_plain_loop(rank: int, world: int) -> str:
    """Units stay unsharded for a budget that is found, or layers are joined: losses are those of
    units that come and go. Returns the seconds of the last step."""
    ways: dict[str, dict[str, Any]] = {
        "apart": {},
        "found": {BUDGET: AUTO},
        "joined": {"suggested_communication_unit_size": JOINED},
    }
    losses: dict[str, list[float]] = {}
    seconds = {}
    for way, options in ways.items():
        torch.manual_seed(0)
        model = fully_shard_model(Layers().cuda(), **options)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses[way] = []
        for step in range(KEPT):
            began = time.perf_counter()
            for microbatch in range(4):
                torch.manual_seed(100 * step + 10 * microbatch + rank)
                with nullcontext() if microbatch == 3 else model.no_sync():
                    loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
                    loss.backward()
                losses[way].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds[way] = round(time.perf_counter() - began, 4)
        budget: Any = model.engine.budget
        assert way != "found" or (budget is not None and budget.used > 0)
        del model, optimizer, loss
    assert losses["joined"] == losses["apart"]
    found, apart = torch.tensor(losses["found"]), torch.tensor(losses["apart"])
    # Kept gradients are summed over microbatches before ranks.
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=0)
    return str(seconds)


DEVICE_CHECKS = {f"like ranks, {s}": Check(like_ranks_train, (s,)) for s in STRATEGIES}
DEVICE_CHECKS["begins on the host"] = Check(begins_on_the_host)
DEVICE_CHECKS["gives memory back"] = Check(gives_memory_back)
DEVICE_CHECKS["a plain loop"] = Check(keeps_and_joins_in_a_plain_loop)
OUTCOMES = Outcomes(DEVICE_CHECKS, timeout_s=120.0)
STREAM_OUTCOMES = Outcomes({"waits": Check(waits)}, timeout_s=120.0, world=1)

test_models_train = expecting(OUTCOMES)
test_weights_of_another_stream_are_waited_for = expecting(STREAM_OUTCOMES)


def _unlike(rank: int, world: int, strategy: str, name: str) -> int:
    """The step in which the error comes."""
    model, optimizer = sharded(strategy, device="cuda")
    for step in range(STEPS):
        try:
            _step(model, optimizer, step, rank, UNLIKE[name])
        except RuntimeError as error:
            assert "launched different collectives" in str(error), error
            assert "  - ranks [0]: " in str(error), error
            assert "  - ranks [1]: " in str(error), error
            return step
    raise AssertionError(f"no error in {STEPS} steps")


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(n, s) for n in UNLIKE for s in ("optim", "optim_grads") if (n, s) not in HANGS],
)
def test_ranks_that_use_other_units_are_told_at_the_end_of_the_next_step(
    name: str, strategy: str
) -> None:
    found = settle_ranks(_unlike, WORLD, strategy, name, timeout=120.0, backend="nccl")
    assert found == [(True, 1), (True, 1)], found
