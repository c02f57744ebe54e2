"""A small GPT, sharded layer by layer. It accumulates, clips, saves, and resumes.

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py --steps 8
    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py --steps 16    # goes on

The only line that differs from a program with PyTorch's FSDP2 is the import of `fully_shard`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp_adapter import fully_shard

VOCAB, WIDTH, TOKENS, MICROBATCHES = 256, 64, 32, 2


class GPT(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).layers
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=ids.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--checkpoints", type=Path, default=Path("runs/gpt"))
given = parser.parse_args()
dist.init_process_group()
rank = dist.get_rank()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
torch.get_device_module(device).set_device(device)  # on CPUs it does nothing
torch.manual_seed(0)
model = GPT().to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
weight = model.blocks[0].linear1.weight
if rank == 0:
    print(f"{type(weight).__name__} {tuple(weight.shape)}, here {tuple(weight.to_local().shape)}")
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": 0}
if (given.checkpoints / ".metadata").exists():
    dcp.load(state, checkpoint_id=given.checkpoints)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
for step in range(state["step"], given.steps):
    data = torch.Generator().manual_seed(1000 * step + rank)  # each rank has its own data
    for number in range(MICROBATCHES):
        model.set_requires_gradient_sync(number == MICROBATCHES - 1)
        ids = torch.randint(0, VOCAB // 8, (4, TOKENS + 1), generator=data).to(device)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / MICROBATCHES).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f}, norm {norm.item():.6f}")

weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": given.steps}
dcp.save(state, checkpoint_id=given.checkpoints)
dist.destroy_process_group()
