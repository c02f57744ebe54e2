"""What became of a program, and the signature under which alike failures are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.lib.hunt.known import REFUSALS
from tests.lib.hunt.pair import Error, Ran
from tests.lib.hunt.programs import Program

OK = "ok"
INVALID = "invalid"
REFUSED = "refused"
WRONG = "wrong"
ERROR = "error"
HANG = "hang"
CRASH = "crash"
FINDINGS = (WRONG, ERROR, HANG, CRASH)

WAITS = "CommunicationError"
"""The error of ranks that wait for each other."""

ALWAYS = {"net", "root", "model", "pass", "step", "sgd", "mlp", "zero"}
"""Kinds of statements that most programs have: they say nothing about a fault."""


@dataclass(frozen=True)
class Verdict:
    """outcome: one of the above; signature: what alike failures share; detail: for a reader."""

    outcome: str
    signature: str = ""
    detail: str = ""


def verdict_of(ran: Ran) -> Verdict:
    """The verdict on a program that ran on two sides, the first of which is the reference."""
    errors = [report.error if report else None for report in ran.reports]
    for report in ran.reports:
        if report is not None and report.error is not None and report.side == "unsharded":
            return Verdict(INVALID, _of_error(report.error), report.error.trace)
    if ran.exits:
        return Verdict(CRASH, f"crash: {_place(ran.stacks)}", _all_stacks(ran))
    raised = [error for error in errors if error is not None]
    if raised:
        return _of_errors(raised, ran)
    if None in ran.reports:
        return Verdict(HANG, f"hang: {_place(ran.stacks)}", _all_stacks(ran))
    found = {}
    for rank, report in enumerate(ran.reports):
        for one in report.differences if report else []:
            found[f"rank {rank}: {one.name}: {one.amount}"] = one
    if found:
        return Verdict(WRONG, "wrong", "\n".join([*found][:12]))
    return Verdict(OK)


def _of_errors(raised: list[Error], ran: Ran) -> Verdict:
    """The verdict where at least one rank has raised."""
    first = raised[0]
    signature = _of_error(first)
    everyone = len(raised) == len(ran.reports)
    if everyone and all(is_refusal(error) for error in raised):
        return Verdict(REFUSED, signature, first.text)
    if everyone:
        return Verdict(ERROR, f"error: {signature}", first.trace)
    detail = "\n".join([first.trace, _all_stacks(ran)])
    return Verdict(ERROR, f"error on one rank: {signature}", detail)


def is_refusal(error: Error) -> bool:
    """True if the package itself raised it, with a documented text."""
    is_own = bool(error.places) and error.places[-1] != "..."
    return is_own and any(re.search(text, error.text) for text, _ in REFUSALS)


def _of_error(error: Error) -> str:
    """Type and text of an error, without what differs from program to program."""
    if error.type == WAITS:
        return WAITS  # its text names units and ranks of the program
    text = error.text.split("\n")[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "Q", text)
    text = re.sub(r"\b(?:module\.)?(?:blocks|enter|head|again)\b[\w.]*", "P", text)
    text = re.sub(r"\d+", "N", text)
    return f"{error.type}: {text[:110]}"


def _place(stacks: dict[int, str]) -> str:
    """The innermost function of the package in each rank's stack."""
    places = []
    for _, stack in sorted(stacks.items()):
        found = re.findall(r'megatron_fsdp_adapter/(\S+?)", line \d+ in (\w+)', stack)
        places.append(":".join(found[0]) if found else "-")
    return ", ".join(sorted({*places}))


def _all_stacks(ran: Ran) -> str:
    parts = [f"rank {rank} exited with {code}" for rank, code in ran.exits.items()]
    parts += [f"rank {rank}:\n{stack[:2500]}" for rank, stack in ran.stacks.items()]
    return "\n".join(parts)


def signature_of(verdict: Verdict, small: Program) -> str:
    """The signature of a failure whose smallest program is known."""
    if not has_many_causes(verdict):
        return verdict.signature
    kinds = [kind for kind in small.kinds if kind not in ALWAYS]
    return f"{verdict.signature}: " + (", ".join(kinds) or "any program")


def has_many_causes(verdict: Verdict) -> bool:
    """True if the signature alone says too little: kinds of statements are then added to it."""
    return verdict.outcome == WRONG or WAITS in verdict.signature
