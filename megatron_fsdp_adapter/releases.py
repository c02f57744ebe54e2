"""Which releases of other packages the tests run with, and what is said to another megatron-core.

Only megatron-core is refused by its release: the wrapper stands in for one of its classes, and a
release that changed a meaning behind a name trains wrongly without an error (0.18 hands another
group to the gradient norm). A look at the names alone was tried and let such releases pass. Other
packages that are not tested are a remark of `doctor`.
"""

from __future__ import annotations

from collections.abc import Mapping

CORE = "megatron-core"

TESTED: Mapping[str, tuple[str, ...]] = {
    CORE: ("0.16.1",),
    "megatron-bridge": ("0.3.1",),
    "transformer-engine": ("2.11.0",),
    "torch": ("2.11", "2.13"),
}
"""Releases that the tests run with, by the beginning of the version; of megatron-core whole
versions, and no other is used."""


def is_tested(package: str, version: str) -> bool | None:
    """Whether the tests run with that release; None if nothing is said about the package. A local
    label ("+abc", a build of one's own) does not matter."""
    if package not in TESTED:
        return None
    if package == CORE:
        return version.partition("+")[0] in TESTED[package]
    return version.startswith(TESTED[package])


def core_problem(version: str) -> str | None:
    """What is wrong with a megatron-core of that version, with the remedy; None if nothing is."""
    if is_tested(CORE, version):
        return None
    supported = ", ".join(TESTED[CORE])
    return (
        f"megatron-core {version} is not supported by megatron_fsdp_adapter, supported is "
        f"{supported}: another release may train wrongly without an error; "
        f"{remedy()}"
    )


def remedy() -> str:
    """What to install."""
    return f"install {CORE}=={TESTED[CORE][-1]}, or use Megatron-LM's core_v{TESTED[CORE][-1]}"
