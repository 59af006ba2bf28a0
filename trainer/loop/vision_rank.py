"""The loop of a rank that encodes images and does nothing else: what comes next, the owner of its weights says."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import torch

from trainer.contract.answer import TrainResult
from trainer.contract.model_shape import ModelShape
from trainer.contract.run import RunConfig
from trainer.data.micro_batch import MicroBatch
from trainer.data.order import TrainingOrder
from trainer.data.reader import PREFETCH_DEPTH, BinReader, prefetch
from trainer.data.slices import RankSlice
from trainer.families.family import Family, load
from trainer.families.geometry import geometry_of
from trainer.families.parts import freeze
from trainer.families.registry import read_model
from trainer.layers.module_set import TorchModules, mark_tensor_parallel, transformer_engine_modules
from trainer.loop.heldout import heldout_bins
from trainer.loop.set_up import training_order
from trainer.loop.share_model import weights_dtype
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision_exchange import Message, VisionWorker, Window
from trainer.parallel.vision_world import Role, roles


@dataclass(slots=True)
class _Work:
    """What this rank encodes.

    Attributes:
        owners: of the replicas that it encodes for, in their order.
        window: micro batches of a replica that are encoded before the gradients of the first are waited for.
    """

    run: RunConfig
    mesh: Mesh
    worker: VisionWorker
    owners: list[int]
    window: int
    orders: list[TrainingOrder]
    heldout: BinReader
    should_stop: bool = False

    def prefetched(self, reader: BinReader, numbers: Iterator[int | None]) -> Iterator[MicroBatch]:
        pin = self.mesh.device.type == "cuda"
        return prefetch(reader, numbers, PREFETCH_DEPTH, pin, self.run.execution.loader_workers)

    def training_bins(self, step: int) -> Iterator[int]:
        """From a step to the last, the micro batches of all replicas by turns."""
        for number in range(step, self.run.train.num_steps):
            for together in zip(*(order.share(number) for order in self.orders), strict=True):
                yield from together

    def encode(self, batches: Iterator[MicroBatch]) -> None:
        """The images of some micro batches, of all replicas by turns."""
        self.worker.get_weights()
        behind, replicas = self.window * len(self.owners), len(self.owners)
        for number, batch in enumerate(batches):
            self.worker.learn(number - behind)
            self.worker.retire(number - behind)
            self.worker.give(number, batch.to(self.mesh.device), self.owners[number % replicas])


def encode_for_others(run: RunConfig, mesh: Mesh) -> TrainResult:
    """Encode images until the training ends."""
    family, shape = read_model(run.hf_dir)
    dp = run.execution.parallel.data_parallel(mesh.bridge.language_ranks + mesh.bridge.vision_ranks)
    role = roles(run.execution.parallel.vision_encoders, dp)[mesh.dp_rank]
    work = _set_up(run, mesh, family, shape, role)
    signal.signal(signal.SIGTERM, lambda *_: setattr(work, "should_stop", True))
    per_step = run.num_micro_batches(dp) * len(work.owners)
    batches: Iterator[MicroBatch] = iter(())
    while True:
        message, number = work.worker.listen()
        if message is Message.END:
            return TrainResult(status="stopped" if number else "finished", step=0)
        if message is Message.BEGIN:
            batches = work.prefetched(work.orders[0].reader, work.training_bins(number))
        elif message is Message.TRAIN:
            work.encode(islice(batches, per_step))
            work.worker.finish_backward()
            work.worker.say_whether_to_stop(work.should_stop)
        else:
            multiple = run.execution.parallel.pp if run.execution.parallel.vpp > 1 else 1
            shares = [heldout_bins(len(work.heldout.bins), replica, dp, multiple) for replica in role.replicas]
            with torch.no_grad():
                work.encode(work.prefetched(work.heldout, chain.from_iterable(zip(*shares, strict=True))))


def _set_up(run: RunConfig, mesh: Mesh, family: Family, shape: ModelShape, role: Role) -> _Work:
    parallel = run.execution.parallel
    dp = parallel.data_parallel(mesh.bridge.language_ranks + mesh.bridge.vision_ranks)
    modules = transformer_engine_modules() if mesh.device.type == "cuda" else TorchModules()
    # Tensor parallel divides this encoder's matrices, where the language model's ranks may share images.
    own = parallel.model_copy(update={"tp": parallel.vision.tp, "vision_split": "tensor_parallel"})
    encoder = load(family.encoder)(shape.vision, own, weights_dtype(run), modules, mesh)
    mark_tensor_parallel(encoder)
    places = parallel.cp * parallel.tp
    part = RankSlice(
        pad_multiple=parallel.pad_multiple,
        cp=parallel.cp,
        vision_ranks=places,
        vision_rank=role.share % places,
        vision_shares=parallel.encoders_of_replica(dp),
        vision_share=role.share,
    )
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, geometry_of(shape), run.seq_len, part)
        for split in ("train", "heldout")
    ]
    patch_format = readers[0].patch_format
    encoder.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)
    ranks = mesh.bridge.places()
    owners = [ranks[replica, role.share % places] for replica in role.replicas]
    encode, tp = (lambda batch: encoder(batch)[: batch.encoded_rows]), mesh.groups.tp
    worker = VisionWorker(encoder, encode, mesh.bridge.links, owners, tp if tp.size() > 1 else None)
    freeze(worker.part, run.train, family)
    worker.prepare(mesh.device)
    orders = [training_order(run, shape, readers[0], replica, dp) for replica in role.replicas]
    return _Work(run, mesh, worker, owners, sum(Window.of(parallel.pp, parallel.vpp)), orders, readers[1])
