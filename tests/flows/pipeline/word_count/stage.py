"""word_count: sample shards -> words.json, the number of words in the messages of each subset."""

from collections import Counter
from collections.abc import Mapping

from pydantic import Field

from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.pages.report import Table, write_report

VERSION = 1


class WordCountConfig(StrictModel):
    """The settings of the count."""

    role: str = Field(default="assistant", description="whose words")


def _run(
    config: WordCountConfig, inputs: Mapping[str, Artifact], work: StorePath, resources: StageResources
) -> StageOutput:
    samples, words = inputs["samples"], Counter()
    for number, shard in enumerate(samples.manifest.shards, 1):
        for key, fields in iter_records(samples.dir / shard.name):
            sample = from_fields(key, fields)
            words[sample.subset] += sum(len(m.text.split()) for m in sample.messages if m.role == config.role)
        resources.report(number, len(samples.manifest.shards))
    write_json(work / "words.json", words)
    sections = [Table("Words", ["subset", "words"], sorted(words.items()))]
    write_report(work, title="word_count", summary={"words counted": words.total()}, sections=sections)
    return StageOutput(stats={"words": words.total()})


STAGE = Stage("word_count", VERSION, _run)
