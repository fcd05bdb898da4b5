"""Proof on a user's own model that the numbers under a plan are those of one device: ``verify`` and the ranks it runs on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "verify": "lightning_megascale.verification.proof",
    "Report": "lightning_megascale.verification.report",
    "RankFailure": "lightning_megascale.verification.ranks",
    "run_ranks": "lightning_megascale.verification.ranks",
}
__all__ = [*_NAMES]

if TYPE_CHECKING:
    from lightning_megascale.verification.proof import verify as verify
    from lightning_megascale.verification.ranks import RankFailure as RankFailure
    from lightning_megascale.verification.ranks import run_ranks as run_ranks
    from lightning_megascale.verification.report import Report as Report


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'lightning_megascale.verification' has no attribute {name!r}")
