"""The contamination stage: copies in train are found with their kind, other images are not, for any number of
processes and after a kill.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.sample import Sample
from dataset_builders.contracts.shard_io import iter_records
from stages.contamination import scan as picture_scan
from stages.contamination.stage import STAGE, ContaminationConfig, contaminated_keys, read_contamination
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from tests.helpers import drawn_pictures
from tests.helpers.data_stages import run_convert
from tests.helpers.drawn_pictures import chart, copies, encoded, form, hard_copies, photo, receipt, scaled, screenshot
from tests.helpers.raw_rows import row, write_source
from tests.helpers.samples import make_samples_artifact, turns
from tests.helpers.tiers import full, tiered

pytestmark = pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)

HALF_A_PNG = encoded(chart(99))[:2000]


def sample(key: str, *images: bytes) -> Sample:
    text = "<image>" * len(images) + f"What is {key}?"
    return Sample(key=key, messages=turns(text, "that"), images=images)


def contaminate(artifact: Artifact, root: Path, resources: StageResources | None = None, **config: float) -> Artifact:
    return run_stage(STAGE, ContaminationConfig(**config), {"samples": artifact}, root, resources).artifact


def of_kind(directory: Path, train: list[bytes], heldout: list[bytes]) -> Artifact:
    """Return train samples 0, 1, ... and held-out samples 100, 101, ... of one image each."""
    shards = {
        f"{split}/shard-00000.tar": [sample(f"a/{begin + i:08d}", image) for i, image in enumerate(images)]
        for split, images, begin in (("train", train, 0), ("heldout", heldout, 100))
    }
    return make_samples_artifact(directory / "samples", shards)


def planted(directory: Path) -> Artifact:
    """Return train shards and held-out samples with every kind of copy, and images that only look similar."""
    train = [sample(f"a/{i:08d}", encoded(chart(i)), encoded(receipt(i))) for i in range(8)]
    train += [sample("a/00000008", HALF_A_PNG), sample("a/00000009"), sample("b/00000000", encoded(chart(2)))]
    blank = encoded(Image.new("RGB", (200, 300), "white"))
    heldout = [
        sample("a/00000100", encoded(chart(2))),  # the same file
        sample("a/00000101", encoded(chart(3), "BMP")),  # the same pixels
        sample("a/00000102", encoded(chart(100)), encoded(scaled(receipt(4), 0.5), "JPEG", quality=70)),  # the second
        sample("a/00000103", encoded(chart(101)), encoded(receipt(101))),
        sample("b/00000104", encoded(chart(5), "JPEG", quality=70), encoded(receipt(5))),  # near, and the same file
        sample("b/00000105"),
        sample("b/00000106", HALF_A_PNG),
        sample("b/00000107", blank),
    ]
    shards = {"train/shard-00000.tar": train[:5], "train/shard-00001.tar": train[5:]}
    return make_samples_artifact(directory, shards | {"heldout/shard-00000.tar": heldout})


def test_every_kind_of_copy_is_found_counted_and_shown_with_its_train_sample(tmp_path):
    artifact = contaminate(planted(tmp_path / "samples"), tmp_path)
    rows = read_contamination(artifact.dir).to_pylist()
    found = [(r["key"], r["place"], r["how"], r["train_key"], r["train_place"]) for r in rows]
    assert found == [
        ("a/00000100", 0, "bytes", "a/00000002", 0),
        ("a/00000101", 0, "pixels", "a/00000003", 0),
        ("a/00000102", 1, "near", "a/00000004", 1),
        ("b/00000104", 0, "near", "a/00000005", 0),
        ("b/00000104", 1, "bytes", "a/00000005", 1),
        ("b/00000106", 0, "bytes", "a/00000008", 0),
    ]
    for r in rows:
        exact = r["how"] != "near"
        assert (r["bits"], r["difference"]) == (0, 0) if exact else (r["bits"] <= 6 and 0 < r["difference"] <= 3.0)
    keys = contaminated_keys(artifact.dir)
    assert keys["b/00000104"] == "bytes" and keys["a/00000102"] == "near" and len(keys) == 5
    assert artifact.manifest.stats == {
        "heldout_samples": 8,
        "heldout_pictures": 10,
        "train_pictures": 17,
        "undecodable_heldout_pictures": 1,
        "look_alike": 0,
        "contaminated": {
            "overall": {"samples": 5, "bytes": 3, "pixels": 1, "near": 2},
            "a": {"samples": 3, "bytes": 1, "pixels": 1, "near": 1},
            "b": {"samples": 2, "bytes": 2, "pixels": 0, "near": 1},
        },
    }
    page = (artifact.dir / "report.html").read_text()
    assert page.count("<img") == 2 and "a/00000102 picture 1" in page
    report = json.loads((artifact.dir / "report.json").read_text())
    assert report["summary"]["contaminated samples"] == 5
    names = {f.name for f in artifact.dir.iterdir()}
    assert names == {MANIFEST, "contamination.parquet", "report.json", "report.html"}


def test_the_limits_decide_what_is_near(tmp_path):
    samples = planted(tmp_path / "samples")
    exact = contaminate(samples, tmp_path, max_difference=0)
    assert set(read_contamination(exact.dir)["how"].to_pylist()) == {"bytes", "pixels"}
    loose = contaminate(samples, tmp_path, max_bits=7, max_difference=255)
    assert len(contaminated_keys(loose.dir)) >= 5


def test_the_most_alike_train_picture_is_named(tmp_path):
    train = [encoded(chart(1), "JPEG", quality=quality) for quality in (20, 90, 50)]
    shards = {f"train/shard-{i:05d}.tar": [sample(f"a/{i:08d}", image)] for i, image in enumerate(train)}
    shards["heldout/shard-00000.tar"] = [sample("a/00000100", encoded(chart(1)))]
    artifact = contaminate(make_samples_artifact(tmp_path / "samples", shards), tmp_path)
    (found,) = read_contamination(artifact.dir).to_pylist()
    assert (found["how"], found["train_key"]) == ("near", "a/00000001")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_an_artifact_of_one_split_has_no_copies(tmp_path, split):
    shards = {f"{split}/shard-00000.tar": [sample("a/00000000", encoded(chart(0)))]}
    samples = make_samples_artifact(tmp_path / "samples", shards)
    assert contaminated_keys(contaminate(samples, tmp_path).dir) == {}


def test_copies_in_a_converted_dataset(tmp_path):
    """Raw rows through convert: different files may go to either split, whatever they show."""
    rows, twins = [], {}
    for i in range(24):
        picture = (chart, receipt)[i % 2](i)
        _, copied = list(copies(picture))[i % 6]
        twins[len(rows)], twins[len(rows) + 1] = len(rows) + 1, len(rows)
        rows += [row([image], [(f"What is picture {len(rows)}?", str(i))]) for image in (encoded(picture), copied)]
        rows += [row([rows[-2]["images"][0]["bytes"]], [(f"Again, what is picture {i}?", str(i))])]  # the same file
    samples = Artifact.load(run_convert(write_source(tmp_path / "raw", {"a": rows}), tmp_path / "root"))
    split_of = {}
    for shard in samples.manifest.shards:
        for key, _ in iter_records(samples.dir / shard.name):
            split_of[int(key.partition("/")[2])] = shard.split
    artifact = contaminate(samples, tmp_path / "root")
    apart = {i for i, twin in twins.items() if split_of[i] == "heldout" and split_of[twin] == "train"}
    wanted = apart | {i + 2 for i in apart if i % 3 == 0}  # the third row shows the first row's file
    found = contaminated_keys(artifact.dir)
    assert {int(key.partition("/")[2]) for key in found} == wanted and len(apart) >= 5
    assert set(found.values()) == {"near"}  # never "bytes": convert keeps equal files in one split


def test_processes_and_kills_change_nothing(tmp_path, monkeypatch):
    samples = planted(tmp_path / "samples")
    alone = contaminate(samples, tmp_path / "one")
    together = contaminate(samples, tmp_path / "two", StageResources(num_workers=2))
    done: list[int] = []

    def killed(task):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(scan(task))
        return done[-1]

    scan = picture_scan.scan_shard
    monkeypatch.setattr(picture_scan, "scan_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        contaminate(samples, tmp_path / "three")
    monkeypatch.setattr(picture_scan, "scan_shard", lambda task: done.append(scan(task)) or task.shard.num_samples)
    progress: list[tuple[int, int]] = []
    again = contaminate(samples, tmp_path / "three", StageResources(on_progress=lambda *at: progress.append(at)))
    assert len(done) == 3 and progress == [(19, 19)]  # two shards existed
    for other in (together, again):
        for name in (MANIFEST, "contamination.parquet", "report.json", "report.html"):
            assert (other.dir / name).read_bytes() == (alone.dir / name).read_bytes(), name


def test_pictures_on_white_paper_are_not_copies_of_each_other(tmp_path):
    """Blank pages are copies of blank pages, but not of pages with a few lines."""
    blank, other_size = (encoded(Image.new("L", size, 255)) for size in ((300, 420), (150, 210)))
    dotted = np.full((420, 300), 255, np.uint8)
    dotted[200:215, 40:260:3] = 0
    landscape = encoded(Image.new("L", (420, 300), 255))
    heldout = [other_size, encoded(Image.fromarray(dotted)), encoded(receipt(0)), landscape]
    artifact = contaminate(of_kind(tmp_path, [blank], heldout), tmp_path)
    assert contaminated_keys(artifact.dir) == {"a/00000100": "near"}


def disc(colour: str) -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((12, 12, 52, 52), fill=colour)
    return image


COLOURS = ("#c00000", "#005a00", "#3838c0", "#4f4f4f")
OTHERS = {
    "forms": lambda seed: form(seed),
    "one field": lambda seed: form(seed, typed=3),
    "screenshots": screenshot,
    "faint x-rays": drawn_pictures.xray,
    "discs in colour and in grey": lambda seed: disc(("blue", "#ff8800", "#4b4b4b", "gray")[seed]),
    "squares of other colours": lambda seed: Image.new("RGB", (64, 64), COLOURS[seed]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_pictures_of_one_template_are_no_copies(kind, tmp_path):
    images = [encoded(OTHERS[kind](seed)) for seed in range(4)]
    artifact = contaminate(of_kind(tmp_path, images[:2], images[2:]), tmp_path, max_bits=7, max_difference=255)
    assert contaminated_keys(artifact.dir) == {}


@pytest.mark.parametrize("count", tiered([15, 60], [15]))
def test_forms_of_one_template_all_count(count, tmp_path):
    forms = [encoded(form(seed, 400)) for seed in range(count)]
    artifact = contaminate(of_kind(tmp_path, forms[count // 5 :], forms[: count // 5]), tmp_path)
    assert contaminated_keys(artifact.dir) == {}
    alike = artifact.manifest.stats["look_alike"]
    assert 0 < alike <= count // 5
    assert f"{alike} held-out samples have one, and count" in (artifact.dir / "report.html").read_text()


@pytest.mark.parametrize(
    ("draw", "lost"),
    [full(form, []), (screenshot, ["contrast 1, brighter by 12"]), full(photo, [])],  # its light parts become one white
    ids=["form", "screenshot", "photo"],
)
def test_a_changed_copy_is_found_among_its_kind(draw, lost, tmp_path):
    changes = dict(hard_copies(draw(0)))
    train = [encoded(draw(seed)) for seed in (1, 0, 2)]
    artifact = contaminate(of_kind(tmp_path, train, list(changes.values())), tmp_path)
    found = {row["key"]: row["train_key"] for row in read_contamination(artifact.dir).to_pylist()}
    assert [name for i, name in enumerate(changes, 100) if found.get(f"a/{i:08d}") != "a/00000001"] == lost
