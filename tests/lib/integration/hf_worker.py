"""Loops of accelerate, transformers' Trainer and TRL, which `test_accelerate.py` runs on two ranks
with torch's `fully_shard` and with ours. Models are tiny Llamas of random weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import torch.distributed as dist
import transformers
import trl
from accelerate import state
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from megatron_fsdp_adapter import leave_fsdp2, use_as_fsdp2
from tests.lib.integration import accelerate_on_cpu

VOCAB = 101
LAYER = "LlamaDecoderLayer"

accelerate_on_cpu.prepare()


def llama(case: str) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings="tied" in case,
        )
    )
    if "ram" in case and dist.get_rank():
        for param in model.parameters():
            param.data.fill_(float("nan"))  # the other ranks' values are not read
    return model


def lora() -> Any:
    return peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )


def samples() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, VOCAB, (64, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


Run = tuple[list[Any], list[Any], dict[str, torch.Tensor]]
"""What steps gave after a save, the same after a load, and the weights then."""


def loop(case: str, folder: Path) -> Run:
    """accelerate: accumulates, clips, saves and loads."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        cpu_ram_efficient_loading="ram" in case,
        state_dict_type="FULL_STATE_DICT" if "full" in case else "SHARDED_STATE_DICT",
        activation_checkpointing="recomputed" in case,
    )
    run = accelerate.Accelerator(
        cpu=True,
        mixed_precision="bf16" if "bf16" in case else "no",
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2 if "accumulates" in case else 1,
    )
    model = llama(case)
    if "lora" in case:
        model = peft.get_peft_model(model, lora())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(samples(), batch_size=2)
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def steps(first: int) -> list[Any]:
        found = []
        for batch in islice(loader, first, first + 4):
            with run.accumulate(model):
                loss = model(**batch).loss
                run.backward(loss)
                if run.sync_gradients:
                    norm: Any = run.clip_grad_norm_(model.parameters(), 0.5)
                    found += [loss.item(), getattr(norm, "full_tensor", norm.clone)().item()]
                optimizer.step()
                optimizer.zero_grad()
        return found

    steps(0)
    run.save_state(str(folder))
    found = steps(4)
    run.load_state(str(folder))
    return found, steps(4), dict(run.get_state_dict(model))


class Logged(transformers.TrainerCallback):
    """Keeps the losses and norms that a trainer logs."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.found += [logs[name] for name in ("loss", "grad_norm", "eval_loss") if name in logs]


def trainer(case: str, folder: Path) -> Run:
    """transformers' Trainer, or TRL's of SFT: saves, evaluates, and is resumed in the middle."""

    def made() -> tuple[Any, Logged]:
        _reset()
        options = {
            "output_dir": str(folder), "use_cpu": True, "max_steps": 4, "save_steps": 2,
            "eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1, "learning_rate": 1e-2,
            "per_device_train_batch_size": 2, "max_grad_norm": 0.5, "report_to": [],
            "gradient_accumulation_steps": 2 if "accumulates" in case else 1,
            "bf16": "bf16" in case, "disable_tqdm": True, "gradient_checkpointing": False,
            "fsdp": True, "fsdp_config": {
                "version": 2, "transformer_layer_cls_to_wrap": [LAYER],
                "state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": "ram" in case,
            },
        }  # fmt: skip
        logged = Logged()
        data = samples()
        if "SFT" not in case:
            args = transformers.TrainingArguments(**options)
            return transformers.Trainer(
                llama(case), args, train_dataset=data, eval_dataset=data[:8], callbacks=[logged]
            ), logged
        rows = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in data])
        torch.manual_seed(3)
        return trl.SFTTrainer(
            llama(case),
            args=trl.SFTConfig(**options, max_length=16),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            processing_class=_tokenizer(),
            callbacks=[logged],
            peft_config=lora() if "lora" in case else None,
        ), logged

    first, logged = made()
    first.train()
    second, again = made()
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    second.save_model(str(folder / "final"))
    dist.barrier()
    [file] = (folder / "final").glob("*.safetensors")
    weights = load_file(file) if not dist.get_rank() else {}
    generated = second.model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 8)
    resumed = list(again.found)
    second.train()  # prepares the same model and optimizer again
    more = again.found[len(resumed) :]
    half = len(logged.found) // 2
    return logged.found[half:] + more, resumed + more, weights


def _tokenizer() -> Any:
    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


CASES: dict[str, Callable[[str, Path], Run]] = {
    "loop": loop,
    "loop, bf16, accumulates, ram, full": loop,
    "loop, tied, recomputed": loop,
    "loop, lora, bf16": loop,
    "Trainer, ram, bf16": trainer,
    "Trainer, accumulates, tied": trainer,
    "SFT": trainer,
    "SFT, lora, bf16": trainer,
}


def _reset() -> None:
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def compare(rank: int, world: int, folder: Path) -> None:
    """Both sides of each case, which must print the same, and go on as if never stopped."""
    transformers.utils.logging.set_verbosity_error()
    for case, run in CASES.items():
        sides = []
        for use in (leave_fsdp2, use_as_fsdp2):
            use()
            _reset()
            place = folder / re.sub(r"\W+", "_", f"{case} {use.__name__}")
            sides.append(run(case, place))
        leave_fsdp2()
        (expected, _, values), (found, again, weights) = sides
        assert found and found == again, f"{case}: resumed {again}, not stopped {found}"
        # Where bf16 rounds, Adam's first updates, of the learning rate whatever a gradient is, go
        # the other way for some that are nearly 0.
        bf16 = "bf16" in case
        near = {"rtol": 1e-2 if bf16 else 1e-5, "atol": 0.0}
        torch.testing.assert_close(found, expected, **near, msg=lambda text, c=case: c + text)
        assert weights.keys() == values.keys(), case
        for name, value in values.items():
            off = (weights[name] - value).abs()
            off = off.mean() if bf16 else off.max()
            assert off < (1e-3 if bf16 else 1e-4), f"{case}: {name} is {off} off"
