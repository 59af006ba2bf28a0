"""The batch of many users, for both kinds of layers: answers are those of one question alone, also after a failure."""

import threading

import pytest

from stages.answer.greedy_decoder import GreedyDecoder, PoolLimits
from stages.answer.transformers_engine import Generator
from stages.chat.batch import Batch
from stages.chat.piece import AnswerSettings
from tests.helpers.evaluation import mixed_samples, talkative_hf_dir
from tests.helpers.patience import at_most
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)

LIMITS = [3, 20, 1, 7, 12, 2, 16, 5, 9, 15]


@pytest.fixture(scope="module", params=["attention", "delta layers"])
def generator(request):
    return Generator(talkative_hf_dir() if request.param == "attention" else talkative_hybrid_dir())


@pytest.fixture(scope="module")
def prompts(generator):
    samples = mixed_samples(len(LIMITS))
    return [generator.encode_prompt(s.messages[:1], generator.encode_images(s.images)) for s in samples]


@pytest.fixture(scope="module")
def alone(generator, prompts):
    return [generator.generate([prompt], limit)[0] for prompt, limit in zip(prompts, LIMITS)]


def answered(generator, prompts, rows=3, tokens=1 << 20):
    """Return (text, ending) of each answer; all are asked at once."""
    batch, texts, endings = Batch(generator, PoolLimits(rows, tokens)), {}, {}
    ended = threading.Semaphore(0)

    def listener(place):
        def listen(piece):
            assert place not in endings and piece.error is None
            texts[place] = texts.get(place, "") + piece.text
            if piece.is_last:
                endings[place] = piece.ending
                ended.release()

        return listen

    for place, prompt in enumerate(prompts):
        batch.ask(prompt, AnswerSettings(LIMITS[place]), listener(place))
    assert all(ended.acquire(timeout=at_most(120)) for _ in prompts)
    batch.close()
    return [(texts[place], endings[place]) for place in range(len(prompts))]


@pytest.mark.parametrize(("rows", "tokens"), [(3, 1 << 20), (16, 1 << 20), (16, 200)])
def test_answers_are_those_of_one_question_alone(generator, prompts, alone, rows, tokens):
    for (text, ending), wanted, prompt in zip(answered(generator, prompts, rows, tokens), alone, prompts):
        assert text == wanted.text and ending.reason == ("stop" if wanted.stopped else "length")
        assert ending.completion_tokens == wanted.num_tokens + wanted.stopped
        assert ending.prompt_tokens == len(prompt.input_ids)


def test_a_step_that_fails_once_changes_no_answer(generator, prompts, alone, monkeypatch):
    """Each answer is read again alone, its images and the text that it has so far, and goes on."""
    go_on, calls = GreedyDecoder.go_on, []

    def failing(self, rows, *rest):
        calls.append(len(rows))
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return go_on(self, rows, *rest)

    monkeypatch.setattr(GreedyDecoder, "go_on", failing)
    assert [text for text, _ in answered(generator, prompts, 4)] == [answer.text for answer in alone]
    assert calls[4] > 1
