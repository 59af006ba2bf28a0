"""BUILDERS: dataset name -> where its Builder is. A new dataset is one module and one line here."""

import importlib

from dataset_builders.contracts.errors import InputError
from dataset_builders.parts import Builder

BUILDERS = {
    "the_cauldron": "dataset_builders.the_cauldron:BUILDER",
    "cord_v2": "dataset_builders.cord_v2:BUILDER",
    "table": "dataset_builders.table:BUILDER",
    "openai_messages": "dataset_builders.openai_messages:BUILDER",
    "llava": "dataset_builders.llava:BUILDER",
    "webdataset_tars": "dataset_builders.webdataset_tars:BUILDER",
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
