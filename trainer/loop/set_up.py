"""The set-up before the first step: the model's chunks, the optimizer, the order of bins, the newest checkpoint.

`set_up` is the set-up of a rank that trains, `set_up_vision_rank` that of a rank which only encodes images. The order
of what `set_up` does matters, and each place says why: adapters, then freezing, then data parallelism, then optimizer.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from trainer.checkpoint import save_and_load as checkpoint
from trainer.checkpoint.adapter_files import load_peft_directory
from trainer.checkpoint.directory import read_step
from trainer.checkpoint.hf_weights import HFTensors, load_hf_weights, read_part
from trainer.contract.modules import check_precision
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig
from trainer.data.balance import CostModel
from trainer.data.flops import cost_model, training_cost
from trainer.data.micro_batch import geometry_of
from trainer.data.order import TrainingOrder
from trainer.data.reader import BinReader, FeatureReader
from trainer.layers.decoder import decoder_config
from trainer.layers.float8_base import base_packer
from trainer.layers.lora import add_adapters, initialise_sharded_adapters, train_whole, trained_rules
from trainer.layers.measures import PartClock, Reports
from trainer.layers.module_set import check_float8
from trainer.layers.modules.choice import choose_modules, host_of
from trainer.layers.sharded_parameters import mark_tensor_parallel
from trainer.loop.loss import Totals
from trainer.loop.optim import build_optimizer
from trainer.loop.step import Chunk, StepContext, finalize_gradients
from trainer.model.adapters import adapted_layers, rules_to_save
from trainer.model.family import Family, freeze
from trainer.model.registry import read_model
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.meta_parameters import materialise_all, parameters_on_meta, return_freed_memory
from trainer.parallel.vision.exchange import Message, PipelineWorker, RemoteOwner, VisionWorker, Window
from trainer.parallel.vision.main_grads import fuse_gradients
from trainer.parallel.vision.world import VisionServer, assignments, encoder_slice
from trainer.plan.checks import pieces_of

# The dtype of the weights; with float8 the language model's matrix products cast them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}

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
    family: Family
    shape: ModelShape
    chunks: list[Chunk]
    optimizer: ChainedOptimizer
    order: TrainingOrder
    heldout: BinReader
    cost: CostModel  # FLOPs of one unit of each kind of work in this training
    context: StepContext
    step: int = 0  # updates so far
    tokens: int = 0  # tokens trained on so far, over all ranks, without padding
    loss_tokens: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    # the newest losses, for result.json
    last: dict[str, float | None] = field(default_factory=lambda: {"loss": None, "heldout_loss": None})

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    def is_told_to_stop(self) -> bool:
        """Whether this rank, or a rank that encodes for it, has received SIGTERM."""
        exchange = self.context.exchange
        return self.stop.has_come or (isinstance(exchange, RemoteOwner) and exchange.should_stop)

    def tell_encoders(self, message: Message, number: int = 0) -> None:
        """Send a message to the ranks that encode images and do nothing else, if there are any."""
        if isinstance(self.context.exchange, RemoteOwner):
            self.context.exchange.tell(message, number)


def set_up(run: RunConfig, mesh: Mesh) -> Trainer:
    """Build the state before the first step, resumed from the newest checkpoint of this run if there is one."""
    family, shape = read_model(run.hf_dir, run.train)
    parallel, rules = run.execution.parallel, family.weight_rules(shape)
    is_divided = parallel.sharding == "fsdp"
    models = build_chunks(run, family, shape, mesh, weights_dtype(run), is_empty=is_divided)
    # One clock and one set of reports for all chunks of this rank. The first chunk makes the exchange of image tokens,
    # because it holds the vision encoder, or a copy of it.
    context = StepContext(mesh, PartClock(), Reports(), models[0].exchange, Totals.zero(mesh.device))
    exchange = context.exchange
    for model in models:
        model.clock, model.reports = context.clock, context.reports
        model.prepare_training(run.train)
    part = mesh.slice_of_bin(parallel, has_vision=shape.vision is not None)
    features = None if run.features_dir is None else FeatureReader(run.features_dir, shape.feature_width)
    readers = [
        BinReader(run.tokenized_dir, run.bins_dir, split, geometry_of(shape), run.seq_len, part, features)
        for split in ("train", "heldout")
    ]
    models[0].prepare_pixels(readers[0].patch_format)
    # `apply_data_parallel` fills the adapters of a divided model.
    set_up_adapters(models, run, rules, None if is_divided else run.adapter_dir)
    if isinstance(exchange, PipelineWorker):  # a copy of the encoder; an owner's encoder is a part of its first chunk
        set_up_adapters([exchange.part], run, rules)
    for model in models:
        # Before data parallelism, which allocates a buffer for every parameter that requires a gradient.
        freeze(model, run.train, family)
    if exchange is not None:
        freeze(exchange.part, run.train, family)
    chunks, optimizer = apply_data_parallel(models, run, mesh, family)
    for model, chunk in zip(models, chunks):
        # megatron-core's schedule calls these functions.
        model.config.finalize_model_grads_func = partial(finalize_gradients, context)
        model.config.grad_scale_func = optimizer.scale_loss
        model.config.no_sync_func = chunk.no_sync if len(chunks) == 1 else [c.no_sync for c in chunks]
    if exchange is not None:
        # After data parallelism has made the gradients' buffers, which the exchange adds to.
        exchange.prepare(mesh.device)
    order = training_order(run, shape, readers[0], mesh.dp_rank, mesh.dp)
    cost = training_cost(shape, family, run.train)
    trainer = Trainer(run, family, shape, chunks, optimizer, order, readers[1], cost, context)
    newest = checkpoint.newest_undamaged(run.output_dir / CHECKPOINTS, mesh)
    if newest is not None:
        trainer.step = read_step(newest, run)
        checkpoint.load(chunks, optimizer, newest, mesh)
    log.info("data state: %s", "fresh" if newest is None else f"resumed at step {trainer.step}")
    trainer.tokens, trainer.loss_tokens = order.tokens_before(trainer.step)
    # Only now do ranks that encode images know at which step to begin.
    trainer.tell_encoders(Message.BEGIN, trainer.step)
    _log_sizes(trainer)
    return trainer


def set_up_vision_rank(run: RunConfig, mesh: Mesh) -> VisionServer:
    """Build the state of a rank that encodes images and does nothing else."""
    family, shape = read_model(run.hf_dir, run.train)
    parallel = run.execution.parallel
    dp = parallel.data_parallel(mesh.vision_world.language_ranks + parallel.vision_ranks)
    assignment = assignments(parallel.vision_encoders, dp)[mesh.dp_rank]
    part = encoder_slice(assignment, parallel, dp)
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
    set_up_adapters([worker.part], run, family.weight_rules(shape))
    freeze(worker.part, run.train, family)
    worker.prepare(mesh.device)
    orders = [training_order(run, shape, readers[0], replica, dp) for replica in assignment.replicas]
    window = sum(Window.of(parallel.pp, parallel.vpp))
    return VisionServer(run, mesh.device, worker, assignment.replicas, dp, owners, window, orders, readers[1])


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
    memory (`is_empty`), for `apply_data_parallel` to divide and fill them."""
    build, parallel, has_float8 = resolve_name(family.model), run.execution.parallel, run.train.has_float8_base
    check_precision(run.train.precision, run.execution.modules, host_of(mesh.device))
    modules = choose_modules(run.execution.modules, mesh.device, parallel.cp)
    pieces = pieces_of(run, shape) if parallel.pp > 1 else ()
    if has_float8:
        return_freed_memory()
    chunks = []
    # A float8 base is packed matrix by matrix, and FSDP2 gives each rank only its part: no rank holds the whole model
    # unpacked.
    with parameters_on_meta() if has_float8 or is_empty else contextlib.nullcontext():
        # megatron-core wants None, not 0, where there are no virtual stages.
        for stage in range(parallel.vpp) if parallel.vpp > 1 else [None]:
            # A config for each chunk, because `set_up` gives each its own functions of the schedule.
            config = decoder_config(shape.language, parallel, dtype, pieces)
            chunks.append(build(shape, parallel, config, modules, mesh, run.seq_len, stage))
    if is_empty:
        log.info("weights: %s (each rank its share, %s)", run.hf_dir, dtype)
        return chunks
    rules, count = family.weight_rules(shape), 0
    # Modules that are trained whole stay in the precision of the training.
    whole = rules_to_save(rules, run.train.adapter) if has_float8 else []
    packed = {rule.ours for rule in rules if rule.sizes and rule not in whole}
    for chunk in chunks:
        pack = base_packer(chunk, mesh.device, packed) if has_float8 else None
        count += load_hf_weights(chunk, run.hf_dir, rules, family.copied, pack)
        if chunk.exchange:
            # A worker's copy of the encoder is no part of the chunk, and gets the owner's weights at the first step.
            materialise_all(chunk.exchange.part)
    log.info("weights: %s (%d parameters' tensors on this rank, %s)", run.hf_dir, count, weights_dtype(run))
    if run.train.precision == "float8":
        check_float8(run)
        for chunk in chunks:
            # E4M3 forward and E5M2 for gradients; each tensor is scaled by its largest value. Transformer Engine then
            # casts each weight once per step.
            chunk.language.config.fp8, chunk.language.config.fp8_recipe = "hybrid", "tensorwise"
    if parallel.pp > 1:
        log.info("language layers of the pipeline's pieces: %s", ", ".join(str(len(piece)) for piece in pieces))
    return [chunk.to(mesh.device) for chunk in chunks]


def set_up_adapters(
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


def weights_dtype(run: RunConfig) -> torch.dtype:
    """Return the dtype in which the bare model is built. FSDP2 keeps float32 weights and casts them layer by layer."""
    return torch.float32 if run.execution.parallel.sharding == "fsdp" else DTYPES[run.train.precision]


def apply_data_parallel(
    models: list[MegatronModule], run: RunConfig, mesh: Mesh, family: Family
) -> tuple[list[Chunk], ChainedOptimizer]:
    """Share the model among the data-parallel ranks, by `parallel.sharding`; return the wrapped chunks of this rank and
    the optimizer of their trained parts. Frozen parts must be frozen before.

    In both ways the chunks have the interface of megatron-core's DistributedDataParallel and the optimizer is
    megatron-core's. All other code (schedule, division of the gradients, clipping, update) is the same.
    """
    if run.execution.parallel.sharding == "fsdp":
        (model,) = models  # the contract refuses fsdp with pipelines
        is_empty = next(model.parameters()).is_meta
        # Before the model is divided: the entries of a checkpoint are those of whole parameters, as in any layout.
        state = checkpoint.state_of_model(model)
        chunk = FullyShardedModel(model, DTYPES[run.train.precision], mesh.groups.dp, mesh.device, state)
        if is_empty:
            _fill_divided(model, run, family)
        optimizer = build_optimizer([chunk], run.train, weights_dtype(run), family)
        chunk.optimize_slices(optimizer)
        return [chunk], optimizer
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    for model in models:
        fuse_gradients(model)
    chunks = [
        # Only the first chunk reduces gradients in buckets in backward.
        DistributedDataParallel(model.config, config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            # A rank alone has the sum of its gradients and all weights; collectives with itself cost the host 1 ms.
            groups[:] = [group for group in groups if group.intra_distributed_optimizer_instance_size > 1]
    return chunks, build_optimizer(chunks, run.train, weights_dtype(run), family)


def _fill_divided(model: MegatronModule, run: RunConfig, family: Family) -> None:
    """Fill the slices of a divided model with the weights of `run.hf_dir`, and initialise its adapters."""
    rules, config = family.weight_rules(model.shape), run.train.adapter
    load_hf_weights(model, run.hf_dir, rules, family.copied)
    if config is None:
        return
    # DoRA's magnitudes are measured on whole weights. A rank now holds only some rows of each, so it reads them again.
    read = partial(read_part, HFTensors(run.hf_dir), model=model)
    initialise_sharded_adapters(model, adapted_layers(rules, config), config, run.train.seed, read)
    if run.adapter_dir is not None:
        load_peft_directory([model], run.adapter_dir, trained_rules(rules, config))


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


def _log_sizes(trainer: Trainer) -> None:
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
