"""Trains a small Llama with transformers' `Trainer`, sharded over all processes, and resumes.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/trainer.py --steps 4
    torchrun --nproc-per-node 2 examples/trainer.py --steps 8    # goes on

The only lines that differ from a program with PyTorch's FSDP2 are the import of this package and
the call of `use_as_fsdp2`. Each process needs a GPU: without one, accelerate does not shard.

Run on two H200 with torch 2.11, transformers 5.17 and accelerate 1.15, through and resumed: losses
and norms of 8 steps equal those of PyTorch's FSDP2 in every printed digit. A test runs it with
transformers 5.24 on two CPU processes, where it makes accelerate shard.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import megatron_fsdp_adapter

VOCAB, TOKENS = 128, 32


class Shown(TrainerCallback):
    """Prints on the first rank where a weight is."""

    def on_step_end(self, args, state, control, model=None, **rest):
        weight = model.model.layers[0].mlp.up_proj.weight
        if state.is_world_process_zero and state.global_step % 4 == 0:
            here = tuple(weight.to_local().shape)
            print(
                f"step {state.global_step}: {type(weight).__name__} {tuple(weight.shape)}, {here=}"
            )


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
given = parser.parse_args()

megatron_fsdp_adapter.use_as_fsdp2()

arguments = TrainingArguments(
    str(given.output),
    max_steps=given.steps,
    save_steps=4,
    logging_steps=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    disable_tqdm=True,
    max_grad_norm=1.0,
    bf16=torch.cuda.is_available(),
    report_to=[],
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
rows = torch.randint(0, VOCAB // 8, (256, TOKENS))  # numbers from an eighth of the vocabulary
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Shown()])
last = get_last_checkpoint(str(given.output)) if given.output.is_dir() else None
trainer.train(resume_from_checkpoint=last)
trainer.save_model(str(given.output / "final"))  # whole weights, as transformers loads them
