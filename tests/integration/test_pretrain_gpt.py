"""Megatron-LM's own pretrain_gpt.py, unmodified, through the runner: it trains as with its own DDP.

Opt-in: needs a checkout of Megatron-LM at core_v0.16.1 or core_v0.19.0 and what its training
modules import.

    pip install six regex pydantic triton
    MEGATRON_LM_PATH=path/to/Megatron-LM python -m pytest --full tests/integration
"""

from __future__ import annotations

import functools
import importlib.util
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.checkpoint.record import read_record
from megatron_fsdp_adapter.cli import verify
from megatron_fsdp_adapter.megatron.options.support import EMERGING
from tests.integration import lm_log
from tests.integration.lm_runs import ACCUMULATED, ROOT, STEPS, Run, launch, train

pytestmark = pytest.mark.full

MOCK = ("--mock-data",)
MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-ffn-hidden-size 48 --disable-bias-linear"
)
RECOMPUTE = shlex.split(
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
TABLE = "--use-megatron-fsdp sets"


@dataclass(frozen=True)
class Setup:
    """A model and its parallelism: arguments that stock DDP and the wrapper are both given.

    last_digit: by how many units of the last printed digit they may differ. A unit is 1e-6 at
    losses near 5, two roundings of fp32.
    """

    name: str
    arguments: tuple[str, ...]
    world: int = 2
    data: bool = False
    last_digit: int = 0


DENSE = Setup("dense", MOCK)
ACCUMULATING = Setup("dense, accumulating and clipping", (*MOCK, *ACCUMULATED), last_digit=1)
SWIGLU = Setup("swiglu", (*MOCK, "--swiglu", "--position-embedding-type", "rope"))
RECOMPUTED = Setup("recompute", (*MOCK, *RECOMPUTE))
EXPERTS = Setup("experts", (*MOCK, *MOE))
EXPERTS_EP2 = Setup(
    "experts-ep2",
    (*MOCK, *MOE, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
)
TP2 = Setup("tp2-dp2", (*MOCK, "--tensor-model-parallel-size", "2"), world=4)
PP2 = Setup("pp2-dp2", (*MOCK, "--pipeline-model-parallel-size", "2"), world=4)
REAL = Setup("real data", (), data=True)

ZERO3: tuple[str, ...] = ()
ZERO3_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
ZERO2 = ("--data-parallel-sharding-strategy", "optim_grads")
ZERO1 = ("--data-parallel-sharding-strategy", "optim")
ZERO0 = ("--data-parallel-sharding-strategy=no_shard",)
OVERLAP = ("--overlap-grad-reduce",)
FOUR = (ZERO3, ZERO2, (*ZERO1, *OVERLAP), ZERO0)

CASES = [
    (DENSE, ZERO3),
    (DENSE, ZERO3_OVERLAP),
    (DENSE, ZERO2),
    (DENSE, ZERO1),
    (DENSE, (*ZERO1, *OVERLAP)),
    (DENSE, ZERO0),
    (DENSE, (*ZERO0, *OVERLAP)),
    (ACCUMULATING, ZERO3),
    (ACCUMULATING, (*ZERO1, *OVERLAP)),
    (SWIGLU, ZERO3),
    (RECOMPUTED, ZERO3),
    (EXPERTS, ZERO3),
    *((split, flags) for split in (EXPERTS_EP2, TP2, PP2) for flags in FOUR),
    (REAL, ZERO3),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of some text, made by the repository's script."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "text"
    source.mkdir()
    for number, path in enumerate(sorted(Path(functools.__file__).parent.glob("*.py"))[:40]):
        (source / f"{number}.py").write_bytes(path.read_bytes()[:20000])
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "--input", str(source),
         "--output-prefix", str(folder / "text")],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "text"


def _data(setup: Setup, text: Path) -> list[str]:
    if not setup.data:
        return []
    return ["--train-data-path", f"{text}_train", "--valid-data-path", f"{text}_valid",
            "--test-data-path", f"{text}_valid"]  # fmt: skip


@pytest.fixture(scope="module")
def stock(megatron_lm: Path, text: Path):
    """Losses and gradient norms of Megatron-LM's own DDP, for a setup; run once for each."""

    @functools.cache
    def values(setup: Setup) -> lm_log.Values:
        run = train(
            megatron_lm,
            [*setup.arguments, *_data(setup, text), "--use-distributed-optimizer",
             "--no-gradient-accumulation-fusion"],
            setup.world,
        )  # fmt: skip
        assert run.status == 0, run.end
        assert "FullyShardedDataParallel" not in run.log
        return run.values

    return values


def _check(run: Run, setup: Setup) -> None:
    assert run.status == 0, run.end
    assert "FullyShardedDataParallel: strategy" in run.log, "the wrapper was not constructed"
    assert run.log.count(TABLE) == 1, "one table, on one rank"
    norms = [key for key in run.values if key[1] == "grad norm"]
    assert len(norms) == STEPS, setup
    assert {what for _, what in run.values} >= {"periodic evaluation", "validation evaluation",
                                               "test evaluation", "lm loss"}  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "flags"), CASES, ids=[f"{s.name} {' '.join(f) or 'zero-3'}" for s, f in CASES]
)
def test_losses_and_norms_are_those_of_ddp(
    megatron_lm: Path, stock, text: Path, setup: Setup, flags: tuple[str, ...]
) -> None:
    """In fp32, in every printed digit: training, evaluation while training and at the end."""
    arguments = [*setup.arguments, *_data(setup, text), "--use-megatron-fsdp", *flags]
    run = train(megatron_lm, arguments, setup.world)
    _check(run, setup)
    assert lm_log.differences(
        stock(setup), run.values, last_digit=setup.last_digit
    ) == []


@pytest.mark.parametrize("setup", [DENSE, SWIGLU, EXPERTS], ids=lambda setup: setup.name)
def test_saves_and_resumes(megatron_lm: Path, stock, tmp_path: Path, setup: Setup) -> None:
    """What follows a resume is what an uninterrupted DDP run printed. Megatron-LM averages the
    first two losses that it logs after a resume, so the comparison begins at the third."""
    common = [*setup.arguments, "--use-megatron-fsdp", "--save", str(tmp_path / "saved")]
    first = train(megatron_lm, [*common, "--save-interval", "2", "--exit-interval", "2"])
    assert first.status == 0, first.end
    assert (tmp_path / "saved" / "iter_0000002" / ".metadata").is_file()
    resumed = train(
        megatron_lm, [*common, "--save-interval", "2", "--load", str(tmp_path / "saved")]
    )
    assert resumed.status == 0, resumed.end
    assert (2, "lm loss") not in resumed.values, "it started again from the beginning"
    assert (3, "grad norm") in resumed.values
    assert resumed.values[3, "grad norm"] == stock(setup)[3, "grad norm"]
    assert lm_log.differences(stock(setup), resumed.values, start=5) == []


def test_a_killed_save_is_never_the_one_that_is_loaded(megatron_lm: Path, tmp_path: Path) -> None:
    """Runs that save in every step are killed at random moments, each resuming what the one before
    left; Megatron-LM's own tracker, folders and reader are what is tested."""
    root, chance, found = tmp_path / "saved", random.Random(0), []
    common = [*MOCK, "--use-megatron-fsdp", "--save", str(root), "--load", str(root),
              "--save-interval=1", "--train-iters=10000"]  # fmt: skip
    for number in range(4):
        newest = root / f"iter_{(found or [0])[-1] + 2:07d}"
        killed = launch(megatron_lm, [*common, "--data-cache-path", str(tmp_path / "cache")],
                        tmp_path / f"log{number}")  # fmt: skip
        deadline = time.monotonic() + 240
        while not newest.exists() and time.monotonic() < deadline and killed[0].poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in killed:
            process.kill()
            process.wait()
        found.append(int((root / folders.TRACKER).read_text()))
        assert verify.examine(folders.final_folder(root, found[-1]))["intact"]
        record = read_record(folders.final_folder(root, found[-1]))
        assert record is not None and (record.world_size, record.iteration) == (2, found[-1])
        assert record.topology["data_parallel_sharding_strategy"] == "optim_grads_params"
    assert found == sorted(set(found)), "a run did not resume what the one before it left"
    last = train(megatron_lm, [*common, "--exit-interval=1"])
    assert last.status == 0, last.end
    assert f"at iteration {found[-1]}" in last.log
    assert folders.half_written(root) == ()


def test_flags_of_main_reach_the_wrapper(megatron_lm: Path) -> None:
    """0.16.1's parser lacks them; bf16 gradients on the wire show in what the wrapper prints."""
    run = train(
        megatron_lm,
        [*MOCK, "--use-megatron-fsdp", "--megatron-fsdp-main-params-dtype", "fp32",
         "--megatron-fsdp-grad-comm-dtype=bf16", "--outer-dp-sharding-strategy", "no_shard",
         "--train-iters", "2", "--bf16"],
    )  # fmt: skip
    assert run.status == 0, run.end
    assert "gradients reduced in torch.bfloat16" in run.log


def test_contradictions_are_one_error(megatron_lm: Path) -> None:
    """All of them, once, before a process group exists."""
    run = train(
        megatron_lm,
        [*MOCK, "--use-megatron-fsdp", "--ckpt-format", "torch_dist", "--use-torch-fsdp2",
         "--optimizer", "dist_muon"],
    )  # fmt: skip
    assert run.status == 2
    assert run.log.count("cannot be used with this configuration") == 1
    for option in ("ckpt_format='torch_dist'", "use_torch_fsdp2=True", "optimizer='dist_muon'"):
        assert f"  - {option}: " in run.log
    assert "Traceback" not in run.log


@pytest.fixture(scope="module")
def makes_every_optimizer(megatron_lm: Path) -> bool:
    """Whether this Megatron-LM makes every optimizer as it makes Adam: from 0.18 on."""
    return "muon-nesterov" in (megatron_lm / "megatron/training/arguments.py").read_text()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("muon", "mlp.linear_fc1.weight"), ("adaptive_muon", "mlp.linear_fc1.weight"),
     ("lion", "Lion, as in megatron-core with adam_beta1 0.9")],
)  # fmt: skip
def test_other_optimizers_train_and_resume(
    megatron_lm: Path, makes_every_optimizer: bool, tmp_path: Path, kind: str, said: str
) -> None:
    """The table says which weights are theirs. Of a resumed run as in `test_saves_and_resumes`."""
    if not makes_every_optimizer:
        pytest.skip("this Megatron-LM makes Muon by another function, and Lion not at all")
    common = [*MOCK, "--use-megatron-fsdp", "--optimizer", kind, "--swiglu"]
    whole = train(megatron_lm, common)
    assert whole.status == 0, whole.end
    assert said in whole.log and (STEPS, "grad norm") in whole.values
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    first = train(megatron_lm, [*common, *save, "--exit-interval", "2"])
    assert first.status == 0, first.end
    resumed = train(megatron_lm, [*common, *save, "--load", str(tmp_path)])
    assert resumed.status == 0, resumed.end
    assert (2, "lm loss") not in resumed.values, "it started again from the beginning"
    assert resumed.values[3, "grad norm"] == whole.values[3, "grad norm"]
    assert lm_log.differences(whole.values, resumed.values, start=5) == []


@pytest.mark.parametrize(
    ("setup", "flags"), [(SWIGLU, ZERO3), (SWIGLU, ZERO1), (EXPERTS_EP2, ZERO3), (PP2, ZERO2)],
    ids=["zero-3", "zero-1", "experts-ep2", "pp2-dp2"],
)  # fmt: skip
def test_lion_has_the_losses_of_core(
    megatron_lm: Path, makes_every_optimizer: bool, setup: Setup, flags: tuple[str, ...]
) -> None:
    """Core's own needs NVIDIA's package (`pip install emerging-optimizers absl-py`)."""
    if not makes_every_optimizer or importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("core has no Lion here: an older release, or emerging_optimizers is missing")
    common = [*setup.arguments, "--optimizer", "lion", "--adam-beta2", "0.95"]
    stock = train(megatron_lm, [*common, "--no-gradient-accumulation-fusion"], setup.world)
    assert stock.status == 0, stock.end
    run = train(megatron_lm, [*common, "--use-megatron-fsdp", *flags], setup.world)
    _check(run, setup)
    assert lm_log.differences(stock.values, run.values) == []


@pytest.mark.parametrize("kind", ["soap", "dist_muon", "lion", "adaptive_muon"])
def test_an_optimizer_that_is_not_supported_is_one_error(
    megatron_lm: Path, makes_every_optimizer: bool, kind: str
) -> None:
    """With value and remedy, before a process group exists; or the parser does not know it."""
    if makes_every_optimizer and kind in EMERGING:
        pytest.skip("this one is supported")
    run = train(megatron_lm, [*MOCK, "--use-megatron-fsdp", "--optimizer", kind])
    assert run.status == 2 and "Traceback" not in run.log
    parsed = f"invalid choice: '{kind}'" not in run.log
    assert not parsed or (f"  - optimizer='{kind}': " in run.log and "; use " in run.log)


def test_without_the_flag_the_script_is_its_own(megatron_lm: Path, stock) -> None:
    """The runner sets nothing and installs nothing: `stock` ran through it."""
    assert stock(DENSE)
