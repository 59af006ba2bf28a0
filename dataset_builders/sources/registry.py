"""BUILDERS: dataset name -> module and attribute of its Builder. A new dataset needs one module and one line here."""

import importlib

from dataset_builders.errors import InputError
from dataset_builders.readers.parts import Builder

BUILDERS = {
    "the_cauldron": "dataset_builders.sources.the_cauldron:BUILDER",
    "cord_v2": "dataset_builders.sources.cord_v2:BUILDER",
    "table": "dataset_builders.sources.table:BUILDER",
    "openai_messages": "dataset_builders.sources.openai_messages:BUILDER",
    "llava": "dataset_builders.sources.llava:BUILDER",
    "webdataset_tars": "dataset_builders.sources.webdataset_tars:BUILDER",
    "image_folder": "dataset_builders.sources.image_folder:BUILDER",
}


def get_builder(name: str) -> Builder:
    if name not in BUILDERS:
        raise InputError(f"unknown dataset builder {name!r}; known: {', '.join(sorted(BUILDERS))}")
    module, _, attribute = BUILDERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
