"""Installs the wrapper in unmodified scripts and recipes, by rebinding Megatron's names.

Code that runs before Megatron constructs anything belongs here. Importing it imports no Megatron.
"""
