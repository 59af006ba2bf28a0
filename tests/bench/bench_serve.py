r"""Seconds until many users of `athanor serve` have their answers: at once, and one after the other.

    python -m tests.bench.bench_serve MODEL_DIRECTORY --users 16 --max-tokens 64

Each user asks about an image of a size of its own. The answers at once must be those one after the other, and both
those of the answer stage's generator in this process. The model is asked once before the clock starts.
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from dataset_builders.contracts.sample import Message
from stages.answer.transformers_engine import Generator
from stages.chat.conversation import prompt_of
from tests.bench.host import describe
from tests.helpers.evaluation import picture
from tests.helpers.serving import Serving, ask, chat, serving


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    images = [picture(n, 64 + 32 * (n % 4), 64 + 16 * (n % 3)) for n in range(args.users)]
    questions = [f"Which digit is in picture {n}?" for n in range(args.users)]
    with tempfile.TemporaryDirectory() as directory, serving([args.model], Path(directory, "root")) as server:
        name = httpx.get(f"{server.url}/v1/models", headers=server.headers).json()["data"][0]["id"]
        bodies = [chat(name, q, [i], max_tokens=args.max_tokens) for q, i in zip(questions, images)]
        ask(server, bodies[0])
        start = time.perf_counter()
        alone = [ask(server, body) for body in bodies]
        one_by_one = time.perf_counter() - start
        start = time.perf_counter()
        with ThreadPoolExecutor(args.users) as users:
            together = list(users.map(lambda body: ask(server, body), bodies))
        at_once = time.perf_counter() - start
        firsts = _first_tokens(server, bodies)
    generator = Generator(args.model)
    prompts = [prompt_of(generator, [Message(role="user", text=f"<image>{q}")], [i]) for q, i in zip(questions, images)]
    staged = [generator.generate([prompt], args.max_tokens)[0].text for prompt in prompts]
    texts = [[c["choices"][0]["message"]["content"] for c in answers] for answers in (alone, together)]
    tokens = sum(c["usage"]["completion_tokens"] for c in together)
    print(*describe(), sep="; ")
    print(f"{args.users} users, {tokens} tokens of answers")
    print(
        f"one after the other: {one_by_one:.2f} s; at once: {at_once:.2f} s, {one_by_one / at_once:.2f} times as fast"
    )
    print(f"first token, streamed at once: {min(firsts):.2f} to {max(firsts):.2f} s")
    equal = [sum(a == b for a, b in zip(some, staged)) for some in texts]
    print(f"equal to the answer stage: {equal[0]} of {args.users} alone, {equal[1]} of {args.users} at once")


def _first_tokens(server: Serving, bodies: list[dict]) -> list[float]:
    """Return the seconds until each user has the first text, all at once."""

    def first(body: dict) -> float:
        start = time.perf_counter()
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, headers=server.headers, timeout=600) as answer:
            for line in answer.iter_lines():
                if '"content": ' in line and '"content": ""' not in line:
                    return time.perf_counter() - start
        raise ValueError("an empty answer")

    with ThreadPoolExecutor(len(bodies)) as users:
        return list(users.map(first, bodies))


if __name__ == "__main__":
    main()
