"""Rows of a flat buffer as DTensors that are cut between rows: chunks, pieces, operators.

May enter: what a program or a checkpoint does with a sharded parameter.
"""
