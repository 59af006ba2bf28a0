"""Ranks that only watch each other. Standard input has one directory per line, and the answer is the pids of its ranks.

A rank writes joined-N when it has joined. It leaves in order once the file `leave` is there, or with an error once
`fail-N` is; told/lost-N has what it is told of others, if there is that folder, log-N its errors, exit-N its status.
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from trainer.parallel import watch

WORLD = 3


def watch_others(directory: Path, rank: int) -> None:
    """Run the life of a rank."""
    os.dup2(os.open(directory / f"log-{rank}", os.O_CREAT | os.O_WRONLY), 2)
    watch.KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1}
    watch.FAILED_SECONDS = 2.0
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), WORLD), rank=rank, world_size=WORLD)
    with watch.watched(rank, WORLD, lambda line: (directory / "told" / f"lost-{rank}").write_text(line)):
        (directory / f"joined-{rank}").touch()
        while not (directory / "leave").exists():
            if (directory / f"fail-{rank}").exists():
                raise ValueError("no\nluck")
            time.sleep(0.05)


def _fork(directory: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        watch_others(directory, rank)
    except BaseException:
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Fork the ranks of a directory, wait until they end, and continue with the next directory."""
    for line in sys.stdin:
        directory = Path(line.strip())
        pids = [_fork(directory, rank) for rank in range(WORLD)]
        print(*pids, flush=True)
        for _ in pids:
            pid, status = os.wait()
            (directory / f"exit-{pids.index(pid)}").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
