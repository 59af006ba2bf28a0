"""The functions that lmms-eval calls to ask and score the held-out samples in this directory.

Written by athanor (stages/evaluate/lmms_eval/task.py), which copies this file as utils.py to the task's directory. It
imports nothing from athanor: the parquet file has the samples and their images as the model gets them.
"""

import importlib
import json

IMAGE_SLOT = "<image>"


class Conversation(list):
    """Messages that accept no system prompt in front. The qwen3_vl model of lmms-eval inserts a system prompt, possibly
    an empty one, into every conversation. Training had its own system prompt, which is in the rows, or none."""

    def insert(self, place, message):
        if message["role"] != "system":
            super().insert(place, message)


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    """Return the conversation up to the answer, for lmms-eval's chat models; earlier answers are references."""
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
    """Return the images, for lmms-eval's simple models, which put all of them before the text."""
    return [image.convert("RGB") for image in doc["images"]]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """Return only the last question, for simple models, which cannot be given earlier turns."""
    return json.loads(doc["messages"])[-1]["text"].replace(IMAGE_SLOT, "")


def doc_to_target(doc):
    """Return the first right answer."""
    return doc["references"][0]


def process_results(doc, results):
    """Return the metric's name, and `<name>_<subset>` -> the score of one answer."""
    scores = {doc["metric"]: METRICS[doc["metric"]](results[0], doc["references"])}
    return scores | {f"{name}_{doc['subset']}": score for name, score in scores.items()}


def normalize(text):
    """Return the text in lower case, stripped, with each run of white space replaced by one space."""
    return " ".join(text.lower().split())


def exact_match(answer, references):
    """Return 1.0 if the answer equals a reference after `normalize`, else 0.0."""
    return float(any(normalize(answer) == normalize(reference) for reference in references))


def anls(answer, references):
    """Return lmms-eval's own ANLS of one answer."""
    return float(importlib.import_module("lmms_eval.api.metrics").anls(references, [answer])["anls"])


def relaxed_accuracy(answer, references):
    """Return lmms-eval's own relaxed correctness of one answer, for the reference that fits best."""
    is_right = importlib.import_module("lmms_eval.tasks.chartqa.utils").relaxed_correctness
    return float(any(is_right(answer, reference) for reference in references))


METRICS = {"exact_match": exact_match, "anls": anls, "relaxed_accuracy": relaxed_accuracy}
