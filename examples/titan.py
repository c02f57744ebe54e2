"""Trains a small Llama with torchtitan's own `Trainer`, sharded over all processes.

    pip install torchtitan
    torchrun --nproc-per-node 2 examples/titan.py

Two lines are this package's: an import, and the call of `use_as_fsdp2`. torchtitan's own command
needs neither: set MEGATRON_FSDP_ADAPTER_USE_AS=fsdp2 for `torchrun ... -m torchtitan.train ...`.
Run with torchtitan 0.3.0 and torch 2.13 on two CPU processes, by a test. Not run on GPUs.
"""

from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

import megatron_fsdp_adapter


class Numbers(BaseDataLoader):
    """Random tokens, other ones on each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **rest):
        self.shape = local_batch_size, seq_len + 1
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self):
        while True:
            tokens = torch.randint(0, 16, self.shape, generator=self.generator)
            positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **rest):
        super().__init__()

    encode = decode = get_vocab_size = None


init_logger()
megatron_fsdp_adapter.use_as_fsdp2()
config = llama3_debugmodel()
config.model_spec.model.layers = config.model_spec.model.layers[:2]
for layer in config.model_spec.model.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
config.dataloader = Numbers.Config()
config.tokenizer = NoTokenizer.Config()
config.dump_folder = "runs/titan"
config.training.steps = 4
config.training.seq_len = 64
config.training.disable_cuda_graphs = True
trainer = config.build()
trainer.train()
weight = trainer.model_parts[0].layers["0"].feed_forward.w1.weight
if torch.distributed.get_rank() == 0:
    print(f"{type(weight).__name__} {weight.shape}, here {weight.to_local().shape}")
trainer.close()
