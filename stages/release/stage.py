"""release: an exported model with its model card, ready to be registered, pushed to a hub and published.

    hf/, MLmodel, ...   see `directory.py`; hf/README.md is the card
    report.json, report.html

The card needs an evaluation of the model. It shows scores with intervals and the scores before training, the number of
held-out images that occur in the training split, the licences of the subsets, and the whole recipe.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.contracts.manifest import read_origins
from stages.release.config import ReleaseConfig
from stages.release.directory import write_directory
from stages.release.flavor import FLAVOR_FILES
from stages.release.model_card import MODEL_CARD, CardFacts, Score, training_facts, write_model_card
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.chat_format.prompt import read_box_format
from stages.shared.pages.report import write_report
from stages.shared.scoring.names import OVERALL, SCORE
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT

# 2: MLflow's flavor, and the answers of other programs; 3: what rows may not hold, pictures that look alike; 4: numbers
# of the card as on the pages, and results of several sources name no dataset; 5: the limits of pictures, and how vLLM
# serves the adapter
VERSION = 5
_MAX_NEW_TOKENS = 64


def release(config: ReleaseConfig, inputs: Mapping[str, Artifact], work: Path, resources: object) -> StageOutput:
    """Run the stage. Inputs: "export", "train", "samples", "evaluate"; "verify", "compare" and "contamination" are
    optional."""
    exported, evaluated = inputs["export"].manifest, inputs["evaluate"].manifest.stats
    converted = inputs["samples"].manifest.stats
    limit = config.recipe.get("evaluate", {}).get("max_new_tokens", _MAX_NEW_TOKENS)
    known = write_directory(work, inputs["export"], inputs["samples"], config.base_model, limit)
    facts = CardFacts(
        name=config.name,
        base_model=config.base_model,
        datasets=config.datasets,
        subsets=dict(sorted(converted["samples"].items())),
        origins=read_origins(converted),
        recipe=config.recipe,
        training=training_facts(inputs["train"], inputs["export"]),
        adapter=exported.stats.get("adapter"),
        copied=exported.stats.get("carried", {}),
        mtp=exported.stats.get("mtp", 0),
        scores=_scores(evaluated, _before(inputs)),
        score_note=_note(evaluated),
        contamination=inputs["contamination"].manifest.stats["contaminated"] if "contamination" in inputs else None,
        verify=inputs["verify"].manifest.stats if "verify" in inputs else None,
        boxes=read_box_format(work / HF_EXPORT),
        pixels=exported.stats.get("pixels"),
        videos=exported.stats.get("videos"),
        reproduce="# the recipe below, in a file of that name\nathanor run recipe.yaml",
    )
    write_model_card(work / HF_EXPORT, facts)
    score = facts.scores[OVERALL][0]
    summary = {"model": facts.name, "base model": facts.base_model or "random weights", "card": f"hf/{MODEL_CARD}"}
    summary |= {"score": score.value, "score before training": score.base, "answers": score.answers}
    write_report(work, title=f"Release of {facts.name}", summary=summary, sections=[])
    return StageOutput(files=known, stats={"model": exported.fingerprint, "card": MODEL_CARD})


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
    left_out = (
        f" {contaminated} samples with a picture that occurs in train or looks alike are left out."
        if contaminated
        else ""
    )
    return (
        f"Of answers to held-out samples, generated greedily. The first metric of a subset is its headline, with a "
        f"{level:.0%} interval from resampled samples; `{SCORE}` of `{OVERALL}` is the mean of the headlines, upwards."
        f"{left_out}"
    )


STAGE = Stage(
    "release",
    VERSION,
    release,
    on_disk=True,
    digested=(f"{HF_EXPORT}/*", f"{HF_EXPORT}/{ADAPTER_EXPORT}/*", *FLAVOR_FILES),
)
