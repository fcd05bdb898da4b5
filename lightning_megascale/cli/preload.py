"""What every rank imports: loaded once by the process that the ranks are forked from (``launch.warm_up``).

That process ends with the one that started it, however that ends: Linux sends it SIGTERM, and the ranks, which lose their parent
with it, are asked to stop in turn. Without this, ranks would go on training after ``kill -9`` of the command.
"""

import ctypes
import os
import signal
import sys

import hydra.utils  # noqa: F401
import lightning.pytorch.callbacks
import lightning.pytorch.loggers  # noqa: F401

import lightning_megascale.callbacks.throughput
import lightning_megascale.data.datamodule
import lightning_megascale.module
import lightning_megascale.strategies.trainer  # noqa: F401

_PR_SET_PDEATHSIG = 1
_SERVER = os.getpid()


def end_with(parent: int) -> None:
    """Asks Linux for SIGTERM when ``parent`` ends; when it has already, ends at once.

    Args:
        parent: the process id that ``os.getppid`` gives while it lives.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def _rank_starts() -> None:
    if os.getppid() == _SERVER:  # not a process that a rank forks
        end_with(_SERVER)


if str(os.getppid()) == os.environ.get("MEGASCALE_PARENT"):  # not where somebody merely imports this
    end_with(os.getppid())
    os.register_at_fork(after_in_child=_rank_starts)
