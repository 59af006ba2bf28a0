"""Features of the images of a made job, from the same stage that a flow runs; bins in which samples share images."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from stages.encode_images import stage
from stages.encode_images.config import EncodingConfig
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.launchers.config import ClusterConfig
from tests.helpers.world import start
from trainer.contract.names import RUN_JSON
from trainer.contract.run import EncodeRun

FLOAT32 = EncodingConfig(dtype="float32", precision="float32", shard_size_mb=0.012)  # a few images in a shard


def encoded(
    hf_dir: Path, tokenized: Path, root: Path, config: EncodingConfig = FLOAT32, processes: int = 1
) -> Artifact:
    """Return the artifact with the features of a tokenized artifact's images. One process without a GPU is forked."""
    inputs = {"model": External(hf_dir, "hf_dir", "0" * 16), "tokenized": Artifact.load(tokenized)}
    cluster = ClusterConfig(processes=processes, num_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        if stage.run_trainer and processes == 1 and not torch.cuda.is_available():
            patch.setattr(stage, "run_trainer", _run_forked)
        return run_stage(stage.STAGE, config, inputs, root, StageResources(cluster=cluster)).artifact


def _run_forked(run: EncodeRun, *_: object) -> None:
    (run.output_dir / RUN_JSON).write_text(run.model_dump_json())
    log = run.output_dir / "log.txt"
    assert start("trainer", run.output_dir / RUN_JSON, log=log).wait() == 0, log.read_text()


def share_images(bins: list[list[TokenizedSample]]) -> list[list[TokenizedSample]]:
    """Return the bins with the same pixels in every image of 4 x 6 patches, and in every one of 6 x 4.

    The latter is the second image of its samples: it is stored once, before the first images of later samples, so a
    sample's images are stored in another order than its own.
    """
    first: dict[tuple[int, ...], np.ndarray] = {}

    def shared(sample: TokenizedSample) -> TokenizedSample:
        if len(sample.image_grid_thw) == 0:
            return sample
        grids = [tuple(grid) for grid in sample.image_grid_thw.tolist()]
        pieces = [visual.patches for visual in sample.visuals()]
        pieces = [
            first.setdefault(grid, piece) if grid in ((1, 4, 6), (1, 6, 4)) else piece
            for grid, piece in zip(grids, pieces, strict=True)
        ]
        return dataclasses.replace(sample, patches=np.concatenate(pieces))

    return [[shared(sample) for sample in samples] for samples in bins]


def images_of(bins: list[list[TokenizedSample]]) -> list[tuple[bytes, ...]]:
    """Return grid and pixels of every image and temporal group, once per use in a sample."""
    visuals = itertools.chain(*(sample.visuals() for sample in itertools.chain(*bins)))
    return [tuple(array.tobytes() for array in visual) for visual in visuals]
