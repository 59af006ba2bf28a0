"""The known datasets: BUILDERS, the subsets on the Hugging Face hub, the known subsets, and their licences.

BUILDERS has name -> module and attribute of a Builder. See "Add a dataset" in CONTRIBUTING.md.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.errors import InputError
from dataset_builders.readers.parts import Builder
from dataset_builders.readers.source_files import nearest

BUILDERS = {
    "the_cauldron": "dataset_builders.sources.the_cauldron:BUILDER",
    "cord_v2": "dataset_builders.sources.cord_v2:BUILDER",
    "table": "dataset_builders.sources.table:BUILDER",
    "openai_messages": "dataset_builders.sources.conversations:OPENAI_MESSAGES",
    "llava": "dataset_builders.sources.conversations:LLAVA",
    "webdataset_tars": "dataset_builders.sources.webdataset_tars:BUILDER",
    "image_folder": "dataset_builders.sources.image_folder:BUILDER",
    "detection": "dataset_builders.sources.detection:BUILDER",
}


def get_builder(name: str) -> Builder:
    if name not in BUILDERS:
        raise InputError(f"unknown dataset builder {name!r}; known: {', '.join(sorted(BUILDERS))}")
    module, _, attribute = BUILDERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


# Known subsets of datasets on the hub, so that a misspelt name is refused before the download. The fifty subsets of
# the_cauldron are from its dataset card; each is one folder of parquet files.
_THE_CAULDRON = """
ai2d aokvqa chart2text chartqa clevr clevr_math cocoqa datikz diagram_image_to_text docvqa
dvqa figureqa finqa geomverse hateful_memes hitab iam iconqa infographic_vqa intergps
localized_narratives mapqa mimic_cgd multihiertt nlvr2 ocrvqa okvqa plotqa raven rendered_text
robut_sqa robut_wikisql robut_wtq scienceqa screen2words spot_the_diff st_vqa tabmwp tallyqa tat_qa
textcaps textvqa tqa vistext visual7w visualmrc vqarad vqav2 vsr websight
"""
HUB_SUBSETS: dict[str, tuple[str, ...]] = {"HuggingFaceM4/the_cauldron": tuple(_THE_CAULDRON.split())}

_CORD_V2 = ("cord_v2_train", "cord_v2_validation", "cord_v2_test")
# Builder -> the subsets that are known of it: those of the dataset that it is named after, and CORD in the_cauldron's
# schema. Rows that another builder read are not theirs, whatever their subset is called.
KNOWN_SUBSETS: dict[str, tuple[str, ...]] = {
    "the_cauldron": (*HUB_SUBSETS["HuggingFaceM4/the_cauldron"], "cord_v2"),
    "cord_v2": _CORD_V2,
}


def known_name(origin: SubsetOrigin) -> str | None:
    """Return the name under which LICENCES and the table of metrics have a subset; None if it is not a known one."""
    return origin.name if origin.name in KNOWN_SUBSETS.get(origin.builder, ()) else None


def check_hub_subsets(name: str, subsets: Sequence[str]) -> None:
    """Raise InputError if the hub dataset is known and lacks one of the subsets, or if no subset is named."""
    known = HUB_SUBSETS.get(name)
    if known is None:
        return
    if not subsets:
        raise InputError(f"hub dataset {name} needs subsets to download, for example subsets=[{known[0]}]")
    for subset in subsets:
        if subset not in known:
            way_out = nearest(subset, known) or f"; it has {', '.join(known)}"
            raise InputError(f"hub dataset {name} has no subset {subset!r}{way_out}")


UNKNOWN = "unknown"
CAULDRON_PROMPTS = "cc-by-4.0"


@dataclass(frozen=True, slots=True)
class Licence:
    """The known licence of a subset."""

    name: str  # the hub's identifier (huggingface.co/docs/hub/repositories-licenses), or `unknown`
    source: str  # the document that states it


_CORD = Licence("cc-by-4.0", "dataset card of naver-clova-ix/cord-v2")
# Licences of subsets, as their publishers state them. A subset that is not in the table is `unknown`.
#
# The dataset card of HuggingFaceM4/the_cauldron names no licence of a subset. It states that each subset is governed by
# its own licence, and licenses the prompts, as far as its authors have rights in them, under CC-BY-4.0. A licence here
# is therefore the original dataset's licence, if its statement could be read; `source` names the statement. This is not
# legal advice.
LICENCES: dict[str, Licence] = {
    "clevr": Licence("cc-by-4.0", "COPYRIGHT.txt of CLEVR v1.0"),
    "iconqa": Licence("cc-by-nc-sa-4.0", "github.com/lupantech/IconQA, README.md"),
    "scienceqa": Licence("cc-by-nc-sa-4.0", "github.com/lupantech/ScienceQA, README.md"),
    "vsr": Licence("apache-2.0", "github.com/cambridgeltl/visual-spatial-reasoning, README.md"),
    "websight": Licence("cc-by-4.0", "dataset card of HuggingFaceM4/WebSight"),
    **dict.fromkeys(("cord_v2", *_CORD_V2), _CORD),
}


def licence_of(origin: SubsetOrigin) -> Licence:
    """Return the licence of a subset; `unknown` if it is not a known one, or the table has none."""
    return LICENCES.get(known_name(origin), Licence(UNKNOWN, "no statement found; see the dataset's own page"))
