"""The releases of other packages that the tests run with, and the messages about others.

Only megatron-core can be refused, because the wrapper stands in for one of its classes. A release
older than the oldest tested one is refused. Any other untested release is used, with one warning:
its names tell if it fits (`core_api.py`, `patches.py`), not its number. For other packages `doctor`
remarks on untested releases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...core.runtime.rank_warnings import warn

CORE = "megatron-core"

TESTED: Mapping[str, tuple[str, ...]] = {
    CORE: ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2"),
    "megatron-bridge": ("0.3.1", "0.6.2"),
    "transformer-engine": ("2.11.0", "2.20.2"),
    "torch": ("2.11", "2.13", "2.15"),
}
"""Package -> releases that the tests run with, in ascending order: whole versions of megatron-core,
beginnings of the others' versions."""

Release = tuple[tuple[int, ...], bool]
"""Numbers of a version, and whether it is final. A candidate compares as less than its release."""


def parse(version: str) -> Release | None:
    """The comparable part of a version; None if the text is no version. A local label ("+abc", of
    a user's own build) is ignored."""
    found = re.match(r"(\d+(?:\.\d+)*)(.*)", version.partition("+")[0])
    if found is None:
        return None
    numbers = tuple(map(int, found[1].split(".")))
    is_early = re.match(r"[.\-_]?(a|b|c|rc|alpha|beta|pre|dev)", found[2]) is not None
    return numbers, not is_early


def is_tested(package: str, version: str) -> bool | None:
    """True if the tests run with that release; None if nothing is known about the package."""
    if package not in TESTED:
        return None
    plain = version.partition("+")[0]
    is_core = package == CORE
    return any(
        plain == tested or (not is_core and plain.startswith(f"{tested}."))
        for tested in TESTED[package]
    )


def remark(package: str, version: str) -> str:
    """The remark of `doctor` about an installed release; empty if nothing is known."""
    tested = is_tested(package, version)
    if tested is None:
        return ""
    if tested:
        return "tested"
    known = ", ".join(TESTED[package])
    if _is_older(package, version):
        return f"older than what is tested ({known}) and not supported"
    return f"not tested; tested are {known}"


def _is_older(package: str, version: str) -> bool:
    """True for a version that is older than all tested ones; an unknown version counts as older."""
    found = parse(version)
    oldest = parse(TESTED[package][0])
    return found is None or oldest is None or found < oldest


def core_problem(version: str) -> str | None:
    """The problem with a megatron-core of that version, with the remedy; None if there is none."""
    if is_tested(CORE, version) or not _is_older(CORE, version):
        return None
    return (
        f"megatron-core {version} is not supported by megatron_fsdp_adapter: the oldest supported "
        f"release is {TESTED[CORE][0]}, and others may train incorrectly without an error. "
        f"{remedy()}"
    )


def seam_problem(version: str, unexpected: Sequence[str]) -> str | None:
    """The problem with a megatron-core that lacks or has changed what is replaced in it."""
    if not unexpected:
        return None
    return (
        f"megatron-core {version} differs from the expected one in names that "
        f"megatron_fsdp_adapter replaces: {', '.join(unexpected)}. {remedy()}"
    )


def warn_if_untested(version: str) -> None:
    """Warns, once per process, if this megatron-core was not tested."""
    if not is_tested(CORE, version):
        warn(
            f"megatron-core {version} is not tested with megatron_fsdp_adapter (tested are "
            f"{', '.join(TESTED[CORE])}): its names and parameters are as expected, but losses, "
            "gradient norms and checkpoints were not compared. Run 'doctor --prove'",
            RuntimeWarning,
        )


def remedy() -> str:
    """The releases to install, as the end of a message."""
    return (
        f"Install one of {', '.join(f'{CORE}=={release}' for release in TESTED[CORE])}, or use "
        "Megatron-LM's tag of one of them"
    )
