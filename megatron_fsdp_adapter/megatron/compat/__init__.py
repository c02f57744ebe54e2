"""Differences between releases of Megatron and other packages, and what is replaced in them.

What exists decides; a version decides only where nothing else distinguishes releases. May enter: a
difference between releases, a name that is replaced, and nothing that would be there without these.
"""
