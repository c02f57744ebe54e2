"""Random life cycles of a training: runs that each resume what the one before has saved, with other
flags, another layout, another wrapper (by way of `convert`), after an exit or a kill.

A cycle runs twice: all runs with stock DDP, and each with the wrapper that was drawn for it. What
they print must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fsdp_adapter.checkpoint.convert import convert
from tests.lib import strays
from tests.lib.gpu import shared_device
from tests.lib.hunt import cycle_grammar
from tests.lib.hunt.cycle_grammar import STOCK, Flags
from tests.lib.hunt.programs import Program, Statement
from tests.lib.integration import lm_runs
from tests.lib.integration.lm_runs import SMALL, Run

Options = dict[str, list[str] | None]
"""Of Megatron's parser: the choices of each option, [] for a switch, None for any value."""


@dataclass(frozen=True)
class Machine:
    """Where cycles run. device: of `lm_runs.DEVICES`; ranks: the most of a run; has: what
    `Flags.asks` may ask for."""

    device: str = "cpu"
    ranks: int = 4
    has: frozenset[str] = frozenset()


ON_CPU = Machine()

STEPS_OF_A_RUN = 2
EVERY_RUN = ("--global-batch-size", "8")
"""Divisible by two microbatches on each of four ranks. Flags of a cycle come after it."""
STOCK_FLAGS = (
    "--use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format torch_dist "
    "--dist-ckpt-optim-fully-reshardable"
)
OUR_FLAGS = "--use-megatron-fsdp --data-parallel-sharding-strategy "
SAVED = "successfully saved checkpoint from iteration"
TIMEOUTS_S = {"cpu": 400.0, "cuda": 150.0}


def machine_of(device: str) -> Machine:
    """This machine, for runs on `device`.

    Raises:
        ValueError: it has no GPU.
    """
    if device == "cpu":
        return ON_CPU
    ranks = min(shared_device.devices(), ON_CPU.ranks)
    if ranks == 0:
        raise ValueError("--device=cuda: torch finds no GPU. Use --device=cpu")
    has = frozenset(name for name in (cycle_grammar.TE,) if importlib.util.find_spec(name))
    return Machine(device, ranks, has)


def parser_options(checkout: Path, machine: Machine = ON_CPU) -> tuple[Options, Options]:
    """The options of the checkout's own parser, and with those that the runner adds."""
    harness = lm_runs.DEVICES[machine.device].harness.removesuffix(".py")
    command = [sys.executable, "-m", "tests.lib.hunt.parser_worker", str(checkout), harness]
    environment = lm_runs.environment_of_ranks()
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout} has no parser that can be read:\n{done.stderr[-3000:]}")
    stock, ours = json.loads(done.stdout.splitlines()[-1])
    return stock, ours


@dataclass(frozen=True)
class Stage:
    """One run of a cycle. wrapper: `STOCK` or a strategy; end: of `ENDS`; own: flags that only this
    package's runner knows."""

    wrapper: str
    world: int
    end: str
    flags: tuple[str, ...]
    own: tuple[str, ...] = ()


def known_rows(rows: Sequence[Flags], options: Options, has: Collection[str] = ()) -> list[Flags]:
    """The rows that the parser knows, and that ask for nothing but what a machine has."""
    found = []
    for row in rows:
        names = [word for word in row.text.split() if word.startswith("--")]
        if all(name in options for name in names) and (not row.asks or row.asks in has):
            found.append(row)
    return found


def drawn(row: Flags, options: Options, draw: random.Random) -> str:
    """The text of a row with a value."""
    if row.values == ():
        return row.text
    name = row.text.split(" {}")[0].split()[-1]
    choices = options[name]
    values = row.values if row.values is not None else tuple(choices or ())
    if choices:
        values = tuple(value for value in values if value in choices)
    return row.text.format(draw.choice(values))


def some(
    rows: Sequence[Flags],
    options: Options,
    draw: random.Random,
    most: int,
    beside: Sequence[str],
    has: Collection[str] = (),
) -> list[str]:
    """Up to `most` rows, with values, that go with each other and with the flags `beside`. has: of
    the machine."""
    known = known_rows(rows, options, has)
    chosen = draw.choices(known, [row.weight for row in known], k=draw.randrange(most + 1))
    texts: list[str] = []
    for row in dict.fromkeys(chosen):
        words = {*" ".join([*beside, *texts]).split()}
        if words.issuperset(row.needs.split()) and words.isdisjoint(row.excludes.split()):
            texts.append(drawn(row, options, draw))
    return texts


def generated_cycle(
    seed: int, options: Options, own_options: Options | None = None, machine: Machine = ON_CPU
) -> Program:
    """The life cycle of a seed: flags of the model, and stages with their own. own_options: with
    those of the package's runner, which are drawn on GPUs alone."""
    draw = random.Random(seed)
    on_gpus = machine.device == "cuda"
    model = some(cycle_grammar.MODELS, options, draw, 4, ())
    if on_gpus:
        model += some(cycle_grammar.ON_GPUS_MODELS, options, draw, 3, model, machine.has)
    run_rows: tuple[Flags, ...] = cycle_grammar.RUNS
    if draw.random() < cycle_grammar.KEEPS_SCHEDULE:
        model += some(cycle_grammar.SCHEDULES, options, draw, 2, model)
    else:
        run_rows = (*run_rows, *cycle_grammar.SCHEDULES)
    statements = [Statement("model", text) for text in model]
    for number in range(draw.choice((2, 2, 3))):
        wrapper = draw.choice(cycle_grammar.WRAPPERS)
        end = draw.choice(cycle_grammar.ENDS)
        flags = some(run_rows, options, draw, 3, model)
        if number == 0 and "--use-checkpoint-args" in flags:
            flags.remove("--use-checkpoint-args")  # it needs a checkpoint
        layouts: tuple[Flags, ...] = cycle_grammar.LAYOUTS
        if on_gpus:
            flags += some(cycle_grammar.ON_GPUS_RUNS, options, draw, 1, [*model, *flags])
            layouts = (*layouts, *cycle_grammar.ON_GPUS_LAYOUTS) if machine.ranks > 1 else ()
        layout = some(layouts, options, draw, 1, model) if layouts else []
        worlds = [world for world in cycle_grammar.WORLDS if int(world) <= machine.ranks]
        if layout:
            worlds = [world for world in worlds if world != "1"]
        statements.append(Statement("stage", f"{wrapper} {end}"))
        statements.append(Statement("world", draw.choice(worlds)))
        statements += [Statement("flag", text) for text in (*flags, *layout)]
        if on_gpus and wrapper != STOCK:
            beside = [*model, *flags, *layout, wrapper]
            own = some(cycle_grammar.ON_GPUS_OURS, own_options or {}, draw, 2, beside)
            statements += [Statement("own", text) for text in own]
    return Program(tuple(statements))


def stages_of(cycle: Program) -> tuple[Stage, ...]:
    """The runs of a cycle; a run without a world has two ranks."""
    model: list[str] = []
    stages: list[Stage] = []
    for one in cycle.statements:
        if one.kind == "stage":
            wrapper, end = one.text.split()
            stages.append(Stage(wrapper, 2, end, tuple(model)))
        elif one.kind == "model" or not stages:
            model += [one.text] if one.kind in ("model", "flag") else []
        else:
            stages.append(_with(stages.pop(), one))
    return tuple(stages)


def _with(stage: Stage, one: Statement) -> Stage:
    """A run with one more statement of its own."""
    if one.kind == "world":
        return replace(stage, world=int(one.text))
    if one.kind == "own":
        return stage if stage.wrapper == STOCK else replace(stage, own=(*stage.own, one.text))
    return replace(stage, flags=(*stage.flags, one.text))


def with_stock(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same runs, all of them with stock DDP."""
    return tuple(replace(one, wrapper=STOCK, own=()) for one in stages)


@dataclass
class Done:
    """What a cycle has printed: runs up to the first that failed. converting: the error of the
    conversion in front of the next run, "" without one."""

    runs: list[Run]
    converting: str = ""


class Runner:
    """Runs cycles with a checkout, and keeps the outcome of stages: cycles that begin alike, for
    example when one is shrunk, share them."""

    def __init__(self, checkout: Path, device: str = "cpu") -> None:
        self.checkout = checkout
        self.device = lm_runs.DEVICES[device]
        self.timeout = TIMEOUTS_S[device]
        # Of every process that it starts: workers of background saves outlive a run that is killed.
        self.mark, os.environ[strays.VARIABLE] = strays.new_mark()
        # Holds a root of checkpoints for each chain of stages.
        self.folder = tempfile.TemporaryDirectory()
        # The run of the last stage of a chain, and its root; an error of converting instead.
        self.known: dict[tuple[Stage, ...], tuple[Run | str, Path]] = {}

    def end(self) -> None:
        """Ends the server of runs, and deletes all checkpoints."""
        lm_runs.end_servers()
        self.folder.cleanup()

    def forget(self) -> None:
        """Deletes all checkpoints."""
        self.folder.cleanup()
        self.folder = tempfile.TemporaryDirectory()
        self.known.clear()

    def done(self, stages: Sequence[Stage]) -> Done:
        """Runs the stages until one fails."""
        found = Done([])
        for count in range(1, len(stages) + 1):
            run, _ = self.last_of(tuple(stages[:count]))
            if isinstance(run, str):
                found.converting = run
                break
            found.runs.append(run)
            if run.status:
                break
        return found

    def last_of(self, chain: tuple[Stage, ...]) -> tuple[Run | str, Path]:
        """The last run of a chain, whose other runs have not failed."""
        if chain not in self.known:
            root = Path(self.folder.name) / f"root{len(self.known)}"
            self.known[chain] = (self.run(chain, root), root)
            strays.end(strays.orphans(self.mark))
        return self.known[chain]

    def run(self, chain: tuple[Stage, ...], root: Path) -> Run | str:
        """Runs the last stage of a chain, which saves to `root`."""
        stage = chain[-1]
        before = STEPS_OF_A_RUN * (len(chain) - 1)
        last = before + STEPS_OF_A_RUN
        words = [
            *EVERY_RUN,
            *shlex.split(" ".join(stage.flags)),
            *shlex.split(wrapper_flags(stage.wrapper)),
            *shlex.split(" ".join(stage.own)),
        ]
        words += ["--mock-data", "--save", str(root), "--save-interval", str(STEPS_OF_A_RUN)]
        if len(chain) > 1:
            source = self.last_of(chain[:-1])[1]
            if (chain[-2].wrapper == STOCK) != (stage.wrapper == STOCK):
                try:
                    source = converted(source, stage.wrapper, before)
                except (ValueError, KeyError, RuntimeError, OSError) as error:
                    return f"{type(error).__name__}: {error}"
            words += ["--load", str(source), "--ckpt-step", str(before)]
        if stage.end == "exit":
            words += ["--exit-interval", str(last)]
            return lm_runs.train(
                self.checkout, words, stage.world, self.timeout, device=self.device
            )
        return self.killed(words, stage.world, last)

    def killed(self, words: list[str], world: int, last: int) -> Run:
        """A run that is killed after it has saved iteration `last`; status 0 if it has."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            script = self.checkout / "pretrain_gpt.py"
            everything = [*SMALL, *self.device.flags, "--data-cache-path", folder, *words]
            added = self.device.environment
            ranks = lm_runs.start(self.device.harness, script, everything, world, log, added)
            deadline = time.monotonic() + self.timeout
            saved = False
            while not saved and time.monotonic() < deadline:
                if any(rank.poll() is not None for rank in ranks):
                    break
                saved = has_saved(log.read_text(), last)
                time.sleep(0.1)
            if not saved:
                return lm_runs.finish(ranks, log, max(deadline - time.monotonic(), 1.0))
            for rank in ranks:
                rank.kill()
                rank.wait()
            return Run(0, log.read_text())


def has_saved(log: str, iteration: int) -> bool:
    """True if the log says that the iteration was saved."""
    lines = [line.split() for line in log.splitlines() if SAVED in line]
    return any(str(iteration) in words for words in lines)


def wrapper_flags(wrapper: str) -> str:
    return STOCK_FLAGS if wrapper == STOCK else OUR_FLAGS + wrapper


def converted(source: Path, wrapper: str, iteration: int) -> Path:
    """A root with the checkpoint in the format of the wrapper that will load it."""
    target = source.with_name(f"{source.name}_as_{'torch_dist' if wrapper == STOCK else 'fsdp'}")
    if not target.exists():
        form = "torch_dist" if wrapper == STOCK else "fsdp_dtensor"
        convert(source, target, form, iteration=iteration)
    return target
