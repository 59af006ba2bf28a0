"""How the trainer ends when it cannot go on: one line, its own exit code, nothing half done."""

import contextlib
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dataset_builders.errors import InputError
from tests.helpers.reference import random_hf_dir
from tests.helpers.run_dir import OPTIM, changed, log_of, make_bins, result_of, run_trainer, write_job
from tests.trainer.train_config import train_config
from trainer.checkpoint.directory import list_checkpoints, read_step
from trainer.contract.checkpoint import write_checkpoint_record
from trainer.contract.names import EXIT_FAILED, EXIT_INPUT
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import geometry_of
from trainer.loop import job
from trainer.model.registry import read_model


def test_a_loss_that_is_not_finite_names_the_step_and_its_samples(tmp_path):
    run = write_job(tmp_path, num_steps=4)
    broken = tmp_path / "hf"
    shutil.copytree(run.hf_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.language_model.norm.weight"][0] = float("inf")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    run = changed(run, hf_dir=broken)
    assert run_trainer(run, processes=0) == EXIT_FAILED
    result = result_of(run)
    assert result.status == "failed" and result.step == 0
    assert "step 0: gradient norm is nan" in result.message and "train.optim.lr" in result.message
    assert len(result.keys) == 7 and all(key.startswith("train/") for key in result.keys)
    assert not list_checkpoints(run.output_dir / "checkpoints")


def test_a_full_gpu_is_one_line_with_the_way_out(tmp_path, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 62.00 MiB.\nGPU 0 has 79.18 GiB.")

    mesh = SimpleNamespace(is_vision=False)
    monkeypatch.setattr(job, "rank_mesh", lambda *_: contextlib.nullcontext(mesh))
    monkeypatch.setattr(job, "train", no_room)
    result = job.run_job(write_job(tmp_path, num_steps=4))
    assert "rank 0" in result.message and "Tried to allocate 62.00 MiB. GPU 0 has 79.18 GiB.)" in result.message
    assert "lower plan_bins.seq_len" in result.message and "\n" not in result.message


def test_image_tokens_that_are_torn_apart_are_the_input_s_fault_and_not_tried_again(tmp_path):
    bins, image = make_bins("first"), geometry_of(read_model(random_hf_dir("first"))[1]).image_token_id
    torn = next(sample for sample in bins[0] if (sample.input_ids == image).sum() > 1)
    last = np.flatnonzero(torn.input_ids == image)[-1]
    torn.input_ids[[last, last + 1]] = torn.input_ids[[last + 1, last]]
    run = write_job(tmp_path, num_steps=4, bins=bins)
    assert run_trainer(run, processes=0) == EXIT_INPUT
    result = result_of(run)
    assert result.is_input_error and "Traceback" not in log_of(run)
    assert re.fullmatch(rf"{run.tokenized_dir}: heldout/\d+: other tokens lie .* tokenize it again", result.message)


def test_a_world_that_does_not_divide_is_found_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "rank_mesh", None)
    run = write_job(tmp_path, num_steps=4, parallel=ParallelConfig(tp=2))
    result = job.run_job(run)
    assert "processes=1 is not a multiple of tp=2 x pp=1 x cp=1 = 2; try processes=2" in result.message
    assert result.is_input_error and "Traceback" not in capsys.readouterr().err


def test_a_run_json_that_is_none_is_one_line(tmp_path, capsys):
    run = write_job(tmp_path, num_steps=4)
    raw = json.loads((run.output_dir / "run.json").read_text())
    raw["train"]["num_stepz"] = 2
    (run.output_dir / "run.json").write_text(json.dumps(raw))
    assert job.run_file(run.output_dir / "run.json") == EXIT_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json: train.num_stepz: Extra inputs are not permitted" in line


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    run = write_job(tmp_path, num_steps=4)
    assert run_trainer(run, processes=0) == 0
    other = run.train.model_copy(update={"optim": run.train.optim.model_copy(update={"lr": 0.5})})
    run = changed(run, train=other, fingerprint="f" * 16)
    assert run_trainer(run, processes=0) == EXIT_INPUT
    assert "optim.lr: 0.003 -> 0.5" in result_of(run).message
    newest = list_checkpoints(run.output_dir / "checkpoints")[-1]
    with pytest.raises(InputError, match="belongs to another training"):
        read_step(newest, run)
    write_checkpoint_record(newest, {"format_version": 0})
    with pytest.raises(InputError, match="format_version is 0, this code reads 2"):
        read_step(newest, run)


def test_a_warmup_as_long_as_the_training_is_refused():
    with pytest.raises(ValueError, match=r"optim\.warmup_steps=10 leaves nothing of num_steps=10; try .*=1"):
        train_config(num_steps=10, optim={**OPTIM.model_dump(), "warmup_steps": 10})


def test_float8_is_refused_where_it_cannot_be(tmp_path):
    run = write_job(tmp_path, num_steps=4)
    run = changed(run, train=run.train.model_copy(update={"precision": "float8"}))
    assert run_trainer(run, processes=0) == EXIT_INPUT
    assert result_of(run).message.startswith("train.precision=float8 needs a GPU of the Hopper generation or newer")
