"""Several hosts made on one Linux machine by namespaces, joined by shaped links to a switch.

A host has its own network, process numbers, hostname, boot id, /etc/hosts, /dev/shm, temporary folder and output
folder. Nothing here knows what is run on a host. Everything a host is made of ends with its first process, and that
process with the one which made it, so nothing is left behind however a test ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO


TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
NETWORK = "10.77.0"  # addresses inside the namespaces only

_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
# Everything below runs in new namespaces, so none of it is seen outside.
_HOST = """
set -e
hostname "$NAME"
mount -t tmpfs -o size=2g tmpfs /dev/shm
for folder in tmp out; do mount --bind "$PRIVATE/$folder" "$SHARED/$folder"; done
mount --bind "$PRIVATE/hosts" /etc/hosts
mount --bind "$PRIVATE/boot_id" /proc/sys/kernel/random/boot_id
ip link set lo up
touch "$PRIVATE/ready"
sleep infinity & wait
"""
_SWITCH = """
set -e
ip link add name switch type bridge
ip link set switch up
touch "$PRIVATE/ready"
sleep infinity & wait
"""


def missing() -> str | None:
    """Why hosts cannot be made here, or `None` where they can."""
    absent = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if absent:
        return f"hosts are made by tools of the package {' and '.join(sorted(absent))}, which is not installed"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    mount = ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tried = subprocess.run(["unshare", *_NAMESPACES, *mount], capture_output=True, text=True, check=False)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


class Namespace:
    """Network, mount, hostname and process namespaces, and the process that keeps them: their process 1.

    Args:
        folder: of its own files; made here.
        script: what process 1 does, in bash. It creates the file `ready` in the folder and then stays.
        environment: of the script.
    """

    def __init__(self, folder: Path, script: str, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "namespace.log").open("w")
        self.keeper = subprocess.Popen(  # pdeathsig: it ends with the process that made it, killed or not
            ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "bash", "-c", script],
            env={**os.environ, **environment, "PRIVATE": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists():
            if self.keeper.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no namespace was made: {(folder / 'namespace.log').read_text()}")
            time.sleep(0.01)
        self.init = int(Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text().split()[0])
        self._processes = os.readlink(f"/proc/{self.init}/ns/pid")

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in here."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-u", "-p", "--", *command]

    def sh(self, command: str) -> str:
        """Run a shell command in here. Returns its standard output; raises where it fails."""
        ended = subprocess.run(self.enter(["bash", "-ec", command]), capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"{command}: {ended.stderr.strip()}")
        return ended.stdout

    def members(self) -> dict[int, str]:
        """The living processes in here but for process 1 and what it waits for, by their process number outside, with
        their command lines."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") != self._processes or int(entry) == self.init:
                    continue
                command = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if command and command != "sleep infinity":  # a zombie has no command line
                    found[int(entry)] = command
        return found

    def kill(self) -> None:
        """End every process in here at once, as a loss of power does. What it was made of goes with them."""
        with contextlib.suppress(ProcessLookupError):
            self.keeper.kill()
        self.keeper.wait()
        self.log.close()
        deadline = time.monotonic() + 10
        while hasattr(self, "init") and Path(f"/proc/{self.init}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


class Host(Namespace):
    """One host.

    Args:
        name: its hostname.
        number: its place; its address ends in `number + 1`.
        folder: of all hosts. In a host's processes `folder/out` and `folder/tmp` (which is `TMPDIR`) are its own; they
            are seen from outside as `self.out` and `self.tmp`.
        hosts_file: the text of its /etc/hosts.
    """

    def __init__(self, name: str, number: int, folder: Path, hosts_file: str) -> None:
        self.name, self.number, self.address = name, number, f"{NETWORK}.{number + 1}"
        self.shared, self.hosts_file = folder, hosts_file
        self.private = private = folder / f"host-{number}"
        self.out, self.tmp = private / "out", private / "tmp"
        for path in (self.out, self.tmp, folder / "out", folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        self.environment = {"TMPDIR": str(folder / "tmp")}
        (private / "hosts").write_text(hosts_file)
        (private / "boot_id").write_text(f"{uuid.uuid4()}\n")
        super().__init__(private, _HOST, {"NAME": name, "SHARED": str(folder)})

    def popen(
        self, command: Sequence[str], log: IO[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a session of its own. It ends with the host at the latest."""
        own = {**(os.environ if environment is None else environment), **self.environment}
        return subprocess.Popen(
            self.enter(command), env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def end(self, patience_s: float = 0.0) -> None:
        """Kill what runs here, and keep the host."""
        deadline = time.monotonic() + patience_s
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Hosts:
    """Hosts on one network, each with a link of its own to a switch. A context manager.

    Args:
        folder: for their files.
        names: their hostnames.
        rate: of each link and direction, in the words of `tc`; `None` for as fast as the machine.
        resolvable: whether /etc/hosts gives every host's address by its name; else a host's own name stands for
            127.0.1.1, as Debian's installer writes it.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("alpha", "beta"),
        *,
        rate: str | None = "1gbit",
        resolvable: bool = True,
    ) -> None:
        self.folder, self.rate = folder, rate
        folder.mkdir(parents=True, exist_ok=True)
        known = "".join(f"{NETWORK}.{at + 1} {name}\n" for at, name in enumerate(names))
        self.all: list[Host] = []
        self._made: list[Namespace] = []
        try:
            self.switch = Namespace(folder / "switch", _SWITCH, {})
            self._made.append(self.switch)
            for number, name in enumerate(names):
                own = known if resolvable else f"127.0.1.1 {name}\n"
                self._add(Host(name, number, folder, f"127.0.0.1 localhost\n{own}"))
        except BaseException:
            self.close()
            raise

    def _add(self, host: Host) -> None:
        self._made.append(host)
        self.all[host.number : host.number + 1] = [host]
        self._connect(host)

    def replace(self, number: int) -> None:
        """End a host, if it has not been, and put one of its name and address, with empty disks, in its place."""
        old = self.all[number]
        old.kill()
        shutil.rmtree(old.private)
        self.switch.sh(f"ip link delete port{number} 2>/dev/null || true")  # gone with the host, after a moment
        self._add(Host(old.name, number, self.folder, old.hosts_file))

    def _connect(self, host: Host) -> None:
        port = f"port{host.number}"
        # in the switch's network alone: within its process numbers the host's would not be known
        cable = f"ip link add {port} type veth peer name net0 netns {host.init}; ip link set {port} master switch up"
        subprocess.run(["nsenter", "-t", str(self.switch.init), "-n", "--", "bash", "-ec", cable], check=True)
        host.sh(f"ip address add {host.address}/24 dev net0; ip link set net0 up")
        if self.rate is not None:
            self._shape(host, self.rate)

    def _shape(self, host: Host, rate: str) -> None:
        shape = f"root tbf rate {rate} burst 256kb latency 100ms"
        host.sh(f"tc qdisc replace dev net0 {shape}")
        self.switch.sh(f"tc qdisc replace dev port{host.number} {shape}")

    def shape(self, rate: str) -> None:
        """Give every link another rate."""
        self.rate = rate
        for host in self:
            self._shape(host, rate)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.all)

    def __getitem__(self, number: int) -> Host:
        return self.all[number]

    def __len__(self) -> int:
        return len(self.all)

    def link(self, number: int, *, up: bool) -> None:
        """Pull a host's cable out at the switch, or put it back."""
        self.switch.sh(f"ip link set port{number} {'up' if up else 'down'}")

    def close(self) -> None:
        """Everything ends, and with it every interface and mount."""
        for made in self._made:  # all at once: the kernel takes a second or two to take one apart
            made.keeper.kill()
        for made in self._made:
            made.kill()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
