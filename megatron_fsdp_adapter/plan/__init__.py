"""Decisions about a module before anything is made: its units, which of them stay unsharded, bytes.

Knows modules, and neither process groups nor devices. May enter: a rule by which parameters are
put together or kept, and the checks of a module that need no engine.
"""
