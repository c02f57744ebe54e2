"""What became of a life cycle, and its signature."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.lib.hunt.cycles import Done, Stage
from tests.lib.hunt.programs import Program
from tests.lib.hunt.verdict import ERROR, HANG, INVALID, OK, REFUSED, WRONG, Verdict
from tests.lib.integration import lm_log
from tests.lib.integration.lm_runs import Run

BOTH_STOP = "both stop"
"""Stock DDP and the wrapper end with an error in the same run."""
STOCK_STOPS = "stock stops"
"""Stock DDP ends with an error, and the wrapper goes on."""
TOLERANCES = {"cpu": 2e-5, "cuda": 1e-4}
"""By the device. On GPUs sums are in another order from run to run (gradients of embeddings, and
experts' tokens), and with the addresses of weights, by which matrix kernels are chosen."""
LOOSE_TOLERANCE = 3e-2
"""With bf16 or FP8, in which sums are rounded in another order."""

_RAISED = re.compile(
    r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit)): ?(.*)$", re.M
)
_REFUSED = re.compile(r"cannot be used with this configuration:\n  - (.*)")
"""What the package prints before it ends a run, without an exception."""
_PLACE = re.compile(r'File "(\S+)", line \d+, in (\w+)')


def verdict_of_cycle(
    stages: Sequence[Stage], stock: Done, ours: Done, device: str = "cpu"
) -> Verdict:
    """The verdict on a cycle that ran on both sides."""
    for index in range(len(stages)):
        reference = stock.runs[index] if index < len(stock.runs) else None
        if index >= len(ours.runs):
            text = ours.converting.split("\n")[0]
            if reference is not None and reference.status:
                return Verdict(BOTH_STOP, signature_of_text(text), text)
            return Verdict(
                REFUSED if ". " in text else ERROR, f"convert: {signature_of_text(text)}", text
            )
        assert reference is not None
        run = ours.runs[index]
        flags = " ".join((*stages[0].flags, *stages[index].flags))
        found = _of_run(index, reference, run, flags, TOLERANCES[device])
        if found is not None:
            return found
    return Verdict(OK)


def _of_run(index: int, stock: Run, ours: Run, flags: str, tolerance: float) -> Verdict | None:
    """The verdict on one run with these flags; None if the cycle goes on. tolerance: in fp32."""
    if stock.status:
        if index == 0:
            return Verdict(INVALID, error_of(stock.log), stock.end)
        if ours.status:
            return Verdict(BOTH_STOP, f"{error_of(stock.log)} | {error_of(ours.log)}", ours.end)
        return Verdict(STOCK_STOPS, error_of(stock.log), stock.end)
    if ours.status == -1:
        return Verdict(HANG, "hang", ours.end)
    if ours.status:
        outcome = REFUSED if is_own_error(ours.log) else ERROR
        return Verdict(
            outcome, f"{'error: ' if outcome == ERROR else ''}{error_of(ours.log)}", ours.end
        )
    is_bf16 = "--bf16" in flags
    if is_bf16:  # that of FP8 as well
        tolerance = LOOSE_TOLERANCE
    # Of iterations that both have printed: a run that is killed may get further on one side.
    first, second = stock.values, ours.values
    common = first.keys() & second.keys()
    # Megatron 0.19.0 adds up the shards of every replica: sqrt(2) of ours with two.
    counts_replicas = is_bf16 and "--num-distributed-optimizer-instances" in flags
    # It reads weights of before the last step, where their gather waits for the next forward.
    reads_old = not is_bf16 and "--overlap-param-gather" in flags
    if counts_replicas or reads_old:
        common = {key for key in common if key[1] != "params norm"}
    lines = lm_log.differences(
        {key: first[key] for key in common}, {key: second[key] for key in common}, tolerance
    )
    if second and not first:
        # Megatron-LM ends some runs that cannot go on with status 0.
        return Verdict(STOCK_STOPS, error_of(stock.log), stock.end)
    if not common:
        lines = ["no value was printed on both sides"] if first or second else []
    if lines:
        return Verdict(WRONG, "wrong", "\n".join([f"run {index + 1}:", *lines[:8]]))
    return None


def digits(stock: Done, ours: Done) -> tuple[int, int]:
    """How many numbers both sides have printed, and how many of these agree in every digit."""
    compared = equal = 0
    for first, second in zip(stock.runs, ours.runs, strict=False):
        common = first.values.keys() & second.values.keys()
        compared += len(common)
        equal += sum(first.values[key] == second.values[key] for key in common)
    return compared, equal


def signature_of_text(text: str) -> str:
    """An error without numbers, paths and names."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|/\S+", "Q", text)
    return re.sub(r"\d+", "N", text)[:140]


def error_of(log: str) -> str:
    """Type and text of the error that ended a run, without what differs from run to run."""
    raised = _RAISED.findall(log)
    refused = _REFUSED.findall(log)
    if raised:
        kind, text = raised[-1]
    else:
        kind, text = "no exception", refused[-1] if refused else ""
    return signature_of_text(f"{kind}: {text}")


def is_own_error(log: str) -> bool:
    """True if the package raised it, or ended the run, with a text that names a remedy."""
    raised = list(_RAISED.finditer(log))
    if not raised:
        return any(re.search(r"\. [A-Z`]", text) for text in _REFUSED.findall(log))
    places = _PLACE.findall(log[: raised[-1].start()])
    is_own = bool(places) and "/megatron_fsdp_adapter/" in places[-1][0]
    rest = log[raised[-1].start() :].split("\n[rank")[0]
    return is_own and bool(re.search(r"\. [A-Z`]", rest))


def signature_of_cycle(verdict: Verdict, small: Program) -> str:
    """The signature of a failure whose smallest cycle is known."""
    if verdict.outcome != WRONG:
        return verdict.signature
    flags = {word for one in small.statements for word in one.text.split() if word.startswith("--")}
    wrappers = [one.text.split()[0] for one in small.statements if one.kind == "stage"]
    return f"wrong: {' > '.join(wrappers)}: {' '.join(sorted(flags))}"
