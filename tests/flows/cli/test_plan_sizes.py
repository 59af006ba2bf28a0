"""The plan prints the host memory that the saves of a training take, and the tensors that an export copies."""

from pathlib import Path

from dataset_builders.contracts.manifest import Manifest
from flows.cli.main import main
from flows.cli.plan import size_rows
from flows.pipeline.recipe import load_recipe
from stages.shared.artifacts.artifact import Artifact
from stages.shared.launchers.vllm import VLLM_PYTHON
from tests.helpers.plans import unopened
from tests.helpers.standin import standin_python
from tests.helpers.tiny_hybrid_model import mtp_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir


def made(directory: Path, stage: str, stats: dict) -> Artifact:
    """Return a finished artifact of a stage, of which the plan reads the statistics alone."""
    fields = {"version": 2, "fingerprint": "f" * 16, "config": {}, "parents": {}}
    return Artifact(directory, Manifest(stage=stage, **fields, stats=stats))


def rows_of(*overrides: str, **artifacts: Artifact) -> dict[str, str]:
    return dict(size_rows(unopened(load_recipe("embedded", list(overrides)).config, **artifacts)))


def host_memory(*overrides: str) -> str | None:
    rows = rows_of(*overrides)
    assert "memory" in rows
    return rows.get("host memory")


PIPELINE = ("model.num_layers=11", "execution.parallel.pp=2", "execution.cluster.processes=2")


def test_the_layers_of_a_pipeline_are_those_that_the_trainer_will_deal(tmp_path):
    assert "layers" not in rows_of()
    full = rows_of(*PIPELINE)["layers"]
    assert full == "2, 9 by pipeline rank (if bins were full; for these bins known once the data is made)"
    sums = {"num_samples": 9, "num_tokens": 900, "num_loss_tokens": 0, "num_patches": 0, "num_images": 0}
    stats = {"epochs": [{"num_bins": 1, "num_tokens": 900, "subsets": {"text": sums}}]}
    sizes = {"num_bins": {"train": 1, "heldout": 0}, "padding_fraction": {"train": 0.0, "heldout": 0.0}}
    bins = made(tmp_path, "plan_bins", {**sizes, **stats})
    assert rows_of(*PIPELINE, plan_bins=bins)["layers"] == "5, 6 by pipeline rank"
    two = rows_of(*PIPELINE, "execution.parallel.vpp=2", "train.global_batch_size=2", plan_bins=bins)["layers"]
    assert two == "2 + 3, 3 + 3 by pipeline rank"  # without a loss the last layer costs little


def test_host_memory_is_named_where_a_save_comes_before_the_last():
    said = host_memory("execution.checkpoint.save_interval=10", "train.num_steps=1000")
    assert said.endswith("MB in the fullest process, page-locked: checkpoints are written from it")
    assert host_memory("execution.checkpoint.save_interval=1000", "train.num_steps=1000") is None
    assert host_memory("execution.checkpoint.save_interval=10", "execution.checkpoint.asynchronous=false") is None


def test_the_room_on_the_disk_counts_checkpoints_at_a_time_and_those_that_stay(monkeypatch):
    parameters = 631_520  # in float32: a checkpoint has 16 bytes of each, the model 4
    for free, room in ((32e6, "0 such trainings"), (33e6, "1 such training"), (59e6, "3 such trainings")):
        monkeypatch.setattr("flows.cli.plan.free_bytes", lambda place, free=free: int(free))
        said = rows_of("train.num_steps=1000", "execution.checkpoint.save_interval=100")["disk"]
        assert said.startswith("32.8 MB while it trains, 12.6 MB with its model afterwards; ") and said.endswith(room)
    assert round((3 * 16 + 4) * parameters / 1e6, 1) == 32.8 and round((16 + 4) * parameters / 1e6, 1) == 12.6
    assert rows_of("train.num_steps=100")["disk"].startswith("12.6 MB while it trains, 12.6 MB ")
    more = ("execution.checkpoint.keep_every=400", "execution.checkpoint.save_interval=100", "train.num_steps=1000")
    assert rows_of(*more)["disk"].startswith("53 MB while it trains, 32.8 MB ")  # those of steps 400 and 800 stay


def test_the_time_of_a_large_model_is_told_for_an_h200():
    assert "time" not in rows_of()  # float32
    large = ("model={variant: qwen3_vl_2b, seed: 0}", "train.precision=bfloat16", "tokenize.max_pixels=262144")
    bins = ("plan_bins.seq_len=6144", "plan_bins.max_patches=24576", "train.global_batch_size=20")
    step, whole = rows_of(*large, *bins, "train.num_steps=1000")["time"].split(", ")
    # Measured at that time: 25,850 tokens a second (tests/bench/results/transformers.md).
    assert 4.0 < float(step.split()[1]) < 6.5 and whole.startswith("79 min in all on an H200")
    assert "time" not in rows_of(*large, *bins, "train.adapter={rank: 8, alpha: 16}")


def test_tensors_that_are_carried_are_named_and_not_those_of_drafts_that_are_trained():
    carried, trained = (rows_of(f"model={mtp_hf_dir()}", f"train.mtp_loss_scaling_factor={n}") for n in (0, 0.1))
    assert carried["copied"] == "15 tensors mtp.*: exported as they are, not trained" and "mtp" not in carried
    assert "copied" not in trained and "copied" not in rows_of(f"model={tiny_hf_dir()}")
    assert trained["mtp"] == "65,920 of the parameters, 23.5% of a step's FLOPs"


CACHED = ("encode_images.dtype=bfloat16", "train.vision.frozen=true", "train.merger.frozen=true")


def test_the_bytes_of_image_features_are_said_as_far_as_they_are_known(tmp_path):
    assert "image features" not in rows_of()
    each = "384 bytes per image token in bfloat16 (3 x 64 numbers)"
    assert rows_of(*CACHED)["image features"] == f"{each}; in all known once the data is made"
    tokenized = made(tmp_path, "tokenize", {"total": {"num_patches": 40_000}})
    assert rows_of(*CACHED, tokenize=tokenized)["image features"] == f"{each}; 3.84 MB if no image occurs twice"
    stats = {"image_tokens": 7_000, "distinct_images": 90, "bytes": 2_688_000}
    rows = rows_of(*CACHED, tokenize=tokenized, encode_images=made(tmp_path, "encode_images", stats))
    assert rows["image features"] == f"{each}; 2.69 MB for 7,000 tokens of 90 distinct images"


def test_a_training_that_reads_features_keeps_no_activations_of_vision_and_deals_no_layers_to_it():
    frozen = CACHED[1:]
    computed, cached = (rows_of(*PIPELINE, *overrides)["layers"] for overrides in (frozen, CACHED))
    assert (computed[:4], cached[:4]) == ("4, 7", "6, 5")
    small = ("execution.parallel.recompute=full", "plan_bins.max_patches=8192")  # little of the language model
    computed, cached = (rows_of(*overrides, *small)["  activations"] for overrides in (frozen, CACHED))
    assert (computed, cached) == ("23.1 MB", "6.55 MB")


def test_adapters_are_counted_by_target_and_in_all(capsys, tmp_path):
    setting = "train.adapter={rank: 4, alpha: 8, targets: [attention, '.*visual.*fc1', delta]}"
    assert main(["plan", "--root", str(tmp_path), "--set", setting]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.partition("Adapters")[2].strip().splitlines()[:4]]
    # three layers of q, k, v, o; three of vision and three mergers
    assert rows[1] == ["attention", "12", "model.language_model.layers.0.self_attn.q_proj", "5,376"]
    assert rows[2] == [".*visual.*fc1", "6", "model.visual.blocks.0.mlp.linear_fc1", "8,448"]
    assert rows[3] == ["delta", "0", "none", "in", "this", "model", "0"]
    sizes = rows_of(setting)
    assert sizes["trained"] == "13,824 beside these (2.189%): lora of rank 4"
    assert sizes["  gradients"] == "55.3 kB" and sizes["  optimizer"] == "111 kB"
    assert "trained" not in rows_of() and "Adapters" not in said.partition("Adapters")[2]


def test_the_parameters_that_a_token_uses_are_told_for_experts():
    assert "for a token" not in rows_of()["parameters"]
    row = rows_of("model={variant: qwen3_vl_30b_a3b, seed: 0}", "tokenize.max_pixels=262144")["parameters"]
    assert row.startswith("31,070,754,032 (") and row.endswith(", 3,891,664,112 of them for a token"), row


def test_a_large_model_is_told_which_programs_can_answer(tmp_path, monkeypatch):
    large = ("model={variant: qwen3_vl_2b, seed: 0}", "tokenize.max_pixels=262144")
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    assert "answers" not in rows_of(*large)
    python = standin_python(tmp_path)
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    said = f"by transformers; vLLM 0.24.0 is here ({python}), so evaluate.engine=vllm works too"
    assert rows_of(*large)["answers"] == said and "answers" not in rows_of()
