"""Public names, imported on first use, so that ``megascale plan`` starts without torch; registers "megascale" with Lightning lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_megascale.registry import register_when_imported

__version__ = "0.1.0"

_NAMES = {
    "MegascaleStrategy": "lightning_megascale.strategies.trainer",
    "ParallelPlan": "lightning_megascale.plan",
    "ModelLayout": "lightning_megascale.layout",
    "MegascaleModule": "lightning_megascale.module",
    "ExpertBalanceMonitor": "lightning_megascale.callbacks.expert_balance",
    "RingContextSharding": "lightning_megascale.callbacks.context_sharding",
    "ThroughputMonitor": "lightning_megascale.callbacks.throughput",
    "TextDataModule": "lightning_megascale.data.datamodule",
    "MixtureDataModule": "lightning_megascale.data.mixture",
    "ImageTextDataModule": "lightning_megascale.data.image_text",
}
__all__ = [*_NAMES]

if TYPE_CHECKING:
    from lightning_megascale.callbacks.context_sharding import RingContextSharding as RingContextSharding
    from lightning_megascale.callbacks.expert_balance import ExpertBalanceMonitor as ExpertBalanceMonitor
    from lightning_megascale.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
    from lightning_megascale.data.datamodule import TextDataModule as TextDataModule
    from lightning_megascale.data.image_text import ImageTextDataModule as ImageTextDataModule
    from lightning_megascale.data.mixture import MixtureDataModule as MixtureDataModule
    from lightning_megascale.layout import ModelLayout as ModelLayout
    from lightning_megascale.module import MegascaleModule as MegascaleModule
    from lightning_megascale.plan import ParallelPlan as ParallelPlan
    from lightning_megascale.strategies.trainer import MegascaleStrategy as MegascaleStrategy


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'lightning_megascale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])


register_when_imported()
