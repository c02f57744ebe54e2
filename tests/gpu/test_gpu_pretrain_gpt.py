"""Megatron-LM's own pretrain_gpt.py of core_v0.19, unmodified, with CUDA graphs: it prints the
losses and norms of a run without.

    MEGATRON_LM_PATH=its/folder python -m pytest -q -rA tests/gpu/test_gpu_pretrain_gpt.py

The folder needs that script with `model_provider.py` and `gpt_builders.py`; what else they import
is in megatron-core's wheel.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from tests.lib.gpu import shared_device
from tests.lib.integration import lm_log
from tests.lib.integration.lm_runs import ROOT

CHECKS = ("launch/runner.py", "graphs/full_iteration.py", "graphs/layer_graphs.py")

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
STEPS = 10
MODEL = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 640 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--seq-length 128 --max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 8 --bf16 "
    f"--lr 1e-3 --min-lr 1e-4 --lr-decay-iters 10 --train-iters {STEPS} --eval-interval 3 "
    "--eval-iters 1 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 1023 "
    "--mock-data --num-workers 0 --distributed-timeout-minutes 2 --logging-level 20 "
    "--no-check-for-nan-in-loss-and-grad "
    "--no-gradient-accumulation-fusion --te-rng-tracker --use-megatron-fsdp "
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --fsdp-double-buffer"
)
SAME_DEVICE = ["env", "LOCAL_RANK=0"] if shared_device.WANTED else []
"""Megatron-LM gives each rank the device of its local rank."""
GRAPHS = {"none": "none", "whole iterations": "full_iteration", "layers": "local"}
SAID = {
    "whole iterations": "capture done for training",
    "layers": "CUDA graphs of layers: 4 TransformerLayer",
}

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no pretrain_gpt.py"),
    pytest.mark.skipif(
        "use_single_mempool" not in FullCudaGraphWrapper.__init__.__code__.co_varnames,
        reason="Megatron-LM before 0.19 copies a number from the host in every microbatch",
    ),
]


@functools.cache
def log_of(graphs: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "--no-python",
            *SAME_DEVICE,
            sys.executable,
            "-m",
            "megatron_fsdp_adapter",
            f"{CHECKOUT}/pretrain_gpt.py",
            *MODEL,
            "--data-cache-path",
            f"{folder}/cache",
            "--cuda-graph-impl",
            GRAPHS[graphs],
            "--cuda-graph-warmup-steps",
            "2",
        ]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
        log = Path(folder) / "log"
        with log.open("w") as file:
            status = subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=150 * shared_device.PATIENCE,
                check=False,
            ).returncode
        text = log.read_text()
    assert status == 0, text[-6000:]
    return text


@pytest.mark.parametrize("graphs", SAID)
def test_pretrain_gpt_prints_what_it_does_without_graphs(graphs: str) -> None:
    plain = lm_log.read(log_of("none"))
    found = lm_log.read(log_of(graphs))
    assert SAID[graphs] in log_of(graphs)
    assert len([key for key in plain if key[1] == "lm loss"]) == STEPS
    assert lm_log.differences(plain, found, last_digit=1) == []
