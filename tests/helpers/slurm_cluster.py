"""A SLURM of two nodes on this machine, from Debian's packages slurm-wlm and munge: for tests, as root.

Two slurmd with names of their own share the loopback address, so a job's nodes cannot be reached by their names: the
header needs `address=127.0.0.1`. There is no accounting, and jobs are found by process (linuxproc), not
by cgroup.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.helpers.patience import at_most

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
START_SECONDS = 60.0
KILL_WAIT_SECONDS = 15  # seconds between SIGTERM and SIGKILL of a plain scancel; Slurm's default is 30
REQUEUE_SECONDS = 5  # seconds for which a requeued job waits; Slurm's "cred_expire" is 120 by default
_CONF = """\
ClusterName=athanor
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.sock,cred_expire={requeue}
SlurmctldPort={ports[0]}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_delay=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait={kill_wait}
SlurmdTimeout=60
SlurmctldTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=gpu Nodes=n1,n2 Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:2
"""


def why_not() -> str:
    """Return why no cluster can be started here; "" if one can be started."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd must run as root"


class SlurmCluster:
    """A running cluster. `conf` is the value of SLURM_CONF for its clients."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.conf = directory, directory / "slurm.conf"
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        for name in ("state", "spool", "log"):
            (self.directory / name).mkdir()
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = _free_ports(3)
        text = _CONF.format(
            host=socket.gethostname(),
            directory=self.directory,
            ports=ports,
            kill_wait=KILL_WAIT_SECONDS,
            requeue=REQUEUE_SECONDS,
        )
        self.conf.write_text(text)
        files = {"key-file": key, "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        options = [f"--{name}={self.directory / value}" for name, value in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        self._until(lambda: (self.directory / "munge.sock").exists(), "munged")
        self.start_controller()
        for node in ("n1", "n2"):
            self.start_node(node)
        self._until(lambda: self.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2, "idle nodes")

    def start_controller(self) -> None:
        self._start("slurmctld", "-D", "-f", str(self.conf))
        self._until(lambda: "UP" in self.call("scontrol", "ping"), "slurmctld")

    def start_node(self, node: str) -> None:
        self._start(node, "-D", "-N", node, "-f", str(self.conf), program="slurmd")

    def call(self, *command: str) -> str:
        """Return a client's standard output; "" if the client failed."""
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=at_most(60))
        return done.stdout if done.returncode == 0 else ""

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.conf)}

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.call("scancel", "--user=root", "--full")
        deadline = time.monotonic() + at_most(30)
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(at_most(20))
            process.kill()
            process.wait(5)

    def processes_of(self, root: Path) -> list[psutil.Process]:
        """Return the running processes of the jobs below `root`, found by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_job = process.environ().get("ATHANOR_JOB", "").startswith(str(root))
                if is_job and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _start(self, name: str, *arguments: str, program: str | None = None) -> None:
        program = shutil.which(program or name, path=_path())
        with (self.directory / "log" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )

    def _until(self, condition, what: str) -> None:
        deadline = time.monotonic() + at_most(START_SECONDS)
        while not condition():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text(errors="replace")[-600:] for path in self.directory.glob("log/*")}
                raise TimeoutError(f"{what} did not come: {logs}")
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Run a cluster while the block lasts."""
    cluster = SlurmCluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
