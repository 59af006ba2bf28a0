"""The bench of training steps: transformers' side is fair, a trace is read right, and the command fills its tables."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.plan_bins.stage import PlanBinsConfig
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.train.stage import make_run_config
from tests.bench import peer
from tests.bench.bench_train_step import layers_of_pieces
from tests.bench.mix import config_of, write_data, write_model
from tests.bench.peer import PeerPlan, collate, read_samples, shuffled
from tests.bench.trace_parts import MARK, STEP_BEGINS, STEP_ENDS, read_parts
from tests.bench.train_report import Measured, column_of_layout
from tests.bench.trainer_job import Execution, endless_training, write_run
from tests.helpers.fake_trainer import metrics_row
from tests.helpers.reference import load_reference, reference_losses
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainerExecution
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.registry import read_model
from trainer.plan.checks import pieces_of

SEQ_LEN = 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, what was written)"""
    root = tmp_path_factory.mktemp("bench")
    torch.manual_seed(0)
    write_model(root / "hf", "qwen3_vl_tiny")
    return root, write_data(root, 3, SEQ_LEN, model="qwen3_vl_tiny")


def test_both_sides_count_the_same_tokens_of_the_same_samples(tiny):
    root, mix = tiny
    samples = read_samples(root, SEQ_LEN)
    sizes = read_model(root / "hf")[1]
    ours = [make_micro_batch([sample], geometry_of(sizes), SEQ_LEN) for sample in samples]
    order = shuffled(samples)
    epoch = [next(order) for _ in samples]
    peers = [collate(epoch[i : i + 3], sizes.images, torch.float32) for i in range(0, len(epoch), 3)]
    assert sorted(sample.key for sample in epoch) == sorted(sample.key for sample in samples)
    assert [sample.key for sample in epoch] != [sample.key for sample in samples]
    assert sum(b.num_tokens for b in ours) == sum(b.tokens for b in peers) == mix.work.tokens
    assert sum(b.num_loss_tokens for b in ours) == sum(b.loss_tokens for b in peers) == mix.work.loss_tokens
    assert mix.samples == len(samples) and mix.work.patches == sum(sum(b.image_patches) for b in ours)
    assert sum(b.slots for b in peers) > mix.work.tokens


@pytest.mark.parametrize(
    ("model", "parallel", "layers"),
    [
        ("qwen3_vl_2b", ParallelConfig(pp=2), [3, 25]),
        ("qwen3_vl_2b", ParallelConfig(pp=2, vision="dealt"), [14, 14]),
        ("qwen3_vl_4b", ParallelConfig(pp=2), [11, 25]),
        ("qwen3_vl_4b", ParallelConfig(pp=2, vision="dealt"), [18, 18]),
    ],
)
def test_a_bench_divides_the_layers_as_the_pipeline_does_for_the_same_samples(model, parallel, layers, tmp_path):
    """`layers` follow from the sums over the samples: the first rank's share of vision is so many layers."""
    write_data(tmp_path, 4, 4096, model=model)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of(model)))
    train = endless_training(4)
    out = write_run(tmp_path, train, 4096, Execution(gpus=2, parallel=parallel))
    assert layers_of_pieces(out) == layers
    plan = PlanBinsConfig(seq_len=4096, max_patches=4 * 4096, pad_multiple=4)
    tokenized = Artifact.load(tmp_path / "data")
    bins = run_stage(PLAN_BINS, plan, {"tokenized": tokenized}, tmp_path / "pipeline").artifact
    inputs = {"model": External(tmp_path / "hf", "hf_dir", "b" * 16), "tokenized": tokenized, "bins": bins}
    resources = StageResources(trainer=TrainerExecution(parallel=parallel))
    run = make_run_config(train, inputs, tmp_path / "run", resources)
    assert [len(piece) for piece in pieces_of(run, read_model(run.hf_dir)[1])] == layers


def test_a_padded_batch_has_the_losses_of_its_samples_alone(tiny):
    root, _ = tiny
    samples = read_samples(root, SEQ_LEN)[:4]
    model = load_reference(root / "hf").eval()
    batch = collate(samples, model.config, torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4 if param.ndim > 1 else 1)  # so that attention, and with it positions, matter
        alone = torch.cat([reference_losses(model, sample) for sample in samples])
        together = model(**batch.inputs, use_cache=False, num_items_in_batch=2 * batch.loss_tokens).loss
    assert len(alone) == batch.loss_tokens
    assert float(together) == pytest.approx(float(alone.sum()) / (2 * len(alone)), rel=1e-5)


@pytest.mark.full
def test_a_size_that_does_not_fit_ends_the_search(tiny, monkeypatch):
    root, _ = tiny
    measure = peer._measure

    def with_little_memory(model, samples, plan, row):
        measure(model, samples, plan, row)
        if row.micro_batch > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(peer, "_measure", with_little_memory)
    plan = PeerPlan(micro_batches=(1, 2, 3), global_batch=3, steps=1, warmup=0, seq_len=SEQ_LEN, dtype=torch.float32)
    rows = peer.measure_peer(root, plan)
    assert [row.fits for row in rows] == [True, False, False]
    assert rows[0].tokens == [rows[0].mix.work.tokens] and rows[0].mix.samples == 3 and math.isfinite(rows[0].loss)
    assert [row.why for row in rows[1:]] == [
        "OutOfMemoryError: CUDA out of memory.",
        "larger than one that could not be measured",
    ]


def event(cat, name, ts, dur, correlation=None):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def test_every_instant_of_a_traced_step_belongs_to_one_thing(tmp_path):
    # What the host launches, and when it runs: (mark, kernel, start, stop).
    ran = [
        ("data", "Memcpy HtoD (Pinned -> Device)", 30, 50),  # 20 waited for it
        ("vision", "nvjet_hsh_128x256", 50, 150),
        ("language", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 150, 250),
        ("language", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", 200, 300),  # 50 beside, 50 alone
        ("loss", "void at::native::reduce_kernel<512>", 300, 340),
        ("optimizer", "multi_tensor_apply_kernel<Adam>", 400, 490),  # 60 idle
        ("language", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 480, 490),
    ]
    events = [event("user_annotation", MARK + STEP_BEGINS, 10, 0)]
    for place, (part, name, start, stop) in enumerate(ran):
        events.append(event("user_annotation", MARK + part, 11 + 2 * place, 0))
        events.append(event("cuda_driver" if place % 2 else "cuda_runtime", "launch", 12 + 2 * place, 1, place))
        events.append(event("gpu_memcpy" if "Memcpy" in name else "kernel", name, start, stop - start, place))
    events.append(event("kernel", "before the step", 0, 5, 99))
    events.append(event("user_annotation", MARK + STEP_ENDS, 500, 0))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    parts = read_parts(tmp_path / "trace.json")
    us = {name: round(1e6 * seconds, 3) for name, seconds in parts.shares.items() if seconds}
    assert us == {
        **{"data wait": 20, "host to device": 20, "vision": 100, "language": 100, "loss": 40},
        **{"optimizer": 90, "communication": 50, "idle": 70},
    }
    assert sum(us.values()) == pytest.approx(490) == pytest.approx(1e6 * parts.seconds)
    assert 1e6 * parts.hidden == pytest.approx(60)
    assert {name: round(1e6 * s) for name, s in parts.collectives.items()} == {**{"ReduceScatter": 100, "SendRecv": 10}}
    assert set(parts.kinds) == {
        *(("vision", "matrix products"), ("language", "attention")),
        *(("loss", "reductions"), ("optimizer", "optimizer's own")),
    }


def test_the_figures_of_a_layout_are_sums_over_wall_clock_time():
    rows = [metrics_row(step, time_ms=1000 * step, step_seconds=0.5, data_seconds=0.1) for step in (1, 2, 3)]
    rows = [row.model_copy(update={"tokens_per_second": 150.0 + row.step}) for row in rows]
    for row in rows:
        row.model_extra.update(language_tflops=3.0, vision_tflops=1.0)
    host = SimpleNamespace(product="bfloat16", peak=4e12, rate=2e12, sustained=1e12)
    measured = Measured(host=host, command="", model="", mix=None, cost=None, gpus={"dp 2": 2}, rows={"dp 2": rows})
    column = column_of_layout(measured, "dp 2")
    wanted = {
        "useful tokens/s/GPU": 50,
        "the same, slowest step": 76,
        "the same, fastest step": 76.5,
        "loss tokens/s/GPU": 5,
        "TFLOP/s/GPU, vision + language": 4 * 0.5 * 2 / 2 / 2,
        "MFU, %": 25,
        "useful tokens a step": 100,
        "step, s": 0.5,
        "wall clock a step, s": 1,
        "data wait with its copies, % of the step": 10,
    }
    assert {name: column[name] for name in wanted} == pytest.approx(wanted)


def tables_of(report):
    """{first header cell: {row: {column: number}}}"""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found[head[0]] = {row[0]: dict(zip(head[1:], row[1:])) for row in rows}
    return found


@pytest.mark.full
def test_the_command_fills_its_tables(tmp_path):
    out = tmp_path / "report.md"
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.bench_train_step", "--tiny", "--peer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--new-shapes", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "Not measured" not in text
    assert text.strip() in done.stdout
    tables = tables_of(text)
    assert len(tables) == 5
    for table in tables.values():
        for row, cells in table.items():
            values = [float(cell.replace(",", "")) for cell in cells.values() if cell != "-"]
            assert values and all(math.isfinite(value) for value in values), row
    main = tables["sums over the counted steps; parts: medians"]
    ours, peer = "dp 1 (1 GPU)", "transformers"
    numbers = {
        *("useful tokens/s/GPU", "loss tokens/s/GPU", "TFLOP/s/GPU, vision + language", "padding, %", "step, s"),
        *("peak memory of rank 0, GB", "useful tokens a step", "times transformers"),
    }
    assert all(float(main[row][column].replace(",", "")) > 0 for row in numbers for column in main[row])
    assert {name.split(",")[0] for name in main["step, s"]} == {ours, peer}
    parts = {"data wait with its copies, s", "vision, s", "language and loss, s", "optimizer, s"}
    assert all(float(main[row][ours]) > 0 for row in parts)
    traced = {row: float(cells[f"{ours}, rank 0"]) for row, cells in tables["a traced step"].items()}
    assert all(traced[f"{part}, s"] > 0 for part in ("vision", "language", "loss", "optimizer"))
    assert tables["one bin a step"]["bins"] == {"first time": "4", "again": "4"}
