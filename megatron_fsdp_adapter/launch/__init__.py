"""Putting the wrapper into programs as they are: names rebound, scripts and recipes unmodified.

May enter: what is done before Megatron constructs anything. Importing it imports no Megatron.
"""
