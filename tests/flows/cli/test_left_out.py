"""Small data for every builder with a third of its rows broken: each row is kept, or named and
counted in the output."""

import csv
import io
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.manifest import Manifest, ShardEntry
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.errors import InputError
from flows.cli.run import left_out_lines
from stages.convert.config import ConvertConfig
from stages.convert.stage import STAGE
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.left_out import LeftOut, count_reasons, write_left_out
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.json_rows import data_uri, json_lines, write_file
from tests.helpers.raw_rows import BAD_IMAGES, CORD_SCHEMA, cord_row, png, row, write_parquet
from tests.helpers.tiers import tiered

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

Rows = list[bool]  # whether each row is sound


def bad_image(rng: random.Random) -> bytes:
    return rng.choice(list(BAD_IMAGES.values()))[0]()


def write_cauldron(rng: random.Random, rows: Rows, source: Path) -> None:
    def broken(i: int) -> dict[str, Any]:
        pairs = ("Empty?", " "), ("Bell\a?", "bad"), ("<image><image>?", "two"), ("Null?", None)
        return row([bad_image(rng)], [("What?", "bad")]) if rng.random() < 0.5 else row([png(i)], [rng.choice(pairs)])

    made = [row([png(i)], [("What?", f"noise {i}")]) if sound else broken(i) for i, sound in enumerate(rows)]
    write_parquet(source / "s/train-0.parquet", made)


def write_cord(rng: random.Random, rows: Rows, source: Path) -> None:
    truth = {"gt_parse": {"menu": [{"nm": "Nasi", "price": "9.000"}]}}
    broken = (
        lambda: cord_row(bad_image(rng), truth),
        lambda: cord_row(png(0), rng.choice(["{", None, "[]", '{"a": 1}'])),
    )
    made = [cord_row(png(i), truth) if sound else rng.choice(broken)() for i, sound in enumerate(rows)]
    source.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(made, CORD_SCHEMA), source / "train-0.parquet", row_group_size=5)


def write_table(rng: random.Random, rows: Rows, source: Path) -> None:
    def broken(i: int) -> tuple[bytes | None, str | None]:
        return rng.choice([(None, "a"), (bad_image(rng), "a"), (b"", "a"), (png(i), ""), (png(i), None)])

    pairs = [(png(i), f"noise {i}") if sound else broken(i) for i, sound in enumerate(rows)]
    made = [{"picture": picture, "reply": reply} for picture, reply in pairs]
    source.mkdir(parents=True)
    if rng.random() < 0.5:
        with (source / "s.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=rng.choice(",;\t"), quoting=csv.QUOTE_ALL)
            writer.writerow(["picture", "reply"])
            writer.writerows([data_uri(picture) if picture else "", reply] for picture, reply in pairs)
        return
    schema = pa.schema({"picture": pa.binary(), "reply": pa.string()})
    pq.write_table(pa.Table.from_pylist(made, schema), source / "s.parquet", row_group_size=7)


def _write_lines(rng: random.Random, lines: list[Any], source: Path) -> None:
    """Write lines as common tools do: with a byte order mark, and with CRLF and blank lines in some places."""
    ends = [rng.choice([b"\n", b"\r\n", b"\n\n", b"\n \t\r\n"]) for _ in lines]
    data = b"".join(json_lines([line]).rstrip(b"\n") + end for line, end in zip(lines, ends))
    write_file(source / "s.jsonl", rng.choice([b"", b"\xef\xbb\xbf", b"\n"]) + data)


def write_openai(rng: random.Random, rows: Rows, source: Path) -> None:
    def chat(image: str, answer: str, role: str = "assistant") -> dict[str, Any]:
        asked = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What?"}]
        return {"messages": [{"role": "user", "content": asked}, {"role": role, "content": answer}]}

    def broken(i: int) -> Any:
        sound = data_uri(png(i))
        odd = [chat("away.png", "a"), chat(data_uri(bad_image(rng)), "a"), chat(sound, ""), chat(sound, "a", "tool")]
        return rng.choice([*odd, b"{", b"7", b"\xff", {"messages": None}])

    made = [chat(data_uri(png(i)), f"noise {i}") if sound else broken(i) for i, sound in enumerate(rows)]
    _write_lines(rng, made, source)


def write_llava(rng: random.Random, rows: Rows, source: Path) -> None:
    def said(image: str, question: str, *answers: str) -> dict[str, Any]:
        turns = [{"from": "human", "value": question}, *({"from": "gpt", "value": answer} for answer in answers)]
        return {"image": image, "conversations": turns}

    def broken(i: int) -> Any:
        name = f"{i}.png"
        odd = [said("away.png", "<image>?", "a"), said(name, "<image><image>?", "a"), said(name, "<image>?", " ")]
        return rng.choice(
            [*odd, said(name, "<image>?"), said(name, "<image>?", "a", "b"), said("bad.png", "?", "a"), 7]
        )

    write_file(source / "bad.png", bad_image(rng))
    for i in range(len(rows)):
        write_file(source / f"{i}.png", png(i))
    made = [said(f"{i}.png", "<image>?", f"noise {i}") if sound else broken(i) for i, sound in enumerate(rows)]
    if rng.random() < 0.5:
        _write_lines(rng, made, source)
    else:
        write_file(source / "s.json", json.dumps(made).encode())


def write_tars(rng: random.Random, rows: Rows, source: Path) -> None:
    source.mkdir(parents=True)
    with tarfile.open(source / "000.tar", "w") as tar:
        for i, sound in enumerate(rows):
            picture, text = ("png", png(i)), ("txt", b"noise %d" % i)
            odd = [
                [picture],
                [text],
                [picture, ("txt", b" ")],
                [("png", bad_image(rng)), text],
                [picture, picture, text],
            ]
            for field, data in [picture, text] if sound else rng.choice(odd):
                info = tarfile.TarInfo(f"{i:03d}.{field}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


Write = Callable[[random.Random, Rows, Path], None]
BUILDERS: dict[str, tuple[dict[str, Any], Write]] = {
    "the_cauldron": ({"turns": "chat"}, write_cauldron),
    "cord_v2": ({}, write_cord),
    "table": ({"image": "picture", "question": "<image>What?", "answer": "reply"}, write_table),
    "openai_messages": ({}, write_openai),
    "llava": ({}, write_llava),
    "webdataset_tars": ({"question": "constant:What?", "answer": "txt"}, write_tars),
}


def convert(builder: str, source: Path, root: Path, max_skip_fraction: float) -> Artifact:
    config = ConvertConfig(
        builder=builder,
        subsets=(),
        options=BUILDERS[builder][0],
        heldout_fraction=0.2,
        min_heldout=2,
        seed=0,
        max_image_pixels=10**6,
        min_image_side=8,
        shard_size_mb=1,
        max_skip_fraction=max_skip_fraction,
    )
    return run_stage(STAGE, config, {"raw": External(source, "raw", "0" * 16)}, root).artifact


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("seed", tiered(range(40), [0]))
def test_a_third_of_small_data_is_broken_and_all_of_it_is_accounted_for(builder, seed, tmp_path):
    rng = random.Random(f"{builder} {seed}")
    count = rng.randrange(12, 31)
    rows = [True] * (count - count // 3) + [False] * (count // 3)
    rng.shuffle(rows)
    BUILDERS[builder][1](rng, rows, tmp_path / "raw")
    with pytest.raises(InputError) as caught:  # more than a share of 0.05 and three rows are lost
        convert(builder, tmp_path / "raw", tmp_path / "root", 0.05)
    artifact = convert(builder, tmp_path / "raw", tmp_path / "root", 1)
    named = [json.loads(line) for line in (artifact.dir / "quarantine.jsonl").read_text().splitlines()]
    assert [line["row"] for line in named] == [i for i, sound in enumerate(rows) if not sound]
    kept = {key for shard in artifact.manifest.shards for key, _ in iter_records(artifact.dir / shard.name)}
    assert {int(key.rpartition("/")[2]) for key in kept} == {i for i, sound in enumerate(rows) if sound}
    assert len(kept) == artifact.manifest.num_samples == count - count // 3
    reasons = ", ".join(f"{why} {number}" for why, number in Counter(line["reason"] for line in named).most_common())
    (line,) = left_out_lines([{"stage": "convert", "dir": str(artifact.dir)}])
    counts = line.removeprefix("convert left out: ").partition(", each named in ")
    assert re.sub(r"\d+", "", counts[0]).count(" of ") == 1 and counts[0].startswith(f"{count // 3} of {count} rows (")
    assert Counter(re.findall(r"\w+ \d+", counts[0].partition("(")[2])) == Counter(re.findall(r"\w+ \d+", reasons))
    assert Path(counts[2]).samefile(artifact.dir / "quarantine.jsonl")
    assert f"{count // 3} of {count} samples of {tmp_path / 'raw'} cannot be used (" in str(caught.value)
    assert "\n" not in str(caught.value) and named[0]["reason"] in str(caught.value)


def test_every_stage_that_leaves_out_samples_has_a_line(tmp_path, monkeypatch):
    def artifact(stage: str, num_samples: int, *reasons: str, **stats: int) -> dict[str, str]:
        directory = tmp_path / "artifacts" / stage
        directory.mkdir(parents=True)
        left_out = [LeftOut(f"s/{i:08d}", reason, "") for i, reason in enumerate(reasons)]
        write_left_out(directory, left_out)
        shard = ShardEntry(
            name="train/shard-00000.tar", split="train", num_samples=num_samples, size_bytes=1, sha256="0" * 64
        )
        fields = {"stage": stage, "version": 1, "fingerprint": "0" * 16, "config": {}, "parents": {}, "files": []}
        shards = [] if stage == "plan_bins" else [shard]
        Manifest(**fields, shards=shards, skips=count_reasons(left_out), stats=stats).write(directory)
        return {"stage": stage, "dir": str(directory)}

    stages = [
        artifact("convert", 58, "image_not_found", "duplicate_sample", raw_rows=60),
        artifact("contamination", 0, raw_rows=1),
        artifact("tokenize", 55, "over_length", "bomb", "over_length"),
        artifact("plan_bins", 0, "too_many_patches"),
    ]
    (tmp_path / "artifacts/contamination/quarantine.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    assert left_out_lines(stages) == [
        "convert left out: 2 of 60 rows (duplicate_sample 1, image_not_found 1), each named in "
        "artifacts/convert/quarantine.jsonl",
        "tokenize left out: 3 of 58 samples (over_length 2, bomb 1), each named in artifacts/tokenize/quarantine.jsonl",
        "plan_bins left out: 1 of 55 samples (too_many_patches 1), each named in artifacts/plan_bins/quarantine.jsonl",
    ]
