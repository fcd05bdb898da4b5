"""What a training step of a model computes, sends and keeps under any plan, and which plan is best on a cluster. No torch."""

from typing import Any

__all__ = ["Estimate", "Setting", "estimate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_megascale.planning import estimates

    return getattr(estimates, name)
