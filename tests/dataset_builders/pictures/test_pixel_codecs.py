"""Codecs: three ways to store pixels, all of which give the same patches."""

import itertools

import numpy as np
import pytest

from dataset_builders.contracts.tokenized import (
    IndexWriter,
    PixelStore,
    TokenizedSample,
    index_partitions,
    iter_index,
    read_pixel_store,
)
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import PIXEL_FIELDS, decode_sample, encode_image, encode_sample
from tests.helpers.index import read_index, write_index
from tests.helpers.pixels import image_config
from tests.helpers.samples import make_image

CODECS = ("u8", "u8_zstd", "original")
# More than ten, so that sorting their names as texts would mix them up.
IMAGES = {
    f"{i}.{'jpg' if i % 2 else 'png'}": make_image(60 + 9 * i, 80, i, "RGB", "JPEG" if i % 2 else "PNG")
    for i in range(12)
}


def _sample(images: dict[str, bytes], videos: tuple[int, ...] = ()) -> TokenizedSample:
    """`videos` are the numbers of images that become the first frame of a temporal group."""
    encoded = [encode_image(data, image_config()) for data in images.values()]
    none, is_video = np.zeros((0, 768), np.uint8), np.isin(np.arange(len(encoded)), videos)
    return TokenizedSample(
        key="a/00000000",
        input_ids=np.arange(40, dtype=np.int32),
        loss_mask=(np.arange(40) % 3 == 0).astype(np.uint8),
        image_grid_thw=np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3),
        is_video=is_video,
        patches=np.concatenate([none, *(patches for patches, _ in encoded)]),
        later_patches=np.concatenate([none, *(255 - encoded[number][0] for number in videos)]),
    )


def _store(codec: str) -> PixelStore:
    return PixelStore(codec=codec, config=image_config())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("images", [{}, dict(list(IMAGES.items())[:1]), IMAGES], ids=["none", "one", "twelve"])
def test_what_is_read_is_what_was_written(codec, images):
    sample = _sample(images)
    fields = encode_sample(sample, codec, images)
    read = decode_sample(sample.key, dict(sorted(fields.items())), _store(codec))
    read.check()
    assert_same(read, sample)


def assert_same(read: TokenizedSample, sample: TokenizedSample) -> None:
    for name in ("input_ids", "loss_mask", "image_grid_thw", "is_video", "patches", "later_patches"):
        assert np.array_equal(getattr(read, name), getattr(sample, name)), name


@pytest.mark.parametrize("codec", ["u8", "u8_zstd"])
def test_both_frames_of_a_temporal_group_are_stored(codec):
    sample = _sample(IMAGES, videos=(0, 3, 4))
    fields = encode_sample(sample, codec, {})
    read = decode_sample(sample.key, dict(sorted(fields.items())), _store(codec))
    read.check()
    assert_same(read, sample)
    for number, visual in enumerate(read.visuals()):
        grid, patches = encode_image(list(IMAGES.values())[number], image_config())[::-1]
        assert visual.grid.tolist() == grid.tolist() and np.array_equal(visual.patches, patches)
        assert np.array_equal(visual.later_patches, 255 - patches if number in (0, 3, 4) else patches[:0])
    lost = {name: data for name, data in fields.items() if not name.startswith("later")}
    for cut in (lost, {**fields, "is_video.u8": fields["is_video.u8"][1:]}, {**fields, "is_video.u8": bytes(12)}):
        with pytest.raises(ValueError, match="a/00000000: the stored record cannot be decoded"):
            decode_sample(sample.key, cut, _store(codec))
    assert _without_pixels(fields, codec).later_patches.shape == (0, 768)


@pytest.mark.parametrize("codec", CODECS)
def test_pixels_can_be_passed_over(codec):
    fields = encode_sample(_sample(IMAGES), codec, IMAGES)
    read = _without_pixels(fields, codec)
    assert read.patches.shape == (0, 768) and len(read.image_grid_thw) == 12


def _without_pixels(fields: dict[str, bytes], codec: str) -> TokenizedSample:
    kept = {name: data for name, data in fields.items() if name not in PIXEL_FIELDS[codec]}
    assert set(kept) == {"image_grid_thw.i32", "input_ids.i32", "is_video.u8", "loss_mask.u8"}
    return decode_sample("a/00000000", kept, _store(codec))


@pytest.mark.parametrize("codec", CODECS)
def test_a_spoilt_record_names_its_key(codec):
    sample = _sample(IMAGES)
    fields = encode_sample(sample, codec, IMAGES)
    name = {"u8": "patches.u8", "u8_zstd": "patches.u8.zst", "original": "3.jpg"}[codec]
    with pytest.raises(ValueError, match="a/00000000: the stored record cannot be decoded"):
        decode_sample(sample.key, {**fields, name: fields[name][: len(fields[name]) // 2 + 1]}, _store(codec))
    if codec == "u8":
        whole_patches = {**fields, name: fields[name][:-768]}
        with pytest.raises(ValueError, match="a/00000000"):
            decode_sample(sample.key, whole_patches, _store(codec))
    with pytest.raises(ValueError, match=r"a/00000000.*KeyError: 'input_ids.i32'"):
        decode_sample(sample.key, {k: v for k, v in fields.items() if k != "input_ids.i32"}, _store(codec))


def test_an_image_of_another_size_than_stored_is_no_silent_change():
    sample = _sample(IMAGES)
    fields = encode_sample(sample, "original", {**IMAGES, "2.png": make_image(200, 200)})
    with pytest.raises(ValueError, match=r"a/00000000.*2.png has the grid.*is stored"):
        decode_sample(sample.key, fields, _store("original"))


def _rows(count: int, per_shard: int) -> list[dict[str, object]]:
    names = ("num_tokens", "num_loss_tokens", "num_patches", "num_images", "offset", "size")
    return [
        {"key": f"a/{i:08d}", "subset": "a", "split": "train", "shard": f"train/shard-{i // per_shard:05d}.tar"}
        | dict.fromkeys(names, i)
        | {"checksum": 2**64 - 1 - i}
        for i in range(count)
    ]


def test_a_partition_holds_whole_shards(tmp_path):
    rows = _rows(20, per_shard=3)
    write_index(tmp_path, rows, partition_rows=7)
    parts = [table.to_pylist() for table in iter_index(tmp_path)]
    assert [len(part) for part in parts] == [6, 6, 6, 2] and list(itertools.chain(*parts)) == rows == read_index(
        tmp_path
    ).to_pylist()
    assert [path.name for path in index_partitions(tmp_path)] == [f"{i:05d}.parquet" for i in range(4)]


def test_a_shard_of_more_rows_than_a_partition_stays_whole(tmp_path):
    write_index(tmp_path, _rows(20, per_shard=9), partition_rows=4)
    assert [table.num_rows for table in iter_index(tmp_path)] == [9, 9, 2]


def test_an_index_without_rows_can_be_read(tmp_path):
    IndexWriter(tmp_path).close()
    assert read_index(tmp_path).num_rows == 0


def test_another_format_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(InputError, match="run the tokenize stage again"):
        index_partitions(tmp_path)
    with pytest.raises(InputError, match=r"format_version 3.*run the tokenize stage again"):
        read_pixel_store(tmp_path, {"patch_format": {}})
