"""Random programs: drawn from the grammar by a seed, as lists of statements."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from tests.lib.hunt import grammar
from tests.lib.hunt.grammar import ROWS, Row

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FORMS = ("dict", "tuple", "dataclass")


@dataclass(frozen=True)
class Statement:
    """A statement of a program, and the name of its kind."""

    kind: str
    text: str


@dataclass(frozen=True)
class Program:
    """Statements that run one after the other."""

    statements: tuple[Statement, ...]

    @property
    def text(self) -> str:
        return "\n".join(one.text for one in self.statements) + "\n"

    @property
    def kinds(self) -> list[str]:
        """The kinds of its statements, each once."""
        return sorted({one.kind for one in self.statements})


@dataclass
class Draft:
    """A program that is being drawn, and what later statements may refer to. without: kinds of
    statements that it is not to have."""

    draw: random.Random
    without: Collection[str] = ()
    statements: list[Statement] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    blocks: list[str] = field(default_factory=list)
    mlps: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    inputs: int = 0

    def add(self, kind: str, text: str) -> None:
        self.statements.append(Statement(kind, text))

    def row(self, place: str) -> None:
        """Adds a statement of the place, if one fits."""
        rows = [row for row in ROWS if row.place == place and self.fits(row)]
        if not rows:
            return
        [row] = self.draw.choices(rows, [row.weight for row in rows])
        self.add(row.kind, filled(row.text, self))
        if place == grammar.BLOCK:
            name = f"b{len(self.blocks)}"
            self.blocks.append(name)
            self.classes += re.findall(r"= (\w+)\(", self.statements[-1].text)
            self.shared += [name] if row.kind == "same block" else []
            self.mlps += [name] if row.kind == "mlp" else []
        if row.kind in ("scheduler", "average"):
            self.facts.add(row.kind)
        if row.kind in ("freeze", "frozen block", "frozen enter"):
            self.frozen += re.findall(r"^net\.(.+)\.requires_grad_", self.statements[-1].text)
        if row.kind == "adopted":
            self.facts.discard("not adopted")
        if row.kind == "new optimizer":
            self.facts.discard("scheduler")

    def fits(self, row: Row) -> bool:
        """True if the program has what the row refers to."""
        if row.kind in self.without or not self.facts.issuperset(row.needs):
            return False
        lists = {
            "block": self.blocks,
            "mlp": self.mlps,
            "unit": self.units,
            "frozen": self.frozen,
        }
        return all(lists.get(name, True) for name in names_in(row.text))

    def rows(self, place: str, most: int) -> None:
        """Adds up to `most` statements of the place."""
        for _ in range(self.draw.randrange(most + 1)):
            self.row(place)


def _next_input(draft: Draft) -> str:
    draft.inputs += 1
    return str(draft.inputs)


Filler = Callable[[Draft], str]

# fmt: off
FILLERS: dict[str, Filler] = {
    "new": lambda draft: f"b{len(draft.blocks)}",
    "block": lambda draft: draft.draw.choice(draft.blocks),
    "mlp": lambda draft: draft.draw.choice(draft.mlps),
    "frozen": lambda draft: draft.draw.choice(draft.frozen),
    "unit": lambda draft: draft.draw.choice(draft.units),
    "form": lambda draft: draft.draw.choice(FORMS),
    "bool": lambda draft: draft.draw.choice(("True", "False")),
    "seed": _next_input,
    "rows": lambda draft: draft.draw.choice(("1", "3", "4", "4")),
    "lr": lambda draft: draft.draw.choice(("0.1", "0.02")),
    "small": lambda draft: draft.draw.choice(("0.05", "0.5")),
    "norm": lambda draft: draft.draw.choice(("2.0", "2.0", "1.0", "float('inf')")),
}
"""What stands for a name in braces."""
# fmt: on

_BRACES = re.compile(r"(?<!\{)\{(\w+)\}(?!\})")


def names_in(text: str) -> list[str]:
    return _BRACES.findall(text)


def filled(text: str, draft: Draft) -> str:
    """The text of a row with its braces filled in."""
    done = _BRACES.sub(lambda found: FILLERS[found[1]](draft), text)
    return done.replace("{{", "{").replace("}}", "}")


def generated(seed: int, without: Collection[str] = ()) -> Program:
    """The program of a seed, without statements of some kinds."""
    draft = Draft(random.Random(seed), without)
    draw = draft.draw
    draft.facts = {"not adopted", "fsdp2" if draw.random() < 0.65 else "fsm"}
    draft.facts.add("bfloat16" if draw.random() < 0.15 else "float32")
    draft.add("net", "net = Net()")
    for _ in range(draw.choice((1, 2, 2, 3, 4))):
        draft.row(grammar.BLOCK)
    draft.rows(grammar.BEFORE, 2)
    if draw.random() < 0.08:
        draft.add("half", "net.bfloat16()\nnet.dtype = torch.bfloat16")
    if "fsdp2" in draft.facts:
        _mark_units(draft)
    else:
        _shard_model(draft)
    draft.row(grammar.OPTIMIZER)
    draft.rows(grammar.SETTING, 2)
    for _ in range(draw.choice((1, 2, 2, 3, 4))):
        _add_step(draft)
    return Program(tuple(draft.statements))


def _add_step(draft: Draft) -> None:
    draw = draft.draw
    for _ in range(draw.choice((1, 1, 1, 2))):
        draft.row(grammar.FORWARD)
    draft.rows(grammar.BETWEEN, 2)
    if draw.random() < 0.95:
        draft.row(grammar.STEP)
    if draw.random() < 0.95:
        draft.row(grammar.ZERO)
    draft.rows(grammar.AFTER, 2)


def _mark_units(draft: Draft) -> None:
    """Adds calls of `fully_shard`: of some blocks and modules in them, and of the net."""
    draw = draft.draw
    options = []
    if "bfloat16" in draft.facts:
        options.append("mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)")
    if draw.random() < 0.3:
        options.append(f"reshard_after_forward={draw.random() < 0.3}")
    tail = "".join(f", {option}" for option in options)
    for name in draft.blocks:
        if draw.random() < 0.15 and name in draft.mlps:
            draft.add("inner unit", f"fully_shard(net.blocks['{name}'].up{tail})")
        if draw.random() < 0.7 and name not in draft.shared:
            draft.add("unit", f"fully_shard(net.blocks['{name}']{tail})")
            draft.units.append(name)
            draft.facts.add("units")
    if draw.random() < 0.15:
        draft.add("list unit", f"fully_shard([net.enter, net.head]{tail})")
    draft.add("root", f"model = fully_shard(net{tail})")


def _shard_model(draft: Draft) -> None:
    """Adds the call of `fully_shard_model`."""
    draw = draft.draw
    classes = sorted({*draft.classes})
    units = ", ".join(draw.sample(classes, draw.randrange(len(classes) + 1)))
    strategy = draw.choice(STRATEGIES)
    options = f", data_parallel_sharding_strategy='{strategy}'"
    if "bfloat16" in draft.facts:
        options += ", mixed_precision_policy=OurPolicy(compute_dtype=torch.bfloat16)"
    draft.add("model", f"model = fully_shard_model(net, None, [{units}]{options})")


def program_of(text: str) -> Program:
    """A program of one statement, with `text`: as a file has it."""
    return Program((Statement("file", text),))


def listing(statements: Iterable[Statement]) -> str:
    """The statements as they are printed, with their kinds."""
    return "\n".join(f"# {one.kind}\n{one.text}" for one in statements)
