"""convert: which rows are kept or left out and why; no image is in both splits; the same bytes in every kind of run."""

import dataclasses
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from dataset_builders.contracts.sample import SKIP_REASONS, Sample, file_digests, from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import InputError
from dataset_builders.readers.parts import Part, SkippedRow
from dataset_builders.sources import registry
from stages.convert import stage as convert_module
from stages.convert.rows import assert_parts_apart
from stages.convert.scan import _nothing_lost
from stages.convert.stage import STAGE, ConvertConfig
from stages.convert.write import write_all
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from tests.helpers.raw_rows import BAD_IMAGES, encode, mixed_rows, picture, plain_rows, png, row, write_source
from tests.helpers.trees import damaged_shards, tree_digest

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

CONFIG = {
    "builder": "the_cauldron",
    "subsets": (),
    "options": {"turns": "chat"},
    "heldout_fraction": 0.3,
    "min_heldout": 0,
    "seed": 1,
    "max_image_pixels": 10**6,
    "min_image_side": 8,
    "shard_size_mb": 0.05,
    "max_skip_fraction": 0.1,
}


def convert(root: Path, source: Path, digest: str = "0" * 16, resources=None, **changes) -> Artifact:
    config = ConvertConfig(**CONFIG | changes)
    return run_stage(STAGE, config, {"raw": External(source, "raw", digest)}, root, resources).artifact


def samples_of(artifact: Artifact, split: str) -> list[Sample]:
    shards = [artifact.dir / s.name for s in artifact.manifest.shards if s.split == split]
    return [from_fields(key, fields) for shard in shards for key, fields in iter_records(shard)]


def all_samples(artifact: Artifact) -> list[Sample]:
    return samples_of(artifact, "train") + samples_of(artifact, "heldout")


def quarantine(artifact_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (artifact_dir / "quarantine.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return a converted source with every kind of row."""
    path = tmp_path_factory.mktemp("mixed")
    return convert(path / "root", write_source(path / "raw", {"mixed": mixed_rows()}))


def test_every_sample_is_there_with_its_images_untouched(mixed):
    rows, samples = mixed_rows(), {s.key: s for s in all_samples(mixed)}
    assert sorted(samples) == [f"mixed/{i:08d}" for i in range(len(rows))]
    for i, raw in enumerate(rows):
        sample = samples[f"mixed/{i:08d}"]
        assert list(sample.images) == [image["bytes"] for image in raw["images"]]
        assert [m.text for m in sample.messages if m.role == "assistant"] == [t["assistant"] for t in raw["texts"]]


def test_the_artifact_holds_what_is_told_in_small_shards_and_nothing_else(mixed):
    tables, pages = {"quarantine.jsonl", "pictures.parquet"}, {"report.html"}
    names = {"train", "heldout", "report.json", "manifest.json"} | pages | tables
    assert {path.name for path in mixed.dir.iterdir()} == names
    assert {path.suffix for path in (mixed.dir / "train").iterdir()} == {".tar"}
    shards = mixed.manifest.shards
    train = [s for s in shards if s.split == "train"]
    assert [s.name for s in train] == [f"train/shard-{i:05d}.tar" for i in range(len(train))] and len(train) > 1
    assert [s.split for s in shards] == sorted((s.split for s in shards), reverse=True)
    assert damaged_shards(mixed.dir, mixed.manifest) == []
    assert mixed.manifest.num_samples == len(mixed_rows())
    assert all(s.size_bytes < 50_000 + 10_240 for s in shards)  # a tar ends with up to 10 kB of zeros
    for shard in shards:
        keys = [key for key, _ in iter_records(mixed.dir / shard.name)]
        assert keys == sorted(keys) and len(keys) == shard.num_samples


def test_manifest_counts(mixed):
    stats = mixed.manifest.stats
    assert stats["seen"] == len(mixed_rows()) and mixed.manifest.skips == {}
    assert stats["samples"]["mixed"] == {s: len(samples_of(mixed, s)) for s in ("train", "heldout")}
    assert sum(stats["pictures"].values()) == 24 + 4 + 3
    assert stats["picture_formats"] == {"JPEG": 2, "PNG": 29}
    assert stats["picture_modes"] == {"CMYK": 1, "P": 1, "RGB": 29} and stats["pictures_rotated_by_exif"] == 1
    assert stats["picture_sides"] == {"shortest": 32, "median": 40, "longest": 40}


def test_no_picture_is_in_both_splits(mixed):
    train, heldout = (
        {digest for sample in samples_of(mixed, split) for digest in file_digests(sample)}
        for split in ("train", "heldout")
    )
    assert train and heldout and not train & heldout


def test_split_of_a_picture_does_not_depend_on_the_rest(tmp_path):
    rows = plain_rows(60)
    small = convert(tmp_path / "a", write_source(tmp_path / "raw_a", {"s": rows[:30]}))
    large = convert(tmp_path / "b", write_source(tmp_path / "raw_b", {"s": rows, "other": plain_rows(20, 500)}))
    held = {s.key for s in samples_of(large, "heldout")}
    assert {s.key for s in samples_of(small, "heldout")} == {k for k in held if k.startswith("s/") and k < "s/00000030"}


def test_heldout_fraction_and_seed(tmp_path):
    source = write_source(tmp_path / "raw", {"s": [row([], [(f"{i}?", "a")]) for i in range(1000)]}, group_rows=500)
    held = [{s.key for s in samples_of(convert(tmp_path, source, seed=seed), "heldout")} for seed in (1, 2)]
    assert all(240 <= len(keys) <= 360 for keys in held) and held[0] != held[1]
    assert samples_of(convert(tmp_path, source, heldout_fraction=0), "heldout") == []


def test_a_source_too_small_to_hold_out_enough_is_an_error_before_a_shard_is_written(tmp_path):
    source = write_source(tmp_path / "raw", {"s": plain_rows(9)})
    with pytest.raises(InputError, match=r"^convert\.min_heldout=5: of 9 usable samples only 4 can be held out"):
        convert(tmp_path, source, min_heldout=5)
    assert not list(tmp_path.rglob("*.tar"))
    assert len(samples_of(convert(tmp_path, source, min_heldout=4), "heldout")) == 4


def test_one_file_or_many_give_the_same_shards(tmp_path, mixed):
    source = write_source(tmp_path / "raw", {"mixed": mixed_rows()}, file_rows=4, group_rows=2)
    many = convert(tmp_path / "root", source)
    assert many.manifest.shards == mixed.manifest.shards and many.manifest.stats == mixed.manifest.stats
    assert tree_digest(many.dir) == tree_digest(mixed.dir)


@pytest.mark.promise(
    "The data stages write the same bytes from one process, several or a Dask cluster, on a disk or in an object "
    "store whose connections are cut, in any order of completion and after kill -9."
)
def test_more_workers_give_the_same_bytes(tmp_path, mixed, monkeypatch):
    monkeypatch.setattr(convert_module, "_ROWS_PER_WORKER", 1)
    heard: list[tuple[int, int]] = []
    resources = StageResources(num_workers=2, on_progress=lambda done, total: heard.append((done, total)))
    source = write_source(tmp_path / "raw", {"mixed": mixed_rows()}, file_rows=10)
    assert tree_digest(convert(tmp_path / "root", source, resources=resources).dir) == tree_digest(mixed.dir)
    done, totals = zip(*heard)
    assert set(totals) == {2 * len(mixed_rows())} and list(done) == sorted(done) and done[-1] == totals[-1]


def test_split_turns_share_the_picture_and_the_split(tmp_path):
    rows = [row([png(i)], [("a?", f"a{i}"), ("b?", ""), ("c?", f"c{i}")]) for i in range(20)]
    source = write_source(tmp_path / "raw", {"s": rows})
    artifact = convert(tmp_path, source, options={"turns": "split"}, max_skip_fraction=1)
    assert {s.key for s in all_samples(artifact)} == {f"s/{i:08d}-{pair}" for i in range(20) for pair in (0, 2)}
    assert artifact.manifest.skips == {"empty_target": 20} and artifact.manifest.stats["seen"] == 60
    held = {s.key[:-2] for s in samples_of(artifact, "heldout")}
    assert held.isdisjoint(s.key[:-2] for s in samples_of(artifact, "train"))
    assert [line["row"] for line in quarantine(artifact.dir)] == list(range(20))


def test_everything_left_out_is_named_with_reason_file_and_row(tmp_path):
    bad = [row([make()], [("What?", "bad")]) for make, _ in BAD_IMAGES.values()]
    bad += [row([png(1), b"\x89PNG nothing"], [("Two?", "bad")]), row([png(1)], [("<image><image>?", "bad")])]
    bad += [row([png(1)], [("Empty?", " ")]), row([png(1)], [("Bell\a?", "bad")])]
    reasons = [reason for _, reason in BAD_IMAGES.values()]
    reasons += ["truncated_image", "image_count_mismatch", "empty_target", "control_chars"]
    rows = [r for pair in zip(plain_rows(len(bad), 100), bad) for r in pair]
    artifact = convert(tmp_path, write_source(tmp_path / "raw", {"s": rows}, file_rows=10), max_skip_fraction=1)
    lines = quarantine(artifact.dir)
    assert [line["reason"] for line in lines] == reasons and set(reasons) <= set(SKIP_REASONS)
    for i, line in enumerate(lines):
        place = 2 * i + 1
        assert line["key"] == f"s/{place:08d}" and line["detail"]
        assert (line["file"], line["row"]) == (f"s/train-{place // 10}.parquet", place % 10)
    assert sum(artifact.manifest.skips.values()) == len(bad) == artifact.manifest.stats["seen"] / 2
    assert {s.key for s in all_samples(artifact)} == {f"s/{2 * i:08d}" for i in range(len(bad))}


def test_pictures_of_left_out_samples_do_not_tie_groups(tmp_path):
    """A left-out sample is in no split, so it joins no groups."""
    pictures = [png(i) for i in range(40)]
    rows = [row([p], [("What?", f"{i}")]) for i, p in enumerate(pictures)]
    rows += [row([a, b], [("Both?", "")]) for a, b in pairwise(pictures)]
    artifact = convert(tmp_path, write_source(tmp_path / "raw", {"s": rows}), max_skip_fraction=1)
    assert samples_of(artifact, "heldout") and samples_of(artifact, "train")


def test_exact_duplicates_go_and_the_first_stays(tmp_path):
    one, two = row([png(1)], [("What?", "a")]), row([png(1)], [("What?", "b")])
    text = row([], [("2+2?", "4")])
    subsets = {"a": [one, two, text, one], "b": [text, one, row([png(2)], [("What?", "a")])]}
    artifact = convert(tmp_path, write_source(tmp_path / "raw", subsets))
    assert {s.key for s in all_samples(artifact)} == {"a/00000000", "a/00000001", "a/00000002", "b/00000002"}
    assert [(line["key"], line["reason"], line["detail"][-10:]) for line in quarantine(artifact.dir)] == [
        ("a/00000003", "duplicate_sample", "a/00000000"),
        ("b/00000000", "duplicate_sample", "a/00000002"),
        ("b/00000001", "duplicate_sample", "a/00000000"),
    ]


def test_too_many_left_out_is_an_error_that_names_the_quarantine(tmp_path):
    rows = plain_rows(190) + [row([], [("What?", "")])] * 10 + [row([b"junk"], [("What?", "a")])] * 15
    source = write_source(tmp_path / "raw", {"s": rows}, group_rows=100)
    with pytest.raises(InputError) as caught:
        convert(tmp_path / "root", source)
    message = str(caught.value)
    assert f"25 of 215 samples of {source} cannot be used (decode_error 15, empty_target 10)" in message
    assert "convert.max_skip_fraction=0.1 allows 21; the first of decode_error: s/00000200: " in message
    path = Path(message.split("each is named in ")[1])
    assert path.is_absolute() and len(path.read_text().splitlines()) == 25
    assert convert(tmp_path / "root", source, max_skip_fraction=0.12).manifest.num_samples == 190


def test_a_small_source_is_judged_from_three_lost_rows_on(tmp_path):
    bad = row([], [("What?", "")])
    two = write_source(tmp_path / "two", {"s": plain_rows(5) + [bad] * 2})
    assert convert(tmp_path, two).manifest.skips == {"empty_target": 2}
    three = write_source(tmp_path / "three", {"s": plain_rows(5) + [bad] * 3})
    words = r"^3 of 8 samples .* \(empty_target 3\), .*=0\.1 allows 0; the first of empty_target: "
    with pytest.raises(InputError, match=words):
        convert(tmp_path, three, digest="1" * 16)


def test_duplicates_are_not_held_against_a_source(tmp_path):
    twice = write_source(tmp_path / "twice", {"s": plain_rows(5) * 60}, group_rows=100)
    assert convert(tmp_path, twice, digest="1" * 16).manifest.skips == {"duplicate_sample": 295}


def test_a_source_without_a_usable_sample_is_an_error(tmp_path):
    source = write_source(tmp_path / "raw", {"s": [row([], [("What?", "")])] * 3})
    with pytest.raises(InputError, match=r"^3 of 3 samples of .*raw cannot be used \(empty_target 3\)"):
        convert(tmp_path, source)
    with pytest.raises(InputError, match="hold no rows"):
        convert(tmp_path, write_source(tmp_path / "empty", {"s": []}), digest="1" * 16)


def test_image_limits_come_from_the_config(tmp_path):
    rows = [row([png(1, 1, 1)], [("What?", "a")]), row([png(2, 100, 100)], [("What?", "b")]), *plain_rows(3, 10)]
    source = write_source(tmp_path / "raw", {"s": rows})
    assert convert(tmp_path, source).manifest.skips == {"too_small": 1}
    assert convert(tmp_path, source, min_image_side=1).manifest.skips == {}
    assert convert(tmp_path, source, max_image_pixels=9999).manifest.skips == {"bomb": 1, "too_small": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"turns": "all"}}, "options"),
        ({"builder": "x"}, r"unknown dataset builder 'x'; known: .*the_cauldron"),
        ({"options": {"turns": "chat", "turn": "chat"}}, "options.turn of builder the_cauldron is no known field; its"),
    ],
)
def test_an_unknown_builder_or_option_is_named(change, words):
    with pytest.raises(ValidationError, match=words):
        ConvertConfig(**CONFIG | change)


def test_an_uncommon_format_is_kept(tmp_path):
    rows = [row([encode(picture(3), "BMP")], [("What?", "a")])]
    artifact = convert(tmp_path, write_source(tmp_path / "raw", {"s": rows}))
    assert artifact.manifest.stats["picture_formats"] == {"BMP": 1}


def test_pictures_are_listed_once_sorted_with_their_first_use(mixed):
    table = pq.read_table(mixed.dir / "pictures.parquet").to_pylist()
    found = [line["sha256"].hex() for line in table]
    expected = {}
    for sample in sorted(all_samples(mixed), key=lambda s: s.key):
        for name in file_digests(sample):
            expected.setdefault(name, sample.key)
    assert found == sorted(expected)
    held = {s.key for s in samples_of(mixed, "heldout")}
    for line in table:
        key = expected[line["sha256"].hex()]
        assert (line["key"], line["subset"]) == (key, "mixed")
        assert line["split"] == ("heldout" if key in held else "train")
    rotated = next(line for line in table if line["key"] == f"mixed/{len(mixed_rows()) - 1:08d}")
    assert (rotated["width"], rotated["height"], rotated["format"]) == (32, 40, "JPEG")


def test_the_header_check_decodes_nothing_and_lets_damage_pass(tmp_path, monkeypatch):
    cut = encode(picture(70, 400, 400), "JPEG")[:-3000]
    rows = [row([cut], [("Cut?", "yes")]), row([png(1, 7, 7)], [("Small?", "yes")]), *plain_rows(3)]
    source = write_source(tmp_path / "raw", {"s": rows})
    assert convert(tmp_path, source).manifest.skips == {"too_small": 1, "truncated_image": 1}
    header = convert(tmp_path, source, decode_check="header", heldout_fraction=0)
    assert header.manifest.skips == {"too_small": 1}
    assert "cannot be shown: truncated_image" in (header.dir / "report.html").read_text()
    monkeypatch.setattr("stages.shared.artifacts.run_stage._write_page", lambda *given: None)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *given, **named: pytest.fail("decoded"))
    assert convert(tmp_path, source, digest="1" * 16, decode_check="header").manifest.num_samples == 4


def test_a_sources_own_splits_are_kept(tmp_path, monkeypatch):
    """The source puts rows 0-9 in train and 10-19 in heldout; an image in both is heldout, with all its samples."""
    pictures = [png(i) for i in range(20)]
    pictures[12] = pictures[3]
    rows = [row([p], [(f"{i}?", "a")]) for i, p in enumerate(pictures)]
    source = write_source(tmp_path / "raw", {"s": rows}, file_rows=10)
    builder = registry.get_builder("the_cauldron")

    def list_parts(*arguments):
        parts = builder.list_parts(*arguments)
        return [dataclasses.replace(p, split="heldout" if p.first_row >= 10 else "train") for p in parts]

    own = dataclasses.replace(builder, list_parts=list_parts)
    monkeypatch.setattr("stages.convert.rows.get_builder", lambda name: own)
    artifact = convert(tmp_path / "root", source, heldout_fraction=0)
    held = {s.key for s in samples_of(artifact, "heldout")}
    assert held == {f"s/{i:08d}" for i in [3, *range(10, 20)]}
    assert artifact.manifest.stats["pictures"] == {"train": 9, "heldout": 10}


def test_a_source_that_changes_between_the_passes_is_an_error(tmp_path, monkeypatch):
    """The second pass finds another image or another word than the scan."""
    rows = plain_rows(6)
    others = [row([png(99)], [("What is in picture 3?", "noise 3")]), row([png(3)], [("?", "x")])]
    for place, other in enumerate(others):
        source = write_source(tmp_path / str(place), {"s": rows})

        def write_changed(*arguments, source=source, changed=(*rows[:3], other, *rows[4:])):
            write_source(source, {"s": changed})
            return write_all(*arguments)

        monkeypatch.setattr(convert_module, "write_all", write_changed)
        with pytest.raises(InputError, match=r"train-0.parquet changed while it was converted"):
            convert(tmp_path / "root", source, digest=str(place) * 16)


def test_a_builder_that_loses_or_repeats_a_row_is_caught(tmp_path):
    def read(keys: list[str], chosen: set[int] | None = None) -> list[SkippedRow]:
        return list(_nothing_lost(part, chosen, iter([SkippedRow(key, "no_text", "") for key in keys])))

    part = Part(path=tmp_path, name="s/x", subset="s", span=(0, 1), first_row=4, file_row=0, num_rows=3)
    good = ["s/00000004", "s/00000005-0", "s/00000005-1", "s/00000006"]
    assert len(read(good)) == 4
    with pytest.raises(ValueError, match="but 0 of 2 chosen ones are read"):
        read([], {4, 6})
    for bad, kind, message in [
        (good[:1] + good[3:], InputError, "3 rows from row 0 on were counted, but 2 are read, the last one is row 2;"),
        (good[:3], InputError, "but 2 are read, the last one is row 1;"),
        ([], InputError, "but 0 are read, the last one is none;"),
        ([*good, "s/00000007"], InputError, f"^{re.escape(str(part.path))}: 3 rows .* row 3 is read, which is not"),
        ([*good[:2], good[1], good[3]], AssertionError, "the key s/00000005-0 comes twice"),
        (["t/00000004", *good[1:]], AssertionError, "t/00000004 is not a key of s"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            read(bad)
        assert "\n" not in str(caught.value)
    with pytest.raises(AssertionError, match="s/x and s/y share keys of s"):
        assert_parts_apart([part, dataclasses.replace(part, name="s/y", first_row=6)])
    assert_parts_apart([part, dataclasses.replace(part, first_row=7), dataclasses.replace(part, subset="t")])


def test_the_report_counts_and_shows_what_is_there_and_what_is_left_out(tmp_path):
    rows = [*plain_rows(30), row([], [("\u4f60\u597d? | ~~~~", "\u043f\u0440\u0438\u0432\u0435\u0442")])]
    rows += [row([], [(f"{i}?", "yes")]) for i in range(7)] + [row([b"<junk>"], [("What?", "a")])]
    artifact = convert(tmp_path, write_source(tmp_path / "raw", {"s": rows}), shard_size_mb=0.02)
    page, report = (artifact.dir / "report.html").read_text(), json.loads((artifact.dir / "report.json").read_text())
    assert "s/00000038" in page and "decode_error" in page and page.count("data:image/png;base64,") > 5
    summary, sections = report["summary"], {section["title"]: section for section in report["sections"]}
    assert {"Picture widths", "Length of an answer", "Pictures of a sample"} <= set(sections)
    assert (summary["raw rows"], summary["samples"], summary["left out"]) == (39, 38, 1)
    assert summary["picture formats"] == {"PNG": 30} and sum(summary["distinct pictures"].values()) == 30
    assert ["yes", 7, pytest.approx(7 / 38)] in sections["Most frequent answers"]["rows"]
    assert {"Cyrillic": 6, "Han": 2}.items() <= {name: n for name, n, _ in sections["Scripts"]["rows"]}.items()
    ((_, train, heldout, left_out, *_),) = sections["Subsets"]["rows"]
    assert {"train": train, "heldout": heldout} == summary["splits"] and left_out == 1


def test_figures_count_every_answer(tmp_path):
    """Compared with a plain count, with more distinct answers than are shown, over several parts."""
    rng = random.Random(0)
    answers = [rng.choice("abcdefghijklmnopqrstuvwxyz") * rng.choice([1, 2, 100]) for _ in range(400)]
    rows = [row([], [(f"{i} {'word ' * (i % 7)}?", answer)]) for i, answer in enumerate(answers)]
    artifact = convert(tmp_path, write_source(tmp_path / "raw", {"s": rows}, file_rows=50, group_rows=50))
    data = {s["title"]: s for s in json.loads((artifact.dir / "report.json").read_text())["sections"]}
    counts = Counter(answer[:60] for answer in answers)
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:20]
    assert [tuple(line[:2]) for line in data["Most frequent answers"]["rows"]] == expected
    lengths = [len(r["texts"][0]["user"]) for r in rows]
    found = data["Length of a question"]["figures"]
    assert (found["count"], found["min"], found["max"]) == (400, min(lengths), max(lengths))
    assert abs(found["mean"] - sum(lengths) / 400) < 1e-6
    assert data["Length of an answer"]["figures"]["max"] == 100
