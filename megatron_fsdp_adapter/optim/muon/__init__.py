"""Muon on shards: momentum stays in rows, where Adam's moments would be, and each matrix is whole
on one rank, its owner, for as long as it takes to orthogonalize it.

`newton_schulz.py` what is computed of a matrix;  `matrices.py` which matrices a parameter is made
of, and which of their elements each rank holds;  `plan.py` which rank computes which, and what
travels for that;  `exchange.py` the buffers and the all-to-all;  `shards.py` the step.
"""
