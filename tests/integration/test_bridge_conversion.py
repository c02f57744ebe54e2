"""Megatron-Bridge, unmodified, loads Hugging Face weights into sharded models and exports them.

Opt-in: see docs/contributing/test_runs.md.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.integration.bridge_runs import need_bridge
from tests.lib.integration.documented import BLOCKS
from tests.lib.integration.lm_runs import HARNESSES, ROOT, run_worker

CHECKS = ("megatron/frameworks/bridge_weights.py", "state/module_weights.py")

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    need_bridge()


run = functools.partial(run_worker, "bridge_hf_worker.py")


CHECKED = {
    # Whatever Megatron-Bridge is given; with tied embeddings and biases; in bf16.
    "llama tied low": 12 + 4 + 2,
    "llama-tp2 tied-tp2": 4 + 4,
    "tied-pp2": 4,
    "moe": 4,
    "memory memory-tp2": 2,
    "meta": 2,
    # Merged into what is exported.
    "adapters adapters-tp2": 2,
}
"""Cases of the worker, and how much each rank checks."""


@pytest.mark.parametrize("cases", CHECKED)
def test_weights_go_in_and_out_of_live_models(tmp_path: Path, cases: str) -> None:
    """Logits are those of the Hugging Face model, exported tensors equal bit for bit, under each
    strategy; a rank holds a few weights at a time."""
    assert run(tmp_path, *cases.split()).count("checked ") == 2 * CHECKED[cases]


def test_experts_of_both_ranks_go_in_and_out(tmp_path: Path) -> None:
    numbers = "megatron.bridge.models.conversion.model_bridge._megatron_local_name_to_global"
    holder, _, name = numbers.rpartition(".")
    # 0.3 numbers experts that are one module each from zero on every rank.
    need_bridge(
        "import inspect; assert '.local_experts.' in inspect.getsource("
        f"b.importlib.import_module('{holder}').{name}), '{name} knows no local_experts'"
    )
    assert run(tmp_path, "moe-ep2").count("checked ") == 2 * 4


ON_CPU = """
from megatron.bridge import AutoBridge
from tests.lib.integration.bridge_hf_worker import OPTIONS
as_on_gpus = AutoBridge.to_megatron_provider
def to_provider(bridge, **how):
    provider = as_on_gpus(bridge, **how)
    for name, value in OPTIONS.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    return provider
AutoBridge.to_megatron_provider = to_provider
"""
USED = """
text = open("my_texts/b.txt").read()
ids = tokenizer(text, return_tensors="pt").input_ids
assert ids[0].tolist() == list(text.encode()) and tokenizer.decode(ids[0]) == text
import torch
ids = torch.cat([ids, torch.tensor([[256]]), ids[:, :1]], dim=1)
with torch.no_grad():
    logits = model(ids[:, :-1]).logits
print(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
"""


def test_the_tutorials_checkpoint_goes_to_hugging_face(tmp_path: Path) -> None:
    """Trained, converted and exported as docs/tutorial.md says: transformers computes the loss that
    training logged for the validation text. That is as long as a sequence, so that all samples are
    the same, and the vocabulary has no padding, which takes part in the softmax of training."""
    length = 64  # of the second text, with the end of a document
    texts = {"a.txt": "A text that is trained on. " * 400, "b.txt": "Änother " * 7}
    (tmp_path / "my_texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "my_texts" / name).write_text(text)
    export, use = [
        block.text
        for block in BLOCKS
        if block.document == "docs/tutorial.md" and "transformers" in block.marks
    ]
    (tmp_path / "export.py").write_text(ON_CPU + export)
    (tmp_path / "use.py").write_text(use + USED)
    model = f"--num-layers=2 --padded-vocab-size=257 --seq-length={length}"
    flags = (
        f"--config={ROOT}/configs/cpu-tiny.yaml {model} --max-position-embeddings={length} "
        "--train-iters=6 --lr-warmup-iters=0 --eval-iters=1 --use-megatron-fsdp "
        "--save=runs/mine --loss-log-file=runs/mine.jsonl "
        "--train-data-path=data/mine_train --valid-data-path=data/mine_valid"
    ).split()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for command in (
        [
            str(ROOT / "scripts/prepare_data.py"),
            "--input=my_texts",
            "--output-prefix=data/mine",
            "--valid-share=0.5",
        ],
        [str(ROOT / "scripts/pretrain_gpt.py"), *flags],
        [
            "-m",
            "megatron_fsdp_adapter",
            "convert",
            "runs/mine",
            "runs/converted",
            "--to=torch_dist",
        ],
        [str(HARNESSES / "bridge_on_cpu.py"), "export.py"],
        ["use.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=tmp_path,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/mine.jsonl").read_text().splitlines()]
    [expected] = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert float(done.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-4)
