"""Fine-tunes LoRA adapters of a small Llama with TRL's `SFTTrainer`, sharded over all processes.

    pip install trl peft
    torchrun --nproc-per-node 2 examples/sft_lora.py

The only lines that differ from a program with PyTorch's FSDP2 are the import of this package and
the call of `use_as_fsdp2`. Each process needs a GPU: without one, accelerate does not shard.

Run on two H200 with torch 2.11, TRL 1.16, peft 0.21, transformers 5.17 and accelerate 1.15: losses
and norms of 4 steps equal those of PyTorch's FSDP2 in every printed digit. A test runs it with
transformers 5.24 on two CPU processes, where it makes accelerate shard.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import megatron_fsdp_adapter

TEXTS = [f"question {a} plus {b} answer {a + b}" for a in range(16) for b in range(16)]
WORDS = sorted({word for text in TEXTS for word in text.split()})

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--output", type=Path, default=Path("runs/sft"))
given = parser.parse_args()

megatron_fsdp_adapter.use_as_fsdp2()

vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
split = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
arguments = SFTConfig(
    str(given.output),
    max_steps=given.steps,
    logging_steps=1,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    bf16=torch.cuda.is_available(),
    max_length=16,
    disable_tqdm=True,
    save_strategy="no",
    report_to=[],
    gradient_checkpointing=False,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": TEXTS}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
if trainer.is_world_process_zero():
    for name, weight in list(trainer.model.named_parameters())[:4]:
        here = tuple(weight.to_local().shape)
        print(f"{name}: {type(weight).__name__} {tuple(weight.shape)}, {here=}")
trainer.save_model(str(given.output / "adapter"))  # the adapters alone, whole
