"""Record what pycocotools gives for sets of answers with boxes: tests/golden/boxes.json.

Needs pycocotools 2.0.11 in a directory (pip install --target DIR --no-deps):

    PYTHONPATH=DIR python -m tests.golden.record_boxes

Only for a change of the cases or of pycocotools' version; never to make a failing test pass.
"""

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from dataset_builders.contracts.boxes import Box
from dataset_builders.storage.files import write_json
from tests.stages.shared.scoring.metrics.box_cases import BOXES_JSON, CASES, Given, random_sets, read


def coco_scores(answers: Sequence[tuple[Given, list[Box] | None]]) -> dict[str, float | int | None]:
    """Return AP, AP at 0.5, and the number of matches at 0.5 among the first 100 detections of each label and image;
    None in place of an AP where pycocotools has -1: there are no true boxes."""
    images, truths, found = [], [], []
    labels = sorted({_plain(box) for _, true in answers for box in true or ()} | {"a"})
    for image, (given, true) in enumerate(answers, 1):
        if true is None:
            continue
        images.append({"id": image, "width": 1000, "height": 1000})
        truths += [_entry(box, image, labels.index(_plain(box)) + 1) for box in true]
        compares_labels = any(box.label for box in true) or not true
        for box in read(given):
            label = _plain(box) if compares_labels else ""
            if label in labels:  # COCO has no other categories
                found.append(_entry(box, image, labels.index(label) + 1) | {"score": 1.0})
    truth, detections = COCO(), COCO()
    categories = [{"id": number} for number in range(1, len(labels) + 1)]
    for coco, entries in ((truth, truths), (detections, found)):
        numbered = [entry | {"id": number} for number, entry in enumerate(entries, 1)]
        coco.dataset = {"images": images, "annotations": numbered, "categories": categories}
        coco.createIndex()
    evaluation = COCOeval(truth, detections, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    all_sizes = evaluation.params.areaRng[0]
    right = sum(int(np.sum(e["dtMatches"][0] > 0)) for e in evaluation.evalImgs if e and e["aRng"] == all_sizes)
    ap, ap50 = (None if value == -1 else float(value) for value in evaluation.stats[:2])
    return {"coco_map": ap, "coco_map50": ap50, "right": right}


def _plain(box: Box) -> str:
    return box.label.strip().lower()


def _entry(box: Box, image: int, category: int) -> dict[str, object]:
    width, height = max(0, box.x2 - box.x1), max(0, box.y2 - box.y1)
    corner = [box.x1, box.y1, width, height]
    return {"image_id": image, "category_id": category, "bbox": corner, "area": width * height, "iscrowd": 0}


if __name__ == "__main__":
    scores = {name: coco_scores(case.answers) for name, case in CASES.items()}
    scores |= {f"random {number}": coco_scores(answers) for number, answers in enumerate(random_sets())}
    how = "COCOeval(truth, detections, 'bbox'): stats[0], stats[1], dtMatches at 0.5; all scores 1.0"
    made_with = {"how": how, "versions": {"pycocotools": version("pycocotools")}}
    write_json(BOXES_JSON, {"made_with": made_with, "scores": scores})
