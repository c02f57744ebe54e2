"""`doctor --prove`: scales a run down by rule and compares it with an unsharded one.

Code that scales a run down, trains it, or judges the results belongs here. No training run imports
it.
"""
