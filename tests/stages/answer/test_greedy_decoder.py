"""The decoder's pool: adding and removing rows changes no answer, for any lengths, limits and images."""

import numpy as np
import pytest
import torch

from dataset_builders.pictures.pixels import encode_image, pixel_values
from stages.answer.greedy_decoder import PoolLimits, Prompt, Row
from stages.answer.transformers_engine import Generator
from stages.shared.chat_format.images import load_image_config
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.evaluation import mixed_samples, picture, talkative_hf_dir
from tests.helpers.tiers import full
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir

pytestmark = pytest.mark.promise(
    "A batch whose rows come and go gives the tokens that transformers gives each prompt alone, also after kill -9."
)


@pytest.fixture(scope="module", params=["attention", "delta layers"])
def generator(request):
    return Generator(ModelDirectory(talkative_hf_dir() if request.param == "attention" else talkative_hybrid_dir()))


@pytest.fixture(scope="module")
def prompts(generator):
    """Return sixteen prompts of all kinds, the longest first."""
    made = [generator.encode_prompt(s.messages[:1], generator.encode_images(s.images)) for s in mixed_samples(16)]
    return sorted(made, key=lambda prompt: -len(prompt.input_ids))


LIMITS = [3, 20, 1, 7, 12, 2, 16, 5, 9, 1, 4, 18, 6, 11, 2, 8]


@pytest.fixture(scope="module")
def alone(generator, prompts):
    return [said_alone(generator, prompt, limit) for prompt, limit in zip(prompts, LIMITS)]


def said_alone(generator, prompt, limit):
    """Return the ids that transformers' own loop generates for one prompt, ignoring end tokens."""
    model = generator.decoder.model
    ids = torch.from_numpy(prompt.input_ids.astype(np.int64))[None]
    images = {}
    if prompt.images.patches:
        patches = np.concatenate(prompt.images.patches)
        images["pixel_values"] = torch.from_numpy(pixel_values(patches, generator.decoder._patch_format))
        images["image_grid_thw"] = torch.from_numpy(prompt.images.grids.astype(np.int64))
        images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": None}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **images, **options)
    return out[0, ids.shape[1] :].tolist()


def _decode(generator, prompts, group_size, limits):
    """Return the ids of each answer, and the order in which rows ended. No token ends an answer."""
    rows = [Row(number, limit) for number, limit in zip(range(len(prompts)), LIMITS)]
    decoder = generator.decoder
    starts = range(0, len(prompts), group_size)
    groups = [decoder.pad(prompts[i : i + group_size], rows[i : i + group_size]) for i in starts]
    ended = [row.number for row in decoder.decode(groups, limits)]
    assert sorted(ended) == list(range(len(prompts)))
    return [row.ids for row in rows], ended


@pytest.mark.parametrize(("group_size", "rows"), [full(1, 1), (16, 16), full(2, 6), (3, 5), full(4, 100)])
def test_rows_that_come_and_go_say_what_each_says_alone(generator, prompts, alone, monkeypatch, group_size, rows):
    monkeypatch.setattr(generator.decoder, "end_ids", frozenset())
    got, _ = _decode(generator, prompts, group_size, PoolLimits(rows, 1 << 20))
    assert len({tuple(ids) for ids in alone}) == len(alone), "equal answers would prove nothing"
    assert got == alone


@pytest.mark.parametrize("group_size", [full(1), 4, full(10)])
def test_long_prompts_beside_short_ones_say_what_each_says_alone(generator, monkeypatch, group_size):
    """Padding moves the chunk boundaries at which a delta layer reads a prompt, and must change no state."""
    monkeypatch.setattr(generator.decoder, "end_ids", frozenset())
    draw, none = np.random.default_rng(0), generator.encode_images([])
    lengths = [300, 200, 129, 128, 127, 65, 64, 63, 2, 1]
    prompts = [Prompt(draw.integers(20, 300, length).astype(np.int32), none) for length in lengths]
    alone = [said_alone(generator, prompt, limit) for prompt, limit in zip(prompts, LIMITS)]
    assert _decode(generator, prompts, group_size, PoolLimits(6, 1 << 20))[0] == alone


@pytest.mark.parametrize(("group_size", "rows"), [(2, 4), (16, 16)])
def test_an_end_token_makes_room_and_cuts_nothing_else(generator, prompts, alone, monkeypatch, group_size, rows):
    """In a pool of 16 an answer that has ended stays in the batch for a while, and must not grow."""
    end = alone[1][4]
    monkeypatch.setattr(generator.decoder, "end_ids", frozenset([end]))
    got, _ = _decode(generator, prompts, group_size, PoolLimits(rows, 1 << 20))
    wanted = [ids[: ids.index(end)] if end in ids else ids for ids in alone]
    assert got == wanted and got != alone


class Watch:
    """A decoder that records the calls of its model, by number of rows."""

    def __init__(self, monkeypatch, decoder):
        self.read, self.steps, self.widths = [], [], []
        read, go_on = decoder.read, decoder.go_on

        def reading(prompts, cache):
            self.read.append(len(prompts.rows))
            return read(prompts, cache)

        def going(tokens, attended, positions, cache):
            self.steps.append(len(tokens))
            self.widths.append(attended.shape[1])
            return go_on(tokens, attended, positions, cache)

        monkeypatch.setattr(decoder, "read", reading)
        monkeypatch.setattr(decoder, "go_on", going)
        monkeypatch.setattr(decoder, "end_ids", frozenset())


def test_prompts_come_in_as_rows_end_and_limits_hold(generator, prompts, monkeypatch):
    watch = Watch(monkeypatch, generator.decoder)
    _decode(generator, prompts, 2, PoolLimits(6, 1 << 20))
    assert watch.read == [2] * 8
    assert max(watch.steps) <= 6
    # One group after another would take the longest answer of each group, less the token that the prefill gives.
    one_by_one = sum(max(LIMITS[i : i + 2]) - 1 for i in range(0, 16, 2))
    assert len(watch.steps) < 0.6 * one_by_one


def test_the_tokens_side_by_side_are_limited_with_their_padding(generator, prompts, monkeypatch):
    watch = Watch(monkeypatch, generator.decoder)
    longest = len(prompts[0].input_ids)
    _decode(generator, prompts, 1, PoolLimits(100, 2 * longest))
    assert max(watch.steps[: LIMITS[1]]) <= 2, "the two longest fill it"
    assert max(watch.steps) > 2, "shorter ones leave room for more"


def test_rows_that_have_ended_leave_and_take_their_columns_with_them(generator, prompts, monkeypatch):
    watch = Watch(monkeypatch, generator.decoder)
    _decode(generator, prompts, 16, PoolLimits(16, 1 << 20))
    # Active rows are at least three quarters of the batch: below that, finished rows are removed.
    working = [sum(limit > step for limit in LIMITS) for step in range(1, max(LIMITS))]
    assert all(alive <= rows <= alive / 0.75 + 1 for alive, rows in zip(working, watch.steps, strict=True))
    last = len(prompts[1].input_ids) + LIMITS[1] - 1  # the row with the most tokens, without a column of padding
    assert watch.widths[-1] == last < len(prompts[0].input_ids) + LIMITS[1] - 1


def test_pixel_values_are_those_of_the_pixel_path_to_the_bit(generator, monkeypatch):
    config = load_image_config(ModelDirectory(talkative_hf_dir()))
    patches, _ = encode_image(picture(5, 96, 64), config)
    other = config.patch_format.model_copy(update={"image_mean": (0.48, 0.46, 0.41), "image_std": (0.27, 0.26, 0.28)})
    for patch_format in (config.patch_format, other):
        monkeypatch.setattr(generator.decoder, "_patch_format", patch_format)
        got = generator.decoder.pixel_values(torch.from_numpy(patches)).numpy()
        assert got.tobytes() == pixel_values(patches, patch_format).tobytes()
