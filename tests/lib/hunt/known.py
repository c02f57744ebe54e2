"""What hunts may find: documented refusals, and findings that wait for a change of the engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

# fmt: off
REFUSALS = (
    (r"a backward ran after this step's gradients had been reduced",
     "backwards of a step but the last run under no_sync (docs/fully_shard_model.md)"),
    (r"whose weights are not gathered \(phase",
     "resharded parameters are read between a forward and its backward (docs/fsdp2.md)"),
    (r"gathered weights were written in a forward, or between a forward and its backward",
     "parameters are written after zero_grad() (docs/fsdp2.md)"),
    (r"a backward raised after it had added gradients",
     "a backward raises, and gradients of an earlier one are still there (docs/fsdp2.md)"),
    (r"was set to True, but it was frozen when the model was sharded, so its main weights are in",
     "main weights of frozen parameters keep their dtype (docs/fully_shard_model.md)"),
)
"""Texts of errors that the package raises on purpose, as patterns, and where they are explained."""
# fmt: on


@dataclass(frozen=True)
class Known:
    """A finding that is listed and not fixed. signature: a pattern for the whole signature;
    reason: its cause."""

    signature: str
    reason: str


# fmt: off
KNOWN = (
    Known(r"wrong: .*\bdrop a gradient\b.*"
          r"\b(evaluation with gradients|no backward|raises (in forward|at the end))\b.*",
          "after that forward a module's own weight is the unsharded one; torch's as well"),
    Known(r"wrong: .*\b(evaluation with gradients|no backward|saliency)\b.*\bunshard a block\b.*",
          "modules list the weights that unshard() shows, without gradients; torch's as well"),
    Known(r"error: KeyError: N",
          "unshard() shows weights that no optimizer has; get_optimizer_state_dict, torch's too"),
    Known(r"wrong: .*\badopted\b.*\bzero in place\b.*",
          "zero_grad of an adopted optimizer sets gradients to None (docs/fsdp2.md)"),
    Known(r"wrong: .*\baccumulate hook\b.*\b(microbatches|no sync)\b.*",
          "hooks run once a step, on reduced gradients; the reference runs them in each backward"),
    Known(r"error.*: RuntimeError: (linalg\.vector|_foreach)_norm cannot compute the inf.*",
          "torch has no infinity norm of a rank without elements; torch's FSDP2 fails, too"),
    Known(r"error: RuntimeError: aten\..* in-place operations that require placement changes.*",
          "torch's DTensor refuses some products of sums, for parameters of one row"),
    Known(r"error: RuntimeError: aten\.mul\.Tensor got mixed torch\.Tensor and DTensor.*",
          "a loss reads a weight that is sharded again behind its unit's forward; torch's as well"),
    Known(r"error: RuntimeError: aten\.addmm\.default got mixed torch\.Tensor and DTensor.*",
          "a block is called alone that is tied to the root; torch's function gives wrong outputs"),
    Known(r"wrong: .*\bcounting\b.*\bsave and load",
          "each rank has buffers of its own, and DCP stores those of one; torch's FSDP2 as well"),
    Known(r"wrong: .*--mtp-num-layers .*--pipeline-model-parallel-size .*",
          "Megatron's resume of MTP over stages loses state, other on 1 rank and on 2; ours is "
          "the run that never stopped (tests/integration/test_megatron_lm.py, mtp pp2)"),
    Known(r"wrong: .*--hidden-dropout.*--tensor-model-parallel-size.*",
          "CPU mode has one generator for host and device. The data loader of the first "
          "tensor-parallel rank draws from it, so dropout, and the parameters that all of these "
          "ranks have, differ between them; checkpoints have the copy of one"),
)
# fmt: on


KINDS_OF_KNOWN = ("accumulate hook",)
"""Kinds of statements that most of the known findings need."""


def reason_for(signature: str) -> str | None:
    """The reason of a known finding; None if the signature is a new one."""
    for one in KNOWN:
        if re.fullmatch(one.signature, signature):
            return one.reason
    return None
