"""What lmms-eval calls to ask and to score the held-out samples beside this file.

Written by athanor (stages/evaluate/lmms_eval/task.py), which copies it as utils.py into the task's directory. It needs
nothing of athanor: the samples and their pictures are in the parquet file, already as the model was asked.
"""

import importlib
import json

IMAGE_SLOT = "<image>"


class Conversation(list):
    """Messages that take no system prompt in front: the qwen3_vl model of lmms-eval puts one into every conversation,
    an empty one at least, and training had its own, which is in the rows, or none."""

    def insert(self, place, message):
        if message["role"] != "system":
            super().insert(place, message)


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    """The conversation up to the answer, as lmms-eval's chat models take it: earlier answers are the reference's."""
    images = iter(doc["images"])
    messages = Conversation()
    for message in json.loads(doc["messages"]):
        pieces = message["text"].split(IMAGE_SLOT) if message["role"] == "user" else [message["text"]]
        content = []
        for place, text in enumerate(pieces):
            if place:
                content.append({"type": "image", "url": next(images).convert("RGB")})
            if text:
                content.append({"type": "text", "text": text})
        messages.append({"role": message["role"], "content": content})
    return messages


def doc_to_visual(doc):
    """The pictures, for lmms-eval's simple models, which put all of them before the text."""
    return [image.convert("RGB") for image in doc["images"]]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """The last question alone, for simple models: what such a model cannot be told is left out."""
    return json.loads(doc["messages"])[-1]["text"].replace(IMAGE_SLOT, "")


def doc_to_target(doc):
    """The first right answer."""
    return doc["references"][0]


def process_results(doc, results):
    """The metric's name, and `<name>_<subset>` -> the score of one answer."""
    scores = {doc["metric"]: METRICS[doc["metric"]](results[0], doc["references"])}
    return scores | {f"{name}_{doc['subset']}": score for name, score in scores.items()}


def normalize(text):
    """Lower case, no white space at the ends, each run of white space inside made one space."""
    return " ".join(text.lower().split())


def exact_match(answer, references):
    """1.0 where the answer is a reference after `normalize`."""
    return float(any(normalize(answer) == normalize(reference) for reference in references))


def anls(answer, references):
    """lmms-eval's own ANLS of one answer."""
    return float(importlib.import_module("lmms_eval.api.metrics").anls(references, [answer])["anls"])


def relaxed_accuracy(answer, references):
    """lmms-eval's own relaxed correctness of one answer, of the reference that suits it best."""
    is_right = importlib.import_module("lmms_eval.tasks.chartqa.utils").relaxed_correctness
    return float(any(is_right(answer, reference) for reference in references))


METRICS = {"exact_match": exact_match, "anls": anls, "relaxed_accuracy": relaxed_accuracy}
