r"""Answers per second: the decoder of the answer stage against a plain loop of transformers, one question after the
other.

    python -m tests.bench.bench_generate --model qwen3_vl_2b --questions 1024 --plain 48 --check 16
    python -m tests.bench.bench_generate --tiny            # everything, on a CPU, in a minute

Random weights of Qwen3-VL's published shapes say nothing that ends, so each question has a length of its own for its
answer, drawn once from a log-normal, and no token ends an answer: both sides stop at the same place. Questions are of
the training benches' mix: a tenth text alone, a tenth several pictures, JPEG files that both sides decode and scale
(the loop before each question, ours in threads meanwhile). Loading is not counted, a few questions before the clock
are. The plain loop is measured on a random part of the same questions, whose answers may be longer or shorter than
those of all: so tokens are compared, not answers.

`no refill` is the same decoder whose batches run until their last answer ends. Model calls are counted on both sides;
they do not depend on the machine. Identical answers: of the loop's questions, token by token, in the dtype that is
measured; and on `--check` questions in float32 without TF32, where they must be the same.
"""

import argparse
import io
import itertools
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.pictures.pixels import encode_image
from stages.answer.greedy_decoder import EncodedImages, GreedyDecoder, PaddedPrompts, PoolLimits, Prompt, Row
from stages.answer.parts import ahead, cut_groups
from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.bench.host import describe, wait_for_device
from tests.bench.mix import CONTROL_TOKENS, MODELS, draw_kind, draw_small, image_token, is_tiny, write_model
from tests.helpers.reference import PIXELS

PIXEL_CONFIG = PixelConfig(min_pixels=32 * 32, max_pixels=1 << 24, patch_format=PIXELS)
TINY = {"model": "qwen3_vl_tiny", "questions": 64, "plain": 12, "check": 6, "part": 32, "batch": [8, 16], "answer": 6}
WARM = 3  # questions before the measurement


@dataclass(frozen=True, slots=True)
class Question:
    """A question: its text's tokens with one placeholder per image, JPEG files, and the length of its answer.

    Attributes:
        length: tokens of the prompt, image tokens included.
    """

    number: int
    ids: np.ndarray
    patches: tuple[int, ...]
    pictures: tuple[bytes, ...]
    limit: int

    @property
    def length(self) -> int:
        return len(self.ids) + sum(count // 4 - 1 for count in self.patches)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one way to answer: seconds, model calls, and the ids of each answer by the question's
    number."""

    name: str
    seconds: float
    calls: int
    said: dict[int, list[int]]

    @property
    def answers_per_second(self) -> float:
        return len(self.said) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.said.values())) / self.seconds


def dtype_of(model: str) -> torch.dtype:
    return torch.float32 if is_tiny(model) else torch.bfloat16


def draw_questions(model: str, count: int, answer: float, sigma: float, most: int) -> list[Question]:
    """Draw a set of questions, which is the same for the same arguments."""
    rng, image_id = np.random.default_rng(0), image_token(model)
    draw = draw_small if is_tiny(model) else draw_kind
    text = (1, image_id - len(CONTROL_TOKENS)) if is_tiny(model) else (1000, 150000)
    questions = []
    for number in range(count):
        kind = draw(rng)
        ids = rng.integers(*text, kind.text)
        places = np.linspace(1, kind.text - 1, len(kind.grids)).astype(int)
        ids = np.insert(ids, places, image_id).astype(np.int32)
        pictures = tuple(_jpeg(rng, 16 * h, 16 * w) for _, h, w in kind.grids)
        limit = int(np.clip(round(rng.lognormal(np.log(answer), sigma)), 1, most))
        questions.append(Question(number, ids, tuple(h * w for _, h, w in kind.grids), pictures, limit))
    return questions


def _jpeg(rng: np.random.Generator, height: int, width: int) -> bytes:
    """Return an image with shapes in it, so that its file is as large as that of a photograph and not of noise."""
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def encode(question: Question, image_id: int) -> Prompt:
    """Return the pixels and tokens that the answer stage would have."""
    encoded = [encode_image(picture, PIXEL_CONFIG) for picture in question.pictures]
    grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
    repeats = np.ones(len(question.ids), np.int64)
    repeats[question.ids == image_id] = grids.prod(-1) // 4
    return Prompt(np.repeat(question.ids, repeats), EncodedImages(grids, tuple(patches for patches, _ in encoded)))


class Calls:
    """A counter of a model's calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.count = 0
        model.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


def plain(decoder: GreedyDecoder, calls: Calls, questions: Sequence[Question], image_id: int) -> Measured:
    """Answer with transformers' generate, one question at a time, each encoded just before."""
    said: dict[int, list[int]] = {}
    model, start = decoder.model, None
    for place, question in enumerate([*questions[:WARM], *questions]):
        if place == WARM:
            wait_for_device()
            start, calls.count, said = time.perf_counter(), 0, {}
        prompt = encode(question, image_id)
        ids = torch.from_numpy(prompt.input_ids.astype(np.int64))[None].to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if question.pictures:
            patches = torch.from_numpy(np.concatenate(prompt.images.patches)).to(model.device)
            inputs["pixel_values"] = decoder.pixel_values(patches)
            inputs["image_grid_thw"] = torch.from_numpy(prompt.images.grids.astype(np.int64)).to(model.device)
            inputs["mm_token_type_ids"] = (ids == image_id).int()
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=question.limit, eos_token_id=None)
        said[question.number] = out[0, ids.shape[1] :].tolist()
    wait_for_device()
    return Measured("one by one", time.perf_counter() - start, calls.count, said)


def ours(
    decoder: GreedyDecoder,
    calls: Calls,
    questions: Sequence[Question],
    args: argparse.Namespace,
    batch: int,
    refill: bool = True,
) -> Measured:
    """Answer with the decoder of the answer stage, part by part, while threads prepare the next part."""
    ordered = sorted(questions, key=lambda question: (-question.length, question.number))
    parts = [ordered[start : start + args.part] for start in range(0, len(ordered), args.part)]
    in_groups = [_groups(part, args.batch_tokens, batch, refill) for part in parts]
    limits = PoolLimits(batch, args.batch_tokens)
    _answer(decoder, [[ordered[-1:]]], limits, args)
    wait_for_device()
    start, calls.count = time.perf_counter(), 0
    said = _answer(decoder, in_groups, limits, args)
    wait_for_device()
    name = f"ours, {batch} side by side" + ("" if refill else ", no refill")
    return Measured(name, time.perf_counter() - start, calls.count, said)


def _groups(part: Sequence[Question], tokens: int, batch: int, refill: bool) -> list[list[Question]]:
    # If a group is as large as the batch, another one has no room before it has ended.
    whole = 1 if refill else 4
    cut = cut_groups([question.length for question in part], whole * batch, whole * tokens)
    return [[part[place] for place in group] for group in cut]


def _answer(
    decoder: GreedyDecoder, parts: Sequence[Sequence[Sequence[Question]]], limits: PoolLimits, args: argparse.Namespace
) -> dict[int, list[int]]:
    image_id, said = image_token(args.model), {}

    def prepare(group: Sequence[Question]) -> PaddedPrompts:
        rows = [Row(question.number, question.limit) for question in group]
        return decoder.pad([encode(question, image_id) for question in group], rows)

    with ThreadPoolExecutor(args.threads) as executor:
        coming: Iterator[PaddedPrompts] = ahead(executor, prepare, itertools.chain(*parts), args.threads + 1)
        for part in parts:
            rows = decoder.decode(itertools.islice(coming, len(part)), limits)
            said |= {row.number: row.ids for row in rows}
    return said


def load(directory: Path, model: str, dtype: torch.dtype) -> tuple[GreedyDecoder, Calls]:
    """Return the model of a shape, on the GPU if there is one, with no token that ends an answer."""
    made = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
    made.to("cuda" if torch.cuda.is_available() else "cpu")
    made.generation_config.pad_token_id = 0
    return GreedyDecoder(made, (), image_token(model), PIXELS), Calls(made)


def same_in_float32(directory: Path, questions: Sequence[Question], args: argparse.Namespace) -> str:
    """Return the number of answers that equal the loop's in float32."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    decoder, calls = load(directory, args.model, torch.float32)
    wanted = plain(decoder, calls, questions, image_token(args.model))
    return same(ours(decoder, calls, questions, args, args.batch[0]), wanted)


def same(got: Measured, wanted: Measured) -> str:
    """Return the number of answers in `wanted` that equal those in `got`."""
    equal = sum(got.said[number] == ids for number, ids in wanted.said.items())
    return f"{equal} of {len(wanted.said)}"


def table(rows: Sequence[Measured]) -> str:
    """Return the table in Markdown. Its first row is the loop."""
    columns = ["answers/s", "tokens/s", "times one by one, by tokens", "model calls an answer", "identical answers"]
    lines = [table_head([""], columns)]
    for row in rows:
        times = row.tokens_per_second / rows[0].tokens_per_second
        rates = [f"{row.answers_per_second:,.2f}", f"{row.tokens_per_second:,.1f}", f"{times:.2f}"]
        lines.append(table_row([row.name, *rates, f"{row.calls / len(row.said):.2f}", same(row, rows[0])]))
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl_2b")
    parser.add_argument("--questions", type=int, default=1024)
    parser.add_argument("--plain", type=int, default=48, help="questions of the plain loop")
    parser.add_argument("--check", type=int, default=16, help="questions that are compared in float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 128, 256], help="answers side by side")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--part", type=int, default=256, help="answers that are written together")
    parser.add_argument("--answer", type=float, default=16, help="median tokens of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of an answer's tokens")
    parser.add_argument("--most", type=int, default=512, help="tokens of an answer at most")
    parser.add_argument("--threads", type=int, default=8, help="that prepare prompts")
    parser.add_argument("--dir", type=Path, help="where the model is written; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on few questions, for a CPU")
    args = parser.parse_args(argv)
    if args.tiny:
        vars(args).update({**TINY, "threads": 2})
    return args


def measure(directory: Path, args: argparse.Namespace, questions: Sequence[Question]) -> tuple[list[Measured], str]:
    """Measure every way, the loop first, and count the answers that equal the loop's in float32."""
    some = [questions[i] for i in np.random.default_rng(1).permutation(len(questions)).tolist()]
    write_model(directory, args.model)
    decoder, calls = load(directory, args.model, dtype_of(args.model))
    rows = [plain(decoder, calls, some[: args.plain], image_token(args.model))]
    for batch, refill in [*((batch, True) for batch in args.batch), (args.batch[-1], False)]:
        rows.append(ours(decoder, calls, questions, args, batch, refill))
        print(table(rows).splitlines()[-1], flush=True)
    del decoder, calls
    return rows, same_in_float32(directory, some[: args.check], args)


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    questions = draw_questions(args.model, args.questions, args.answer, args.sigma, args.most)
    with bench_folder(args.dir) as folder:
        rows, checked = measure(folder, args, questions)
    device, versions = describe()
    limits = np.array([question.limit for question in questions])
    prompts = np.array([question.length for question in questions])
    text = (
        f"`{shlex.join(['python', '-m', 'tests.bench.bench_generate', *argv])}`\n\n"
        f"{device}; {versions}; {dtype_of(args.model)}\n\n"
        f"{len(questions)} questions, {prompts.mean():.0f} prompt tokens (longest {prompts.max()}), "
        f"{limits.mean():.1f} answer tokens (median {np.median(limits):.0f}, longest {limits.max()})\n\n"
        f"{table(rows)}\n\nIn float32, identical answers: {checked}"
    )
    print_report(text, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
