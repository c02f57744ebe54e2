"""Checks whether the imported megatron-core can be used."""

from __future__ import annotations

from collections.abc import Iterable

import megatron.core

from . import patches, releases
from .table import OPTIMIZER


def require_supported_core(replaced: Iterable[patches.Patch] = OPTIMIZER) -> None:
    """Checks the imported megatron-core; warns once per process if its release is not tested.

    replaced: the rows whose names it must have.

    Raises RuntimeError with version and remedy if it is too old, or if it lacks or has changed what
    the package replaces in it."""
    version = str(getattr(megatron.core, "__version__", "of no known version"))
    found = releases.core_problem(version)
    if found is None:
        found = releases.seam_problem(version, patches.missing(replaced))
    if found is not None:
        raise RuntimeError(found)
    releases.warn_if_untested(version)
