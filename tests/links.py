"""Nodes with slow links between them on one machine: network namespaces joined by a bridge, each link shaped to a rate. Needs root.

Each node is a namespace with one device, ``veth0``, whose counter says what crossed. Ranks are started in them by ``run``, as ``python -m
tests.links`` with a function's name; what that returns is JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 29541


def missing() -> str | None:
    """Why nodes cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} (iproute2) not found"
    name = f"lmsprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


class Nodes:
    """Some nodes, made by ``nodes``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def run(self, function: str, ranks_per_node: int, *args: Any, timeout: float = 120) -> list[Any]:
        """Calls ``function(*args)`` on every rank, node by node, and returns what they return, in rank order.

        Args:
            function: "module:name"; its arguments and its result are JSON.
        """
        with tempfile.TemporaryDirectory() as folder:
            world = self.count * ranks_per_node
            processes = [self._start(function, rank, world, ranks_per_node, args, folder) for rank in range(world)]
            try:
                codes = [process.wait(timeout) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            texts = [(Path(folder) / f"{rank}.log").read_text()[-2000:] for rank in range(world)]
            if any(codes):
                raise RuntimeError(f"ranks ended with {codes}:\n" + "\n".join(text for text, code in zip(texts, codes) if code))
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]

    def _start(self, function: str, rank: int, world: int, each: int, args: Any, folder: str) -> subprocess.Popen:
        node = rank // each
        env = {
            **os.environ,
            **dict(GLOO_SOCKET_IFNAME="veth0", OMP_NUM_THREADS="1", NODE=str(node)),
            **dict(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="10.77.9.1", MASTER_PORT=str(PORT)),
        }
        command = ["ip", "netns", "exec", f"lms{node}", sys.executable, "-m", "tests.links", function, json.dumps(args), folder]
        with (Path(folder) / f"{rank}.log").open("w") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)


@contextmanager
def nodes(count: int, rate: str = "200mbit") -> Iterator[Nodes]:
    """``count`` nodes whose links send ``rate`` (tc's spelling)."""
    _tear_down(count)
    _ip("link", "add", "lmsbr", "type", "bridge")
    try:
        _ip("link", "set", "lmsbr", "up")
        for node in range(count):
            inside = ("netns", "exec", f"lms{node}", "ip")
            _ip("netns", "add", f"lms{node}")
            _ip(*inside, "link", "set", "lo", "up")
            _ip("link", "add", "veth0", "netns", f"lms{node}", "type", "veth", "peer", "name", f"lmsp{node}")
            _ip("link", "set", f"lmsp{node}", "master", "lmsbr")
            _ip("link", "set", f"lmsp{node}", "up")
            _ip(*inside, "addr", "add", f"10.77.9.{node + 1}/24", "dev", "veth0")
            _ip(*inside, "link", "set", "veth0", "up")
            shape = ["tc", "qdisc", "replace", "dev", "veth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
            _ip("netns", "exec", f"lms{node}", *shape)
        yield Nodes(count)
    finally:
        _tear_down(count)


def _tear_down(count: int) -> None:
    for node in range(count):
        _ip("netns", "del", f"lms{node}", check=False)
    _ip("link", "del", "lmsbr", check=False)


def sent_bytes() -> int:
    """What this node has sent to others so far."""
    return int(Path("/sys/class/net/veth0/statistics/tx_bytes").read_text())


def main() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    name, args, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    module, _, function = name.partition(":")
    result = getattr(importlib.import_module(module), function)(*json.loads(args))
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
