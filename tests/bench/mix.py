"""The model and data of the training benches: random weights of published sizes, and bins of drawn samples.

The samples are drawn like a mix of vision-language data: image tokens are log-normal around 500, one tenth of the
samples is text only, one tenth has several images; a few dozen to a few hundred text tokens, three tenths of which
carry loss. Tiny models, which are for a CPU, get images of some 24 tokens.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
import transformers

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.shard_io import ShardWriter
from dataset_builders.contracts.tokenized import PatchFormat, PixelConfig, PixelStore, TokenizedSample
from dataset_builders.records.pixel_codecs import encode_sample
from stages.plan_bins.pack import pack
from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.plan_bins.stage import PlanBinsConfig
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.config import EmbeddedModelConfig
from stages.shared.inputs.load_transformers import no_progress_bar
from tests.bench.host import Host
from tests.helpers.bins import Kind, make_sample
from tests.helpers.index import write_index
from tests.helpers.large_model import write_large_model
from tests.helpers.tiny_model import tiny_hf_dir
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import Geometry
from trainer.model.registry import FAMILIES, get_family
from trainer.model.shape import Work

# Qwen3-VL's encoder, sized as in another project's vision-heavy test, with Qwen3-0.6B; see `draw_heavy`.
HEAVY = "vision_heavy"
_HEAVY_SIZES = {"num_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8}
_HEAVY_SIZES |= {"vision_depth": 45, "vision_hidden_size": 1536, "vision_intermediate_size": 8960}
_HEAVY_SIZES |= {"vision_num_heads": 16, "deepstack_indexes": ()}
MODELS = [*(name for model_type in FAMILIES for name in get_family(model_type).variants), HEAVY]
CONTROL_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>", "<|endoftext|>")
VOCABULARY = range(1000, 150000)
MAX_PATCHES_PER_TOKEN = 4
PAD_MULTIPLE = 4
PIXELS = PatchFormat(
    patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5)
)


# --- the model ---


def is_tiny(name: str) -> bool:
    """Whether a variant is meant for a CPU."""
    return name.endswith("_tiny")


def random_model(name: str) -> EmbeddedModelConfig:
    """Return the sizes of a variant or of `HEAVY`; "NAME:4" has only four decoder layers."""
    if name == HEAVY:
        return EmbeddedModelConfig(seed=0, variant="qwen3_vl_2b", **_HEAVY_SIZES)
    variant, _, layers = name.partition(":")
    model = EmbeddedModelConfig(seed=0, variant=variant)
    return model.model_copy(update={"num_layers": int(layers)}) if layers else model


def image_token(name: str) -> int:
    """Return the image token's id in a variant, which is the last id."""
    return random_model(name).vocab_size - 1


def config_of(name: str) -> dict[str, Any]:
    """Return config.json of a variant whose control tokens have the last ids."""
    model = random_model(name)
    ids = {token: model.vocab_size - 1 - place for place, token in enumerate(CONTROL_TOKENS)}
    return model.hf_configs(ids)["config.json"]


def write_model(directory: Path, name: str) -> None:
    """Write a directory of random weights without a tokenizer. A model in bfloat16 is never in memory as a whole."""
    model, config = random_model(name), config_of(name)
    if model.dtype == "bfloat16":
        write_large_model(directory, config)
        return
    reference = resolve_name(get_family(config["model_type"]).reference)(transformers.AutoConfig.for_model(**config))
    with no_progress_bar():
        reference.to(getattr(torch, model.dtype)).save_pretrained(directory)


def write_model_and_look(directory: Path, model: str) -> Host:
    """Call `write_model`, add the tokenizer's files that a stage wants, and describe the machine, in one process."""
    write_model(directory, model)
    for file in tiny_hf_dir().iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            shutil.copy(file, directory)
    return Host.here()


# --- the data ---


@dataclass(frozen=True, slots=True)
class Mix:
    """The sums over some samples. `work.loss_tokens` are the tokens that are predicted, never a sample's first."""

    samples: int
    images: int
    work: Work

    @classmethod
    def of(cls, samples: Iterable[TokenizedSample]) -> "Mix":
        """Return the sums, counted from the samples."""
        count, images, work = 0, 0, np.zeros(5, np.int64)
        for sample in samples:
            patches = sample.image_grid_thw.astype(np.int64).prod(-1)
            length = len(sample.input_ids)
            work += [length, int(sample.loss_mask[1:].sum()), length**2, patches.sum(), (patches**2).sum()]
            count, images = count + 1, images + len(patches)
        return cls(count, images, Work(*work.tolist()))


def draw_kind(rng: np.random.Generator, image_tokens: int = 500, text: tuple[int, int] = (40, 300)) -> Kind:
    """Draw one sample of the mix.

    Args:
        image_tokens: median number of an image's tokens.
        text: bounds of the number of text tokens.
    """
    which = rng.random()
    images = 0 if which < 0.1 else int(rng.integers(2, 5)) if which < 0.2 else 1
    grids = []
    low, high = image_tokens * 16 / 500, image_tokens * 3000 / 500
    for _ in range(images):
        tokens = float(np.clip(rng.lognormal(np.log(image_tokens), 0.6), low, high)) / max(1, images - 1)
        height = max(1, round(np.sqrt(tokens * rng.uniform(0.5, 2.0))))
        grids.append((1, 2 * height, 2 * max(1, round(tokens / height))))
    return Kind(int(rng.integers(*text)), tuple(grids), learnt=0.3)


def draw_small(rng: np.random.Generator) -> Kind:
    """Draw a sample of the mix for a tiny model."""
    return draw_kind(rng, image_tokens=24, text=(8, 40))


def draw_heavy(rng: np.random.Generator) -> Kind:
    """Draw a sample of the vision-heavy mix: eight images of 768 x 768 pixels."""
    return Kind(int(rng.integers(40, 300)), 8 * ((1, 48, 48),), learnt=0.3)


def pad_multiple_of(*layouts: ParallelConfig) -> int:
    """Return the number of tokens to a multiple of which samples are padded, so that each layout can read them."""
    return max(PAD_MULTIPLE, *(2 * parallel.cp * parallel.tp for parallel in layouts))


def write_data(
    root: Path,
    num_bins: int,
    seq_len: int,
    vocabulary: range = VOCABULARY,
    *,
    model: str = "qwen3_vl_2b",
    pad_multiple: int = PAD_MULTIPLE,
) -> Mix:
    """Write tokenized shards of drawn samples and the bins that plan_bins makes of them, the same for the same
    arguments.

    Samples that do not fill a bin are left out. In a dataset they would be one bin in many thousands, here one in
    `num_bins`.

    Args:
        root: gets `data`, an artifact of tokenize, and `bins`, one of plan_bins.
        num_bins: number of full bins, about.
        vocabulary: ids that text is drawn from; those that the model has, if it has not all of these.
        pad_multiple: each sample is padded to a multiple of this number of tokens, as the layout needs.

    Returns:
        the contents of the bins.
    """
    samples = _drawn(num_bins, seq_len, vocabulary, model, pad_multiple)
    directory, name = root / "data", "train/shard-00000.tar"
    with ShardWriter(directory, name) as writer:
        rows = []
        for sample in samples:
            record = writer.write(sample.key, encode_sample(sample, "u8", {}))
            place = {"offset": record.offset, "size": record.size, "checksum": record.checksum}
            rows.append({"key": sample.key, "subset": "mix", "split": "train", "shard": name} | place | _sizes(sample))
        entry = writer.commit("train")
    write_index(directory, rows)
    pixels = PixelStore(codec="u8", config=PixelConfig(min_pixels=1, max_pixels=1 << 24, patch_format=PIXELS))
    stats = {"pixels": pixels.model_dump(mode="json")}
    Manifest(
        stage="tokenize", version=1, fingerprint="b" * 16, config={}, parents={}, shards=[entry], stats=stats
    ).write(directory)
    plan = PlanBinsConfig(seq_len=seq_len, max_patches=MAX_PATCHES_PER_TOKEN * seq_len, pad_multiple=pad_multiple)
    made = run_stage(PLAN_BINS, plan, {"tokenized": Artifact.load(directory)}, root).artifact.dir
    (root / "bins").symlink_to(made.relative_to(root))
    return Mix.of(samples)


def _drawn(num_bins: int, seq_len: int, vocabulary: range, model: str, pad_multiple: int) -> list[TokenizedSample]:
    """Draw samples for `num_bins` bins, and leave out those of the emptiest bins until the others fit into so many."""
    geometry = Geometry(image_token(model), PIXELS.merge_size, 3 * PIXELS.patch_size**2)
    draw = draw_heavy if model == HEAVY else draw_small if is_tiny(model) else draw_kind
    text = range(1, geometry.image_token_id - len(CONTROL_TOKENS))  # a small model has fewer ids than `VOCABULARY`
    vocabulary = vocabulary if vocabulary.stop <= text.stop else text
    rng = np.random.default_rng(0)
    samples: list[TokenizedSample] = []
    total = 0
    while total < num_bins * seq_len:
        sample = make_sample(draw(rng), geometry, vocabulary, len(samples), f"mix/{len(samples):08d}")
        if len(sample.input_ids) <= seq_len:
            samples.append(sample)
            total += len(sample.input_ids)
    bins = np.arange(len(samples))
    while bins.max() >= num_bins:
        tokens, patches = (np.array([_sizes(each)[name] for each in samples]) for name in ("num_tokens", "num_patches"))
        padded = -(-tokens // pad_multiple) * pad_multiple
        bins = pack(padded, patches, seq_len, MAX_PATCHES_PER_TOKEN * seq_len)
        fullest = np.argsort(-np.bincount(bins, padded), kind="stable")[:num_bins]
        samples = [sample for sample, number in zip(samples, bins) if number in fullest]
    return samples


def _sizes(sample: TokenizedSample) -> dict[str, int]:
    return {
        "num_tokens": len(sample.input_ids),
        "num_images": len(sample.image_grid_thw),
        "num_loss_tokens": int(sample.loss_mask[1:].sum()),
        "num_patches": len(sample.patches),
    }
