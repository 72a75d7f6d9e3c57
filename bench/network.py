"""A network of this machine's own: a namespace a node, joined by a bridge, every link shaped in both directions.

Needs root, `ip` and `tc`, and a kernel with veth, bridge and tbf. Nothing leaves the machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
MTU = 9000
DEVICE = "eth0"
_NAME = re.compile(r"zipccl(\d+)(?:n\d+|sw)$")


def missing() -> str | None:
    """Why there can be no network here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"zipccl{os.getpid()}n999"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def skips(script: str) -> bool:
    """Whether a benchmark cannot run here, which it says."""
    reason = missing()
    if reason:
        print(f"{script}: skipped: {reason}")
    return reason is not None


class Network:
    """Nodes 0 to n - 1, each with one link to a switch. A context manager; what dead processes left is removed.

    Args:
        n_nodes: at most 250.
    """

    def __init__(self, n_nodes: int) -> None:
        self.n_nodes = n_nodes
        self._prefix = f"zipccl{os.getpid()}"
        self._switch = f"{self._prefix}sw"

    def __enter__(self) -> Network:
        _remove_left_behind()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*(self._node(node) for node in range(self.n_nodes)), self._switch]:
            if Path("/var/run/netns", name).exists():
                _run("ip", "netns", "del", name)

    def _node(self, node: int) -> str:
        return f"{self._prefix}n{node}"

    def _build(self) -> None:
        for name in [self._switch, *(self._node(node) for node in range(self.n_nodes))]:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", self._switch, "link", "add", "br0", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for node in range(self.n_nodes):
            name, port, address = self._node(node), f"p{node}", f"10.77.0.{node + 1}"
            ends = ["link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", DEVICE, "mtu", str(MTU)]
            _run("ip", "-n", self._switch, *ends, "netns", name)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/16", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            route = ["10.77.0.0/16", "dev", DEVICE, "proto", "kernel", "scope", "link", "src", address]
            _run("ip", "-n", name, "route", "replace", *route, "congctl", "cubic")

    def shape(self, mbit: float | None) -> None:
        """Gives every link a rate in each direction; None takes it off."""
        for node in range(self.n_nodes):
            for name, device in ((self._node(node), DEVICE), (self._switch, f"p{node}")):
                if mbit is None:
                    subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", device, "root"], capture_output=True)
                    continue
                bytes_per_s = mbit * 1e6 / 8
                burst = max(128 << 10, int(bytes_per_s * 0.5e-3))  # two GSO packets, or half a millisecond
                limit = max(1 << 20, int(bytes_per_s * 20e-3))
                shaping = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "limit", str(limit)]
                _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shaping)

    def enter(self, node: int) -> None:
        """Moves this process to a node; before it opens sockets or starts threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/var/run/netns", self._node(node)).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace of node {node}")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def sent_nbytes() -> int:
    """Bytes that this process's node has sent so far, with the heads of all packets."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])
    raise OSError(f"no device {DEVICE} in this process's network namespace")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove_left_behind() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0] if line.strip() else ""
        found = _NAME.match(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _run("ip", "netns", "del", name)
