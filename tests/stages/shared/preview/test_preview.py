"""Pages of artifacts: everything of the artifact is shown, no foreign text becomes HTML, and the bytes never change."""

import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataset_builders.contracts.bins import read_bins
from dataset_builders.contracts.manifest import MANIFEST, FileEntry, Manifest, Parent
from dataset_builders.contracts.sample import IMAGE_SLOT, SPLITS, Message, Sample, file_digests
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import read_pixel_store
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import read_rgb
from dataset_builders.pictures.pixels import decode_sample
from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.plan_bins.stage import PlanBinsConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.shared.pages.report import REPORT_HTML, Drawing, Table, write_report
from stages.shared.pages.shown_numbers import counted
from stages.shared.preview.render import PreviewOptions, Target, find_target, render_preview
from stages.shared.preview.tokens import Speller
from stages.tokenize.stage import STAGE as TOKENIZE
from stages.tokenize.stage import TokenizeConfig
from tests.helpers.index import read_index
from tests.helpers.pages import Element, assert_images_told, assert_self_contained, image_bytes, parse_page
from tests.helpers.raw_rows import encode, jpeg_with_exif, orientation_exif, picture
from tests.helpers.samples import make_image, make_sample, make_samples_artifact, turns
from tests.helpers.tiny_model import tiny_hf_dir

HOSTILE = "</span></pre><script>alert(\"1\")</script>'\" onload='x' <img src=https://evil.example/a.png> &lt;b&gt; ]]>"
UNICODE = "na\u00efve \u4f60\u597d \U0001f600"


def _odd_samples() -> list[Sample]:
    clear = Image.new("RGBA", (200, 150), (255, 0, 0, 0))
    upright = jpeg_with_exif(picture(3, 160, 96), orientation_exif(6))
    return [
        Sample(key="odd/00000000", messages=turns(HOSTILE, HOSTILE), images=()),
        Sample(
            key="odd/00000001",
            messages=(
                Message(role="system", text="Be short."),
                Message(role="user", text=f"First {IMAGE_SLOT} then {IMAGE_SLOT}: what?"),
                Message(role="assistant", text="context", is_learnt=False),
                Message(role="user", text="And why?"),
                Message(role="assistant", text="because"),
            ),
            images=(upright, encode(clear)),
        ),
        Sample(key="odd/00000002", messages=turns("Say it.", UNICODE), images=()),
        Sample(key="odd/00000003", messages=turns(f"{IMAGE_SLOT}Big?", "yes"), images=(make_image(900, 700),)),
    ]


@dataclass(frozen=True)
class Made:
    root: Path
    samples: Artifact
    tokenized: Artifact
    bins: Artifact

    @property
    def originals(self) -> dict[str, Sample]:
        return {s.key: s for s in (*_odd_samples(), *map(make_sample, range(24)))}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """Return a root as a run leaves it: convert, embedded_model, tokenize, plan_bins."""
    root = tmp_path_factory.mktemp("root")
    shards = {
        "train/shard-00000.tar": [*_odd_samples(), *map(make_sample, range(8))],
        "train/shard-00001.tar": list(map(make_sample, range(8, 16))),
        "heldout/shard-00000.tar": list(map(make_sample, range(16, 24))),
    }
    first = make_samples_artifact(root / "artifacts" / "convert" / "new", shards)
    samples_dir = first.dir.rename(first.dir.with_name(first.manifest.fingerprint))
    samples = Artifact.load(samples_dir)
    hf_dir = root / "artifacts" / "embedded_model" / ("e" * 16) / "hf"
    shutil.copytree(tiny_hf_dir(), hf_dir)
    shutil.copytree(tiny_hf_dir("second"), hf_dir.parents[1] / ("d" * 16) / "hf")  # another model, sorted before it
    inputs = {"samples": samples, "processor": processor_input(ModelDirectory(hf_dir))}
    config = TokenizeConfig(max_seq_len=1024, max_pixels=640 * 640, max_skip_fraction=1.0)
    tokenized = run_stage(TOKENIZE, config, inputs, root).artifact
    bins_config = PlanBinsConfig(seq_len=640, max_patches=2000, max_images=8, pad_multiple=1)
    bins = run_stage(PLAN_BINS, bins_config, {"tokenized": tokenized}, root).artifact
    return Made(root, samples, tokenized, bins)


def _page(artifact: Artifact, shard: str | None = None, **options) -> str:
    return render_preview(Target(artifact, shard), PreviewOptions(**({"num_samples": 100} | options)))


def _cards(page: str) -> dict[str, Element]:
    return {card.find("code")[0].text: card for card in parse_page(page).find("section", "card")}


def test_a_stage_leaves_the_page_that_the_command_makes(made):
    for artifact in (made.tokenized, made.bins):
        assert (artifact.dir / REPORT_HTML).read_text(encoding="utf-8") == _page(artifact, num_samples=12)


def test_samples_stand_with_their_pictures_roles_and_slots(made):
    page = _page(made.samples)
    cards = _cards(page)
    tokenized = {row["key"] for row in read_index(made.tokenized.dir).to_pylist()}
    assert cards.keys() == made.originals.keys() >= tokenized
    for key, sample in made.originals.items():
        card = cards[key]
        assert card.attributes["data-group"] == sample.subset
        assert len(card.find("figure")) == len(sample.images)
        for digest, image, caption in zip(file_digests(sample), sample.images, card.find("figcaption")):
            height, width = read_rgb(image).shape[:2]
            assert digest[:16] in caption.text and f"{width} x {height} px" in caption.text
        said = [(bubble.classes[1], bubble.find("div", "say")[0].text) for bubble in card.find("div", "msg")]
        assert [(role, re.sub(r"image \d", IMAGE_SLOT, text)) for role, text in said] == [
            (m.role, m.text) for m in sample.messages
        ]
        chips = [chip.text for chip in card.find("span", "chip")]
        assert chips == [f"image {place}" for place in range(1, len(sample.images) + 1)]
        assert sample.digest()[:12] in card.find("small")[0].text
    odd = cards["odd/00000001"]
    assert ["learnt" in bubble.classes for bubble in odd.find("div", "assistant")] == [False, True]
    assert [e.text for e in odd.find("div", "role")][2:] == ["assistant, given", "user", "assistant, learnt"]
    options = [e.attributes["value"] for e in parse_page(page).find("option")]
    assert options == ["", "compare", "multi", "odd", "single", "text"]


def test_pictures_are_what_training_sees(made):
    card = _cards(_page(made.samples))["odd/00000001"]
    upright, clear = [np.asarray(Image.open(io.BytesIO(image_bytes(f.find("img")[0])))) for f in card.find("figure")]
    original = made.originals["odd/00000001"].images[0]
    assert upright.shape == (160, 96, 3) and np.array_equal(upright, read_rgb(original))
    assert (clear == 255).all(), "transparent is white"
    assert "turned by EXIF 6" in card.find("figcaption")[0].text
    big = _cards(_page(made.samples))["odd/00000003"].find("img")[0]
    width, height = Image.open(io.BytesIO(image_bytes(big))).size
    assert 320 <= width <= 640 and abs(height / width - 700 / 900) < 0.01 and len(image_bytes(big)) <= 250_000


def test_a_picture_that_cannot_be_decoded_has_a_box_that_says_so(tmp_path):
    image = make_image(64, 64)
    sample = Sample(key="a/00000000", messages=turns(f"{IMAGE_SLOT}?", "x"), images=(image[: len(image) // 2],))
    artifact = make_samples_artifact(tmp_path / "samples", {"train/shard-00000.tar": [sample]})
    (box,) = _cards(_page(artifact))["a/00000000"].find("div", "lost")
    assert "truncated_image" in box.text


def test_hostile_text_stays_text(made):
    for artifact in (made.samples, made.tokenized):
        page = _page(artifact)
        assert_self_contained(page)
        shown = _cards(page)["odd/00000000"]
        assert HOSTILE in shown.text and not shown.find("img") and not shown.find("script")
    hostile = {
        "config": {HOSTILE: HOSTILE},
        "parents": {HOSTILE: Parent(name=HOSTILE, fingerprint=HOSTILE, digest=HOSTILE)},
    }
    manifest = Manifest(stage="other", version=1, fingerprint="0" * 16, stats={HOSTILE: HOSTILE}, **hostile)
    page = _page(Artifact(made.root / "artifacts" / "other" / "x", manifest))
    assert_self_contained(page)
    assert page.count("onload=") == page.count("onload=&#39;x&#39;") == 4, "a setting, its value, a parent's name twice"
    assert not parse_page(page).find("img")


def test_hostile_tokens_stay_text(made, monkeypatch):
    monkeypatch.setattr("stages.shared.preview.tokens.find_speller", lambda *_: Speller(lambda ids: HOSTILE, HOSTILE))
    page = _page(made.tokenized, num_samples=4)
    assert_self_contained(page)
    assert all(token.text == HOSTILE for card in _cards(page).values() for token in card.find("i"))


def test_tokens_are_coloured_as_they_are_learnt_and_know_their_ids(made):
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    pixels = read_pixel_store(made.tokenized.dir, made.tokenized.manifest.stats)
    cards = _cards(_page(made.tokenized))
    rows = read_index(made.tokenized.dir).to_pylist()
    assert cards.keys() == {row["key"] for row in rows}
    for row in rows:
        card, record = cards[row["key"]], read_record(made.tokenized.dir / row["shard"], row["offset"], row["size"])
        sample = decode_sample(row["key"], record, pixels)
        ids, is_image = sample.input_ids, sample.input_ids == chat.image_token_id
        tokens = [(e, "learnt" in e.parents[-1].classes) for e in card.find("i")]
        named = [[int(n) for n in e.attributes["data-t"].partition(" at ")[0].split()] for e, _ in tokens]
        assert [n for numbers in named for n in numbers] == ids[~is_image].tolist()
        assert "".join(e.text for e, _ in tokens) == chat.decode(ids[~is_image])
        learnt = [learnt for (_, learnt), numbers in zip(tokens, named) for _ in numbers]
        assert learnt == sample.loss_mask[~is_image].astype(bool).tolist()
        chips = [e.text for e in card.find("span", "chip")]
        sizes = [(int(w) // 2, int(h) // 2) for _, h, w in sample.image_grid_thw]
        assert chips == [f"image {i}: {w} x {h} = {counted(w * h, 'token')}" for i, (w, h) in enumerate(sizes, 1)]
        assert f"{row['num_tokens']:,} tokens" in card.text and f"{row['num_loss_tokens']:,} learnt" in card.text


def test_characters_of_several_tokens_are_whole(made):
    card = _cards(_page(made.tokenized))["odd/00000002"]
    several = [e for e in card.find("i") if " " in e.attributes["data-t"].partition(" at ")[0]]
    assert several and "\ufffd" not in card.text and UNICODE in card.text


def test_patches_are_drawn_over_what_the_model_sees(made):
    card = _cards(_page(made.tokenized))["odd/00000003"]
    row = next(row for row in read_index(made.tokenized.dir).to_pylist() if row["key"] == "odd/00000003")
    rows, columns = (int(n) for n in re.search(r"grid 1 x (\d+) x (\d+)", card.text).groups())
    assert rows * columns == row["num_patches"] and f"{columns * 16} x {rows * 16} px" in card.text
    (svg,) = card.find("svg")
    assert svg.attributes["viewbox"] == f"0 0 {columns} {rows}"
    lines = {path.classes[0]: path.attributes["d"].count("M") for path in svg.find("path")}
    assert lines == {"patches": columns // 2 + rows // 2, "blocks": columns // 2 + 1 + rows // 2 + 1}


@pytest.mark.parametrize("codec", ["u8_zstd", "original"])
def test_every_codec_gives_the_same_pictures(made, tmp_path, codec):
    inputs = {"samples": made.samples, "processor": processor_input(ModelDirectory(tiny_hf_dir()))}
    config = TokenizeConfig.model_validate({**made.tokenized.manifest.config, "codec": codec})
    other = run_stage(TOKENIZE, config, inputs, tmp_path).artifact
    pages = [_cards(_page(artifact, model=ModelDirectory(tiny_hf_dir()))) for artifact in (other, made.tokenized)]
    shown = [[image.attributes["src"] for card in cards.values() for image in card.find("img")] for cards in pages]
    assert shown[0] == shown[1] and len(shown[0]) > 20


def test_without_the_tokenizer_ids_are_shown_and_the_way_out(made, tmp_path):
    alone = tmp_path / "artifacts" / "tokenize" / "x"
    shutil.copytree(made.tokenized.dir, alone)
    page = _page(Artifact.load(alone))
    assert "give --model to see text" in page
    tokens = _cards(page)["odd/00000002"].find("i")
    assert all(e.text.strip() == e.attributes["data-t"].partition(" ")[0] for e in tokens)
    assert "give --model" not in _page(Artifact.load(alone), model=ModelDirectory(tiny_hf_dir()))
    other = ModelDirectory(tiny_hf_dir("second"))
    assert "not the one that wrote these tokens" in _page(Artifact.load(alone), model=other)
    (tmp_path / "artifacts" / "train" / "t").mkdir(parents=True)
    run_json = tmp_path / "artifacts" / "train" / "t" / "run.json"
    run_json.write_text(f'{{"hf_dir": "{tiny_hf_dir()}"}}')  # a training in the same root knows the directory
    assert "give --model" not in _page(Artifact.load(alone))


def test_bins_are_bars_of_their_samples(made):
    page = parse_page(_page(made.bins))
    bars = page.find("div", "bin")
    bins = [(split, n, refs) for split in SPLITS for n, refs in enumerate(read_bins(made.bins.dir, split))]
    assert len(bars) == len(bins) > 2
    for bar, (split, number, refs) in zip(bars, bins):
        assert bar.attributes["data-group"] == split and f"{split} {number}" in bar.text
        for strip, name, room in zip(bar.find("div", "strip"), ("num_tokens", "num_patches"), (640, 2000)):
            wanted = [(ref, getattr(ref, name)) for ref in refs if getattr(ref, name)]
            segments = strip.find("span")
            widths = [float(re.search(r"width:([\d.]+)%", s.attributes["style"]).group(1)) for s in segments]
            assert widths == pytest.approx([100 * size / room for _, size in wanted], abs=1e-3)
            for segment, (ref, _) in zip(segments, wanted, strict=True):
                hover = segment.attributes["data-t"]
                assert hover.startswith(f"{ref.key}\n{ref.num_tokens:,} tokens, {ref.num_loss_tokens:,} learnt")
                assert (f"{ref.num_patches:,} patches" in hover) == (ref.num_images > 0)
        assert f"{sum(r.num_tokens for r in refs):,} of 640 tokens" in bar.text
    colours = {s.attributes["style"].partition("background:")[2] for s in page.find("span") if "style" in s.attributes}
    legend = [s.text for s in page.find("div", "legend")[0].find("span")]
    assert len(colours) == len(legend) - 1 == len({ref.key.partition("/")[0] for _, _, refs in bins for ref in refs})
    assert "Tokens of a bin" in page.text and "fill" in page.find("div", "tiles")[0].text, "over all bins"


def test_any_other_stage_shows_manifest_report_and_parents(made, tmp_path):
    parents = {
        "tokenized": made.tokenized.parent(),
        "model": Parent(name="hf_dir", fingerprint="f" * 16, digest="f" * 16),
    }
    directory = made.root / "artifacts" / "train" / "a1b2c3d4e5f60718"
    directory.mkdir(parents=True)
    config = {"optim": {"lr": 0.001}, "names": ["a", "b"]}
    files = [FileEntry(name="model.pt", size_bytes=99_000, sha256="5" * 64)]
    about = {"fingerprint": directory.name, "config": config, "parents": parents, "files": files}
    Manifest(stage="train", version=3, **about).write(directory)
    drawing = Drawing("Loss", '<svg xmlns="http://www.w3.org/2000/svg"/>', "Loss over the steps")
    sections = [drawing, Table("Times", ["part"], [["vision"]])]
    write_report(directory, title="train", summary={"tokens": 12345}, sections=sections)
    page = _page(Artifact.load(directory), link_from=made.root / "artifacts")
    assert_self_contained(page)
    root = parse_page(page)
    for wanted in ("12,345", "optim.lr", "0.001", "a, b", "version 3", "vision", "Loss", "model.pt", "99,000"):
        assert wanted in root.text
    assert root.find("img", "curve") and not root.find("nav") and not root.find("script")
    (link,) = root.find("a")  # none to the samples, whose artifact has no page here
    assert link.attributes["href"] == f"tokenize/{made.tokenized.manifest.fingerprint}/report.html"
    assert f"model hf_dir {'f' * 16}" in root.text
    shutil.rmtree(directory.parent)


@pytest.mark.parametrize("stage", ["samples", "tokenized", "bins"])
def test_the_same_artifact_gives_the_same_page_that_loads_nothing(made, tmp_path, stage):
    artifact = getattr(made, stage)
    page = _page(artifact, num_samples=6)
    assert_self_contained(page)
    shutil.copytree(made.root, tmp_path / "moved")
    moved = Artifact.load(tmp_path / "moved" / artifact.dir.relative_to(made.root))
    assert _page(moved, num_samples=6) == page == _page(artifact, num_samples=6)
    assert page != _page(artifact, num_samples=1)
    if stage != "bins":
        assert_images_told(page)


@pytest.mark.parametrize("stage", ["samples", "tokenized"])
def test_few_samples_are_of_every_subset(made, stage):
    groups = [card.attributes["data-group"] for card in _cards(_page(getattr(made, stage), num_samples=5)).values()]
    assert sorted(groups) == ["compare", "multi", "odd", "single", "text"]


def test_one_key_one_shard(made):
    key = make_sample(17).key
    assert list(_cards(_page(made.samples, key=key))) == list(_cards(_page(made.tokenized, key=key))) == [key]
    (bar,) = parse_page(_page(made.bins, key=key)).find("div", "bin")
    assert any(span.attributes.get("data-t", "").startswith(f"{key}\n") for span in bar.find("span"))
    for artifact in (made.samples, made.tokenized):
        page = _page(artifact, shard="train/shard-00001.tar")
        assert _cards(page).keys() == {make_sample(number).key for number in range(8, 16)}


def test_what_is_not_there_is_one_line_with_the_way_out(made):
    for artifact in (made.samples, made.tokenized, made.bins):
        with pytest.raises(InputError, match=r"--key nothing/00000000: .*leave "):
            _page(artifact, key="nothing/00000000")
    for artifact in (made.samples, made.tokenized):
        with pytest.raises(InputError, match=r"has no shard train/shard-00009.tar"):
            _page(artifact, shard="train/shard-00009.tar")


def test_a_shard_by_itself(made, tmp_path):
    lone = tmp_path / "lone.tar"
    shutil.copyfile(made.samples.dir / "train/shard-00001.tar", lone)
    page = render_preview(find_target(str(lone), tmp_path), PreviewOptions(num_samples=3))
    assert_self_contained(page)
    assert list(_cards(page)) == [make_sample(number).key for number in (8, 9, 10)]
    shutil.copyfile(made.tokenized.dir / "train/shard-00001.tar", lone)
    with pytest.raises(InputError, match="tokenized shard without its artifact"):
        render_preview(find_target(str(lone), tmp_path), PreviewOptions())
    lone.write_bytes(b"no tar at all" * 100)
    with pytest.raises(InputError, match=r"lone.tar is damaged: .* is not the header of a member"):
        render_preview(find_target(str(lone), tmp_path), PreviewOptions())


def test_a_missing_shard_is_named(made, tmp_path):
    shutil.copytree(made.samples.dir, tmp_path / "copy")
    (tmp_path / "copy" / "train" / "shard-00000.tar").unlink()
    with pytest.raises(InputError, match=r"shard-00000.tar is missing"):
        _page(Artifact.load(tmp_path / "copy"))


def test_targets_by_path_stage_and_fingerprint(made, tmp_path, monkeypatch):
    tokenized, name = made.tokenized, made.tokenized.manifest.fingerprint
    ways = [str(tokenized.dir), str(tokenized.dir / MANIFEST), "tokenize", name, name[:6], f"tokenize/{name[:4]}"]
    assert {find_target(way, made.root).artifact.dir.resolve() for way in ways} == {tokenized.dir.resolve()}
    assert find_target("tokenize", made.root).name == f"tokenize-{name[:8]}"
    shard = find_target(str(tokenized.dir / "train/shard-00001.tar"), made.root)
    assert (shard.artifact.dir, shard.shard) == (tokenized.dir, "train/shard-00001.tar")
    (tmp_path / "tokenize").mkdir()  # a folder of that name that is not an artifact
    monkeypatch.chdir(tmp_path)
    assert find_target("tokenize", made.root).artifact.dir == tokenized.dir


def test_the_newest_of_a_stage_and_prefixes_that_fit_two(tmp_path):
    for number, fingerprint in enumerate(("aaaa000000000000", "aaaa111111111111", "bbbb000000000000")):
        directory = tmp_path / "artifacts" / "train" / fingerprint
        directory.mkdir(parents=True)
        Manifest(stage="train", version=1, fingerprint=fingerprint, config={}, parents={}).write(directory)
        time = 1_000_000_000 - number * (1 if number == 2 else -1)
        os.utime(directory / MANIFEST, (time, time))
    assert find_target("train", tmp_path).artifact.manifest.fingerprint == "aaaa111111111111"
    with pytest.raises(InputError, match="aaaa may be train/aaaa000000000000, train/aaaa111111111111; give more"):
        find_target("aaaa", tmp_path)
    with pytest.raises(InputError, match="the path is empty"):
        find_target("", tmp_path)
    for nothing in ("no/such/thing", "cccc", "convert", str(tmp_path)):
        line = r"is not an artifact: .*; give the directory of one, or one of its stages: train"
        with pytest.raises(InputError, match=line):
            find_target(nothing, tmp_path)
