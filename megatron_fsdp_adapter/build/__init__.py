"""From a plan to an engine: weights made on the meta device, the same model on all ranks, reports.

Makes engines, and no optimizer. May enter: what is done once around an engine's construction, and
what names a fault by its unit.
"""
