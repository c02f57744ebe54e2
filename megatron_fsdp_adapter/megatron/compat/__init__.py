"""Differences between releases of Megatron and other packages: a datum or a small function each.

Decided by what is there, by a version only where nothing else distinguishes releases. May enter: a
difference between releases, and nothing that would be the same without it.
"""
