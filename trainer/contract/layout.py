"""Does a layout fit the model, the processes, the global batch and the bins? Said in one line before anything starts.

What megatron-core 0.16.1 would assert later, in its own words, is refused here: transformer_config.py (heads, query
groups, uneven pipelines), transformer_block.py (get_num_layers_to_build), tensor_parallel/ (every divided width),
parallel_state.py (world size), schedules.py (micro batches of the interleaved schedule). Every message names the
fields, their values and the nearest value that works.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import load_manifest
from trainer.contract import ParallelConfig, RunConfig
from trainer.contract.model_facts import ModelFacts, read_facts


class FieldNames(NamedTuple):
    """How the fields are called where the person who reads the message sets them; here, in run.json and torchrun."""

    parallel: str = "parallel."
    processes: str = "processes"


IN_RUN_JSON = FieldNames()


def check_run(run: RunConfig, world_size: int) -> None:
    """`check_layout` of a job whose inputs are on disk.

    Raises:
        InputError: something does not fit, or `hf_dir` or `bins_dir` is not what it should be.
    """
    plan = load_manifest(run.bins_dir).config
    if "pad_multiple" not in plan:
        raise InputError(f"bins_dir={run.bins_dir} is no artifact of plan_bins: its manifest has no pad_multiple")
    check_layout(
        run.parallel,
        read_facts(run.hf_dir),
        world_size=world_size,
        global_batch_size=run.train.global_batch_size,
        seq_len=run.seq_len,
        pad_multiple=plan["pad_multiple"],
    )


def check_layout(
    parallel: ParallelConfig,
    facts: ModelFacts | None,
    *,
    world_size: int,
    global_batch_size: int,
    seq_len: int,
    pad_multiple: int,
    names: FieldNames = IN_RUN_JSON,
) -> None:
    """See that a layout fits all that it meets.

    Args:
        facts: of the model; None where it is not known yet: then what depends on it is not checked.
        world_size: processes, over all hosts.
        global_batch_size: bins between two optimizer updates.
        seq_len: tokens a bin holds.
        pad_multiple: what the plan of the bins rounds each sample's tokens up to.

    Raises:
        InputError: it does not fit.
    """
    if facts is not None:
        _check_tensor_parallel(parallel, facts, names)
        _check_layers(parallel, facts, names)
    check_world(parallel, world_size, names)
    _check_global_batch(parallel, world_size, global_batch_size, names)
    _check_bins(parallel, seq_len, pad_multiple)


def check_world(parallel: ParallelConfig, world_size: int, names: FieldNames = IN_RUN_JSON) -> None:
    """See that the processes divide into copies of the model.

    Raises:
        InputError: they do not.
    """
    size = parallel.model_size
    if world_size % size:
        raise InputError(
            f"{names.processes}={world_size} is not a multiple of tp={parallel.tp} x pp={parallel.pp} x "
            f"cp={parallel.cp} = {size}; try {names.processes}={_nearest_multiple(world_size, size)}"
        )


def _nearest(value: float, candidates: Iterable[int]) -> int | None:
    return min(candidates, key=lambda candidate: (abs(candidate - value), candidate), default=None)


def _nearest_multiple(value: int, of: int) -> int:
    down = value // of * of
    return _nearest(value, [down, down + of] if down else [of])


def _check_tensor_parallel(parallel: ParallelConfig, facts: ModelFacts, names: FieldNames) -> None:
    """tp divides every width that is shared. Fewer key-value heads than ranks are refused: megatron-core would give
    several ranks the same head, which no test of ours has seen. The merger's width is a multiple of the vision heads.
    """
    language = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    vision = ("vision_num_heads", "vision_intermediate_size") if parallel.vision_split == "tensor_parallel" else ()
    sizes = {name: getattr(facts, name) for name in (*language, *vision)}
    wrong = next((name for name in sizes if sizes[name] % parallel.tp), None)
    if wrong is None:
        return
    common = math.gcd(*sizes.values())
    fixes = [f"{names.parallel}tp={_nearest(parallel.tp, _divisors(common))}"]
    split = ""
    if wrong in vision:
        split = f" (vision_split={parallel.vision_split})"
        fixes.append(f"{names.parallel}vision_split=images")
    raise InputError(
        f"{names.parallel}tp={parallel.tp} does not divide the model's {wrong}={sizes[wrong]}{split}; "
        f"try {' or '.join(fixes)}"
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _check_layers(parallel: ParallelConfig, facts: ModelFacts, names: FieldNames) -> None:
    problem = _layer_problem(parallel, facts)
    if problem is None:
        return
    fixes = list(_layer_fixes(parallel, facts))
    if not fixes:  # no single field mends it: the nearest pipeline of even, whole ranks
        even = parallel.model_copy(update={"vpp": 1, "first_pipeline_layers": None})
        pp = _nearest(parallel.pp, _fitting("pp", range(1, facts.num_layers + 1), even, facts))
        fixes = [{"pp": pp, "vpp": 1, "first_pipeline_layers": None}]
    written = (", ".join(f"{names.parallel}{field}={json.dumps(fix[field])}" for field in fix) for fix in fixes)
    raise InputError(f"{names.parallel}{problem}; try {' or '.join(written)}")


def _layer_problem(parallel: ParallelConfig, facts: ModelFacts) -> str | None:
    """Why the language layers do not fit the pipeline, beginning with a field of `parallel`; None where they do."""
    pp, vpp, first, layers = parallel.pp, parallel.vpp, parallel.first_pipeline_layers, facts.num_layers
    if pp == 1:
        return None
    if first is None:
        if layers % (pp * vpp):
            return f"pp={pp} ranks x vpp={vpp} pieces do not share the model's num_layers={layers} evenly"
        chunk = layers // (pp * vpp)
    else:
        rest = layers - first
        if rest <= 0:
            return (
                f"first_pipeline_layers={first} of num_layers={layers} leaves no layer to the others of pp={pp} ranks"
            )
        if first % vpp:
            return f"first_pipeline_layers={first} does not divide into vpp={vpp} pieces"
        if rest % ((pp - 1) * vpp):
            return (
                f"first_pipeline_layers={first} of num_layers={layers} leaves {rest}, which the {pp - 1} others of "
                f"pp={pp} ranks x vpp={vpp} pieces do not share evenly"
            )
        chunk = first // vpp
    if chunk < facts.num_deepstack:
        return (
            f"pp={pp}, vpp={vpp}, first_pipeline_layers={json.dumps(first)} put {chunk} of num_layers={layers} into "
            f"the first piece of the first rank, which needs {facts.num_deepstack}: one for each deepstack level"
        )
    return None


def _layer_fixes(parallel: ParallelConfig, facts: ModelFacts) -> Iterator[dict[str, int | None]]:
    """For each field that can mend it alone, the nearest value that does."""
    layers = range(1, facts.num_layers + 1)
    needs_pipeline = parallel.vpp > 1 or parallel.first_pipeline_layers is not None
    for field, candidates, start in (
        ("pp", layers[1:] if needs_pipeline else layers, parallel.pp),
        ("vpp", layers, parallel.vpp),
        ("first_pipeline_layers", layers, parallel.first_pipeline_layers or facts.num_layers / parallel.pp),
    ):
        best = _nearest(start, _fitting(field, candidates, parallel, facts))
        if best is not None:
            yield {field: best}


def _fitting(field: str, candidates: Iterable[int], parallel: ParallelConfig, facts: ModelFacts) -> list[int]:
    return [c for c in candidates if _layer_problem(parallel.model_copy(update={field: c}), facts) is None]


def _check_global_batch(parallel: ParallelConfig, world_size: int, global_batch_size: int, names: FieldNames) -> None:
    """Every data-parallel rank gets as many bins; with vpp a multiple of pp of them (schedules.py: groups of pp micro
    batches go through a piece of the model one after the other, and no group may be smaller than pp).
    """
    dp = world_size // parallel.model_size
    unit, wanted = dp, f"dp={dp}"
    if parallel.vpp > 1:
        unit, wanted = dp * parallel.pp, f"dp={dp} x pp={parallel.pp} = {dp * parallel.pp} (vpp={parallel.vpp})"
    if global_batch_size % unit:
        raise InputError(
            f"train.global_batch_size={global_batch_size} bins is not a multiple of {wanted}, where dp is "
            f"{names.processes}={world_size} / (tp x pp x cp = {parallel.model_size}); "
            f"try train.global_batch_size={_nearest_multiple(global_batch_size, unit)}"
        )


def _check_bins(parallel: ParallelConfig, seq_len: int, pad_multiple: int) -> None:
    """Slices of bins and of samples are whole. A longer bin keeps every sample, so seq_len is rounded up, and to what
    the plan's own check wants of the two.
    """
    wanted, whole_bin = parallel.pad_multiple, parallel.bin_multiple
    if seq_len % whole_bin:
        both = math.lcm(whole_bin, pad_multiple)
        raise InputError(
            f"plan_bins.seq_len={seq_len} is not a multiple of {whole_bin} (cp={parallel.cp}, tp={parallel.tp}, "
            f"sequence_parallel={json.dumps(parallel.sequence_parallel)}); "
            f"try plan_bins.seq_len={-(-seq_len // both) * both}"
        )
    if pad_multiple % wanted:
        whole = [d for d in range(wanted, seq_len + 1, wanted) if seq_len % d == 0]
        raise InputError(
            f"plan_bins.pad_multiple={pad_multiple} is not a multiple of {wanted} (cp={parallel.cp}); "
            f"try plan_bins.pad_multiple={_nearest(pad_multiple, whole)}"
        )
