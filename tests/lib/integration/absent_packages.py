"""Empty modules for packages that Megatron-Bridge imports, and that what is tested does not use.

Import it before Megatron-Bridge, or give it to pytest (`-p tests.lib.integration.absent_packages`).
A package that is there is used. Every name of such a module is a class that does nothing.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

ABSENT = ("pulp", "torchprofile", "megatron.energon")


class _Meta(abc.ABCMeta):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Meta):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):  # as a decorator with arguments
        return args[0] if args else self

    def __init_subclass__(cls, **kwargs):
        pass

    def __class_getitem__(cls, item):
        return cls


class Empty(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (Nothing,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


sys.meta_path.append(_Finder())  # behind all others: a package that is there is used
