"""Known subsets of datasets on the Hugging Face hub, so that a misspelt name is refused before the download.

The fifty subsets of the_cauldron are from its dataset card; each is one folder of parquet files.
"""

from collections.abc import Sequence

from dataset_builders.errors import InputError
from dataset_builders.readers.file_patterns import nearest

_THE_CAULDRON = """
ai2d aokvqa chart2text chartqa clevr clevr_math cocoqa datikz diagram_image_to_text docvqa
dvqa figureqa finqa geomverse hateful_memes hitab iam iconqa infographic_vqa intergps
localized_narratives mapqa mimic_cgd multihiertt nlvr2 ocrvqa okvqa plotqa raven rendered_text
robut_sqa robut_wikisql robut_wtq scienceqa screen2words spot_the_diff st_vqa tabmwp tallyqa tat_qa
textcaps textvqa tqa vistext visual7w visualmrc vqarad vqav2 vsr websight
"""
HUB_SUBSETS: dict[str, tuple[str, ...]] = {"HuggingFaceM4/the_cauldron": tuple(_THE_CAULDRON.split())}


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
