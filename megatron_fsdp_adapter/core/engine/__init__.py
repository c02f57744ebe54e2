"""The buffer engine: units, groups, gather and reduce pipelines, prefetch order, hooks.

Knows modules, parameters and domains, and neither kinds of parallelism nor optimizers. May enter:
what happens to a unit's weights or gradients during a step.
"""
