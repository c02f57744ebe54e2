"""Muon on shards: momentum stays in rows, where Adam's moments would be, and each matrix is whole
on one rank, its owner, for as long as it takes to orthogonalize it.

`newton_schulz.py` what is computed of a matrix;  `matrices.py` which matrices a parameter is made
of, and which of their elements each rank holds;  `owners.py` which rank computes which;  `plan.py`
what travels for that;  `exchange.py` the buffers and the all-to-all;  `shards.py` the step.
"""
