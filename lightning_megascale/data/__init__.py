"""Data modules; they know nothing of the rest of the package."""

from lightning_megascale.data.ranks import data_parallel_position, split_by_data_parallel_rank

__all__ = ["data_parallel_position", "split_by_data_parallel_rank"]
