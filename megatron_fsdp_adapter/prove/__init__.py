"""`doctor --prove`: a run made small by rule, and compared with one that shards nothing.

May enter: what makes a run small, trains it, or judges what came out; no training run imports it.
"""
