"""Weights for inference between steps: exports, and memory that is released for them.

May enter: what an engine for inference on the same devices needs of a training run.
"""
