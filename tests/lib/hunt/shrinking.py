"""Smaller programs that fail alike: statements are left out, many at a time and then one by one;
the rest are replaced by simpler ones of their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.lib.hunt import grammar
from tests.lib.hunt.programs import Program, Statement

MOST_TRIALS = 150
PLACES = {row.kind: row.place for row in grammar.ROWS}


@dataclass
class Shrinking:
    """A program that gets smaller. fails: True for programs that fail like it; most: how many
    programs may still be tried."""

    statements: tuple[Statement, ...]
    fails: Callable[[Program], bool]
    most: int

    def try_instead(self, statements: tuple[Statement, ...]) -> bool:
        """Takes other statements if they fail alike."""
        if not statements or self.most <= 0:
            return False
        self.most -= 1
        is_as_bad = self.fails(Program(statements))
        if is_as_bad:
            self.statements = statements
        return is_as_bad

    def leave_out(self, size: int) -> bool:
        """Leaves out parts of `size` statements that are not needed; True if there are any. The
        last ones are tried first: what comes after a failure is never needed."""
        before = len(self.statements)
        end = before
        while end > 0:
            start = max(end - size, 0)
            self.try_instead(self.statements[:start] + self.statements[end:])
            end = start
        return len(self.statements) < before

    def simplify(self) -> bool:
        """Replaces statements by simpler ones; True if any was replaced."""
        changed = False
        for index, one in enumerate(self.statements):
            other = simpler(one)
            if other != one:
                rest = self.statements[index + 1 :]
                changed |= self.try_instead((*self.statements[:index], other, *rest))
        return changed


def simpler(one: Statement) -> Statement:
    """The simplest statement at the place of `one`."""
    place = PLACES.get(one.kind)
    if place == grammar.FORWARD:
        return Statement("pass", "model(x(1)).square().mean().backward()")
    if place == grammar.OPTIMIZER:
        return Statement("sgd", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
    if place == grammar.BLOCK:
        return Statement("mlp", re.sub(r" = .*", " = Mlp()", one.text))
    return one


def shrunk(program: Program, fails: Callable[[Program], bool], most: int = MOST_TRIALS) -> Program:
    """A program for which `fails` is still True, and of which no statement can be left out, or
    that `most` trials have led to."""
    found = Shrinking(program.statements, fails, most)
    size = len(program.statements) // 2
    while size > 1:
        found.leave_out(size)
        size //= 2
    while found.leave_out(1) or found.simplify():
        pass
    return Program(found.statements)
