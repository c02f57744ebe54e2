"""Reports about a running engine: faults by unit and buffer, bad gradients, memory.

Changes nothing in training. May enter: reports that need the engine and nothing above it.
"""
