"""The set-up before the first step: the model's chunks, the optimizer, the order of bins, the newest checkpoint."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from megatron.core.optimizer import MegatronOptimizer

from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.adapter_files import load_peft_directory
from trainer.checkpoint.directory import read_step
from trainer.checkpoint.hf_read import load_hf_weights
from trainer.contract.machine.modules import check_precision
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig
from trainer.data.balance import CostModel
from trainer.data.features import FeatureReader
from trainer.data.flops import cost_model, training_cost
from trainer.data.geometry import geometry_of
from trainer.data.order import TrainingOrder
from trainer.data.reader import BinReader
from trainer.layers.decoder import decoder_config
from trainer.layers.lora.convert import add_adapters
from trainer.layers.lora.float8_base import base_packer
from trainer.layers.lora.trained import train_whole, trained_rules
from trainer.layers.module_set import check_float8, mark_tensor_parallel
from trainer.layers.modules.choice import choose_modules, host_of
from trainer.loop.share_model import Chunk, share_model, weights_dtype
from trainer.loop.step import finalize_gradients
from trainer.model.adapters import adapted_layers, rules_to_save
from trainer.model.family import Family, freeze
from trainer.model.registry import read_model
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape
from trainer.parallel.late_memory import all_with_memory, parameters_on_meta, return_freed_matrices
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import Message, Window
from trainer.parallel.vision.owner import RemoteOwner
from trainer.parallel.vision.serve import Serving, images_of
from trainer.parallel.vision.worker import PipelineWorker, VisionWorker
from trainer.parallel.vision.world import assignments
from trainer.plan.checks import pieces_of

log = logging.getLogger("athanor.trainer")


@dataclass(slots=True)
class StopRequest:
    """The handler of SIGTERM, which only notes that the signal has come."""

    has_come: bool = False

    def __call__(self, *_: object) -> None:
        self.has_come = True


@dataclass(slots=True)
class Trainer:
    """The state of the training loop."""

    run: RunConfig
    mesh: Mesh
    family: Family
    chunks: list[Chunk]
    optimizer: MegatronOptimizer
    order: TrainingOrder
    heldout: BinReader
    cost: CostModel  # FLOPs of one unit of each kind of work in this training
    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    last: dict[str, float | None] = field(default_factory=lambda: {"loss": None, "heldout_loss": None})

    @property
    def num_devices(self) -> int:
        """Number of the job's devices, including those that only encode images."""
        return self.mesh.world_size + self.run.execution.parallel.vision_ranks

    def is_told_to_stop(self) -> bool:
        """Whether this rank, or a rank that encodes for it, has received SIGTERM."""
        exchange = self.chunks[0].module.exchange
        return self.stop.has_come or (isinstance(exchange, RemoteOwner) and exchange.should_stop)

    def tell_encoders(self, message: Message, number: int = 0) -> None:
        """Send a message to the ranks that encode images and do nothing else, if there are any."""
        exchange = self.chunks[0].module.exchange
        if isinstance(exchange, RemoteOwner):
            exchange.tell(message, number)


def build_chunks(
    run: RunConfig,
    family: Family,
    shape: ModelShape,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    is_empty: bool = False,
) -> list[torch.nn.Module]:
    """Build the chunks of the model that this rank holds, with the weights of `run.hf_dir`, on its device; or without
    memory (`is_empty`), for `share_model` to divide and fill them."""
    build, rules, parallel = resolve_name(family.model), family.weight_rules(shape), run.execution.parallel
    check_precision(run.train.precision, run.execution.modules, host_of(mesh.device))
    modules = choose_modules(run.execution.modules, mesh.device, run.execution.parallel.cp)
    stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
    pieces = pieces_of(run, shape) if parallel.pp > 1 else ()
    chunks, has_float8 = [], run.train.has_float8_base
    if has_float8:
        return_freed_matrices()
    # A float8 base is packed matrix by matrix, and FSDP2 gives each rank only its part: no rank holds the whole model
    # unpacked.
    with parameters_on_meta() if has_float8 or is_empty else contextlib.nullcontext():
        for stage in stages:
            config = decoder_config(shape.language, parallel, dtype, pieces)
            chunks.append(build(shape, parallel, config, modules, mesh, run.seq_len, stage))
    for chunk in chunks:
        # One clock and one set of reports for all chunks of this rank.
        chunk.clock, chunk.reports = chunks[0].clock, chunks[0].reports
        chunk.prepare_training(run.train)
    if is_empty:
        log.info("weights: %s (each rank its share, %s)", run.hf_dir, dtype)
        return chunks
    _load_weights(chunks, run, family, rules, mesh)
    if run.train.precision == "float8":
        check_float8(run)
        for chunk in chunks:
            chunk.language.use_float8()
    if parallel.pp > 1:
        log.info("language layers of the pipeline's pieces: %s", ", ".join(str(len(piece)) for piece in pieces))
    return [chunk.to(mesh.device) for chunk in chunks]


def _load_weights(
    chunks: Sequence[torch.nn.Module], run: RunConfig, family: Family, rules: Sequence[Rule], mesh: Mesh
) -> None:
    """Fill the chunks with the weights of `run.hf_dir`; a float8 base is packed on the device."""
    has_float8, count = run.train.has_float8_base, 0
    whole = rules_to_save(rules, run.train.adapter) if has_float8 else []
    packed = {rule.ours for rule in rules if rule.sizes and rule not in whole}
    for chunk in chunks:
        pack = base_packer(chunk, mesh.device, packed) if has_float8 else None
        count += load_hf_weights(chunk, run.hf_dir, rules, family.copied, pack)
        if chunk.exchange:
            all_with_memory(chunk.exchange.part)
    log.info("weights: %s (%d parameters' tensors on this rank, %s)", run.hf_dir, count, weights_dtype(run))


def give_adapters(
    models: Sequence[torch.nn.Module], run: RunConfig, rules: Sequence[Rule], start: Path | None = None
) -> None:
    """Add adapters to chunks, or to copies of a part, and train only the adapters; no effect without adapters.

    Args:
        start: PEFT directory with the adapters' values; None: the adapters are new, or loaded afterwards.
    """
    config = run.train.adapter
    if config is None:
        return
    layers, whole = adapted_layers(rules, config), rules_to_save(rules, config)
    for model in models:
        add_adapters(model, layers, config, run.train.seed)
        train_whole(model, whole)
    if start is not None:
        load_peft_directory(models, start, trained_rules(rules, config))


def set_up(run: RunConfig, mesh: Mesh) -> Trainer:
    """Build the state before the first step, resumed from the newest checkpoint of this run if there is one."""
    family, shape = read_model(run.hf_dir, run.train)
    parallel = run.execution.parallel
    is_divided = parallel.sharding == "fsdp"
    models = build_chunks(run, family, shape, mesh, weights_dtype(run), is_empty=is_divided)
    part = mesh.slice_of_bin(parallel, has_vision=shape.vision is not None)
    features = None if run.features_dir is None else FeatureReader(run.features_dir, shape.feature_width)
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, geometry_of(shape), run.seq_len, part, features)
        for split in ("train", "heldout")
    ]
    models[0].prepare_pixels(readers[0].patch_format)
    exchange, rules = models[0].exchange, family.weight_rules(shape)
    # `share_model` fills the adapters of a divided model.
    give_adapters(models, run, rules, None if is_divided else run.adapter_dir)
    if isinstance(exchange, PipelineWorker):
        give_adapters([exchange.part], run, rules)
    for model in models:
        # Before `share_model`: data parallelism allocates a buffer for every parameter that requires a gradient.
        freeze(model, run.train, family)
    if exchange:
        freeze(exchange.part, run.train, family)
    chunks, optimizer = share_model(models, run, mesh, family)
    for model, chunk in zip(models, chunks):
        # megatron-core's schedule calls these functions.
        model.config.finalize_model_grads_func = finalize_gradients
        model.config.grad_scale_func = optimizer.scale_loss
        model.config.no_sync_func = chunk.no_sync if len(chunks) == 1 else [c.no_sync for c in chunks]
    if exchange:
        exchange.prepare(mesh.device)
    order = training_order(run, shape, readers[0], mesh.dp_rank, mesh.dp)
    cost = training_cost(shape, family, run.train)
    trainer = Trainer(run, mesh, family, chunks, optimizer, order, readers[1], cost)
    _resume(trainer)
    trainer.tell_encoders(Message.BEGIN, trainer.step)
    _log_arithmetic(trainer)
    return trainer


def set_up_vision_rank(run: RunConfig, mesh: Mesh) -> Serving:
    """Build the state of a rank that encodes images and does nothing else."""
    family, shape = read_model(run.hf_dir, run.train)
    parallel = run.execution.parallel
    dp = parallel.data_parallel(mesh.vision_world.language_ranks + parallel.vision_ranks)
    assignment = assignments(parallel.vision_encoders, dp)[mesh.dp_rank]
    part = images_of(assignment, parallel, dp)
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, geometry_of(shape), run.seq_len, part)
        for split in ("train", "heldout")
    ]
    places = mesh.vision_world.places()
    owners = [places[replica, part.vision_rank] for replica in assignment.replicas]
    # This encoder divides matrices over its tensor-parallel ranks, whatever the language model's ranks share.
    own = parallel.model_copy(update={"tp": parallel.vision.tp, "vision_split": "tensor_parallel"})
    modules = choose_modules(run.execution.modules, mesh.device, run.execution.parallel.cp)
    encoder = resolve_name(family.encoder)(shape.vision, own, weights_dtype(run), modules, mesh)
    mark_tensor_parallel(encoder)
    patch_format = readers[0].patch_format
    encoder.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)
    encode, tp = (lambda batch: encoder(batch)[: batch.encoded_rows]), mesh.groups.tp
    worker = VisionWorker(encoder, encode, mesh.vision_world.links, owners, tp if tp.size() > 1 else None)
    give_adapters([worker.part], run, family.weight_rules(shape))
    freeze(worker.part, run.train, family)
    worker.prepare(mesh.device)
    orders = [training_order(run, shape, readers[0], replica, dp) for replica in assignment.replicas]
    window = sum(Window.of(parallel.pp, parallel.vpp))
    return Serving(run, mesh.device, worker, assignment.replicas, dp, owners, window, orders, readers[1])


def training_order(run: RunConfig, shape: ModelShape, reader: BinReader, dp_rank: int, dp: int) -> TrainingOrder:
    """Return the order in which a data-parallel rank trains on its bins."""
    model = cost_model(shape) if run.features_dir is None else cost_model(shape).without_vision()
    cost = partial(model.planned_cost, seq_len=run.seq_len) if run.execution.parallel.balance else None
    return TrainingOrder(
        reader,
        seed=run.train.seed,
        global_batch_size=run.train.global_batch_size,
        dp_rank=dp_rank,
        dp=dp,
        bin_cost=cost,
    )


def _resume(trainer: Trainer) -> None:
    newest = checkpoint.newest_whole(trainer.run.output_dir / CHECKPOINTS, trainer.mesh)
    if newest is not None:
        trainer.step = read_step(newest, trainer.run)
        checkpoint.load(trainer.chunks, trainer.optimizer, newest, trainer.mesh)
    log.info("data state: %s", "fresh" if newest is None else f"resumed at step {trainer.step}")
    trainer.tokens, trainer.loss_tokens = trainer.order.tokens_before(trainer.step)


def _log_arithmetic(trainer: Trainer) -> None:
    run, mesh, bins = trainer.run, trainer.mesh, trainer.order.reader.bins
    p = run.execution.parallel
    samples = sum(part.num_rows for part in bins.partitions)
    log.info("world %d = dp %d x cp %d x tp %d x pp %d on %s", mesh.world_size, mesh.dp, p.cp, p.tp, p.pp, mesh.device)
    log.info(
        "global batch %d bins = %d micro batches x dp %d",
        run.train.global_batch_size,
        run.num_micro_batches(mesh.dp),
        mesh.dp,
    )
    log.info(
        "bins: %d of %d tokens, %.2f samples per bin; %d steps = %.1f epochs",
        len(bins),
        run.seq_len,
        samples / len(bins),
        run.train.num_steps,
        trainer.order.epoch(run.train.num_steps),
    )
