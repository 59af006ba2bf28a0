"""Record what the reference implementations give: tests/golden/captions.json and tests/golden/cord.json.

Needs Java, and pycocoevalcap 1.2, donut-python 1.0.9 with nltk and zss in a directory (pip install --target DIR
--no-deps):

    PYTHONPATH=DIR python -m tests.golden.record_scores

Only for a change of the cases or of a reference's version; never to make a failing test pass.
"""

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer
from sacrebleu.metrics import BLEU

from dataset_builders.storage.files import write_json
from tests.stages.shared.scoring.metrics.caption_cases import CAPTIONS, CAPTIONS_JSON, TEXTS
from tests.stages.shared.scoring.metrics.cord_cases import CORD_JSON, RECEIPTS


def tokenize(texts: list[str]) -> list[str]:
    """Return the words that the Java tokenizer finds, joined by spaces."""
    found = PTBTokenizer().tokenize({at: [{"caption": text}] for at, text in enumerate(texts)})
    return [found[at][0] for at in range(len(texts))]


def record_captions() -> dict[str, Any]:
    words = iter(tokenize([text for answer, references in CAPTIONS for text in (answer, *references)]))
    answers, references = {}, {}
    for at, (_, texts) in enumerate(CAPTIONS):
        answers[at], references[at] = [next(words)], [next(words) for _ in texts]
    # A sentence after the captions, so that no caption is the file's last line, which has no line end.
    texts = tokenize([*TEXTS, "The end."])[:-1]
    return {
        "made_with": {
            "cider": "pycocoevalcap.cider.cider.Cider().compute_score: all captions as one set",
            "rouge_l": "pycocoevalcap.rouge.rouge.Rouge().compute_score",
            "bleu4": "sacrebleu BLEU(tokenize='none', smooth_method='none').corpus_score / 100, each caption alone",
            "bleu4_of_five": "the same of every five captions in a row",
            "bleu4_coco": "pycocoevalcap.bleu.bleu.Bleu(4).compute_score, the fourth, each caption alone",
            "words": "pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer().tokenize",
            "versions": {name: version(name) for name in ("pycocoevalcap", "sacrebleu")},
        },
        "cider": [float(score) for score in Cider().compute_score(references, answers)[1]],
        "rouge_l": [float(score) for score in Rouge().compute_score(references, answers)[1]],
        "bleu4": [sacrebleu(answers[at], [references[at]]) for at in answers],
        "bleu4_coco": [coco_bleu({0: answers[at]}, {0: references[at]}) for at in answers],
        "bleu4_of_five": [
            sacrebleu([answers[at][0] for at in five], [references[at] for at in five])
            for five in (range(at, at + 5) for at in range(len(CAPTIONS) - 4))
        ],
        "all": {
            "cider": float(Cider().compute_score(references, answers)[0]),
            "rouge_l": float(Rouge().compute_score(references, answers)[0]),
            "bleu4": sacrebleu([text for (text,) in answers.values()], list(references.values())),
            "bleu4_coco": coco_bleu(answers, references),
        },
        "words": [text.split(" ") if text else [] for text in texts],
    }


def sacrebleu(answers: list[str], references: list[list[str]]) -> float:
    most = max(len(texts) for texts in references)
    streams = [[texts[at] if at < len(texts) else None for texts in references] for at in range(most)]
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(answers, streams).score / 100


def coco_bleu(answers: dict[int, list[str]], references: dict[int, list[str]]) -> float:
    return float(Bleu(4).compute_score(references, answers, verbose=0)[0][3])


def donut_evaluator() -> Any:
    """Return donut.util without the package, which needs timm; and without a dataset loader that scores do not need."""
    folder = Path(importlib.util.find_spec("donut").submodule_search_locations[0])
    sys.modules["datasets"] = ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None
    spec = importlib.util.spec_from_file_location("donut_util", folder / "util.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.JSONParseEvaluator()


def record_cord() -> dict[str, Any]:
    donut = donut_evaluator()
    return {
        "made_with": {
            "cord_nted": "donut.util.JSONParseEvaluator().cal_acc(prediction, reference)",
            "cord_f1": "donut.util.JSONParseEvaluator().cal_f1([prediction], [reference])",
            "versions": {name: version(name) for name in ("donut-python", "zss", "nltk")},
        },
        "cord_nted": [float(donut.cal_acc(predicted, wanted)) for predicted, wanted in RECEIPTS],
        "cord_f1": [float(donut.cal_f1([predicted], [wanted])) for predicted, wanted in RECEIPTS],
        "all": {"cord_f1": donut.cal_f1([one for one, _ in RECEIPTS], [two for _, two in RECEIPTS])},
    }


if __name__ == "__main__":
    write_json(CAPTIONS_JSON, record_captions())
    write_json(CORD_JSON, record_cord())
