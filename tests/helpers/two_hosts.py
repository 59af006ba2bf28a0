"""Two hosts on this machine: network namespaces with their own addresses and names, joined by one virtual cable."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.shared.launchers.job import as_rank
from trainer.contract.run import RunConfig

_LINK = "net0"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")  # addresses of the two namespaces only; nothing else can reach them


def why_not() -> str:
    """Return why namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "needs root, ip and unshare"
    name = f"athanor-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "the kernel lets nobody make a network namespace"
    _ip("netns", "delete", name)
    return ""


@dataclass(frozen=True)
class Host:
    """A host: its name, which is also the name of its network namespace, and its address."""

    name: str
    address: str

    def start(self, command: Sequence[str], log: Path, gpus: str = "") -> subprocess.Popen:
        """Start a command on the host, which sees these GPUs. Its output is appended to the log."""
        named = ["unshare", "--uts", "/bin/sh", "-c", 'hostname "$0"; exec "$@"', self.name, *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": _LINK, "NCCL_SOCKET_IFNAME": _LINK, "OMP_NUM_THREADS": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        with log.open("ab") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named], stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def kill(self) -> None:
        """Kill -9 all processes of the host, as if it had lost power."""
        for pid in map(int, _ip("netns", "pids", self.name).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self) -> None:
        """Disconnect the host: its messages are lost, and no connection is closed."""
        _ip("-n", self.name, "link", "set", _LINK, "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts that know each other by name and have no other network."""
    first, second = (Host(f"athanor-{os.getpid()}-{end}", address) for end, address in zip("ab", _ADDRESSES))
    try:
        for host in (first, second):
            _ip("netns", "add", host.name)
            hosts = Path("/etc/netns") / host.name / "hosts"  # `ip netns exec` mounts it over /etc/hosts
            hosts.parent.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{known.address} {known.name}" for known in (first, second))]
            hosts.write_text("\n".join(lines) + "\n")
        ends = ["peer", "name", _LINK, "netns", second.name]
        _ip("link", "add", _LINK, "netns", first.name, "type", "veth", *ends)
        for host in (first, second):
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", _LINK)
            for device in ("lo", _LINK):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second
    finally:
        for host in (first, second):
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
                _ip("netns", "delete", host.name)
            shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def start_agents(run: RunConfig, hosts: Sequence[Host], processes: int = 1) -> list[subprocess.Popen]:
    """Start the trainer on the hosts, with a torchrun agent on each, as the sbatch file does.

    Args:
        processes: number of processes on each host.
    """
    logs = run.output_dir / "logs"
    logs.mkdir(exist_ok=True)
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={processes}"]
    agent += ["--rdzv-id=1.0", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29500", "--max-restarts=0"]
    trainer = [sys.executable, "-m", "trainer", str(run.output_dir / "run.json")]
    command = [*agent, "--no-python", *as_rank(logs, trainer)]
    gpus = [range(first * processes, (first + 1) * processes) for first in range(len(hosts))]
    return [
        host.start(command, logs / "trainer.log", ",".join(map(str, of_host))) for host, of_host in zip(hosts, gpus)
    ]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
