"""README.md of an exported model: its model card, for people and, in its YAML head, for the Hugging Face hub.

The head follows the hub's metadata (huggingface.co/docs/hub/model-cards): base_model, datasets, license (those of all
subsets trained on), pipeline_tag, library_name, tags, and the scores as a model-index. The card says nothing of time
or place: its bytes depend on the model and its scores alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from dataset_builders.licences import CAULDRON_PROMPTS, licence_of
from stages.artifact import Artifact
from stages.dataset_card import section, table
from stages.hf_directory import check_hf_dir

MODEL_CARD = "README.md"
_CAULDRON = "HuggingFaceM4/the_cauldron"
_TASK = "image-text-to-text"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TRANSFORMERS = """```python
from transformers import AutoModelForImageTextToText, AutoProcessor

path = "{path}"
processor = AutoProcessor.from_pretrained(path)
model = AutoModelForImageTextToText.from_pretrained(path, dtype="auto", device_map="auto")
messages = [{{"role": "user", "content": [
    {{"type": "image", "path": "picture.png"}},
    {{"type": "text", "text": "What is in the picture?"}},
]}}]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
answer = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(answer, skip_special_tokens=True))
```"""
_VLLM = """```python
from PIL import Image
from vllm import LLM, SamplingParams

llm = LLM("{path}")
messages = [{{"role": "user", "content": [
    {{"type": "image_pil", "image_pil": Image.open("picture.png")}},
    {{"type": "text", "text": "What is in the picture?"}},
]}}]
print(llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)
```"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric over one subset of the held-out samples.

    Attributes:
        low, high: interval of `confidence`; None where there is none.
        answers: scored.
        base: the same metric of the base model on the same answers; None where it was not scored.
    """

    metric: str
    value: float
    answers: int
    low: float | None = None
    high: float | None = None
    base: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """What a card tells.

    Attributes:
        name: of the model.
        base_model: hub name or directory that training started from; None: random weights.
        datasets: where the samples came from, hub names or descriptions.
        subsets: subset -> {"train": samples, "heldout": samples}.
        recipe: the whole configuration that decides the model, as plain values.
        training: name -> value: steps, tokens, losses, parameters.
        scores: subset, or `overall`, -> its scores, the headline first.
        score_note: what the scores are of, and how intervals were made.
        contamination: the `contaminated` counts of that stage's manifest; None where it did not run.
        reproduce: the command.
    """

    name: str
    base_model: str | None
    datasets: Sequence[str]
    subsets: Mapping[str, Mapping[str, int]]
    recipe: Mapping[str, object]
    training: Mapping[str, int | float | str]
    scores: Mapping[str, Sequence[Score]]
    score_note: str = ""
    contamination: Mapping[str, Mapping[str, int]] | None = None
    reproduce: str = ""
    tags: Sequence[str] = field(default=("athanor",))


def subset_sizes(samples: Artifact) -> dict[str, dict[str, int]]:
    """`CardFacts.subsets` of a convert artifact."""
    return {name: dict(sizes) for name, sizes in sorted(samples.manifest.stats["samples"].items())}


def training_facts(trained: Artifact, exported: Artifact) -> dict[str, int | float | str]:
    """`CardFacts.training` of a train and an export artifact: what the manifests say, by names for people."""
    names = {"steps": "steps", "epochs": "epochs", "tokens": "tokens", "loss_tokens": "learnt tokens"}
    names |= {"loss": "last training loss", "heldout_loss": "held-out loss"}
    stats = trained.manifest.stats
    found = {title: _rounded(stats[name]) for name, title in names.items() if stats.get(name) is not None}
    parts = {f"parameters, {part}": count for part, count in exported.manifest.stats["parameters"].items()}
    return {**found, **parts, "weights": exported.manifest.stats["dtype"]}


def write_model_card(hf_dir: Path, facts: CardFacts) -> Path:
    """Write README.md into an exported directory; returns its path."""
    path = hf_dir / MODEL_CARD
    write_text(path, model_card(facts))
    return path


def model_card(facts: CardFacts) -> str:
    """The whole card, Markdown with the hub's YAML head."""
    base = facts.base_model or "random weights"
    about = f"Fine-tuned by athanor from `{base}` on pictures and conversations about them."
    parts = [
        f"---\n{_head(facts).to_yaml()}\n---\n\n# {facts.name}\n\n{about}\n",
        section("Scores", _scores(facts)),
        section("Contamination", _contamination(facts)),
        section("Data", _data(facts)),
        section("Training", table(["", "value"], [[name, value] for name, value in facts.training.items()])),
        section("How to load it", _loading(facts.name)),
        section("How to reproduce it", _reproduce(facts)),
    ]
    return "".join(parts)


def check_push(repo_id: str | None) -> None:
    """See, before there is anything to push, that there is a token to push with.

    Raises:
        InputError: there is none.
    """
    if repo_id is not None and huggingface_hub.get_token() is None:
        raise InputError(f"pushing to {repo_id} needs a token; log in with `hf auth login` or set HF_TOKEN")


def push_to_hub(hf_dir: Path, repo_id: str, private: bool = True, api: huggingface_hub.HfApi | None = None) -> str:
    """Upload an exported directory, its card included, as a model of the hub; returns the model's page.

    Args:
        repo_id: owner/name; made where it is not there yet.
        private: of a repository that is made now; one that is there keeps what it is.
        api: for a hub of one's own; None: the one in HF_ENDPOINT, with the token of `hf auth login` or HF_TOKEN.

    Raises:
        InputError: the directory is no whole model, the name is none, or the hub refuses or cannot be reached.
    """
    if not _HUB_NAME.fullmatch(repo_id):
        raise InputError(f"repo_id={repo_id!r} is no hub name; give owner/name")
    check_hf_dir(hf_dir)
    if not (hf_dir / MODEL_CARD).is_file():
        raise InputError(f"{hf_dir} has no {MODEL_CARD}, the model card; write it before the model is pushed")
    api = api or huggingface_hub.HfApi()
    try:
        page = api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=hf_dir, repo_type="model", commit_message="Model exported by athanor"
        )
    except LocalTokenNotFoundError as error:
        raise InputError(f"pushing {repo_id} needs a token; log in with `hf auth login` or set HF_TOKEN") from error
    except HFValidationError as error:
        raise InputError(f"repo_id={repo_id!r} is no hub name ({_line(error)}); give owner/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise InputError(
            f"the hub refused {repo_id} ({status}: {_line(error)}); check that your token may write there"
        ) from error
    except Exception as error:  # whatever carries the bytes has kinds of its own (requests, httpx, xet)
        raise InputError(
            f"pushing {repo_id} to {api.endpoint} failed ({type(error).__name__}: {_line(error)}); "
            "push again: files that arrived are not sent twice"
        ) from error
    return str(page)


def read_model_card(hf_dir: Path) -> ModelCard:
    """The card of a directory, parsed as the hub does.

    Raises:
        InputError: there is none, or its head is no metadata of a model.
    """
    path = hf_dir / MODEL_CARD
    if not path.is_file():
        raise InputError(f"{hf_dir} has no {MODEL_CARD}; export the model again")
    try:
        return ModelCard.load(path)
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise InputError(f"{path}: its YAML head cannot be read ({_line(error)}); write the card again") from error


def _head(facts: CardFacts) -> ModelCardData:
    names = {"base_model": facts.base_model} if facts.base_model and _HUB_NAME.fullmatch(facts.base_model) else {}
    datasets = [name for name in facts.datasets if _HUB_NAME.fullmatch(name)]
    results = [_result(facts, subset, score) for subset, scores in facts.scores.items() for score in scores]
    results = [result for result in results if math.isfinite(result.metric_value)]
    return ModelCardData(
        **names,
        datasets=datasets or None,
        license=_licences(facts),
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=[*facts.tags],
        model_name=facts.name,
        eval_results=results or None,
    )


def _licences(facts: CardFacts) -> list[str]:
    """Those of all subsets that were trained on, each once; the prompts of the_cauldron have one too."""
    names = {licence_of(subset).name for subset, sizes in facts.subsets.items() if sizes.get("train")}
    return sorted(names | ({CAULDRON_PROMPTS} if _CAULDRON in facts.datasets else set()))


def _result(facts: CardFacts, subset: str, score: Score) -> EvalResult:
    return EvalResult(
        task_type=_TASK,
        dataset_type=next((name for name in facts.datasets if _HUB_NAME.fullmatch(name)), "heldout"),
        dataset_name=f"{subset}, held-out samples",
        dataset_config=subset,
        dataset_split="heldout",
        metric_type=score.metric,
        metric_value=round(score.value, 6),
    )


def _scores(facts: CardFacts) -> str:
    if not facts.scores:
        return "None."
    rows = [
        [subset, score.metric, round(score.value, 4), _interval(score), _base(score), score.answers]
        for subset, scores in facts.scores.items()
        for score in scores
    ]
    columns = ["subset", "metric", "score", "interval", "base model", "answers"]
    return f"{facts.score_note}\n\n{table(columns, rows)}"


def _interval(score: Score) -> str:
    return "" if score.low is None or score.high is None else f"{score.low:.4f} to {score.high:.4f}"


def _base(score: Score) -> str:
    return "" if score.base is None else f"{score.base:.4f}"


def _contamination(facts: CardFacts) -> str:
    if facts.contamination is None:
        return "Not looked for."
    columns = ["subset", "held-out samples with such a picture", "same file", "same pixels", "nearly the same"]
    rows = [
        [name, *(count[key] for key in ("samples", "bytes", "pixels", "near"))]
        for name, count in facts.contamination.items()
    ]
    return f"Held-out pictures that occur in the training data too, in pictures by kind:\n\n{table(columns, rows)}"


def _data(facts: CardFacts) -> str:
    rows = [
        [name, sizes.get("train", 0), sizes.get("heldout", 0), licence_of(name).name, licence_of(name).source]
        for name, sizes in facts.subsets.items()
    ]
    text = f"From {', '.join(facts.datasets)}."
    if _CAULDRON in facts.datasets:
        text += (
            f" The card of {_CAULDRON} names no licence of a subset: each is governed by that of its original dataset; "
            f"the prompts are {CAULDRON_PROMPTS}."
        )
    return f"{text}\n\n{table(['subset', 'train', 'held out', 'licence', 'stated in'], rows)}"


def _loading(name: str) -> str:
    path = f"path/to/{name}"
    return f"With transformers:\n\n{_TRANSFORMERS.format(path=path)}\n\nWith vLLM:\n\n{_VLLM.format(path=path)}"


def _reproduce(facts: CardFacts) -> str:
    command = f"```sh\n{facts.reproduce}\n```\n\n" if facts.reproduce else ""
    return f"{command}The recipe, whole:\n\n```yaml\n{yaml.safe_dump(dict(facts.recipe), sort_keys=False).strip()}\n```"


def _rounded(value: int | float) -> int | float:
    return value if isinstance(value, int) else round(value, 4)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
