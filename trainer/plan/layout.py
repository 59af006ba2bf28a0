"""Checks, before a training starts, that a layout fits the model, the processes, the global batch and the bins.

megatron-core 0.16.1 asserts the same conditions later, with less helpful messages: transformer_config.py (heads, query
groups), pipeline_parallel_layer_layout.py (layers), tensor_parallel/ (every divided width), parallel_state.py (world
size), schedules.py (micro batches of the interleaved schedule). Every message here is one line that names the fields,
their values and the nearest value that works.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dataset_builders.errors import InputError
from trainer.contract.parallel import ParallelConfig
from trainer.model.shape import ModelShape
from trainer.plan.pieces import pipeline_room


class FieldNames(NamedTuple):
    """The names in messages of the fields that a person can set; the defaults are those of run.json and torchrun."""

    parallel: str = "execution.parallel."
    processes: str = "processes"


IN_RUN_JSON = FieldNames()


def check_layout(
    parallel: ParallelConfig,
    shape: ModelShape | None,
    *,
    world_size: int,
    global_batch_size: int,
    seq_len: int,
    pad_multiple: int,
    names: FieldNames = IN_RUN_JSON,
) -> None:
    """Check that a layout fits the model, the processes and the bins.

    Args:
        shape: the model's shape; None if it is not known yet, and then the checks that need it are skipped.
        pad_multiple: number to a multiple of which the plan of the bins rounds up each sample's tokens.
    """
    if shape is not None:
        _check_vision(parallel, shape, names)
        _check_tensor_parallel(parallel, shape, names)
        _check_context_parallel(parallel, shape, names)
        _check_layers(parallel, shape, names)
    check_world(parallel, world_size, names)
    _check_experts(parallel, shape, world_size, names)
    _check_global_batch(parallel, world_size, global_batch_size, names)
    _check_bins(parallel, seq_len, pad_multiple)


def check_world(parallel: ParallelConfig, world_size: int, names: FieldNames = IN_RUN_JSON) -> None:
    """Check that the processes divide into copies of the model."""
    size, alone = parallel.model_size, parallel.vision_ranks
    language = world_size - alone
    if language < 1 or language % size:
        without = f" without vision.ranks={alone}" if alone else ""
        nearest = alone + _nearest_multiple(max(1, language), size)
        raise InputError(
            f"{names.processes}={world_size}{without} is not a multiple of tp={parallel.tp} x pp={parallel.pp} x "
            f"cp={parallel.cp} = {size}; try {names.processes}={nearest}"
        )
    dp, encoders = parallel.data_parallel(world_size), parallel.vision_encoders
    if alone and encoders % dp and dp % encoders:
        tp = alone // encoders
        nearest = tp * _nearest(encoders, [n for n in range(1, encoders + dp) if not (n % dp and dp % n)])
        raise InputError(
            f"{names.parallel}vision.ranks={alone} with vision.tp={tp} encode for dp={dp} copies of the language "
            "model, and neither number of copies is a multiple of the other; "
            f"try {names.parallel}vision.ranks={nearest}, {names.processes}={language + nearest}"
        )


def _check_experts(parallel: ParallelConfig, shape: ModelShape | None, world_size: int, names: FieldNames) -> None:
    """Check that the ranks of a pipeline rank, and the experts of each layer, divide evenly by ep."""
    ranks = (world_size - parallel.vision_ranks) // parallel.pp
    sizes = {"dp x cp x tp": ranks} | ({} if shape is None else shape.language.expert_divided_widths())
    if wrong := _undivided(sizes, parallel.ep):
        raise InputError(
            f"{names.parallel}ep={parallel.ep} does not divide {wrong}={sizes[wrong]}; try "
            f"{names.parallel}ep={_nearest_divisor(sizes, parallel.ep)}"
        )


def _undivided(sizes: Mapping[str, int], ranks: int) -> str | None:
    """Return the name of the first size that is no multiple of a number of ranks; None if all are."""
    return next((name for name, size in sizes.items() if size % ranks), None)


def _nearest_divisor(sizes: Mapping[str, int], ranks: int) -> int:
    """Return the number of ranks nearest to `ranks` that divides all sizes."""
    common = math.gcd(*sizes.values())
    return _nearest(ranks, [d for d in range(1, common + 1) if common % d == 0])


def _nearest(value: float, candidates: Iterable[int]) -> int | None:
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate), default=None)


def _nearest_multiple(value: int, of: int) -> int:
    down = value // of * of
    return _nearest(value, [down, down + of] if down else [of])


def _check_vision(parallel: ParallelConfig, shape: ModelShape, names: FieldNames) -> None:
    """Check, of a layout with ranks for images, that the model takes images and that vision.tp divides its widths."""
    if not parallel.vision_ranks:
        return
    if shape.vision is None:
        raise InputError(
            f"{names.parallel}vision.ranks={parallel.vision_ranks} encode images, and the model takes text alone; try "
            f"{names.parallel}vision=first_rank"
        )
    tp, sizes = parallel.vision.tp, shape.vision.divided_widths()
    if wrong := _undivided(sizes, tp):
        raise InputError(
            f"{names.parallel}vision.tp={tp} does not divide the model's {wrong}={sizes[wrong]}; "
            f"try {names.parallel}vision.tp={_nearest_divisor(sizes, tp)}"
        )


def _check_tensor_parallel(parallel: ParallelConfig, shape: ModelShape, names: FieldNames) -> None:
    """Check that tp divides every shared width."""
    has_vision = shape.vision is not None and parallel.vision_split == "tensor_parallel"
    vision = shape.vision.divided_widths() if has_vision else {}
    # Fewer key-value heads than ranks are an error too: megatron-core would give several ranks the same head, which our
    # tests do not cover.
    sizes = shape.language.divided_widths() | vision
    wrong = _undivided(sizes, parallel.tp)
    if wrong is None:
        return
    fixes = [f"{names.parallel}tp={_nearest_divisor(sizes, parallel.tp)}"]
    split = ""
    if wrong in vision:
        split = f" (vision_split={parallel.vision_split})"
        fixes.append(f"{names.parallel}vision_split=images")
    raise InputError(
        f"{names.parallel}tp={parallel.tp} does not divide the model's {wrong}={sizes[wrong]}{split}; "
        f"try {' or '.join(fixes)}"
    )


def _check_context_parallel(parallel: ParallelConfig, shape: ModelShape, names: FieldNames) -> None:
    """Check that cp divides each tensor-parallel rank's heads, in layers whose cp ranks share heads and no sequence."""
    for name, size in shape.language.context_divided_widths().items():
        if size // parallel.tp % parallel.cp:
            fitting = [d for d in range(1, size + 1) if size // parallel.tp % d == 0]
            raise InputError(
                f"{names.parallel}cp={parallel.cp} x tp={parallel.tp} does not divide the model's {name}={size}, which "
                f"its ranks share; try {names.parallel}cp={_nearest(parallel.cp, fitting)}"
            )


def _check_layers(parallel: ParallelConfig, shape: ModelShape, names: FieldNames) -> None:
    problem = _layer_problem(parallel, shape)
    if problem is None:
        return
    fixes = list(_layer_fixes(parallel, shape))
    if not fixes:  # no single field is enough: take the nearest pipeline of equal ranks with one piece each
        even = parallel.model_copy(update={"vpp": 1, "first_pipeline_layers": None})
        pp = _nearest(parallel.pp, _fitting("pp", range(1, shape.language.num_layers + 1), even, shape))
        fixes = [{"pp": pp, "vpp": 1, "first_pipeline_layers": None}]
    written = (", ".join(f"{names.parallel}{field}={json.dumps(fix[field])}" for field in fix) for fix in fixes)
    raise InputError(f"{names.parallel}{problem}; try {' or '.join(written)}")


def _layer_problem(parallel: ParallelConfig, shape: ModelShape) -> str | None:
    """Return why the language layers do not fit the pipeline, starting with a field of `parallel`; None if they fit."""
    if parallel.pp == 1:
        return None
    least, groups = pipeline_room(shape, parallel)
    short = next(((group, layers) for group, layers in groups if layers < sum(least[i] for i in group)), None)
    if short is None:
        return None
    group, layers = short
    deep = f", {least[0]} of them in the first: one per deepstack level" if group[0] == 0 and least[0] > 1 else ""
    need = f"need {sum(least[i] for i in group)} layers{deep}"
    pp, vpp, first, total = parallel.pp, parallel.vpp, parallel.first_pipeline_layers, shape.language.num_layers
    if first is None:
        return f"pp={pp} ranks x vpp={vpp} are {len(group)} pieces of the model's num_layers={total}, which {need}"
    if group[0] == 0:
        return f"first_pipeline_layers={first} is for the first rank's vpp={vpp} pieces, which {need}"
    return (
        f"first_pipeline_layers={first} of num_layers={total} leaves {max(0, layers)} to the others of pp={pp} ranks, "
        f"whose vpp={vpp} pieces each {need} in all"
    )


def _layer_fixes(parallel: ParallelConfig, shape: ModelShape) -> Iterator[dict[str, int | None]]:
    """Yield, for each field that can make the layers fit by itself, the nearest value that does."""
    layers = range(1, shape.language.num_layers + 1)
    needs_pipeline = parallel.vpp > 1 or parallel.first_pipeline_layers is not None
    for field, candidates, start in (
        ("pp", layers[1:] if needs_pipeline else layers, parallel.pp),
        ("vpp", layers, parallel.vpp),
        ("first_pipeline_layers", layers, parallel.first_pipeline_layers or shape.language.num_layers / parallel.pp),
    ):
        best = _nearest(start, _fitting(field, candidates, parallel, shape))
        if best is not None:
            yield {field: best}


def _fitting(field: str, candidates: Iterable[int], parallel: ParallelConfig, shape: ModelShape) -> list[int]:
    return [c for c in candidates if _layer_problem(parallel.model_copy(update={field: c}), shape) is None]


def _check_global_batch(parallel: ParallelConfig, world_size: int, global_batch_size: int, names: FieldNames) -> None:
    """Check that all data-parallel ranks get the same number of bins, and with vpp a multiple of pp bins."""
    dp = parallel.data_parallel(world_size)
    unit, formula = dp, f"dp={dp}"
    if parallel.vpp > 1:
        # schedules.py: micro batches go through a piece of the model in groups, and no group may be smaller than pp.
        unit, formula = dp * parallel.pp, f"dp={dp} x pp={parallel.pp} = {dp * parallel.pp} (vpp={parallel.vpp})"
    if global_batch_size % unit:
        language, alone = f"{names.processes}={world_size}", parallel.vision_ranks
        language = f"({language} - vision.ranks={alone})" if alone else language
        raise InputError(
            f"train.global_batch_size={global_batch_size} bins is not a multiple of {formula}, where dp is "
            f"{language} / (tp x pp x cp = {parallel.model_size}); "
            f"try train.global_batch_size={_nearest_multiple(global_batch_size, unit)}"
        )


def _check_bins(parallel: ParallelConfig, seq_len: int, pad_multiple: int) -> None:
    whole_sample, whole_bin = parallel.pad_multiple, parallel.bin_multiple
    if seq_len % whole_bin:
        # Rounded up, because a longer bin keeps every sample, to a value that the plan's own check of pad_multiple
        # accepts.
        both = math.lcm(whole_bin, pad_multiple)
        raise InputError(
            f"plan_bins.seq_len={seq_len} is not a multiple of {whole_bin} (cp={parallel.cp}, tp={parallel.tp}, "
            f"sequence_parallel={json.dumps(parallel.sequence_parallel)}); "
            f"try plan_bins.seq_len={-(-seq_len // both) * both}"
        )
    if pad_multiple % whole_sample:
        fitting = [d for d in range(whole_sample, seq_len + 1, whole_sample) if seq_len % d == 0]
        raise InputError(
            f"plan_bins.pad_multiple={pad_multiple} is not a multiple of {whole_sample} (cp={parallel.cp}); "
            f"try plan_bins.pad_multiple={_nearest(pad_multiple, fitting)}"
        )
