"""contamination: the search for held-out images that occur in the training split, once per samples artifact.

    contamination.parquet     one row per such image: key, place, how, train_key, train_place, bits, difference,
                              apart
    report.json, report.html  counts by subset, and each near copy next to its original

convert never puts the same encoded bytes, or samples that share them, into both splits. It cannot detect the same image
in another file, for example a PNG converted to a JPEG, or a thumbnail. An image is a copy if it has

    bytes    the SHA-256 of a train image's file (in an artifact that convert did not split)
    pixels   the SHA-256 of its decoded pixels
    near     a perceptual hash within `max_bits` of 64, a thumbnail within `max_difference` grey levels, and at its own
             size no part that differs by more than `max_apart`

An image of which only the first two of these hold looks alike, as two forms of one template do. It is counted and
shown, and is no copy. A score without contaminated samples excludes the keys of `contaminated_keys`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.contracts.sample import subset_of
from dataset_builders.pictures.images import pixels_png
from dataset_builders.pictures.picture_hash import THUMBNAIL_SIDE
from dataset_builders.storage.files import atomic_path
from dataset_builders.storage.store import StorePath, local_copy, remove_tree
from stages.contamination.config import ContaminationConfig
from stages.contamination.copies import HOWS, Copy, How, find_copies
from stages.contamination.scan import PictureTask, read_pictures, scan_pictures
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.pages.report import Picture, Pictures, Section, Table, write_report
from stages.shared.pages.shown_numbers import show_value
from stages.shared.scoring.names import OVERALL

# 3: a shape in colour is no copy of one in a grey of other lightness; 4: what the images on the page show
VERSION = 4
CONTAMINATION = "contamination.parquet"
CONTAMINATION_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("place", pa.int32()),
        ("how", pa.string()),
        ("train_key", pa.string()),
        ("train_place", pa.int32()),
        ("bits", pa.int32()),
        ("difference", pa.float64()),
        ("apart", pa.float64()),
    ]
)
_SAMPLES_PER_WORKER = 500  # samples that take about as long as the start of a process
_SHOWN = 24
_SHOWN_ALIKE = 6
_SHOWN_ROWS = 500
_SCALE = 4  # enlargement of the thumbnails on the page


def find_contamination(
    config: ContaminationConfig, inputs: Mapping[str, Artifact], work: StorePath, resources: StageResources | None
) -> StageOutput:
    """Run the stage. Input: "samples", a convert artifact."""
    samples = inputs["samples"]
    resources = resources or StageResources()
    num_workers = max(1, samples.manifest.num_samples // _SAMPLES_PER_WORKER)
    tasks = scan_pictures(samples, work, resources.at_most(num_workers))
    heldout, train = ([t for t in tasks if t.shard.split == split] for split in ("heldout", "train"))
    found = find_copies(heldout, train, config, resources)
    copies, alike = ([copy for copy in found if (copy.how is None) is only] for only in (False, True))
    rows = [{name: getattr(copy, name) for name in CONTAMINATION_SCHEMA.names} for copy in copies]
    with atomic_path(work / CONTAMINATION) as tmp:
        pq.write_table(pa.Table.from_pylist(rows, CONTAMINATION_SCHEMA), tmp)
    stats = _stats(samples, heldout, train, copies) | {"look_alike": len({copy.key for copy in alike})}
    _write_report(work, stats, copies, alike)
    if tasks:
        remove_tree(tasks[0].out.parent)
    return StageOutput(stats=stats)


def read_contamination(directory: StorePath) -> pa.Table:
    """Read contamination.parquet of an artifact of this stage, with CONTAMINATION_SCHEMA."""
    return pq.read_table(local_copy(directory / CONTAMINATION), schema=CONTAMINATION_SCHEMA)


def contaminated_keys(directory: StorePath) -> dict[str, How]:
    """Return key -> the surest kind of copy, for each held-out sample with a copy in the training split."""
    how_of: dict[str, How] = {}
    for row in read_contamination(directory).select(["key", "how"]).to_pylist():
        how_of[row["key"]] = min(how_of.get(row["key"], row["how"]), row["how"], key=HOWS.index)
    return how_of


def _stats(
    samples: Artifact, heldout: Sequence[PictureTask], train: Sequence[PictureTask], copies: Sequence[Copy]
) -> dict[str, object]:
    """Return the manifest's figures: for everything under `overall`, and for each subset with a copy."""
    pictures = read_pictures(heldout)
    by_subset: dict[str, list[Copy]] = {}
    for copy in copies:
        by_subset.setdefault(subset_of(copy.key), []).append(copy)
    return {
        "heldout_samples": sum(s.num_samples for s in samples.manifest.shards if s.split == "heldout"),
        "heldout_pictures": len(pictures["sha256"].unique()),
        "train_pictures": len(read_pictures(train)["sha256"].unique()),
        "undecodable_heldout_pictures": pictures["phash"].null_count,
        # Two files of one film are not found; the same file, or frame of a list, is in one split alone (convert).
        **({"videos_not_compared": videos["shown"]} if (videos := samples.manifest.stats.get("videos")) else {}),
        "contaminated": {OVERALL: _count(copies)} | {name: _count(by_subset[name]) for name in sorted(by_subset)},
    }


def _count(copies: Sequence[Copy]) -> dict[str, int]:
    """Return the number of samples with a copy, and the number of copies of each kind."""
    hows = Counter(copy.how for copy in copies)
    return {"samples": len({copy.key for copy in copies}), **{how: hows[how] for how in HOWS}}


def _write_report(
    directory: StorePath,
    stats: Mapping[str, object],
    copies: Sequence[Copy],
    alike: Sequence[Copy],
) -> None:
    counts = stats["contaminated"]
    summary = {name.replace("_", " "): value for name, value in stats.items() if name != "contaminated"}
    summary["contaminated samples"] = counts[OVERALL]["samples"]
    columns = ["subset", "samples", *HOWS]
    shown = [copy for copy in copies if copy.thumbnails][:_SHOWN]
    listed = [[getattr(copy, name) for name in CONTAMINATION_SCHEMA.names] for copy in copies[:_SHOWN_ROWS]]
    sections: list[Section] = [
        Table("Contaminated held-out samples", columns, [[name, *count.values()] for name, count in counts.items()]),
        Pictures("Near copies: held-out left, train right, their thumbnails", [_pair(copy) for copy in shown]),
        Pictures(
            f"Pictures that look alike and are no copies; {stats['look_alike']} held-out samples have one, and count",
            [_pair(copy) for copy in alike[:_SHOWN_ALIKE]],
        ),
        Table(f"Copies, the first {len(listed)} of {len(copies)}", list(CONTAMINATION_SCHEMA.names), listed),
    ]
    write_report(directory, title="Held-out pictures in train", summary=summary, sections=sections)


def _pair(copy: Copy) -> Picture:
    shape = (THUMBNAIL_SIDE, THUMBNAIL_SIDE)
    pair = np.concatenate([np.frombuffer(data, np.uint8).reshape(shape) for data in copy.thumbnails], axis=1)
    keys = f"{copy.key} picture {copy.place}\n{copy.train_key} picture {copy.train_place}"
    difference, apart = show_value(copy.difference), show_value(copy.apart)
    caption = f"{keys}\n{copy.bits} bits, {difference} grey levels, {apart} apart"
    shows = f"left an image of held-out {copy.key}, right one of {copy.train_key} in train"
    return Picture(pixels_png(pair.repeat(_SCALE, 0).repeat(_SCALE, 1)), shows, caption)


STAGE = Stage("contamination", VERSION, find_contamination, digested=(CONTAMINATION,))
