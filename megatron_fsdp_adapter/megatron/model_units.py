"""Which modules of a Megatron model are gathered and reduced as units."""

from __future__ import annotations

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from ..core.engine.partition import unit_modules

DEFAULT_UNIT_MODULES: tuple[type[nn.Module], ...] = (TransformerLayer, MambaLayer)


def _has_tied_weight(module: nn.Module) -> bool:
    """Whether embedding and output layer use one parameter. With pipeline parallelism each stage
    has a copy of its own, used once, but for a last one that predicts further tokens (MTP): its
    embedding is called too."""
    return any(
        getattr(child, "share_embeddings_and_output_weights", False)
        and (getattr(child, "pre_process", True) or getattr(child, "mtp_process", False))
        and getattr(child, "post_process", True)
        for child in module.modules()
    )


def _is_read_from_outside(module: nn.Module) -> bool:
    """Whether prediction heads (MTP) read the output layer's weight past its forward, and call the
    embedding without gradients."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "mtp_detach_heads", False))


def _default_units(module: nn.Module) -> dict[str, nn.Module]:
    """Transformer and Mamba layers, and embedding and output layer unless their weights are tied
    or read by other modules: such a weight belongs to the root unit, which stays gathered."""
    tied = _has_tied_weight(module) or _is_read_from_outside(module)

    def is_unit(child: nn.Module) -> bool:
        return isinstance(child, DEFAULT_UNIT_MODULES) or (
            not tied and isinstance(child, LanguageModelEmbedding)
        )

    units = unit_modules(module, is_unit)
    if not tied:
        outputs = unit_modules(module, lambda child: False)
        for name, child in module.named_modules():
            if name.split(".")[-1] == "output_layer":
                outputs[name] = child
        units.update(outputs)
    return units


def chosen_units(
    module: nn.Module, unit_classes: list[type[nn.Module]] | None
) -> dict[str, nn.Module]:
    """The units, by default or of the classes the user names."""
    if unit_classes is None:
        return _default_units(module)
    return unit_modules(module, lambda child: isinstance(child, tuple(unit_classes)))
