"""The buffer engine: units, groups, gather and reduce pipelines, prefetch order, hooks."""
