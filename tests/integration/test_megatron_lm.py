"""Megatron-LM's own pretrain_gpt.py and pretrain_hybrid.py, unmodified, through the runner: they
train, save, resume and move between splits as with its own DDP.

Opt-in: needs a checkout of Megatron-LM at core_v0.16.1 or core_v0.19.0 and what its training
modules import.

    pip install six regex pydantic triton
    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full tests/integration
"""

from __future__ import annotations

import functools
import importlib.util
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_fsdp_adapter.checkpoint import atomic, folders
from megatron_fsdp_adapter.checkpoint.convert import convert
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.megatron.options.support import EMERGING
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.integration import lm_log
from tests.lib.integration.lm_runs import EP2, MOE, PP2, ROOT, STEPS, TP2, VPP2, Run, launch, train

CHECKS = (
    "launch/runner.py",
    "launch/megatron_lm.py",
    "megatron/wrapper/adapter.py",
    "megatron/optimizer/optimizer.py",
    "megatron/checkpoint/megatron_saves.py",
    "megatron/checkpoint/checkpoint_drivers.py",
    "megatron/checkpoint/gpt_into_hybrid.py",
)

pytestmark = pytest.mark.full

GPT = "pretrain_gpt.py"
HYBRID = "pretrain_hybrid.py"
STOCK = "--use-distributed-optimizer --no-gradient-accumulation-fusion"
SWIGLU = "--swiglu --position-embedding-type rope"
LAYERS = "--spec hybrid_cpu STACK --hybrid-layer-pattern"
"""Of attention, an MLP and experts. Those of Mamba are left out: their kernels are CUDA only."""
LION = "--optimizer lion --adam-beta2 0.95"
LION_STOCK = "--no-gradient-accumulation-fusion"
"""Core's own Lion has no distributed optimizer."""
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --q-lora-rank 32 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 16"
)
FURTHER = "--mtp-num-layers 1 --position-embedding-type rope"
# 255 tokens (and one for the end of a document until 0.17): the same padded vocabulary for every
# split.
FOUR_LAYERS = f"{SWIGLU} --num-layers 4 --disable-bias-linear --vocab-size 255"
LLAMA = (
    f"{SWIGLU} --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --train-iters 4"
)


@dataclass(frozen=True)
class Model:
    """A model and its parallelism: what stock DDP and the wrapper are both given.

    last_digit: by how many units of the last printed digit they may differ. A unit is 1e-6 at
    losses near 5, two roundings of fp32. stock: flags of the run with stock DDP.
    """

    arguments: str
    world: int = 2
    script: str = GPT
    last_digit: int = 0
    stock: str = STOCK


MODELS = {
    "dense": Model(""),
    # Two microbatches a rank, and clipping in every step. ZeRO-2/3 add up ranks first and
    # microbatches then, DDP the other way round, and both add up squares in the order of shards.
    "accumulating and clipping": Model("--global-batch-size 8 --clip-grad 0.5", last_digit=1),
    "swiglu": Model(SWIGLU),
    "recompute": Model(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "experts": Model(MOE),
    "experts-ep2": Model(f"{MOE} {EP2}"),
    "experts-ep2-dp2": Model(f"{MOE} {EP2} --global-batch-size 8", world=4, last_digit=1),
    "tp2-dp2": Model(TP2, world=4),
    "pp2-dp2": Model(PP2, world=4),
    "mtp pp2": Model(f"{FURTHER} {PP2}", last_digit=1),
    "pp2-vpp2-dp2": Model(f"--num-layers 4 {VPP2} --global-batch-size 8", world=4, last_digit=1),
    "mtp": Model(FURTHER),
    "mla": Model(LATENT),
    "mla tp2-dp2": Model(f"{LATENT} {TP2}", world=4),
    "real data": Model(
        "--train-data-path {text}_train --valid-data-path {text}_valid "
        "--test-data-path {text}_valid"
    ),
    "hybrid": Model(f"{LAYERS} *-*-", script=HYBRID),
    "hybrid, swiglu": Model(f"{SWIGLU} {LAYERS} *-*-", script=HYBRID),
    "hybrid, older name": Model(f"{LAYERS} *-*-", script="pretrain_mamba.py"),
    "hybrid experts-ep2": Model(f"{LAYERS} *-*E {MOE} {EP2}", script=HYBRID),
    "hybrid pp2-dp2": Model(f"{LAYERS} *-|*- {PP2}", world=4, script=HYBRID),
    "lion": Model(f"{SWIGLU} {LION}", stock=LION_STOCK),
    "lion experts-ep2": Model(f"{MOE} {EP2} {LION}", stock=LION_STOCK),
    "lion pp2-dp2": Model(f"{PP2} {LION}", world=4, stock=LION_STOCK),
    "muon": Model("--optimizer muon --swiglu"),
    "llama": Model(LLAMA),
    "llama, experts": Model(f"{LLAMA} {MOE}"),
    "four layers": Model(FOUR_LAYERS),
    "four layers, experts": Model(f"{FOUR_LAYERS} {MOE}"),
    "257 tokens": Model(f"{FOUR_LAYERS} --vocab-size 257"),
}

OURS = "--use-megatron-fsdp"
ZERO1, ZERO2, ZERO0 = (
    f"{OURS} --data-parallel-sharding-strategy {name}"
    for name in ("optim", "optim_grads", "no_shard")
)
OVERLAP = "--overlap-grad-reduce"
DENSE_APART = (
    "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "
    "--expert-data-parallel-sharding-strategy optim --expert-num-distributed-optimizer-instances 1"
)
EXPERTS_APART = (
    "--data-parallel-sharding-strategy optim --expert-num-distributed-optimizer-instances 2 "
    "--expert-outer-dp-sharding-strategy optim "
    "--expert-data-parallel-sharding-strategy optim_grads_params"
)
FOUR = (OURS, ZERO2, ZERO1, ZERO0)

LIKE_DDP = [
    ("dense", OURS),
    ("dense", f"{OURS} {OVERLAP} --overlap-param-gather"),
    ("dense", ZERO2),
    ("dense", ZERO1),
    ("dense", f"{ZERO1} {OVERLAP}"),
    ("dense", ZERO0),
    ("dense", f"{ZERO0} {OVERLAP}"),
    ("accumulating and clipping", OURS),
    ("accumulating and clipping", f"{ZERO1} {OVERLAP}"),
    *((name, OURS) for name in ("swiglu", "recompute", "experts", "real data")),
    *(
        (name, flags)
        for name in ("experts-ep2", "tp2-dp2", "pp2-dp2")
        for flags in (OURS, ZERO2, f"{ZERO1} {OVERLAP}", ZERO0)
    ),
    *(
        (name, flags)
        for name in ("hybrid", "hybrid experts-ep2", "hybrid pp2-dp2")
        for flags in FOUR
    ),
    ("mtp pp2", OURS),
    ("experts-ep2-dp2", f"{OURS} {DENSE_APART}"),
    ("experts-ep2-dp2", f"{OURS} {EXPERTS_APART}"),
    *((name, OURS) for name in ("pp2-vpp2-dp2", "mtp", "mla", "mla tp2-dp2")),
    ("mla", ZERO1),
    ("hybrid, older name", OURS),
    ("lion", OURS),
    ("lion", ZERO1),
    ("lion experts-ep2", OURS),
    ("lion pp2-dp2", ZERO2),
]
"""Model and flags of a run that prints what Megatron-LM's own DDP does."""

RESUMES = {
    "dense": "FullyShardedDataParallel",
    "swiglu": "FullyShardedDataParallel",
    "experts": "FullyShardedDataParallel",
    # Both stages hold the embedding. Megatron's own resume loses a part of the state.
    "mtp pp2": "FullyShardedDataParallel",
    "hybrid experts-ep2": "FullyShardedDataParallel",
    "muon": "mlp.linear_fc1.weight",
    "lion": "Lion, as in megatron-core with adam_beta1 0.9",
}
"""Models whose runs are saved and resumed, and what the log has to say of each."""

REFUSED = {
    "--ckpt-format torch_dist --use-torch-fsdp2 --optimizer dist_muon": (
        "ckpt_format='torch_dist'",
        "use_torch_fsdp2=True",
        "optimizer='dist_muon'",
    ),
    **{
        f"--optimizer {kind}": (f"optimizer='{kind}'",)
        for kind in ("soap", "dist_muon", "lion", "adaptive_muon")
    },
}
"""Flags, and the options that the one error names."""

Trained = Callable[..., Run]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of some text, made by the repository's script."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "text"
    source.mkdir()
    for number, path in enumerate(sorted(Path(functools.__file__).parent.glob("*.py"))[:40]):
        (source / f"{number}.py").write_bytes(path.read_bytes()[:20000])
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "prepare_data.py"),
            "--input",
            str(source),
            "--output-prefix",
            str(folder / "text"),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "text"


@pytest.fixture(scope="module")
def makes_every_optimizer(megatron_lm: Path) -> bool:
    """Whether this Megatron-LM makes every optimizer as it makes Adam: from 0.18 on."""
    return "muon-nesterov" in (megatron_lm / "megatron/training/arguments.py").read_text()


@pytest.fixture(scope="module")
def trained(megatron_lm: Path, text: Path, makes_every_optimizer: bool) -> Trained:
    """A finished run of a model of `MODELS` with more flags; each run once."""

    @functools.cache
    def run(name: str, flags: str, status: int = 0) -> Run:
        model = MODELS[name]
        if LAYERS in model.arguments and not (megatron_lm / HYBRID).is_file():
            pytest.skip(f"this Megatron-LM has no {HYBRID}")
        if "--optimizer" in model.arguments and not makes_every_optimizer:
            pytest.skip("this Megatron-LM makes Muon by another function, and Lion not at all")
        if flags == LION_STOCK and importlib.util.find_spec("emerging_optimizers") is None:
            pytest.skip("core's own Lion needs emerging_optimizers (and absl-py)")
        data = "" if "data-path" in model.arguments else "--mock-data"
        arguments = f"{data} {model.arguments} {flags}".format(text=text)
        done = train(megatron_lm, arguments.split(), model.world, script=model.script)
        assert status is None or done.status == status, done.end
        ours = done.log.count(f"{OURS} sets"), "FullyShardedDataParallel: strategy" in done.log
        assert status or ours == ((1, True) if OURS in flags else (0, False)), done.end
        return done

    return run


@pytest.mark.parametrize(("name", "flags"), LIKE_DDP, ids=map(" ".join, LIKE_DDP))
def test_losses_and_norms_are_those_of_ddp(trained: Trained, name: str, flags: str) -> None:
    """In fp32, in every printed digit: training, evaluation while training and at the end."""
    stock = trained(name, MODELS[name].stock).values
    run = trained(name, flags).values
    assert sum(what == "grad norm" for _, what in run) == STEPS
    assert {what for _, what in run} >= {
        "periodic evaluation",
        "validation evaluation",
        "test evaluation",
        "lm loss",
    }
    assert lm_log.differences(stock, run, last_digit=MODELS[name].last_digit) == []


def assert_resumed(whole: Run, resumed: Run) -> None:
    """From iteration 2. Megatron-LM averages the first two losses that it logs after a resume, so
    the comparison of losses begins at the third."""
    assert (2, "lm loss") not in resumed.values, "it started again from the beginning"
    assert resumed.values[3, "grad norm"] == whole.values[3, "grad norm"]
    assert lm_log.differences(whole.values, resumed.values, start=5) == []


@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_is_one_that_never_stopped(
    trained: Trained, tmp_path: Path, name: str
) -> None:
    whole = trained(name, OURS)
    assert RESUMES[name] in whole.log
    saving = f"{OURS} --save {tmp_path} --save-interval 2"
    trained(name, f"{saving} --exit-interval 2")
    stored = dcp.FileSystemReader(tmp_path / "iter_0000002").read_metadata().state_dict_metadata
    # Under expert parallelism, of each rank.
    ranks = ("(0, 0, 0)", "(0, 0, 1)") if "ep2" in name else ("(0, 0)",)
    assert all(f"rng_state.{rank}.0.torch_rng_state" in stored for rank in ranks)
    resumed = trained(name, f"{saving} --load {tmp_path}")
    assert_resumed(whole, resumed)
    assert "generators keep their seeds" not in resumed.log
    assert (
        whole.values[STEPS, "test evaluation"]
        == trained(name, f"{OURS} --load {tmp_path} --skip-train").values[STEPS, "test evaluation"]
    )


def test_a_gpt_checkpoint_goes_on_as_a_hybrid_model(
    trained: Trained, tmp_path: Path, megatron_lm: Path
) -> None:
    """As with stock DDP, with its optimizer state: a new run, and a resumed one."""
    interop = megatron_lm / "megatron" / "core" / "dist_checkpointing" / "gpt_checkpoint_interop.py"
    if not interop.is_file():
        pytest.skip("this Megatron-LM does not do it")
    formats = {
        f"{STOCK} --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable": "stock",
        OURS: "ours",
        ZERO1: "ours",
    }
    found = []
    for flags, name in formats.items():
        root = tmp_path / name
        if not root.exists():
            trained("swiglu", f"{flags} --save {root} --save-interval 2 --exit-interval 2")
        for start in ("--finetune", ""):
            found.append(trained("hybrid, swiglu", f"{flags} --load {root} {start}").values)
    for values in found:
        assert len(values) > STEPS
    for ours in (found[2:4], found[4:]):
        for stock, run in zip(found[:2], ours, strict=True):
            assert lm_log.differences(stock, run) == []


@pytest.fixture
def saves_asynchronously(megatron_lm: Path) -> None:
    source = (megatron_lm / "megatron" / "training" / "async_utils.py").read_text()
    if "get_async_strategy" not in source:
        pytest.skip("this Megatron-LM saves asynchronously only in the torch_dist format")


def assert_saved(root: Path, iteration: int) -> None:
    folder = folders.final_folder(root, iteration)
    assert verify.examine(folder)["intact"]
    record = read_record(folder)
    assert record is not None
    assert record["world_size"] == 2
    assert record["iteration"] == iteration
    assert record["topology"]["data_parallel_sharding_strategy"] == "optim_grads_params"


def test_a_run_that_saves_asynchronously_trains_and_resumes_as_one_that_does_not(
    trained: Trained, saves_asynchronously: None, tmp_path: Path
) -> None:
    """In every printed digit, with a save in each step, each while the next step runs."""
    plain = trained("dense", OURS)
    saving = f"{OURS} --async-save --save {tmp_path} --save-interval 1"
    whole = trained("dense", saving)
    assert lm_log.differences(plain.values, whole.values) == []
    assert "scheduled an async checkpoint save" in whole.log
    assert "Disabling --async-save" not in whole.log
    assert folders.complete_iterations(tmp_path) == (1, 2, 3, 4, 5, 6)
    assert folders.half_written(tmp_path) == ()
    assert folders.read_tracker(tmp_path) == 6
    for iteration in (1, 6):
        assert_saved(tmp_path, iteration)
    atomic.write_atomically(tmp_path / folders.TRACKER, "2")
    assert_resumed(plain, trained("dense", f"{saving} --load {tmp_path}"))


def _tracked(root: Path) -> int:
    """The iteration that the tracker names; 0 without one."""
    if (root / folders.TRACKER).is_file():
        return folders.read_tracker(root)
    return 0


@pytest.mark.parametrize("way", ["", "--async-save"])
def test_a_killed_save_is_never_the_one_that_is_loaded(
    request: pytest.FixtureRequest, megatron_lm: Path, tmp_path: Path, way: str
) -> None:
    """Runs that save in every step are killed at random moments, each resuming what the one before
    left; Megatron-LM's own tracker, folders and reader are what is tested."""
    if way:
        request.getfixturevalue("saves_asynchronously")
    root = tmp_path / "saved"
    chance = random.Random(len(way))
    found = [0]
    common = (
        f"--mock-data {OURS} {way} --save {root} --load {root} --save-interval 1 "
        f"--train-iters 10000 --data-cache-path {tmp_path / 'cache'}"
    )
    for number in range(4):
        killed = launch(megatron_lm, common.split(), tmp_path / f"log{number}")
        deadline = time.monotonic() + 240
        while (
            _tracked(root) <= found[-1] and time.monotonic() < deadline and killed[0].poll() is None
        ):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in killed:
            process.kill()
            process.wait()
        found.append(_tracked(root))
        assert_saved(root, found[-1])
    assert found == sorted(set(found)), "a run did not resume what the one before it left"
    last = train(megatron_lm, [*common.split(), "--exit-interval", "1"])
    assert last.status == 0, last.end
    assert f"at iteration {found[-1]}" in last.log
    assert folders.half_written(root) == ()


def test_flags_of_main_reach_the_wrapper(trained: Trained) -> None:
    """0.16.1's parser lacks them; bf16 gradients on the wire show in what the wrapper prints.
    Version 2 of Megatron's wrapper is refused by Megatron-LM beside the distributed optimizer."""
    run = trained(
        "dense",
        f"{OURS} --megatron-fsdp-main-params-dtype fp32 "
        "--megatron-fsdp-grad-comm-dtype=bf16 --outer-dp-sharding-strategy no_shard "
        "--megatron-fsdp-version 2 "
        "--train-iters 2 --bf16",
    )
    assert "gradients reduced in torch.bfloat16" in run.log


@pytest.mark.parametrize("flags", REFUSED)
def test_contradictions_are_one_error(
    trained: Trained, makes_every_optimizer: bool, flags: str
) -> None:
    """All of them, once, with value and remedy, before a process group exists; or the parser does
    not know the value."""
    kind = flags.rpartition(" ")[2]
    if makes_every_optimizer and kind in EMERGING:
        pytest.skip("this one is supported")
    log = trained("dense", f"{OURS} {flags}", 2).log
    assert "Traceback" not in log
    if f"invalid choice: '{kind}'" not in log:
        assert log.count("cannot be used with this configuration") == 1
        for option in REFUSED[flags]:
            assert f"  - {option}: " in log
        assert re.search(r"\. (?:Use|Set|Leave) ", log)


# Other formats, and other splits of the model.

FORMATS = {
    "fsdp_dtensor": f"{OURS} --ckpt-format fsdp_dtensor",
    "torch_dist": f"{STOCK} --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable",
}


@pytest.mark.parametrize("name", ["llama", "llama, experts"])
@pytest.mark.parametrize(("saved", "other"), [tuple(FORMATS), tuple(FORMATS)[::-1]])
def test_what_is_converted_goes_on_with_the_same_losses(
    trained: Trained,
    megatron_lm: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    saved: str,
    other: str,
) -> None:
    """Ours with stock DDP, and stock's with ours: what a resume without the conversion prints, in
    every printed digit. (An uninterrupted run of stock prints other losses where its optimizer does
    not keep its steps.)"""
    monkeypatch.setattr(sys, "path", [*sys.path, str(megatron_lm)])  # saved arguments: its classes
    source = tmp_path / saved
    target = tmp_path / other
    trained(name, f"{FORMATS[saved]} --save {source} --save-interval 2")
    convert(source, target, other, iteration=2)
    atomic.write_atomically(source / folders.TRACKER, "2")
    expected = trained(name, f"{FORMATS[saved]} --load {source}").values
    resumed = trained(name, f"{FORMATS[other]} --load {target}").values
    wanted = [(step, what) for step in (3, 4) for what in ("lm loss", "grad norm")]
    assert (2, "lm loss") not in expected.keys() | resumed.keys(), "it started from the beginning"
    assert [resumed[key] for key in wanted] == [expected[key] for key in wanted]


@pytest.fixture(scope="module")
def saved(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a fresh run after two steps; of a run that loads `source` and takes no
    step, if that is given."""

    @functools.cache
    def save(name: str, flags: str, source: Path | None = None) -> Path:
        root = tmp_path_factory.mktemp("saved")
        if source is None:
            ends = "--save-interval 2 --exit-interval 2"
        else:
            ends = (
                f"--load {source.parent} --train-iters 2 --save-interval 100 --eval-iters 0 "
                "--use-checkpoint-opt_param-scheduler"
            )
        trained(name, f"{OURS} {flags} --save {root} {ends}")
        return root / "iter_0000002"

    return save


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer in a checkpoint, whole, read by torch alone."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {}
    for key, entry in stored.items():
        if isinstance(entry, TensorStorageMetadata) and key.startswith(("model.", "optimizer.")):
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


SPLITS = [
    ("four layers", "", TP2),
    ("four layers", "", PP2),
    ("four layers", "", VPP2),
    ("mtp", "", PP2),
    ("mla", "", TP2),
    ("four layers", "", "--data-parallel-sharding-strategy optim"),
    ("four layers, experts", EP2, ""),
    ("four layers, experts", DENSE_APART, EXPERTS_APART),
    ("257 tokens", "", TP2),
]
"""Model, and the flags of the runs between which a checkpoint goes there and back."""


@pytest.mark.parametrize(("name", "here", "there"), SPLITS)
def test_weights_and_optimizer_state_move_there_and_back(
    saved: Callable[..., Path], name: str, here: str, there: str
) -> None:
    """Model and optimizer tensors, bit for bit, whole. 257 tokens are padded to 384 rows, with
    tensor parallelism to 512: the real ones move."""
    first = saved(name, here)
    moved = saved(name, there, first)
    a, b, c = (tensors(folder) for folder in (first, moved, saved(name, here, moved)))
    assert a.keys() == b.keys() == c.keys()
    assert sum(".exp_avg_sq" in key for key in a) > 10
    tables = [key for key in a if a[key].shape != b[key].shape]
    assert len(tables) == (6 if name == "257 tokens" else 0), tables  # two, with two moments each
    for key in a:
        rows = slice(257 if key in tables else None)
        one, other, back = (t[key][rows] if t[key].dim() else t[key] for t in (a, b, c))
        assert torch.equal(one, other), key
        assert torch.equal(one, back), key
