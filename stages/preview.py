"""One self-contained HTML page for any artifact: what is in it, so that a person can look at it.

    convert                  pictures beside their conversations
    tokenize                 every token, learnt ones coloured, and the patches over each picture
    plan_bins                bins as bars
    every stage              its report, settings, parents, shards

The same artifact and options give the same bytes.
"""

import html
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from stages.artifact import Artifact
from stages.preview_about import about_html, summary_tiles
from stages.preview_bins import bins_html
from stages.preview_page import preview_page
from stages.preview_samples import choose_samples, find_sample, samples_html, samples_of_shard
from stages.preview_target import Target
from stages.preview_tokens import tokens_html
from stages.report import read_report

# Kinds of a report's sections that the page shows in its own, fuller way.
_SHOWN_BETTER = {"convert": ("pictures",), "tokenize": ("text",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewOptions:
    """What a page shows.

    Attributes:
        num_samples: samples or bins, at most.
        key: of the one sample to show; None: some of every subset.
        hf_dir: model directory whose tokenizer spells the tokens; None: it is looked for in the artifact's root.
        link_from: folder of the page, for links to parents; None: no links.
    """

    num_samples: int = 24
    key: str | None = None
    hf_dir: Path | None = None
    link_from: Path | None = None


def render_preview(target: Target, options: PreviewOptions) -> str:
    """The page.

    Raises:
        InputError: a key or shard is not there, or a file of the artifact is missing or spoilt.
    """
    if target.artifact is None:
        return _shard_page(target, options)
    artifact, manifest = target.artifact, target.artifact.manifest
    report = read_report(artifact.dir)
    name = f"{manifest.stage} {manifest.fingerprint}"
    shard = f", {html.escape(str(target.shard))}" if target.shard else ""
    heading = f"<h1>{html.escape(manifest.stage)} <code>{html.escape(manifest.fingerprint)}{shard}</code></h1>"
    parts = [heading, summary_tiles(artifact, report), _content(artifact, target, options)]
    without = _SHOWN_BETTER.get(manifest.stage, ())
    return preview_page(name, "\n".join([*parts, about_html(artifact, report, without, options.link_from)]))


def _content(artifact: Artifact, target: Target, options: PreviewOptions) -> str:
    """What is particular to the artifact's kind."""
    stage, shards = artifact.manifest.stage, artifact.manifest.shards
    if target.shard:
        shards = [shard for shard in shards if shard.name == target.shard]
        if not shards:
            raise InputError(f"{artifact.dir} has no shard {target.shard}; its manifest names the ones it has")
    if stage == "convert" and shards:
        if options.key:
            return samples_html(find_sample(artifact.dir, shards, options.key))
        return samples_html(choose_samples(artifact.dir, shards, options.num_samples))
    if stage == "tokenize":
        name = str(target.shard) if target.shard else None
        return tokens_html(artifact, options.num_samples, options.key, name, options.hf_dir)
    if stage == "plan_bins":
        return bins_html(artifact, options.num_samples, options.key)
    if options.key:
        raise InputError(f"--key {options.key}: a {stage} artifact holds no samples; leave --key out")
    return ""


def _shard_page(target: Target, options: PreviewOptions) -> str:
    """A sample shard that lies outside of its artifact."""
    path = target.shard
    found = samples_of_shard(path, options.key, options.num_samples)
    return preview_page(path.name, f"<h1>{html.escape(path.name)}</h1>\n{samples_html(found)}")
