"""The model card: its header for the hub, its text for people, and the upload to the hub."""

import json
import math
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.errors import InputError
from dataset_builders.sources.registry import KNOWN_SUBSETS, LICENCES, UNKNOWN, licence_of
from stages.release.hub import check_push, push_to_hub
from stages.release.model_card import CardFacts, Score, model_card, training_facts, write_model_card
from stages.shared.chat_format.config import BoxFormat
from tests.helpers.tiny_model import tiny_hf_dir
from tests.stages.artifacts import stage_artifact

pytestmark = pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)

CAULDRON = "HuggingFaceM4/the_cauldron"


def origin(name: str, builder: str = "the_cauldron") -> SubsetOrigin:
    return SubsetOrigin(builder=builder, name=name)


def facts(**changes: object) -> CardFacts:
    known = {
        "name": "receipts-2b",
        "base_model": "Qwen/Qwen3-VL-2B-Instruct",
        "datasets": [CAULDRON, "our own scans"],
        "subsets": {"iconqa": {"train": 900, "heldout": 100}, "ai2d": {"train": 50}, "clevr": {"heldout": 7}},
        "origins": {name: origin(name) for name in ("iconqa", "ai2d", "clevr")},
        "recipe": {"name": "receipts", "train": {"num_steps": 100, "seed": 0}},
        "training": {"steps": 100, "tokens": 1_234_567, "loss": 0.25},
        "scores": {
            "iconqa": [Score(metric="exact_match", value=0.91234567, answers=100, low=0.85, high=0.96, base=0.125)],
            "overall": [Score(metric="exact_match", value=0.9, answers=107), Score(metric="cer", value=0.1, answers=7)],
        },
        "score_note": "Means with 95% intervals.",
        "contamination": {"overall": {"samples": 3, "bytes": 0, "pixels": 1, "near": 2}},
        "reproduce": "athanor run receipts",
    }
    return CardFacts(**known | changes)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))


@pytest.fixture
def to_push(hf_dir: Path, monkeypatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    write_model_card(hf_dir, facts())
    return hf_dir


def test_the_hub_reads_the_head(hf_dir):
    assert write_model_card(hf_dir, facts()) == hf_dir / "README.md"
    data = ModelCard.load(hf_dir / "README.md").data
    assert (data.base_model, data.datasets) == ("Qwen/Qwen3-VL-2B-Instruct", [CAULDRON])
    assert data.license == ["cc-by-4.0", "cc-by-nc-sa-4.0", "unknown"]  # prompts, iconqa, ai2d; clevr is not trained on
    assert (data.pipeline_tag, data.library_name, data.tags) == ("image-text-to-text", "transformers", ["athanor"])
    found = [(r.dataset_config, r.dataset_type, r.metric_type, r.metric_value) for r in data.eval_results]
    assert found == [
        ("iconqa", "heldout", "exact_match", 0.912346),
        ("overall", "heldout", "exact_match", 0.9),
        ("overall", "heldout", "cer", 0.1),
    ], "of two sources, none is named"
    head = yaml.safe_load((hf_dir / "README.md").read_text().split("---\n")[1])
    assert head["model-index"][0]["name"] == "receipts-2b" and len(head["model-index"][0]["results"]) == 2
    write_model_card(hf_dir, facts(datasets=[CAULDRON]))
    alone = ModelCard.load(hf_dir / "README.md").data.eval_results
    assert {result.dataset_type for result in alone} == {CAULDRON}


def test_people_read_the_rest():
    card = model_card(facts())
    assert "| iconqa | exact\\_match | 0.9123 | 0.85 to 0.96 | 0.125 | 100 |" in card
    assert "| overall | 3 | 0 | 1 | 2 |" in card
    assert "| iconqa | 900 | 100 | cc-by-nc-sa-4.0 | github.com/lupantech/IconQA, README.md |" in card
    assert "| ai2d | 50 | 0 | unknown |" in card and f"The card of {CAULDRON} names no licence" in card
    assert "| tokens | 1,234,567 |" in card and "athanor run receipts" in card and "num_steps: 100" in card
    assert 'path = "path/to/receipts-2b"' in card and 'LLM("path/to/receipts-2b")' in card
    assert model_card(facts()) == card


def test_the_card_says_how_boxes_are_written_and_turned_back_to_pixels():
    assert "Boxes" not in model_card(facts())
    (line,) = [line for line in model_card(facts(boxes=BoxFormat())).splitlines() if line.startswith("Boxes")]
    form = '[{"bbox_2d": [x1, y1, x2, y2], "label": ".."}]'
    assert line == (
        f"Boxes are read and written as `{form}`, from 0 to 1000 along each side (`relative_1000`). "
        "In pixels of a picture of W x H, as it is shown, x is x * W / 1000 and y is y * H / 1000."
    )
    card = model_card(facts(boxes=BoxFormat(convention="resized_pixels", form="lines")))
    assert "as `label: [x1, y1, x2, y2]`, one a line, in pixels of the picture as the processor resizes it" in card
    assert "to h x w, the last two numbers of its `image_grid_thw` times `patch_size`." in card


def test_what_is_not_there_is_said_and_not_made_up(hf_dir):
    bare = facts(base_model="/data/my model", datasets=["our own scans"], scores={}, contamination=None, reproduce="")
    write_model_card(hf_dir, bare)
    data, text = ModelCard.load(hf_dir / "README.md").data, (hf_dir / "README.md").read_text()
    assert data.base_model is None and data.datasets is None and data.eval_results is None
    assert data.license == ["cc-by-nc-sa-4.0", "unknown"]
    assert "Not looked for." in text and "`/data/my model`" in text and "names no licence" not in text


def test_a_score_of_nothing_is_left_out_of_the_head(hf_dir):
    write_model_card(hf_dir, facts(scores={"iconqa": [Score(metric="cer", value=math.nan, answers=0)]}))
    assert ModelCard.load(hf_dir / "README.md").data.eval_results is None


def test_facts_come_from_the_manifests(tmp_path):
    trained = {"steps": 10, "epochs": 1.23456, "tokens": 1000, "loss_tokens": 50, "loss": 0.5, "heldout_loss": None}
    exported = {"dtype": "bfloat16", "parameters": {"vision": 3, "language": 4}, "active_parameters": 6}
    made = [stage_artifact(tmp_path / str(len(stats)), "train", stats=stats) for stats in (trained, exported)]
    assert training_facts(*made) == {
        **{"steps": 10, "epochs": 1.23456, "tokens": 1000, "learnt tokens": 50, "last training loss": 0.5},
        **{"parameters, vision": 3, "parameters, language": 4, "parameters, for a token": 6, "weights": "bfloat16"},
    }


def test_licences_are_of_subsets_that_exist_and_say_their_source():
    named = {name for subsets in KNOWN_SUBSETS.values() for name in subsets}
    assert set(LICENCES) <= named and all(one.source and one.name != UNKNOWN for one in LICENCES.values())
    for cord in (origin("cord_v2_test", "cord_v2"), origin("cord_v2")):
        assert licence_of(cord).name == "cc-by-4.0"
    assert licence_of(origin("textcaps")).name == UNKNOWN


def test_a_licence_is_of_the_rows_and_not_of_a_name():
    subsets = {"web_vsr": {"train": 5}, "mine_clevr": {"train": 7}, "x_vsr": {"train": 9}}
    origins = {"web_vsr": origin("vsr"), "mine_clevr": origin("clevr", "table"), "x_vsr": origin("x_vsr")}
    card = model_card(facts(subsets=subsets, origins=origins, datasets=["a", "b"]))
    assert "| web\\_vsr | 5 | 0 | apache-2.0 | github.com/cambridgeltl/visual-spatial-reasoning, README.md |" in card
    assert "| mine\\_clevr | 7 | 0 | unknown |" in card and "| x\\_vsr | 9 | 0 | unknown |" in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == ["apache-2.0", UNKNOWN]


class FakeApi(HfApi):
    """Records its calls; raises `error` instead of uploading."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(endpoint="https://hub.example")
        self.error, self.calls = error, []

    def create_repo(self, repo_id, **kwargs):
        self.calls.append(("create_repo", repo_id, kwargs))
        return f"{self.endpoint}/{repo_id}"

    def upload_folder(self, **kwargs):
        if self.error:
            raise self.error
        self.calls.append(("upload_folder", kwargs["repo_id"], sorted(p.name for p in kwargs["folder_path"].iterdir())))


@pytest.mark.parametrize("private", [True, False])
def test_the_whole_directory_is_pushed(to_push, private):
    api = FakeApi()
    assert push_to_hub(to_push, "me/receipts-2b", private, api) == "https://hub.example/me/receipts-2b"
    created, uploaded = api.calls
    assert created == ("create_repo", "me/receipts-2b", {"repo_type": "model", "private": private, "exist_ok": True})
    assert {"README.md", "model.safetensors", "config.json", "chat_template.jinja"} <= set(uploaded[2])


def test_what_cannot_be_pushed_is_not_begun(hf_dir):
    api = FakeApi()
    with pytest.raises(InputError, match=r"has no README\.md, the model card"):
        push_to_hub(hf_dir, "me/receipts-2b", api=api)
    write_model_card(hf_dir, facts())
    for name in ("receipts", "me/receipts/2b", "me/", ""):
        with pytest.raises(InputError, match="is not a hub name; give owner/name"):
            push_to_hub(hf_dir, name, api=api)
    (hf_dir / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        push_to_hub(hf_dir, "me/receipts-2b", api=api)
    assert api.calls == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalTokenNotFoundError("no token"), "needs a token; log in with `hf auth login`"),
        (ConnectionResetError("reset\nby peer"), r"failed \(ConnectionResetError: reset by peer\); push again"),
    ],
)
def test_a_failure_is_one_line(to_push, error, words):
    with pytest.raises(InputError, match=words) as raised:
        push_to_hub(to_push, "me/receipts-2b", api=FakeApi(error))
    assert "\n" not in str(raised.value)


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    """Run a hub that accepts no token."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"error": "You don't have the rights to create a model under this namespace"}).encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_hub_that_refuses(to_push, refusing_hub):
    """Uses the hub's own client against a server."""
    with pytest.raises(InputError, match=r"the hub refused me/receipts-2b \(403: .*rights to create") as raised:
        push_to_hub(to_push, "me/receipts-2b", api=HfApi(endpoint=refusing_hub, token="hf_of_no_one"))
    assert "\n" not in str(raised.value) and "hf_of_no_one" not in str(raised.value)


def test_a_hub_that_is_not_there(to_push):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(InputError, match=f"pushing me/receipts-2b to {endpoint} failed"):
            push_to_hub(to_push, "me/receipts-2b", api=HfApi(endpoint=endpoint, token="hf_of_no_one"))


def test_a_push_without_a_token_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    check_push(None)
    with pytest.raises(InputError, match=r"pushing to owner/name needs a token; log in with `hf auth login`"):
        check_push("owner/name")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    check_push("owner/name")


def test_the_card_tells_how_vllm_serves_the_adapter_with_what_was_trained():
    size = {"shortest_edge": 1024, "longest_edge": 65536}
    adapter = {"kind": "lora", "rank": 12, "parameters": 99, "targets": ["attention", "vision"]}
    card = model_card(facts(adapter=adapter, pixels=size))
    flags = (
        "--enable-lora",
        "--max-lora-rank 16",
        "--enable-tower-connector-lora",
        "--lora-modules receipts-2b=adapter",
        "--generation-config adapter",
        "--mm-processor-cache-gb 0",
        '--mm-processor-kwargs \'{"size": {"shortest_edge": 1024, "longest_edge": 65536}}\'',
    )
    assert "an area of 1,024 to 65,536 pixels" in card and all(flag in card for flag in flags)
    assert "tower" not in model_card(facts(adapter=adapter | {"targets": ["attention"]}, pixels=size))
    assert "vllm serve" not in model_card(facts(pixels=size)) and "vllm serve" not in model_card(
        facts(adapter=adapter | {"kind": "dora"}, pixels=size)
    )


def test_the_card_says_how_videos_are_read_and_which_form_of_the_prompt_was_trained():
    videos = {"fps": 2.0, "min_frames": 4, "max_frames": 64, "min_pixels": 4096, "max_pixels": 2_000_000}
    card = model_card(facts(videos=videos | {"prompt": "ab" * 32}))
    assert "at 2 frames a second, 4 to 64 frames, of 4,096 to 2,000,000 pixels over all frames" in card
    assert "since 5.10" in card and f"SHA-256 `{'ab' * 32}`" in card
    assert "frames a second" not in model_card(facts())
