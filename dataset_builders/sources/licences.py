"""Licences of subsets, as their publishers state them. A subset that is not in the table is `unknown`.

The dataset card of HuggingFaceM4/the_cauldron names no licence of a subset. It states that each subset is governed by
its own licence, and licenses the prompts, as far as its authors have rights in them, under CC-BY-4.0. A licence here is
therefore the original dataset's licence, if its statement could be read; `source` names the statement. This is not
legal advice.
"""

from dataclasses import dataclass

UNKNOWN = "unknown"
CAULDRON_PROMPTS = "cc-by-4.0"


@dataclass(frozen=True, slots=True)
class Licence:
    """The known licence of a subset."""

    name: str  # the hub's identifier (huggingface.co/docs/hub/repositories-licenses), or `unknown`
    source: str  # the document that states it


_CORD = Licence("cc-by-4.0", "dataset card of naver-clova-ix/cord-v2")
LICENCES: dict[str, Licence] = {
    "clevr": Licence("cc-by-4.0", "COPYRIGHT.txt of CLEVR v1.0"),
    "iconqa": Licence("cc-by-nc-sa-4.0", "github.com/lupantech/IconQA, README.md"),
    "scienceqa": Licence("cc-by-nc-sa-4.0", "github.com/lupantech/ScienceQA, README.md"),
    "vsr": Licence("apache-2.0", "github.com/cambridgeltl/visual-spatial-reasoning, README.md"),
    "websight": Licence("cc-by-4.0", "dataset card of HuggingFaceM4/WebSight"),
    **dict.fromkeys(("cord_v2", "cord_v2_train", "cord_v2_validation", "cord_v2_test"), _CORD),
}


def licence_of(subset: str) -> Licence:
    """Return the licence of a subset; `unknown` if the table has none."""
    return LICENCES.get(subset, Licence(UNKNOWN, "no statement found; see the dataset's own page"))
