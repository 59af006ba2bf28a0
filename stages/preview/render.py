"""One self-contained HTML page for any artifact, so that a person can look at its contents.

    convert                  pictures beside their conversations
    tokenize                 every token, learnt ones coloured, and the patches over each picture
    plan_bins                bins as bars
    every stage              its report, settings, parents, shards

The same artifact and options give the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from dataset_builders.errors import InputError
from dataset_builders.storage.store import is_local, local_dir
from stages.artifacts.artifact import Artifact, Input
from stages.preview.about import about_artifact
from stages.preview.bins import bins_html
from stages.preview.page import preview_page
from stages.preview.samples import choose_samples, find_sample, samples_html, samples_of_shard
from stages.preview.target import Target
from stages.preview.tokens import tokens_html

_STAGE_SAMPLES = 12
_OPENED_SHARDS = 8  # of a large dataset
_OPENED_REMOTE = 2  # the same while somebody waits: a shard in a store is fetched whole
# Kinds of a report's sections that the page shows in its own, fuller way.
_SHOWN_BETTER = {"convert": ("pictures",), "tokenize": ("text",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewOptions:
    """The contents of a page.

    Attributes:
        num_samples: samples or bins, at most.
        num_shards: shards to look for samples in, at most; None: as many as open quickly where they lie.
        key: of the one sample to show; None: some of every subset.
        hf_dir: model directory whose tokenizer spells the tokens; None: search the artifact's root for one.
        link_from: folder of the page, for links to parents; None: no links.
    """

    num_samples: int = 24
    num_shards: int | None = None
    key: str | None = None
    hf_dir: Path | None = None
    link_from: Path | None = None


def render_preview(target: Target, options: PreviewOptions) -> str:
    """The page.

    Raises:
        InputError: a key or shard is not there, or a file of the artifact is missing or damaged.
    """
    if target.artifact is None:  # a sample shard that lies outside of its artifact
        samples = samples_of_shard(target.shard, options.key, options.num_samples)
        return preview_page(target.shard.name, target.shard.name, "", samples_html(samples))
    artifact, manifest = target.artifact, target.artifact.manifest
    title = f"{manifest.stage} {manifest.fingerprint}"
    about = f"{manifest.fingerprint}, {target.shard}" if target.shard else manifest.fingerprint
    content = _content(artifact, target, options)
    of_artifact = about_artifact(artifact, _SHOWN_BETTER.get(manifest.stage, ()), options.link_from)
    return preview_page(title, manifest.stage, about, content, **of_artifact)


def stage_preview(artifact: Artifact, inputs: Mapping[str, Input]) -> str:
    """The page that a stage leaves in its artifact: the same wherever the artifact lies. The processor that the stage
    read spells the tokens."""
    hf_dir = local_dir(inputs["processor"].dir) if "processor" in inputs else None
    options = PreviewOptions(num_samples=_STAGE_SAMPLES, num_shards=_OPENED_SHARDS, hf_dir=hf_dir)
    return render_preview(Target(artifact), options)


def _content(artifact: Artifact, target: Target, options: PreviewOptions) -> Markup:
    """The part of the page that depends on the artifact's kind."""
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
        return tokens_html(artifact, options.num_samples, options.key, name, options.hf_dir)
    if stage == "plan_bins":
        return bins_html(artifact, options.num_samples, options.key)
    if options.key:
        raise InputError(f"--key {options.key}: a {stage} artifact holds no samples; leave --key out")
    return Markup()
