"""Models that transformers shards while it loads them, which `test_transformers.py` trains with
torch's `fully_shard` and with ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from megatron_fsdp_adapter import leave_fsdp2, use_as_fsdp2

VOCAB = 101
STEPS = 3
CASES: dict[int, dict[str, dict[str, int]]] = {
    2: {"rows": {"fsdp_size": 2}},
    4: {"rows and TP": {"fsdp_size": 2, "tp_size": 2}},
}
"""Options of `DistributedConfig`, by the number of ranks."""


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def batch(step: int, rank: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (2, 12), generator=seeded)


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    rows = batch(step, rank)
    loss: torch.Tensor = _whole(model(input_ids=rows, labels=rows).loss)
    return loss


def _save_whole(folder: Path, tied: bool) -> Path:
    """Saves a tiny model, from the first rank."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def _loaded(folder: Path, options: dict[str, int] | None) -> Any:
    config = None if options is None else DistributedConfig(**options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32
    )
    return model.train()


def trained(folder: Path, options: dict[str, int], rank: int) -> tuple[list[float], Any]:
    """Losses and norms of steps, and the model."""
    model = _loaded(folder, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        loss = loss_of(model, step, rank // options.get("tp_size", 1))
        loss.backward()
        squares = [_whole(param.grad).square().sum() for param in model.parameters()]
        found += [loss.item(), sum(squares).sqrt().item()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return found, model


def _check_saved(model: Any, folder: Path, options: dict[str, int], rank: int) -> None:
    """The files of `save_pretrained`, whole and sharded, have the model that was trained."""
    model.eval()
    with torch.no_grad():
        expected = loss_of(model, STEPS, rank // options.get("tp_size", 1))
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "sharded", distributed_checkpoint=True)
    dist.barrier()
    for name, given in (("whole", None), ("sharded", options)):
        again = _loaded(folder / name, given).eval()
        with torch.no_grad():
            found = loss_of(again, STEPS, rank // options.get("tp_size", 1))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, msg=name)


def compare(rank: int, world: int, folder: Path) -> None:
    """Both sides of each case, which must have the same bits; what is saved is loaded again."""
    transformers.utils.logging.set_verbosity_error()
    whole = _save_whole(folder / "model", tied=False)
    sides: tuple[Callable[[], Any], ...] = (leave_fsdp2, use_as_fsdp2)
    for name, options in CASES[world].items():
        found = []
        for use in sides:
            use()
            numbers, model = trained(whole, options, rank)
            found.append(numbers)
        assert found[0] == found[1], f"{name}: {found}"
        _check_saved(model, folder / "saved", options, rank)
        leave_fsdp2()


def compare_tied(rank: int, world: int, folder: Path) -> None:
    """Tied embeddings, beside an unsharded model whose gradients are averaged. Torch's function
    gives other numbers from the second step on."""
    transformers.utils.logging.set_verbosity_error()
    whole = _save_whole(folder / "tied", tied=True)
    model = _loaded(whole, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for step in range(STEPS):
        losses = [loss_of(model, step, other) for other in range(world)]
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        squares = [param.grad.square().sum() for param in model.parameters()]
        expected += [losses[rank].item(), sum(squares).sqrt().item()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    use_as_fsdp2()
    found, _ = trained(whole, {"fsdp_size": world}, rank)
    leave_fsdp2()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
