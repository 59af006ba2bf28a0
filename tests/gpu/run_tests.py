"""Run the GPU tests of a host: files that one GPU is enough for side by side, one to a GPU, then what needs several.

    python -m tests.gpu.run_tests DIRECTORY [pytest's arguments]

DIRECTORY gets ledger.jsonl, with one row for each test, and the output of pytest for each file. The rows can be
appended to the ledger of a full pass of the same commit, where they take the place of the skips of a machine without
a GPU (tests/README.md).
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from tests.tiers.plugin import ROOT, read_ledger


def run(name: str, files: list[str], ledger: Path, gpus: str, arguments: list[str]) -> None:
    """Run the GPU tests of files with some GPUs visible."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", f"--ledger={ledger}"]
    began = time.monotonic()
    with ledger.with_name(f"{name}.txt").open("a") as out:
        subprocess.run([*command, *arguments, *files], cwd=ROOT, env=environment, stdout=out, stderr=out, check=False)
    print(f"{time.monotonic() - began:5.0f} s  GPU {gpus:8} {name}", flush=True)


def main(directory: Path, arguments: list[str]) -> int:
    """Run all GPU tests and print how many passed, and which failed."""
    directory.mkdir(parents=True, exist_ok=True)
    count = torch.cuda.device_count()
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [file for file, text in texts.items() if "requires_gpus(" in text]
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)

    def work(gpu: int) -> None:
        while not waiting.empty():
            file = waiting.get()
            run(Path(file).stem, [file], directory / f"one-{gpu}.jsonl", str(gpu), arguments)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [row for gpu in range(count) for row in read_ledger(directory / f"one-{gpu}.jsonl")]
    ledger = directory / "ledger.jsonl"
    # What one GPU was not enough for, or what failed, has no row yet and so runs now.
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows if row["outcome"] == "passed"))
    several = [file for file in files if re.search(r"requires_gpus\((?!1\))", texts[file])]
    if count > 1:
        run("several", several, ledger, ",".join(map(str, range(count))), arguments)
    seen = {row["test"] for row in read_ledger(ledger)}
    with ledger.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows if row["test"] not in seen)
    last = {row["test"]: row for row in read_ledger(ledger)}
    print(Counter(row["outcome"] for row in last.values()), Counter(row["why"] for row in last.values() if row["why"]))
    failed = [test for test, row in last.items() if row["outcome"] == "failed"]
    print("".join(f"FAILED {test}\n" for test in failed), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
