"""Two hosts, simulated on one machine by network namespaces, with NCCL over sockets.

    python -m tests.gpu.run_two_hosts DIRECTORY [GPUS OF A HOST] >two_hosts.md

A host has one GPU, unless another number is given. The steps are compared with those of one torchrun agent with all
ranks. Then all processes of one host are killed with -9, and then those of the other. Needs root, iproute2, and a
kernel with namespaces and virtual cables.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import torch

from tests.bench.host import version_text
from tests.helpers.run_dir import changed, metrics_of, result_of, run_trainer, write_job
from tests.helpers.two_hosts import start_agents, two_hosts
from trainer.contract.run import RunConfig

STEPS = 12
# Two namespaces share a kernel, through which NCCL would find a shorter way than the cable.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_DEBUG": "INFO"}


def job(root: Path, name: str, steps: int, gpus: int) -> RunConfig:
    """Return the tests' small training, in bfloat16 if there is a GPU."""
    run = write_job(root, num_steps=steps, name=name, global_batch_size=2 * gpus)
    if not torch.cuda.is_available():
        return run
    run = changed(run, train=run.train.model_copy(update={"precision": "bfloat16"}))
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    return run


def seconds_until_named(root: Path, lost: int, gpus: int) -> tuple[float, float, str]:
    """Return the seconds from the end of a host until the other host names it, the seconds until the agent has ended,
    and the message."""
    run, other = job(root, f"lost-{lost}", 100_000, gpus), 1 - lost
    with two_hosts() as hosts:
        agents = start_agents(run, hosts, gpus)
        while not any(row.step >= 3 for row in metrics_of(run)):
            assert all(agent.poll() is None for agent in agents), (run.output_dir / "logs/trainer.log").read_text()
            time.sleep(0.2)
        hosts[lost].kill()
        began = time.monotonic()
        while not (run.output_dir / "result.json").is_file() and agents[other].poll() is None:
            time.sleep(0.05)
        named = time.monotonic() - began
        agents[other].wait(120)
        ended = time.monotonic() - began
    return named, ended, result_of(run).message


def main(root: Path, gpus: int = 1) -> None:
    """Print the report in Markdown.

    Args:
        gpus: of each host.
    """
    if shutil.which("ip") is None:
        raise SystemExit("run_two_hosts: the command `ip` is missing; install iproute2")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"# Two hosts\n\n{version_text('torch')}; {', '.join(names) or 'no GPU: gloo'}\n")
    one, two = (job(root, name, STEPS, gpus) for name in ("one-agent", "two-hosts"))
    assert run_trainer(one, processes=2 * gpus) == 0
    os.environ.update(SOCKETS)
    with two_hosts() as hosts:
        statuses = [agent.wait(240) for agent in start_agents(two, hosts, gpus)]
    log = (two.output_dir / "logs/trainer.log").read_text()
    assert statuses == [0, 0], log[-3000:]
    ways = sorted({line.split(" via ")[1].split("/0")[0].strip() for line in log.splitlines() if " via " in line})
    print(f"NCCL's channels between the two: {', '.join(ways) or 'none: gloo'}.\n")
    print(
        "| step | loss, one agent | two hosts | gradient norm, one agent | two hosts |\n| ---: " + "| ---: " * 4 + "|"
    )
    for of_one, of_two in zip(metrics_of(one), metrics_of(two), strict=True):
        figures = (of_one.loss, of_two.loss, of_one.grad_norm, of_two.grad_norm)
        print(f"| {of_one.step} | {' | '.join(f'{figure:.9g}' for figure in figures)} |")
    for lost in (0, 1):
        named, ended, message = seconds_until_named(root, lost, gpus)
        print(
            f"\nkill -9 of all of rank {lost}'s host: named after {named:.1f} s, torchrun ended after {ended:.1f} s:\n"
        )
        print(f"    {message}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
