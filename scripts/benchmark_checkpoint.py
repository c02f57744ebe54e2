"""Time and memory of saving and loading, next to torch DCP with the plain state dict.

    torchrun --nproc-per-node 2 scripts/benchmark_checkpoint.py --folder FOLDER
    torchrun --nproc-per-node 2 scripts/benchmark_checkpoint.py --folder FOLDER --layers 2

The state is that of a Llama of 1.03 billion parameters (20 layers): fp32 main weights and two
moments, 12 bytes a parameter, as this package shards them: flat buffers, one for each unit, cut by
rows. Subjects (`--subjects`), in turn, `--repeats` times, on the same memory:

    plain      torch DCP, a plain dict of this rank's tensors (no DTensor, each with a storage of
               its own, nobody else has its keys): the same bytes and nothing to find out
    dtensors   torch DCP with its own writer, our DTensors: what Megatron's save does by itself
    ours       save_checkpoint and load_checkpoint
    digests    with `ours`: another load, with check_digests
    async      AsyncSaver: the time until training goes on, and until the checkpoint is there

`dtensors` and `async` take another copy of the state: 12 GB together at 20 layers.

Every load is checked by sums of bits. Times are those of the slowest rank, peaks of the greediest
one, above what the process had before (VmHWM). The state of the page cache is the machine's own;
--cold drops the files from it before each load.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_adapter.checkpoint import AsyncSaver, load_checkpoint, save_checkpoint
from megatron_fsdp_adapter.checkpoint.chunks import LayoutRef, uneven_dtensor
from megatron_fsdp_adapter.checkpoint.storage import exact_storage
from megatron_fsdp_adapter.core.layout import ParamSpec, plan_group, row_granularity

HIDDEN, FFN, VOCABULARY, QUERY_KEY_VALUE = 2048, 5632, 32000, 2560
KINDS = ("main", "exp_avg", "exp_avg_sq")
SUBJECTS = ("plain", "dtensors", "ours", "digests", "async")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Measured:
    """Of one call: seconds of the slowest rank, and those of them that the processor worked (all
    threads); GiB above the start. Each of the rank that has most."""

    seconds: float
    cpu_seconds: float
    gib: float


def units(layers: int) -> list[Shapes]:
    """Shapes of a Llama's parameters by name, unit by unit."""
    layer: Shapes = {
        "self_attention.linear_qkv.weight": (QUERY_KEY_VALUE, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,),
        "pre_mlp_layernorm.weight": (HIDDEN,),
    }
    ends: list[Shapes] = [
        {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)},
        {"output_layer.weight": (VOCABULARY, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)},
    ]
    numbered = [
        {f"decoder.layers.{i}.{name}": shape for name, shape in layer.items()}
        for i in range(layers)
    ]
    return [*numbered, *ends]


def make_state(layers: int, rank: int, size: int) -> dict[str, Any]:
    """The sharded state: {kind: {name: DTensor}}, views of one buffer for each unit and kind."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_cp",))
    state: dict[str, Any] = {kind: {} for kind in KINDS}
    for shapes in units(layers):
        specs = [
            ParamSpec(i, (name,), shape, torch.float32, True, row_granularity(shape))
            for i, (name, shape) in enumerate(shapes.items())
        ]
        layout = plan_group(specs, size)
        for kind in KINDS:
            buffer = torch.empty(layout.shard_numel, dtype=torch.float32)
            for index, spec in enumerate(layout.specs):
                held = layout.shard_item_range(index, rank)
                local = buffer[held.start : held.stop].view(layout.local_shape(index, rank))
                state[kind][spec.fqns[0]] = uneven_dtensor(
                    local,
                    mesh,
                    [Shard(0)],
                    spec.shape,
                    torch.empty(spec.shape, device="meta").stride(),
                    LayoutRef(layout, index, rank).chunks(),
                )
    return state


def locals_of(state: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """This rank's tensors as a plain dict, on the same memory."""
    return {
        f"rank{rank}.{kind}.{name}": exact_storage(tensor._local_tensor)
        for kind, tensors in state.items()
        for name, tensor in tensors.items()
        if tensor._local_tensor.numel()
    }


def fill(state: Mapping[str, Any], seed: int) -> None:
    """Values that differ between tensors; the same for the same seed. Copies of one random block,
    since drawing all of them would take longer than saving them."""
    block = torch.empty(1 << 22).random_(generator=torch.Generator().manual_seed(seed))
    for tensors in state.values():
        for number, tensor in enumerate(tensors.values()):
            flat = tensor._local_tensor.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])
            flat[:1] = number + seed


def signature(plain: Mapping[str, torch.Tensor]) -> list[int]:
    """Sums of the bits of each tensor: what a load must bring back."""
    return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in plain.values()]


def _status(field: str) -> float:
    """A field of /proc/self/status in GiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 2**20


def measure(call: Callable[[], Any]) -> Measured:
    """Runs a call on all ranks at once."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, worked, started = _status("VmRSS"), time.process_time(), time.perf_counter()
    call()
    found = time.perf_counter() - started, time.process_time() - worked, _status("VmHWM") - before
    worst = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Measured(*worst.tolist())


class Bench:
    """The subjects and what was measured of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rank, self.size = given, dist.get_rank(), dist.get_world_size()
        self.root = Path(given.folder)
        self.state = make_state(given.layers, self.rank, self.size)
        self.plain = locals_of(self.state, self.rank)
        self.saver = AsyncSaver()
        self.found: dict[tuple[str, str], list[Measured]] = {}

    def note(self, subject: str, what: str, call: Callable[[], Any]) -> None:
        one = measure(call)
        self.found.setdefault((subject, what), []).append(one)
        if self.rank == 0:
            times = f"{one.seconds:7.2f} s, cpu {one.cpu_seconds:6.2f} s"
            print(f"{subject:<9} {what:<9} {times} {one.gib:6.2f} GiB", flush=True)

    def repeat(self, number: int) -> None:
        """Each subject once; the order turns round from one repeat to the next."""
        subjects: dict[str, Callable[[], None]] = {
            "plain": lambda: self.torch("plain", self.plain),
            "dtensors": lambda: self.torch("dtensors", self.state),
            "ours": self.ours,
            "async": self.background,
        }
        chosen = [subjects[name] for name in self.given.subjects if name in subjects]
        for subject in chosen if number % 2 == 0 else reversed(chosen):
            subject()

    def torch(self, name: str, state: Mapping[str, Any]) -> None:
        folder = str(self.root / "torch")
        self.both(
            name,
            lambda: torch_dcp.save(dict(state), checkpoint_id=folder),
            lambda: torch_dcp.load(dict(state), checkpoint_id=folder),
        )

    def both(self, name: str, save: Callable[[], Any], *loads: Callable[[], Any]) -> None:
        fill(self.state, seed=self.rank)
        expected = signature(self.plain)
        self.note(name, "save", save)
        for what, load in zip((name, "digests"), loads, strict=False):
            for tensors in self.state.values():
                for tensor in tensors.values():
                    tensor._local_tensor.zero_()
            if self.given.cold:
                self.drop_cache()
            self.note(what, "load", load)
            assert signature(self.plain) == expected, f"{what}: other values came back"
        self.clear()

    def ours(self) -> None:
        root = self.root / "ours"
        loads: list[Callable[[], Any]] = [lambda: load_checkpoint(root, self.state)]
        if "digests" in self.given.subjects:
            loads.append(lambda: load_checkpoint(root, self.state, check_digests=True))
        self.both("ours", lambda: save_checkpoint(root, 1, self.state), *loads)

    def background(self) -> None:
        root = self.root / "async"
        self.note("async", "blocked", lambda: self.saver.save(root, 1, self.state))
        self.note("async", "rest", self.saver.wait)
        self.clear()

    def drop_cache(self) -> None:
        dist.barrier()
        if self.rank == 0:
            for path in self.root.rglob("*.distcp"):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()

    def clear(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.root)
            os.sync()
        dist.barrier()

    def report(self) -> str:
        """Medians with their spread, and ratios to the plain dict: of wall time, and of processor
        time, which a machine that is shared disturbs less."""
        lines = [
            "",
            f"{'':<19} {'median':>9} {'from .. to':>19} {'x plain':>8} {'cpu':>9} {'x plain':>8} "
            f"{'peak extra':>11}",
        ]
        for (subject, what), values in self.found.items():
            reference = self.found.get(("plain", what), [])
            seconds = [value.seconds for value in values]
            lines.append(
                f"{subject:<9} {what:<9} {statistics.median(seconds):>7.2f} s "
                f"{min(seconds):>7.2f} .. {max(seconds):>6.2f} s "
                f"{_ratio(seconds, [one.seconds for one in reference])} "
                f"{statistics.median(one.cpu_seconds for one in values):>7.2f} s "
                f"{_ratio([o.cpu_seconds for o in values], [o.cpu_seconds for o in reference])} "
                f"{max(value.gib for value in values):>7.2f} GiB"
            )
        return "\n".join(lines)


def _ratio(values: list[float], reference: list[float]) -> str:
    if not reference:
        return " " * 8
    return f"{statistics.median(values) / statistics.median(reference):>8.2f}"


def main(arguments: list[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", required=True, help="scratch folder; must not exist")
    parser.add_argument("--layers", type=int, default=20, help="of the Llama; default 20")
    parser.add_argument(
        "--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS, metavar="SUBJECT"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="loads without the page cache")
    given = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if Path(given.folder).exists():
        raise ValueError(f"--folder {given.folder} exists; name one that may be deleted")
    bench = Bench(given)
    if bench.rank == 0:
        numel = sum(t.numel() for t in bench.state["main"].values() if isinstance(t, DTensor))
        gib = sum(t.nbytes for t in bench.plain.values()) / 2**30
        print(f"{numel:,} parameters, {gib:.2f} GiB of state on rank 0 of {bench.size}")
    for number in range(given.repeats):
        bench.repeat(number)
    bench.saver.close()
    if bench.rank == 0:
        print(bench.report())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
