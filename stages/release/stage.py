"""release: an exported model with its model card, ready to be registered, pushed to a hub and published.

    hf/           the files of the export (hard links on the same file system, else copies) and README.md, the card
    hf/adapter/   the export's adapter, if it has one, with the name of its base model
    report.json, report.html

The card needs an evaluation of the model. It shows scores with intervals and the scores before training, the number of
held-out images that occur in the training split, the licences of the subsets, and the whole recipe.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import local_dir
from stages.artifacts.artifact import Artifact, Stage, StageOutput
from stages.inputs.hf_directory import read_json
from stages.pages.report import Section, Table, write_report
from stages.release.config import ReleaseConfig
from stages.release.model_card import HUB_NAME, MODEL_CARD, CardFacts, Score, training_facts, write_model_card
from stages.scoring.names import OVERALL
from stages.scoring.summary import SCORE
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG

VERSION = 1
_REPRODUCE = "athanor run recipe.yaml"


def _run(config: ReleaseConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    """Run the stage. Inputs: "export", "train", "samples", "evaluate"; "compare" and "contamination" are optional."""
    hf_dir = work / HF_EXPORT
    shutil.rmtree(hf_dir, ignore_errors=True)
    hf_dir.mkdir()
    places = {HF_EXPORT: hf_dir}
    if "adapter" in inputs["export"].manifest.stats:
        places[ADAPTER_EXPORT] = hf_dir / ADAPTER_EXPORT
    known: list[FileEntry] = []  # entries of files that were just checked
    entries = {entry.name: entry for entry in inputs["export"].manifest.files}
    for folder, place in places.items():
        place.mkdir(exist_ok=True)
        for file in sorted(local_dir(inputs["export"].dir / folder).iterdir()):
            name = f"{folder}/{file.name}"
            if file.name == ADAPTER_CONFIG:
                write_json(place / ADAPTER_CONFIG, _with_base(read_json(file), config.base_model))
            elif _link(file, place / file.name) and name in entries:
                known.append(entries[name].model_copy(update={"name": str((place / file.name).relative_to(work))}))
    facts = _facts(config, inputs)
    write_model_card(hf_dir, facts)
    _write_report(work, facts)
    return StageOutput(files=known, stats={"model": inputs["export"].manifest.fingerprint, "card": MODEL_CARD})


def _with_base(adapter: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """Return adapter_config.json with the base model's hub name; a directory is useless on another machine."""
    is_name = base_model is not None and HUB_NAME.fullmatch(base_model)
    return {**adapter, "base_model_name_or_path": base_model if is_name else None}


def _link(source: Path, target: Path) -> bool:
    """Create a hard link to a file that never changes; if that is impossible, copy the file and return False."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def _facts(config: ReleaseConfig, inputs: Mapping[str, Artifact]) -> CardFacts:
    contaminated = inputs["contamination"].manifest.stats["contaminated"] if "contamination" in inputs else None
    return CardFacts(
        name=config.name,
        base_model=config.base_model,
        datasets=config.datasets,
        subsets=dict(sorted(inputs["samples"].manifest.stats["samples"].items())),
        recipe=config.recipe,
        training=training_facts(inputs["train"], inputs["export"]),
        adapter=inputs["export"].manifest.stats.get("adapter"),
        carried=inputs["export"].manifest.stats.get("carried", {}),
        scores=_scores(inputs["evaluate"].manifest.stats, _before(inputs)),
        score_note=_note(inputs["evaluate"].manifest.stats),
        contamination=contaminated,
        reproduce=f"# the recipe below, in a file of that name\n{_REPRODUCE}",
    )


def _before(inputs: Mapping[str, Artifact]) -> dict[str, float]:
    """Return subset -> its headline before training; empty if no comparison ran."""
    if "compare" not in inputs:
        return {}
    subsets = inputs["compare"].manifest.stats["subsets"]
    headlines = {name: values["base"]["value"] for name, values in subsets.items() if "base" in values}
    scores = [values["base_score"] for values in subsets.values() if "base_score" in values]
    return headlines | {OVERALL: sum(scores) / len(scores)}


def _scores(stats: Mapping[str, Any], before: Mapping[str, float]) -> dict[str, list[Score]]:
    """Return subset -> its scores: the headline with its interval first, then the other scores."""
    scores: dict[str, list[Score]] = {}
    for subset, values in stats["scores"].items():
        headline, answers = stats["headlines"][subset], stats["counts"][subset]["answers"]
        name = SCORE if subset == OVERALL else stats["headlines"][subset]["metric"]
        first = Score(
            metric=name,
            value=headline["value"],
            answers=answers,
            low=headline["low"],
            high=headline["high"],
            base=before.get(subset),
        )
        rest = {metric: value for metric, value in values.items() if metric not in (name, SCORE)}
        scores[subset] = [first, *(Score(metric=m, value=value, answers=answers) for m, value in rest.items())]
    return scores


def _note(stats: Mapping[str, Any]) -> str:
    level = stats["headlines"][OVERALL]["level"]
    contaminated = stats["counts"][OVERALL]["contaminated"]
    left_out = f" {contaminated} samples with a picture that occurs in train are left out." if contaminated else ""
    return (
        f"Of answers to held-out samples, generated greedily. The first metric of a subset is its headline, with a "
        f"{level:.0%} interval from resampled samples; `{SCORE}` of `{OVERALL}` is the mean of the headlines, upwards."
        f"{left_out}"
    )


def _write_report(work: Path, facts: CardFacts) -> None:
    """Write report.json and report.html: the headlines of the card, for readers of a run's pages."""
    rows = [
        [subset, score.metric, score.value, score.low, score.high, score.base, score.answers]
        for subset, scores in facts.scores.items()
        for score in scores[:1]
    ]
    columns = ["subset", "metric", "score", "low", "high", "before training", "answers"]
    sections: list[Section] = [Table("Scores on the card", columns, rows)]
    summary = {"model": facts.name, "base model": facts.base_model or "random weights", "card": f"hf/{MODEL_CARD}"}
    write_report(work, title="Release", summary=summary, sections=sections)


STAGE = Stage("release", VERSION, _run, on_disk=True, digested=(f"{HF_EXPORT}/*", f"{HF_EXPORT}/{ADAPTER_EXPORT}/*"))
