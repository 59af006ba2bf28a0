r"""Answers per second of the programs that can answer: transformers' generate, our pool, and vLLM.

    python -m tests.bench.bench_engines --model qwen3_vl_2b --questions 512 --plain 24
    python -m tests.bench.bench_engines --model qwen3_vl_tiny --questions 16 --plain 4      # on a CPU

vLLM is the one of this Python or of ATHANOR_VLLM_PYTHON. Each gets the same questions as messages and JPEG files,
through the stage's own engines, and forms prompts and pixels itself; the loop asks a random part of them, one by one.
Weights are random, so each question has a length of its own for its answer, drawn once from a log-normal; the few
answers that end earlier are counted as they are, so tokens are compared. Loading is not counted, and a few questions
before the clock are.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dataset_builders.contracts.sample import Message
from stages.answer.engine import Engine, EngineSettings, Request, make_engine
from stages.answer.parts import ahead, cut_groups
from stages.answer.transformers_engine import Generator
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from tests.bench.bench_generate import _jpeg
from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.bench.host import describe, wait_for_device
from tests.gpu.write_model import write_model

WARM = 3  # questions before the measurement
WORDS = ("What does the chart show", "Which tree is taller", "Answer with one word", "red green blue or 1984")


def draw(args: argparse.Namespace) -> list[Request]:
    """Draw the questions: a tenth text alone, the others with one image; the same for the same arguments."""
    rng, requests = np.random.default_rng(0), []
    for number in range(args.questions):
        image = rng.random() > 0.1
        side = np.clip(rng.lognormal(np.log(args.side), 0.3, 2), 40, 1200).astype(int)
        text = " ".join(rng.choice(WORDS, rng.integers(2, 16))) + "?"
        limit = int(np.clip(round(rng.lognormal(np.log(args.answer), 1.0)), 1, args.most))
        message = Message(role="user", text=f"{'<image>' if image else ''}{text}")
        requests.append(Request(number, (message,), (_jpeg(rng, *side),) if image else (), limit))
    return requests


def plain(generator: Generator, requests: Sequence[Request]) -> tuple[float, dict[int, list[int]]]:
    """Answer with transformers' generate, one question at a time, each encoded just before."""
    said, model, start = {}, generator.decoder.model, 0.0
    for place, request in enumerate([*requests[:WARM], *requests]):
        if place == WARM:
            wait_for_device()
            start, said = time.perf_counter(), {}
        images = generator.encode_images(request.images)
        prompt = generator.encode_prompt(request.messages, images)
        ids = torch.from_numpy(prompt.input_ids.astype(np.int64))[None].to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if request.images:
            patches = torch.from_numpy(np.concatenate(images.patches)).to(model.device)
            inputs["pixel_values"] = generator.decoder.pixel_values(patches)
            inputs["image_grid_thw"] = torch.from_numpy(images.grids.astype(np.int64)).to(model.device)
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=request.max_new_tokens)
        said[request.number] = out[0, ids.shape[1] :].tolist()
    wait_for_device()
    return time.perf_counter() - start, said


def through(
    engine: Engine, requests: Sequence[Request], args: argparse.Namespace
) -> tuple[float, dict[int, list[int]]]:
    """Answer with an engine of the stage, while threads prepare."""

    def answer(some: Sequence[Request]) -> dict[int, list[int]]:
        groups = cut_groups([args.side**2 // 1024 + 64] * len(some), args.batch, args.batch_tokens)
        asked = [[some[place] for place in group] for group in groups]
        with ThreadPoolExecutor(args.threads) as executor:
            coming = ahead(executor, engine.prepare, asked, args.threads + 1)
            return {number: said.ids for number, said in engine.answer(coming)}

    answer(requests[: 4 * WARM])
    wait_for_device()
    start = time.perf_counter()
    said = answer(requests)
    wait_for_device()
    return time.perf_counter() - start, said


def main(argv: Sequence[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3_vl_2b")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--plain", type=int, default=24, help="questions of the loop")
    parser.add_argument("--batch", type=int, default=128, help="answers side by side")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--answer", type=float, default=8, help="median tokens of an answer")
    parser.add_argument("--most", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--side", type=int, default=300, help="median side of an image in pixels")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--engines", nargs="+", default=["plain", "transformers", "vllm"])
    parser.add_argument("--dir", type=Path, help="where the model is written; default: a temporary directory")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args(argv)
    requests, rows = draw(args), {}
    with bench_folder(args.dir) as folder:
        write_model(args.model, folder / "hf")
        model = ModelDirectory(folder / "hf")
        longest = 16 * args.side**2 // 1024 + 512 + args.most
        settings = EngineSettings(model, read_prompt_format(model), args.batch, args.batch_tokens, longest=longest)
        for name in args.engines:
            print(name, flush=True)
            if name == "plain":
                some = [requests[i] for i in np.random.default_rng(1).permutation(len(requests))[: args.plain]]
                rows[name] = plain(Generator(model), some)
            else:
                started = time.perf_counter()
                engine = make_engine(name, settings)
                print(f"loaded in {time.perf_counter() - started:.0f} s", flush=True)
                rows[name] = through(engine, requests, args)
                del engine
    device, versions = describe()
    first = next(iter(rows.values()))
    lines = [table_head([""], ["answers/s", "tokens/s", "times the first, by tokens", "the first's answers"])]
    for name, (seconds, said) in rows.items():
        tokens = sum(map(len, said.values()))
        times = tokens / seconds / (sum(map(len, first[1].values())) / first[0])
        same = sum(said.get(number) == ids for number, ids in first[1].items())
        cells = [
            f"{len(said) / seconds:,.2f}",
            f"{tokens / seconds:,.1f}",
            f"{times:.2f}",
            f"{same} of {len(first[1])}",
        ]
        lines.append(table_row([name, *cells]))
    command = shlex.join(["python", "-m", "tests.bench.bench_engines", *argv])
    print_report(f"`{command}`\n\n{device}; {versions}\n\n" + "\n".join(lines), args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
