"""BUILDERS: dataset name -> where its Builder is. A new dataset is one module and one line here."""

import importlib

from dataset_builders.contracts.errors import InputError
from dataset_builders.parts import Builder

BUILDERS = {
    "the_cauldron": "dataset_builders.the_cauldron:BUILDER",
}


def get_builder(name: str) -> Builder:
    """The builder of that name.

    Raises:
        InputError: there is none.
    """
    if name not in BUILDERS:
        raise InputError(f"unknown dataset builder {name!r}; known: {', '.join(sorted(BUILDERS))}")
    module, _, attribute = BUILDERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
