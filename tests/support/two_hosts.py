"""Two hosts that are none: network namespaces with host names of their own, and a cable between them
that can be pulled. All addresses are inside of these namespaces.

Needs root, `unshare`, `nsenter` (util-linux) and `ip` (iproute2), which is also found where
`scripts/install_dependencies.sh --unpack iproute2 libbpf1 libelf1 libmnl0` has put it: for machines
that reach no network.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import time

NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLES = ("cable0", "cable1")


class NoHosts(Exception):
    """Why there are none."""


def find_ip(source):
    """The program and the environment that it needs."""
    found = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found:
        return found, dict(os.environ)
    tree = pathlib.Path(source) / "build-dependencies/debian"
    for path in ("usr/bin/ip", "usr/sbin/ip", "bin/ip", "sbin/ip"):
        if (tree / path).is_file():
            folders = glob.glob(f"{tree}/usr/lib/*-linux-gnu") + glob.glob(f"{tree}/lib/*-linux-gnu")
            return str(tree / path), {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    raise NoHosts("there is no program ip (Debian package iproute2)")


class Hosts:
    """Ends with close(), which also ends what runs on the hosts' network."""

    def __init__(self, source):
        self.ip, self.environment = find_ip(source)
        if os.geteuid() != 0:
            raise NoHosts("only root can make network namespaces")
        self.holders = []
        try:
            self.make()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.close()
            said = getattr(error, "stderr", None) or b""
            raise NoHosts(f"network namespaces cannot be made: {error} "
                          f"{said.decode(errors='replace').strip()}") from error

    def make(self):
        for name in NAMES:
            # It keeps the namespaces, and says when it is in them.
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", sys.executable, "-c",
                 f"import socket, time; socket.sethostname({name!r}); print(1, flush=True); "
                 "time.sleep(3600)"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.holders.append(holder)
            if not holder.stdout.readline():
                raise subprocess.CalledProcessError(1, "unshare", stderr=holder.stderr.read())
        self.run_ip("link", "add", CABLES[0], "netns", self.holders[0].pid, "type", "veth", "peer",
                    "name", CABLES[1], "netns", self.holders[1].pid)
        for host in range(2):
            self.run_ip("address", "add", f"{ADDRESSES[host]}/24", "dev", CABLES[host], host=host)
            for device in (CABLES[host], "lo"):
                self.run_ip("link", "set", device, "up", host=host)
        self.wait_for_carrier()

    def run_ip(self, *arguments, host=None):
        command = [self.ip, *map(str, arguments)]
        where = [] if host is None else self.on(host)
        subprocess.run([*where, *command], check=True, capture_output=True, env=self.environment)

    def on(self, host):
        """What stands before a command that is to run on the host."""
        return ["nsenter", "--target", str(self.holders[host].pid), "--net", "--uts"]

    def wait_for_carrier(self):
        trial = ("import socket; s = socket.socket(); s.settimeout(1); "
                 f"exit(0 if s.connect_ex(('{ADDRESSES[0]}', 9)) == 111 else 1)")
        for _ in range(20):
            if subprocess.run([*self.on(1), sys.executable, "-c", trial], check=False).returncode == 0:
                return
            time.sleep(0.1)
        raise subprocess.CalledProcessError(1, "connect", stderr=b"the hosts do not reach each other")

    def pull_cable(self):
        self.run_ip("link", "set", CABLES[0], "down", host=0)

    def plug_in_cable(self):
        self.run_ip("link", "set", CABLES[0], "up", host=0)
        self.wait_for_carrier()

    def close(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()
        self.holders = []


class Ranks:
    """Processes of one run, as many on each host, started by hand."""

    def __init__(self, hosts, per_host, port, command, folder, variables=lambda rank: {}):
        self.processes, self.outputs = [], []
        for rank in range(2 * per_host):
            host = rank // per_host
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(2 * per_host),
                           "LOCAL_RANK": str(rank % per_host), "LOCAL_WORLD_SIZE": str(per_host),
                           "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port),
                           **variables(rank)}
            environment = {name: value for name, value in environment.items() if value is not None}
            outputs = tuple(pathlib.Path(folder) / f"rank{rank}_{port}.{kind}"
                            for kind in ("out", "err"))
            self.outputs.append(outputs)
            with open(outputs[0], "wb") as out, open(outputs[1], "wb") as err:
                self.processes.append(subprocess.Popen(
                    [*hosts.on(host), *map(str, command)], stdin=subprocess.DEVNULL, stdout=out,
                    stderr=err, env=environment))

    def all_run(self):
        return all(process.poll() is None for process in self.processes)

    def wait(self, seconds):
        """The statuses; None: it had to be killed."""
        deadline = time.monotonic() + seconds
        statuses = []
        for process in self.processes:
            try:
                statuses.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        self.kill()
        return statuses

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def out(self, rank):
        return self.outputs[rank][0].read_text(errors="replace")

    def errors(self, rank):
        return self.outputs[rank][1].read_text(errors="replace")

    def all_errors(self):
        return "\n".join(f"rank {rank}: {self.errors(rank)}" for rank in range(len(self.outputs)))

    def messages(self, rank):
        return [line for line in self.errors(rank).splitlines() if line.startswith("troupe: ")]
