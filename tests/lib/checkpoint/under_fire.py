"""Random life cycles of a checkpoint root, and what must hold after each life.

    python -m tests.lib.checkpoint.under_fire FIRST COUNT FOLDER

runs trials by hand in an empty folder, and prints those that fail.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp_adapter.checkpoint import folders
from megatron_fsdp_adapter.tools.cli import verify
from tests.lib.checkpoint.convert_cases import Model, fsdp_state, load_all, save_fsdp
from tests.lib.checkpoint.fires import NO_SPACE, Fire, SmallDisk
from tests.lib.checkpoint.jobs import CONVERTED, Job, Journal, Noted, Step, run_jobs
from tests.lib.ranks.one_rank import world_of_one

FIRES = ("kill", "term", "full", "small disk", "two jobs", "convert")
"""The subject of a trial. Jobs of the last two are also killed, or find a full disk."""
WAYS = ("plain", "background", "background", "megatron", "megatron_background")
SOURCE = 3
"""The iteration of the checkpoint that is converted."""
GONE = "its temporary folder"
BY_NOW = "another job saves to it"
IN_PLACE = "is complete, but the save failed after that"
SMALL, LARGE = 192 << 10, 64 << 20
MOMENTS = 120
"""Operations of about three saves, among which a fire begins."""


def _fire(rng: random.Random, kind: str, ranks: int, pause: float) -> Fire:
    lasts = rng.choice((1, 1, 3, 1_000))
    return Fire(kind, rng.randint(1, MOMENTS), rng.randrange(ranks), lasts, pause)


def _job(rng: random.Random, number: int, kind: str, base: int, keep: int | None) -> Job:
    """A job that goes on from iteration `base`."""
    iteration = base
    steps = []
    for _ in range(rng.randint(2, 4)):
        iteration += rng.choice((0, 1, 1, 2))
        steps.append(Step(rng.choice(WAYS), iteration))
    ranks = rng.choice((1, 1, 2))
    pause = 0.01 if kind == "two jobs" else rng.choice((0.0, 0.003))
    happens = kind
    if kind in ("two jobs", "convert"):
        happens = rng.choice(("", "kill", "term", "full"))
    if kind == "small disk":
        happens = rng.choice(("", "", "kill"))
    on_term = rng.choice(("flag", "saves", "saves and ends")) if ranks == 1 else "flag"
    fire = _fire(rng, happens, ranks, pause)
    return Job(number, ranks, tuple(steps), keep, fire, on_term, rng.randrange(1 << 30))


def _converter(rng: random.Random, number: int) -> Job:
    fire = _fire(rng, rng.choice(("", "kill", "full")), 1, 0.01)
    step = Step("convert", SOURCE)
    return Job(number, 1, (step,), None, fire, "flag", rng.randrange(1 << 30))


def lives(rng: random.Random, kind: str, number: int, tracked: int) -> list[Job]:
    """The jobs of a life."""
    base = max(0, tracked + rng.choice((0, 0, 0, -2, 3)))
    keep = rng.choice((None, None, None, 2, 1))
    jobs = [_job(rng, 10 * number, kind, base, keep)]
    if kind == "two jobs":
        jobs.append(
            _job(rng, 10 * number + 1, kind, max(0, base + rng.choice((-1, 0, 0, 1))), keep)
        )
    if kind == "convert":
        converter = _converter(rng, 10 * number + 1)
        jobs = [converter, *jobs] if rng.random() < 0.5 else [converter]
    return jobs


class Trial:
    """One root through its lives. problems: what did not hold."""

    def __init__(self, seed: int, work: Path, source: Path) -> None:
        self.rng = random.Random(seed)
        self.kind = FIRES[seed % len(FIRES)]
        self.work = work
        self.source = source
        self.root = work / "root"
        self.journal = Journal(work / "journal")
        self.lives: list[list[Job]] = []
        self.printed = ""
        self.problems: list[str] = []
        self.disk: SmallDisk | None = None

    def run(self) -> None:
        self.root.mkdir(parents=True)
        if self.kind == "small disk":
            self.disk = SmallDisk(self.root, SMALL)
        for number in range(1, self.rng.randint(2, 3) + 1):
            self._live(lives(self.rng, self.kind, number, self._tracked()))
        if self.disk:
            self.disk.grow(LARGE)
        self._clean_end()

    def _tracked(self) -> int:
        try:
            return folders.read_tracker(self.root)
        except (FileNotFoundError, ValueError):
            return 0

    def _live(self, jobs: list[Job]) -> None:
        self.lives.append(jobs)
        told = len(self.journal.saves())
        place = self.work / f"life{len(self.lives)}"
        printed, hung = run_jobs(jobs, self.root, self.journal, self.source, place)
        self.printed += printed
        if hung:
            self.problems.append("a job hung")
        self._check_folders()
        self._check_words(jobs, self.journal.saves()[told:], printed)

    def _clean_end(self) -> None:
        """A job that nothing happens to saves, and leaves nothing of the others."""
        number = 10 * (len(self.lives) + 1)
        iteration = max((save.iteration for save in self.journal.saves()), default=0) + 1
        self._live([Job(number, 1, (Step("plain", iteration),), None, Fire(), "flag", 0)])
        left = [
            path.name
            for path in self.root.iterdir()
            if path.name.startswith(("tmp.iter", "old.")) or not any_content(path)
        ]
        if left:
            self.problems.append(f"left by earlier jobs: {left}")
        if self._tracked() != iteration:
            self.problems.append("the clean save is not the newest")

    # What must hold.

    def _check_folders(self) -> None:
        saves = self.journal.saves()
        stored = {}
        for path in self.root.iterdir():
            number = folders.iteration_of(path)
            if number is not None and any_content(path):
                stored[number] = self._value_in(path)
        for iteration in {save.iteration for save in saves if save.finished}:
            if iteration not in stored:
                old = folders.replaced_name(folders.final_folder(self.root, iteration))
                if old.is_dir():
                    stored[iteration] = self._value_in(old)
        for iteration, value in stored.items():
            may = self._newest([save for save in saves if save.iteration == iteration])
            if value is not None and value not in {save.value for save in may}:
                self.problems.append(f"iteration {iteration} holds {value}, not one of {may}")
        for save in saves:
            if save.finished and save.iteration not in stored and not self._pruned(save, saves):
                self.problems.append(f"lost: {save}")
        if not any(save.finished for save in saves):
            return
        named = self._tracked()
        if named not in {save.iteration for save in self._newest(saves)}:
            self.problems.append(f"the tracker names {named}, not one of {self._newest(saves)}")
        if named not in stored and not self._pruned_by_another(named, saves):
            self.problems.append(f"the tracker names {named}, and there are {sorted(stored)}")

    def _value_in(self, folder: Path) -> int | None:
        """The number that is stored."""
        try:
            if (folder / "digests.json").exists():
                report = verify.examine(folder)
                if not report["intact"]:
                    self.problems.append(f"{folder.name} is damaged: {report['problems']}")
                    return None
            state = load_all(folder)
        except Exception as error:
            self.problems.append(f"{folder.name} cannot be read: {error}")
            return None
        value = state.get("number")
        if value is None:
            return CONVERTED
        for key, tensor in state.items():
            if key.startswith("model.") and not bool((tensor == value).all()):
                self.problems.append(f"{folder.name}: {key} is not of {value}")
        return int(value)

    def _newest(self, saves: Sequence[Noted]) -> list[Noted]:
        """The saves that may be the newest of `saves`.

        Of each job: the finished one that was begun last, and all that were begun after it unless
        they failed. A life in which none has finished adds to what earlier ones left."""
        found: list[Noted] = []
        for jobs in reversed(self.lives):
            any_finished = False
            for job in jobs:
                own = [save for save in saves if save.job == job.number]
                finished = [save for save in own if save.finished]
                begun = max((save.begun for save in finished), default=-1)
                any_finished = any_finished or bool(finished)
                found += [save for save in own if save.begun >= begun and _may_be_there(save)]
            if any_finished:
                break
        return found

    def _pruned(self, lost: Noted, saves: Sequence[Noted]) -> bool:
        """True if some save with `keep` may have deleted it."""
        for save in saves:
            if save.keep is not None and save.iteration > lost.iteration:
                between = {
                    other.iteration
                    for other in saves
                    if lost.iteration < other.iteration < save.iteration
                }
                if len(between) >= save.keep - 1:
                    return True
        return False

    def _pruned_by_another(self, iteration: int, saves: Sequence[Noted]) -> bool:
        """With two jobs, one may prune what the other is about to name."""
        gone = [save for save in saves if save.iteration == iteration]
        return self.kind in ("two jobs", "convert") and any(
            self._pruned(save, saves) for save in gone
        )

    def _check_words(self, jobs: list[Job], saves: Sequence[Noted], printed: str) -> None:
        """Errors name causes that were there."""
        texts = [save.text for save in saves if save.finished is False]
        happens = {job.fire.kind for job in jobs}
        for text in [*texts, *_blocks(printed)]:
            if len(jobs) == 1 and (GONE in text or "another job" in text):
                self.problems.append(f"there was no other job: {text}")
        for save in saves:
            if save.finished is not False:
                continue
            full = "full" in happens or self.kind == "small disk"
            others = len(jobs) > 1 and (GONE in save.text or BY_NOW in save.text)
            dead = "kill" in happens and not save.text.startswith("CheckpointError")
            taken = save.by == "convert" and "is not empty" in save.text
            if not ((full and NO_SPACE in save.text) or others or dead or taken):
                self.problems.append(f"a cause that was not there: {save}")


def any_content(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _may_be_there(save: Noted) -> bool:
    """True unless the save has failed for certain."""
    # Megatron's own writing of the tracker raises OSError, behind a complete checkpoint.
    kinds = ["CheckpointError", "CheckpointException", "ValueError"]
    if save.by == "convert":
        kinds.append("OSError")
    certain = save.text.startswith(tuple(kinds))
    return save.finished is not False or not certain or IN_PLACE in save.text


def _blocks(printed: str) -> Iterable[str]:
    return [line for line in printed.splitlines() if re.search("another job|is gone", line)]


def _in_child(seed: int, work: Path, source: Path) -> str:
    """Runs a trial in a process of its own, which may mount; what is wrong, and with what."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            os.setpgid(0, 0)
            trial = Trial(seed, work, source)
            trial.run()
            if trial.problems:
                lines = [f"seed {seed}: {trial.kind}", *trial.problems]
                lines += [str(job) for jobs in trial.lives for job in jobs]
                lines += [str(save) for save in trial.journal.saves()]
                text = "\n".join([*lines, trial.printed, str(sorted(os.listdir(trial.root)))])
        except PermissionError as error:
            text = f"skipped: {error}"
        except BaseException:
            text = f"seed {seed}\n{traceback.format_exc()}"
        finally:
            with os.fdopen(write, "w") as out:
                out.write(text)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, 9)
    return text


def run_trials(rank: int, size: int, seeds: Sequence[int], work: str) -> dict[int, str]:
    """What is wrong with each trial that fails. Runs as the only rank, without its world meanwhile:
    gloo's threads do not survive the forks of a trial."""
    dist.destroy_process_group()
    source = Path(work, "source")
    if os.fork() == 0:
        try:
            with world_of_one():
                save_fsdp(source, fsdp_state(Model()), SOURCE)
        finally:
            os._exit(0)
    os.wait()
    found = {}
    for seed in seeds:
        place = Path(work, f"trial{seed}")
        text = _in_child(seed, place, source)
        if text:
            found[seed] = text
        shutil.rmtree(place)
    dist.init_process_group("gloo", init_method=f"file://{work}/end", rank=0, world_size=1)
    return found


def main(first: int, count: int, work: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kinds: Counter[str] = Counter()
    for seed in range(first, first + count):
        kinds[FIRES[seed % len(FIRES)]] += 1
    found = run_trials(0, 1, range(first, first + count), work)
    print("\n\n".join(found.values()))
    print(f"{count} trials {dict(kinds)}, {len(found)} failed: {sorted(found)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
