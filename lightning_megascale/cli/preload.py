"""What every rank imports: loaded once by the process that the ranks are forked from (``launch.warm_up``)."""

import hydra.utils  # noqa: F401
import lightning.pytorch.callbacks
import lightning.pytorch.loggers  # noqa: F401

import lightning_megascale.callbacks.throughput
import lightning_megascale.data.datamodule
import lightning_megascale.module
import lightning_megascale.strategies.trainer  # noqa: F401
