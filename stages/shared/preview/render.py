"""The contents of an artifact on its page, and a page of any artifact or shard on request.

    convert      images next to their conversations
    tokenize     every token, with trained tokens coloured, and the patches over each image
    plan_bins    bins as bars

The same artifact and options give the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from dataset_builders.errors import InputError
from dataset_builders.storage.store import is_local
from stages.shared.artifacts.artifact import Artifact, Input
from stages.shared.inputs.model_directory import ModelDirectory, opened_model
from stages.shared.pages.page import artifact_page, plain_page
from stages.shared.preview.bins import bins_html
from stages.shared.preview.samples import choose_samples, find_sample, samples_html, samples_of_shard
from stages.shared.preview.target import Target
from stages.shared.preview.tokens import tokens_html

_STAGE_SAMPLES = 12
_OPENED_SHARDS = 8  # most shards to open, for a large dataset
_OPENED_REMOTE = 2  # most shards to open in a store while a user waits: a shard is downloaded completely


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewOptions:
    """The options of a page.

    Attributes:
        num_samples: maximal number of samples or bins.
        num_shards: maximal number of shards to search for samples; None: a number that opens quickly.
        key: key of the only sample to show; None: some samples of every subset.
        model: a model with the tokenizer that decodes the tokens; None: search the artifact's root for one.
        link_from: folder of the page, for links to parents; None: no links.
    """

    num_samples: int = 24
    num_shards: int | None = None
    key: str | None = None
    model: ModelDirectory | None = None
    link_from: Path | None = None


def render_preview(target: Target, options: PreviewOptions) -> str:
    """Return the page that the stage of an artifact wrote, with the samples of these options; or a page of a shard that
    lies outside of its artifact.

    Raises:
        InputError: there is no such key or shard, or a file of the artifact is missing or damaged.
    """
    if target.artifact is None:
        samples = samples_of_shard(target.shard, options.key, options.num_samples)
        return plain_page(target.shard.name, contents=samples_html(samples))
    contents, shard = _contents(target.artifact, target, options), str(target.shard or "")
    return artifact_page(target.artifact.dir, target.artifact.manifest, contents, shard, options.link_from)


def stage_contents(artifact: Artifact, inputs: Mapping[str, Input]) -> Markup:
    """Return the contents on the page that a stage leaves in its artifact. They do not depend on the artifact's path.
    The processor that the stage used decodes the tokens."""
    model = opened_model(inputs["processor"]) if "processor" in inputs else None
    options = PreviewOptions(num_samples=_STAGE_SAMPLES, num_shards=_OPENED_SHARDS, model=model)
    return _contents(artifact, Target(artifact), options)


def _contents(artifact: Artifact, target: Target, options: PreviewOptions) -> Markup:
    stage, shards = artifact.manifest.stage, artifact.manifest.shards
    if target.shard:
        shards = [shard for shard in shards if shard.name == target.shard]
        if not shards:
            raise InputError(f"{artifact.dir} has no shard {target.shard}; its manifest names the ones it has")
    if stage == "convert" and shards:
        if options.key:
            return samples_html(find_sample(artifact.dir, shards, options.key))
        num_shards = options.num_shards or (_OPENED_SHARDS if is_local(artifact.dir) else _OPENED_REMOTE)
        return samples_html(choose_samples(artifact.dir, shards, options.num_samples, num_shards))
    if stage == "tokenize":
        name = str(target.shard) if target.shard else None
        return tokens_html(artifact, options.num_samples, options.key, name, options.model)
    if stage == "plan_bins":
        return bins_html(artifact, options.num_samples, options.key)
    if options.key:
        raise InputError(f"--key {options.key}: a {stage} artifact holds no samples; leave --key out")
    return Markup()
