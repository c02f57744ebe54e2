"""Parameters that are frozen when a model is sharded, and trained later.

They have no gradients until then: neither memory for these, nor a reduction.
"""

from __future__ import annotations

from ..core.engine.params import ParamPair


def refuse_training(pair: ParamPair) -> None:
    """RuntimeError if a parameter that was frozen until now cannot be trained."""
    problem = _problem_of(pair)
    if problem:
        raise RuntimeError(
            f"requires_grad of {pair.managed.fqns[0]} was set to True, but {problem}. Shard the "
            "model with requires_grad=True, and freeze the parameter after that"
        )


def _problem_of(pair: ParamPair) -> str:
    key = pair.group.key
    if not key.may_be_trained:
        return f"it was frozen when the model was sharded, and its weights are {key.represented}"
    main = pair.group.config.policy.main_params_dtype
    if main not in (None, key.own_dtype):
        return (
            "it was frozen when the model was sharded, so its main weights are in "
            f"{key.own_dtype}, while those of trained parameters are in {main}"
        )
    return ""
