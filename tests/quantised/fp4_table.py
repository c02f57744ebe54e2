"""Which checks of NVFP4 and MXFP8 there are, and their outcomes as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.quantised import fp4_checks
from tests.quantised.te_checks import host_is_the_device, one_to_eight_shards
from tests.quantised.te_weights import NASTY

RECIPES = ("nvfp4", "mxfp8")
KNOWN = [name for name in NASTY if name != "NaN"]
"""What is strewn into weights for TE's kernels of NVFP4: of NaN they say that there is none."""


def _checks() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for recipe in RECIPES:
        for nasty in NASTY:
            usual = nasty or "usual"
            found[f"{recipe}: our kernels, float64: {usual}"] = (
                fp4_checks.kernels_are_the_definition, (recipe, nasty, 10),
            )  # fmt: skip
            found[f"{recipe}: our kernels, torch on host and device: {usual}"] = (
                host_is_the_device, (recipe, nasty, 4),
            )  # fmt: skip
        found |= {
            f"{recipe}: our kernels, float64: layers over 8 shards": (
                fp4_checks.wide_weights_are_the_definition, (recipe,)
            ),
            f"{recipe}: our quantisers of TE's parameters, float64": (
                fp4_checks.quantisers_are_the_definition, (recipe,)
            ),
            f"{recipe}: padded scales and columns, float64": (
                fp4_checks.passes_find_what_they_read, (recipe,)
            ),
            f"{recipe}: passes wait for nothing": (fp4_checks.passes_do_not_wait, (recipe,)),
            f"{recipe}: rates": (fp4_checks.rates, (recipe,)),
        }  # fmt: skip
        for nasty in NASTY if recipe == "mxfp8" else KNOWN:
            found[f"{recipe}: TE's cast, float64: {nasty or 'usual'}"] = (
                fp4_checks.te_is_the_definition, (recipe, nasty, 3),
            )  # fmt: skip
    found["mxfp8: our kernels, TE's over one to eight shards"] = (one_to_eight_shards, ("mxfp8",))
    for nasty in KNOWN:
        found[f"nvfp4: TE's amaxes and scales, float64: {nasty or 'usual'}"] = (
            fp4_checks.te_scales_are_the_definition, (nasty, 4),
        )  # fmt: skip
    found["mxfp8: TE's cast of padded scales, float64"] = (fp4_checks.te_quantises_shards, ())
    # Last what runs kernels of TE's: one that stops the device stops all that follow.
    return dict(sorted(found.items(), key=lambda item: "TE's" in item[0] or "columns" in item[0]))


CHECKS = _checks()
"""By name: format, what is compared, with what, of what."""


def table(values: Mapping[str, str]) -> str:
    """Markdown: a line for each check; values: what each one said, in order."""
    lines = ["| format | what | against | of | outcome |", "|---|---|---|---|---|"]
    for name, value in values.items():
        recipe, _, rest = name.partition(": ")
        what, _, against = rest.partition(", ")
        against, _, kind = against.partition(": ")
        lines.append(f"| {recipe} | {what} | {against} | {kind} | {value} |")
    return "\n".join(lines)
