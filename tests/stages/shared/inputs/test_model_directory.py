"""An HF directory: every error in it gives one line, and its digests follow its content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.errors import InputError
from flows.cli.check import check_model_dir
from flows.cli.main import make_parser
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from stages.answer.ask import ask
from stages.shared.artifacts.verify import file_entries
from stages.shared.inputs.model_directory import (
    ModelDirectory,
    model_input,
    processor_input,
    resolve_hf_dir,
    safetensors_header,
)
from tests.helpers.adapter_files import write_adapter
from tests.helpers.bins import TEXT_ONLY, make_samples
from tests.helpers.reference import load_reference, reference_logits
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, mtp_hf_dir
from tests.helpers.tiny_model import SHAPES, tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from trainer.checkpoint.hf_weights import HFTensors
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.model.registry import read_model


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        ModelDirectory(path).check_weights()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_tensors_that_are_only_carried_are_not_counted():
    path = hybrid_hf_dir()
    ModelDirectory(path).check_weights()
    tensors = load_file(path / "model.safetensors")
    trained = sum(tensor.numel() for name, tensor in tensors.items() if not name.startswith("mtp."))
    assert sum(ModelDirectory(path).count_parameters().values()) == trained
    assert trained < sum(tensor.numel() for tensor in tensors.values())


def test_a_training_of_drafts_needs_their_tensors(tmp_path):
    path = Path(shutil.copytree(mtp_hf_dir(), tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    check_model(load_recipe("embedded", [f"model={path}"]).config)
    trained = "train.mtp_loss_scaling_factor=0.1"
    check_model(load_recipe("embedded", [f"model={mtp_hf_dir()}", trained]).config)
    with pytest.raises(InputError, match=r"lacks mtp\.norm\.weight, which .* or set train\.mtp_loss_scaling_factor=0$"):
        check_model(load_recipe("embedded", [f"model={path}", trained]).config)
    with pytest.raises(InputError, match="this model has none"):
        check_model(load_recipe("embedded", [trained]).config)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("preprocessor_config.json", "no preprocessor_config.json"),
        ("chat_template.jinja", "no chat template"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_missing_file_is_named(hf_dir, name, words):
    (hf_dir / name).unlink()
    assert words in _refusal(hf_dir)


def test_a_missing_directory_is_named(tmp_path):
    assert "does not exist" in _refusal(tmp_path / "nowhere")


def test_another_architecture_is_refused_with_the_list(hf_dir):
    _edit(hf_dir / "config.json", model_type="llava")
    assert "'llava'; supported: qwen3, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe" in _refusal(hf_dir)
    _edit(hf_dir / "config.json", model_type="qwen4_exp")
    assert "'qwen4_exp', whose sparse attention, gated residual streams and" in _refusal(hf_dir)


@pytest.mark.parametrize("kept", [0, 5, 2000, -1])
def test_weights_cut_short_are_refused(hf_dir, kept):
    data = (hf_dir / "model.safetensors").read_bytes()
    (hf_dir / "model.safetensors").write_bytes(data[:kept])
    assert "copy it again" in _refusal(hf_dir)


def _shard(hf_dir: Path) -> dict[str, torch.Tensor]:
    """Split the weights into two files with an index, as large models have them."""
    tensors = load_file(hf_dir / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, hf_dir / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (hf_dir / "model.safetensors").unlink()
    return tensors


def test_sharded_weights_pass_and_what_is_missing_is_named(hf_dir):
    whole = ModelDirectory(hf_dir).count_parameters()
    _shard(hf_dir)
    ModelDirectory(hf_dir).check_weights()
    assert ModelDirectory(hf_dir).count_parameters() == whole
    second = hf_dir / "model-00002-of-00002.safetensors"
    tensors = load_file(second)
    name, _ = tensors.popitem()
    save_file(tensors, second)
    assert f"lacks {name} (1 tensors" in _refusal(hf_dir)
    second.unlink()
    assert "names model-00002-of-00002.safetensors, which is missing" in _refusal(hf_dir)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_by_part(shape):
    model = AutoModelForImageTextToText.from_pretrained(tiny_hf_dir(shape), local_files_only=True)
    visual = model.model.visual
    merger = sum(p.numel() for m in (visual.merger, visual.deepstack_merger_list) for p in m.parameters())
    vision = sum(p.numel() for p in visual.parameters()) - merger
    language = sum(p.numel() for p in model.parameters()) - vision - merger
    counted = ModelDirectory(tiny_hf_dir(shape)).count_parameters()
    assert counted == {"vision": vision, "merger": merger, "language": language}


TEXTS = {
    "empty": "",
    "cut": '{"model_type": "qwen3',
    "a list": "[]",
    "null": "null",
    "text": '"text"',
    "deep": '{"a":' * 100_000,
    "a long number": '{"model_type": ' + "1" * 5000 + "}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_json_of_another_shape_is_one_line(hf_dir, name, text):
    if name == "model.safetensors.index.json":
        _shard(hf_dir)
    if name == "tokenizer_config.json":
        (hf_dir / "chat_template.jinja").unlink()
    (hf_dir / name).write_text(text)
    line = _refusal(hf_dir)
    assert line.startswith(str(hf_dir / name)) and "copy the model's own file again" in line and len(line) < 400


@pytest.mark.parametrize("text_config", [None, [], 7, "text", {}])
def test_a_text_config_that_is_none_is_one_line(hf_dir, text_config):
    _edit(hf_dir / "config.json", text_config=text_config)
    assert "config" in _refusal(hf_dir)
    config = json.loads((hf_dir / "config.json").read_text())
    del config["text_config"]
    (hf_dir / "config.json").write_text(json.dumps(config))
    assert "has no text_config; copy the model's own config.json" in _refusal(hf_dir)


@pytest.mark.parametrize("weight_map", [None, [], {}, 7, "text"])
def test_an_index_without_a_map_is_one_line(hf_dir, weight_map):
    _shard(hf_dir)
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map is not an object of tensors" in _refusal(hf_dir)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "sub/w.safetensors", "/etc/passwd", "", ".", "..", 7, [], None, "weights.bin"]
)
def test_an_index_names_files_beside_it_alone(hf_dir, name):
    """Other files would be in no digest, so a change of them would go unnoticed."""
    tensors = _shard(hf_dir)
    index = hf_dir / "model.safetensors.index.json"
    weight_map = {**json.loads(index.read_text())["weight_map"], sorted(tensors)[0]: name}
    for outside in (hf_dir.parent / "outside.safetensors", hf_dir / "sub" / "w.safetensors"):
        outside.parent.mkdir(exist_ok=True)
        shutil.copyfile(hf_dir / "model-00001-of-00002.safetensors", outside)
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "only *.safetensors beside the index are read: put the file there and name it so" in _refusal(hf_dir)


def test_the_single_file_is_taken_where_there_is_an_index_too(hf_dir):
    """from_pretrained also prefers it, so the file that is checked is the file that is trained."""
    single = (hf_dir / "model.safetensors").read_bytes()
    _shard(hf_dir)
    (hf_dir / "model-00001-of-00002.safetensors").write_bytes(b"")
    (hf_dir / "model.safetensors").write_bytes(single)
    ModelDirectory(hf_dir).check_weights()
    source = HFTensors(hf_dir)
    assert all(source.get(name).numel() for name in source.names())


def _with_head(hf_dir: Path, head: torch.Tensor | None, *, in_shards: bool = False) -> None:
    """Store an output projection beside the embedding of a tied model; None: a copy of the embedding."""
    tensors = load_file(hf_dir / "model.safetensors")
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = embedding.clone() if head is None else head.reshape(embedding.shape)
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    if in_shards:
        _shard(hf_dir)


TIED = {"text": text_hf_dir, "images": tiny_hf_dir, "hybrid": hybrid_hf_dir}


@pytest.mark.parametrize(("kind", "in_shards"), [("text", False), ("images", True), ("hybrid", False)])
def test_a_tied_model_that_stores_another_output_projection_is_refused_and_the_advice_trains_it(
    tmp_path, kind, in_shards
):
    hf_dir = Path(shutil.copytree(TIED[kind](), tmp_path / "model"))
    _with_head(hf_dir, None, in_shards=in_shards)
    ModelDirectory(hf_dir).check_weights()
    shutil.rmtree(hf_dir)
    shutil.copytree(TIED[kind](), hf_dir)
    vocab = next(f for f in safetensors_header(hf_dir / "model.safetensors").items() if "embed_tokens" in f[0])[1]
    head = 0.1 * torch.randn(vocab["shape"], generator=torch.Generator().manual_seed(5))
    _with_head(hf_dir, head, in_shards=in_shards)
    line = _refusal(hf_dir)
    assert "lm_head.weight differs from model." in line and "set tie_word_embeddings to false there" in line
    with single_rank() as mesh:
        (sample,) = make_samples([TEXT_ONLY], geometry_of(read_model(hf_dir)[1]), range(20, 300))
        theirs = reference_logits(load_reference(hf_dir), sample)
        config = json.loads((hf_dir / "config.json").read_text()) | {"tie_word_embeddings": False}
        if "text_config" in config:  # transformers reads only the key of the whole model
            config["text_config"]["tie_word_embeddings"] = True
        (hf_dir / "config.json").write_text(json.dumps(config))
        ModelDirectory(hf_dir).check_weights()
        assert torch.equal(reference_logits(load_reference(hf_dir), sample), theirs)
        ours = build_tiny(hf_dir, mesh)
        batch = make_micro_batch([sample], geometry_of(ours.shape), 128)
        logits = ours.hidden_states(batch)[:, 0] @ ours.language.output_weight.t()
    torch.testing.assert_close(logits[: len(theirs)], theirs, atol=1e-4, rtol=0)


def test_an_output_projection_of_another_dtype_is_refused(hf_dir):
    embedding = load_file(hf_dir / "model.safetensors")["model.language_model.embed_tokens.weight"]
    _with_head(hf_dir, embedding.bfloat16())
    assert "lm_head.weight differs" in _refusal(hf_dir)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_weights_is_refused_for_training_and_for_answers(hf_dir, tmp_path, name):
    adapter = write_adapter(tmp_path / "adapter", hf_dir)
    shutil.copyfile(adapter / name, hf_dir / name)
    line = _refusal(hf_dir)
    assert f"{hf_dir / name} is an adapter's" in line and "move it to a directory of its own" in line
    given = make_parser().parse_args(["ask", str(hf_dir), "-", "Which digit?"])
    for check in (
        lambda: check_model(load_recipe("embedded", [f"model={hf_dir}"]).config),
        lambda: check_model_dir(given),
        lambda: ask(hf_dir, None, "Which digit?"),
    ):
        with pytest.raises(InputError, match="is an adapter's, beside the weights"):
            check()
    (hf_dir / name).unlink()
    check_model_dir(make_parser().parse_args(["ask", str(hf_dir), "-", "Which?", "--adapter", str(adapter)]))
    with pytest.raises(InputError, match="it is an adapter: give its base model, and this directory as start_adapter"):
        ModelDirectory(adapter).check_weights()


def _with_header(hf_dir: Path, change: Callable[[dict], object]) -> None:
    """Write another JSON header before the same tensors; `change` may return other bytes."""
    file = hf_dir / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])
    entries.pop("__metadata__", None)
    changed = change(entries)
    header = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def _entry(entries: dict, **values: object) -> None:
    first = min(entries, key=lambda name: entries[name]["data_offsets"][0])
    for name, value in values.items():
        entries[first][name] = value(entries[first]) if callable(value) else value
        if entries[first][name] is None:
            del entries[first][name]


HEADERS: dict[str, Callable[[dict], object]] = {
    "a list": lambda entries: b"[]",
    "null": lambda entries: b"null",
    "deep": lambda entries: b'{"a":' * 50_000,
    "a long number": lambda entries: b'{"a": ' + b"1" * 5000 + b"}",
    "not JSON": lambda entries: b"{{{{",
    "an entry is text": lambda entries: entries.update({min(entries): "text"}),
    "an entry is null": lambda entries: entries.update({min(entries): None}),
    "no offsets": lambda entries: _entry(entries, data_offsets=None),
    "no shape": lambda entries: _entry(entries, shape=None),
    "a shape of texts": lambda entries: _entry(entries, shape=lambda entry: [str(side) for side in entry["shape"]]),
    "a negative shape": lambda entries: _entry(entries, shape=lambda entry: [-side for side in entry["shape"]]),
    "a wrong shape": lambda entries: _entry(entries, shape=lambda entry: [*entry["shape"], 2]),
    "an unknown dtype": lambda entries: _entry(entries, dtype="X1"),
    "a dtype that is not trained": lambda entries: _entry(entries, dtype="I32"),
    "an overlap": lambda entries: [entry.update(data_offsets=[0, 4]) for entry in entries.values()],
    "offsets past the end": lambda entries: _entry(entries, data_offsets=[0, 2**63]),
    "a tensor less": lambda entries: entries.pop(max(entries, key=lambda name: entries[name]["data_offsets"][1])),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_another_shape_is_one_line(hf_dir, name):
    _with_header(hf_dir, HEADERS[name])
    assert str(hf_dir / "model.safetensors") in _refusal(hf_dir)


@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("images", "model.language_model.norm.weight", None),
        ("images", "lm_head.weight", torch.zeros(513, 64)),  # a row longer than the tied embedding
        ("hybrid", "mtq.norm.weight", torch.ones(3)),  # unknown, to a family whose exports copy mtp.*
    ],
)
def test_weights_of_another_size_are_named(tmp_path, kind, name, tensor):
    hf_dir = Path(shutil.copytree(TIED[kind](), tmp_path / "model"))
    tensors = load_file(hf_dir / "model.safetensors") | {name: tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, hf_dir / "model.safetensors")
    assert "its weights are" in (line := _refusal(hf_dir)) and "and the sizes in config.json make" in line


@pytest.fixture
def released(hf_dir, tmp_path) -> Path:
    """Return a release's directory with an adapter."""
    hf_dir.rename(tmp_path / "hf")
    write_adapter(tmp_path / "hf" / "adapter", tmp_path / "hf")
    files = file_entries(tmp_path, ("hf/*", "hf/adapter/*"))
    Manifest(stage="release", version=1, fingerprint="a" * 16, config={}, parents={}, files=files).write(tmp_path)
    assert len(files) > 7
    return tmp_path / "hf"


def test_a_model_of_an_artifact_is_what_was_written(released, tmp_path):
    """The model is .../artifacts/release/0123456789abcdef/hf: its manifest is in the parent directory."""
    model_input(ModelDirectory(released))
    _flip_last_bit(released / "model.safetensors")
    with pytest.raises(InputError, match=r"safetensors is damaged: .*; delete") as error:
        model_input(ModelDirectory(released))
    assert str(released / "model.safetensors") in str(error.value) and f"delete {tmp_path}" in str(error.value)
    model_input(ModelDirectory(Path(shutil.copytree(released, tmp_path / "elsewhere" / "hf"))))  # a deliberate copy


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "adapter/adapter_model.safetensors"])
def test_a_model_or_adapter_is_not_asked_if_a_file_is_damaged_or_missing(released, name):
    given = ["ask", str(released), "-", "Which digit?", "--adapter", str(released / "adapter")]
    check_model_dir(make_parser().parse_args(given))
    path = released / name
    _flip_last_bit(path)
    for what in ("is damaged: its SHA-256", "is missing"):
        with pytest.raises(InputError, match=f"{path} {what}"):
            check_model_dir(make_parser().parse_args(given))
        with pytest.raises(InputError, match=f"{path} {what}"):
            ask(released, None, "Which digit?", adapter_dir=released / "adapter")
        path.unlink(missing_ok=True)


def _digests(hf_dir: Path) -> tuple[str, str]:
    """Return the digests of a directory as a processor and as a model."""
    return processor_input(ModelDirectory(hf_dir)).digest, model_input(ModelDirectory(hf_dir)).digest


def test_digests_follow_content_not_place(hf_dir):
    for of in (processor_input, model_input):
        assert of(ModelDirectory(hf_dir)).parent() == of(ModelDirectory(tiny_hf_dir())).parent()


@pytest.mark.parametrize(
    ("name", "is_of_processor"),
    [
        ("model.safetensors", False),
        *((name, True) for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json")),
    ],
)
def test_weights_matter_to_the_model_alone_and_processor_files_to_both(hf_dir, name, is_of_processor):
    processor, model = _digests(hf_dir)
    with (hf_dir / name).open("ab") as file:
        file.write(b"\n")
    changed = _digests(hf_dir)
    assert (changed[0] != processor) == is_of_processor and changed[1] != model


def test_token_ids_of_the_config_matter_to_the_processor(hf_dir):
    before, _ = _digests(hf_dir)
    _edit(hf_dir / "config.json", torch_dtype="bfloat16")
    assert _digests(hf_dir)[0] == before
    _edit(hf_dir / "config.json", image_token_id=3)
    assert _digests(hf_dir)[0] != before


def test_a_local_directory_is_itself(hf_dir, monkeypatch):
    monkeypatch.chdir(hf_dir.parent)
    assert resolve_hf_dir("model") == hf_dir


def test_neither_directory_nor_hub_name():
    with pytest.raises(InputError, match="not a directory here, nor a hub name"):
        resolve_hf_dir("./no/such/directory")


def test_a_hub_name_without_network(monkeypatch):
    def offline(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(InputError, match=r"'some/model'.*hub cannot be reached.*give that directory"):
        resolve_hf_dir("some/model")


def test_a_tensor_in_two_files_is_refused_with_both_names(hf_dir):
    tensors = load_file(hf_dir / "model.safetensors")
    (hf_dir / "model.safetensors").unlink()
    twice, *names = sorted(tensors)
    for file, held in {"a.safetensors": [twice, *names], "b.safetensors": [twice]}.items():
        save_file({name: tensors[name] for name in held}, hf_dir / file, metadata={"format": "pt"})
    weight_map = {twice: "b.safetensors"} | dict.fromkeys(names, "a.safetensors")
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert f"b.safetensors and a.safetensors both hold {twice}; copy the" in _refusal(hf_dir)
