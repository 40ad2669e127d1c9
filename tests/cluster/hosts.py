"""Hosts of a cluster on this machine: namespaces with processes, a network, a home and a /tmp of their own, and an sshd.

They share nothing but the machine's read-only parts and this checkout. The first is a laptop, from which the others are reached
only by ssh. Everything ends with the process that holds each namespace, however that happens: unnamed namespaces leave nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from samples import REPOSITORY, wait_until

HOME = "/home/tester"
LAPTOP = "10.77.0.1"
NEEDED = ("unshare", "nsenter", "setpriv", "ip", "sshd", "ssh", "ssh-keygen", "rsync")

_IN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """Says why such hosts are not possible here; None if they are."""
    if os.getuid() != 0:
        return "only root may make namespaces"
    if missing := [name for name in NEEDED if shutil.which(name, path=_IN_PATH) is None]:
        return f"{missing[0]} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, timeout=60, check=False
    )
    return None if tried.returncode == 0 else "this machine lets nobody make namespaces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A simulated host."""

    address: str
    process_id: int
    """ID of its first process, in this machine's own numbering."""

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs these words there."""
        return ["nsenter", f"--target={self.process_id}", "--net", "--pid", "--mount", "--uts", "--", *words]

    def run(self, script: str, timeout_s: float = 300, **environ: str) -> str:
        """Returns the output of a login shell there; fails if the shell fails."""
        words = self._login(script, environ)
        done = subprocess.run(
            words,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def running(self, script: str, **environ: str) -> Iterator[None]:
        """Runs a login shell there while the block lasts."""
        process = subprocess.Popen(
            self._login(script, environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # including what it started, such as an ssh that holds a tunnel open
            process.wait(timeout=60)

    def _login(self, script: str, environ: dict[str, str]) -> list[str]:
        variables = {"HOME": HOME, "TERM": "dumb", "LANG": "C.UTF-8", "PATH": _IN_PATH, **environ}
        pairs = [f"{name}={value}" for name, value in variables.items()]
        return self.command(["env", "-i", *pairs, "bash", "--login", "-c", f"cd && {script}"])

    def reaches(self, address: str, port: int) -> bool:
        """Tells whether something listens at an address, seen from there."""
        words = self.command(["bash", "-c", f"</dev/tcp/{address}/{port}"])
        return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0

    def write(self, path: str, text: str) -> None:
        """Writes a file there that only its owner may read."""
        folder = shlex.quote(os.path.dirname(path))
        words = ["sh", "-c", f"umask 077; mkdir -p {folder} && cat > {shlex.quote(path)}"]
        subprocess.run(self.command(words), input=text, text=True, check=True, timeout=60)

    def processes(self) -> list[str]:
        """Returns the command lines of processes there, except its sshd and this query."""
        listed = subprocess.run(
            self.command(["ps", "-eo", "args", "--no-headers"]), capture_output=True, text=True, check=True, timeout=60
        )
        mine = ("sshd", "ps -eo", "sleep infinity", "mount --make-rprivate")
        return [line for line in listed.stdout.splitlines() if not any(name in line for name in mine) and "<defunct>" not in line]

    def fall_silent(self, timeout_s: float) -> None:
        """Waits until nothing runs there any more; fails with what still runs after the timeout."""
        ends_at = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < ends_at, left
            time.sleep(0.5)

    def files(self, folder: str) -> list[str]:
        """Returns the paths of the files below a folder there, sorted."""
        words = ["sh", "-c", f"test ! -d {folder} || find {folder} -type f"]
        listed = subprocess.run(self.command(words), capture_output=True, text=True, check=True, timeout=60)
        return sorted(listed.stdout.split())


@contextmanager
def hosts(count: int, scratch: Path) -> Iterator[tuple[Host, list[Host]]]:
    """Creates a laptop, and this many hosts that it reaches by ssh as root with the key `~/.ssh/id_ed25519`.

    `ray` and `python` of this test run are on the path of every login shell.

    Args:
        count: Number of hosts besides the laptop.
        scratch: An empty folder on this machine.
    """
    for name in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(scratch / name)],
            check=True,
            timeout=60,
            capture_output=True,
        )
    lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
    own = [line for line in lines if not line.startswith("root:")]
    (scratch / "passwd").write_text("\n".join([f"root:x:0:0:root:{HOME}:/bin/bash", *own]) + "\n", encoding="utf-8")
    names = "".join(f"10.77.0.{number} host{number}\n" for number in range(1, count + 2))
    (scratch / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
    (scratch / "sshd_config").write_text(
        f"HostKey {HOME}/.sshd/host_key\nAuthorizedKeysFile {HOME}/.ssh/authorized_keys\nPermitRootLogin yes\nUsePAM no\n"
        "PidFile none\nPasswordAuthentication no\nUseDNS no\n",
        encoding="utf-8",
    )
    with ExitStack() as running:
        laptop = running.enter_context(_host(LAPTOP, scratch))
        _ip(laptop, "link add br0 type bridge", "link set br0 up", f"addr add {LAPTOP}/24 dev br0")
        others = []
        for number in range(count):
            other = running.enter_context(_host(f"10.77.0.{number + 2}", scratch))
            _ip(
                laptop,
                f"link add v{number} type veth peer name eth0 netns {other.process_id}",
                f"link set v{number} master br0 up",
            )
            _ip(other, "link set eth0 up", f"addr add {other.address}/24 dev eth0", f"route add default via {LAPTOP}")
            others.append(other)
        for other in others:
            wait_until(lambda address=other.address: laptop.reaches(address, 22), 60)
        yield laptop, others


@contextmanager
def _host(address: str, scratch: Path) -> Iterator[Host]:
    """A host without a network, until the block ends."""
    name = f"host{address.rpartition('.')[2]}"
    venv, checkout = Path(sys.prefix) / "bin", REPOSITORY
    script = f"""set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /home
mkdir -p {HOME}/.ssh {HOME}/.sshd
cd {shlex.quote(str(scratch))}
cp sshd_config host_key {HOME}/.sshd
cp user_key.pub {HOME}/.ssh/authorized_keys
cp user_key {HOME}/.ssh/id_ed25519
echo 'export PATH={venv}:$PATH PYTHONPATH={checkout}' > {HOME}/.profile
touch {HOME}/.bashrc
chmod -R go= {HOME}
mount --bind passwd /etc/passwd
mount --bind hosts /etc/hosts
mount -t tmpfs tmpfs /etc/profile.d
cd /
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
hostname {name}
ip link set lo up
touch {HOME}/ready
$(command -v sshd) -f {HOME}/.sshd/sshd_config
sleep infinity &
wait"""  # a waiting shell reaps orphans, which would otherwise look like remaining processes
    words = ["setpriv", "--pdeathsig", "KILL"]  # a killed test run also kills its hosts
    words += ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "PATH": _IN_PATH})
    try:
        wait_until(lambda: bool(_children(process.pid)), 30)
        host = Host(address=address, process_id=_children(process.pid)[0])
        wait_until(lambda: f"{HOME}/ready" in host.files(HOME), 60)
        yield host
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # this ends the namespace's first process, and so all of it
        process.wait(timeout=60)


def _children(process_id: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _ip(host: Host, *commands: str) -> None:
    for command in commands:  # only the network: a peer is named by this machine's numbering of processes
        words = ["nsenter", f"--target={host.process_id}", "--net", "--", "ip", *command.split()]
        subprocess.run(words, check=True, timeout=60, capture_output=True)
