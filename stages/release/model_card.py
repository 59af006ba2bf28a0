"""README.md of an exported model: its model card, for people and, in its YAML head, for the Hugging Face hub.

The head follows the hub's metadata (huggingface.co/docs/hub/model-cards): base_model, datasets, license (of all subsets
trained on), pipeline_tag, library_name, tags, and the scores as a model-index. The card contains no time and no path:
its bytes depend only on the model and its scores.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.sources.registry import CAULDRON_PROMPTS, licence_of
from dataset_builders.storage.files import write_text
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.config import BoxFormat
from stages.shared.inputs.served import lora_options
from stages.shared.pages.page import render
from stages.shared.pages.shown_numbers import show_value

MODEL_CARD = "README.md"
_CAULDRON = "HuggingFaceM4/the_cauldron"
_TASK = "image-text-to-text"
_FORMS = {
    "bbox_2d": '`[{"bbox_2d": [x1, y1, x2, y2], "label": ".."}]`',
    "fenced": '`[{"bbox_2d": [x1, y1, x2, y2], "label": ".."}]` in a block of code',
    "lines": "`label: [x1, y1, x2, y2]`, one a line",
}
_IN_PIXELS = "In pixels of a picture of W x H, as it is shown,"
_CONVENTIONS = {
    "relative_1000": "from 0 to 1000 along each side (`relative_1000`). "
    f"{_IN_PIXELS} x is x * W / 1000 and y is y * H / 1000.",
    "resized_pixels": "in pixels of the picture as the processor resizes it (`resized_pixels`): to h x w, the last two "
    f"numbers of its `image_grid_thw` times `patch_size`. {_IN_PIXELS} x is x * W / w and y is y * H / h.",
}
_LANGUAGE_ROLES = {"attention", "mlp", "experts", "delta"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric over one subset of the held-out samples."""

    metric: str
    value: float
    answers: int  # their number
    low: float | None = None  # the ends of the interval; None if it has none
    high: float | None = None
    base: float | None = None  # of the base model on the same questions; None if it was not scored


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """The facts of a card."""

    name: str  # of the model
    base_model: str | None  # hub name or directory that training started from; None: random weights
    datasets: Sequence[str]  # sources of the samples, hub names or descriptions
    subsets: Mapping[str, Mapping[str, int]]  # subset -> {"train": samples, "heldout": samples}
    origins: Mapping[str, SubsetOrigin]  # subset -> the rows that it was made from, for its licence
    recipe: Mapping[str, object]  # the whole configuration that determines the model, as plain values
    training: Mapping[str, int | float | str]  # name -> value: steps, tokens, losses, parameters
    scores: Mapping[str, Sequence[Score]]  # subset, or `overall` -> its scores, the headline first
    score_note: str = ""  # on the scored answers and the intervals
    contamination: Mapping[str, Mapping[str, int]] | None = None  # that stage's `contaminated`; None if it did not run
    reproduce: str = ""  # the command that reproduces the model
    copied: Mapping[str, int] = field(default_factory=dict)  # prefix -> number of tensors copied from the base model
    mtp: int = 0  # number of tensors of multi-token prediction that were trained
    adapter: Mapping[str, object] | None = None  # facts of the trained adapter; None: the model itself was trained
    verify: Mapping[str, Any] | None = None  # the stats of that stage's manifest; None if it did not run
    boxes: BoxFormat | None = None  # the form of boxes that was trained; None: no sample had boxes
    # settings of videos as `VideoConfig`, and "prompt", the digest of how one is written; None: no sample had a video
    videos: Mapping[str, Any] | None = None
    pixels: Mapping[str, int] | None = None  # limits of a picture's area, as `size` has them; None for a text model

    @property
    def adapter_flags(self) -> str:
        """The arguments with which `vllm serve` gives the base model what the adapter was trained with."""
        rank, targets = self.adapter["rank"], self.adapter["targets"]
        options = lora_options(rank, [".visual." if {*targets} - _LANGUAGE_ROLES else ""])
        flags = ["--enable-lora", f"--max-lora-rank {options['max_lora_rank']}"]
        flags += ["--enable-tower-connector-lora"] if options["enable_tower_connector_lora"] else []
        flags += [f"--lora-modules {self.name}=adapter", "--generation-config adapter"]
        if self.pixels:
            size = json.dumps({"size": dict(self.pixels)})
            flags += [f"--mm-processor-kwargs '{size}'", "--mm-processor-cache-gb 0"]
        return " \\\n    ".join(flags)


def training_facts(trained: Artifact, exported: Artifact) -> dict[str, int | float | str]:
    """Return `CardFacts.training` of a train and an export artifact: manifest figures, with names for people."""
    names = {"steps": "steps", "epochs": "epochs", "tokens": "tokens", "loss_tokens": "learnt tokens"}
    names |= {"loss": "last training loss", "heldout_loss": "held-out loss"}
    stats = trained.manifest.stats
    values = {title: stats[name] for name, title in names.items() if stats.get(name) is not None}
    counts, active = exported.manifest.stats["parameters"], exported.manifest.stats["active_parameters"]
    parts = {f"parameters, {part}": count for part, count in counts.items()}
    if active < sum(counts.values()):
        parts["parameters, for a token"] = active
    return {**values, **parts, "weights": exported.manifest.stats["dtype"]}


def write_model_card(hf_dir: Path, facts: CardFacts) -> Path:
    """Write README.md to an exported directory; return its path."""
    path = hf_dir / MODEL_CARD
    write_text(path, model_card(facts))
    return path


def model_card(facts: CardFacts) -> str:
    """Return the whole card, Markdown with the hub's YAML head."""
    scores: list[list[object]] = []
    for subset, score in ((subset, score) for subset, of_subset in facts.scores.items() for score in of_subset):
        ends = [] if score.low is None or score.high is None else [score.low, score.high]
        base = "" if score.base is None else show_value(score.base)
        interval = " to ".join(map(show_value, ends))
        scores.append([subset, score.metric, score.value, interval, base, score.answers])
    kinds = ("samples", "bytes", "pixels", "near")
    return render(
        "model_card.md.j2",
        facts=facts,
        head=_head(facts).to_yaml(),
        scores=scores,
        contamination=[[name, *(count[k] for k in kinds)] for name, count in (facts.contamination or {}).items()],
        cauldron=_CAULDRON,
        prompts_licence=CAULDRON_PROMPTS,
        subsets=[
            [name, sizes.get("train", 0), sizes.get("heldout", 0), licence.name, licence.source]
            for name, sizes in facts.subsets.items()
            for licence in (licence_of(facts.origins[name]),)
        ],
        adapter=[[k, ", ".join(v) if isinstance(v, list) else v] for k, v in (facts.adapter or {}).items()],
        boxes="" if facts.boxes is None else f"{_FORMS[facts.boxes.form]}, {_CONVENTIONS[facts.boxes.convention]}",
        recipe=yaml.safe_dump(dict(facts.recipe), sort_keys=False).strip(),
    )


def _head(facts: CardFacts) -> ModelCardData:
    names = {"base_model": facts.base_model} if facts.base_model and HUB_NAME.fullmatch(facts.base_model) else {}
    datasets = [name for name in facts.datasets if HUB_NAME.fullmatch(name)]
    # Of all subsets that were trained on, each once, and of the_cauldron's prompts.
    licences = {licence_of(facts.origins[name]).name for name, sizes in facts.subsets.items() if sizes.get("train")}
    licences |= {CAULDRON_PROMPTS} if _CAULDRON in facts.datasets else set()
    results = [
        EvalResult(
            task_type=_TASK,
            # Of several sources, no result says which one its subset is from.
            dataset_type=datasets[0] if datasets and len(facts.datasets) == 1 else "heldout",
            dataset_name=f"{subset}, held-out samples",
            dataset_config=subset,
            dataset_split="heldout",
            metric_type=score.metric,
            metric_value=round(score.value, 6),
        )
        for subset, scores in facts.scores.items()
        for score in scores
        if math.isfinite(score.value)
    ]
    return ModelCardData(
        **names,
        datasets=datasets or None,
        license=sorted(licences),
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=["athanor", *([str(facts.adapter["kind"]), "peft"] if facts.adapter else [])],
        model_name=facts.name,
        eval_results=results or None,
    )
