"""share="model": one rank of a model replica reads, and its peers get the batch from it over the CPU instead of reading it too."""

from __future__ import annotations

import io
import logging
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megascale.data.positioned import Batch, BatchLoader
from lightning_megascale.data.ragged import Ragged

SHARES = ("none", "model")
_ALIGNED = 64  # bytes: where a tensor may begin in a message
_END = object()
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replica:
    """The ranks that work on the same rows as this one: together they hold one copy of the model.

    A strategy gives it as ``strategy.model_replica``; None where a rank is alone with its rows. The groups serve nothing but batches, so
    that their order is that of the loaders, whatever else is on the way.

    Args:
        group: of all these ranks, with a backend that works on the CPU.
        reader: global rank of the one that reads.
        first_inputs: entries of a batch that only the ranks of the first pipeline stage read.
        is_first: whether this rank is one of them, as the reader is.
        first_group: of those, as ``group``; None where the reader is the only one, or all are.
    """

    group: Any
    reader: int
    first_inputs: tuple[str, ...] = ()
    is_first: bool = True
    first_group: Any = None


class Withheld:
    """Stands in a batch for an entry that was not sent to this rank, since its pipeline stages do not read it.

    It can be handed on (``.values``, ``.to(...)``, into the model's call), has its rows' ``counts``, and raises an error that names the
    entry when anything else is done with it.

    Args:
        name: of the entry.
        counts: (B,) int64, values of each row, where the entry is ``Ragged``.
    """

    __slots__ = ("name", "counts")

    def __init__(self, name: str, counts: Tensor | None = None) -> None:
        self.name, self.counts = name, counts

    @property
    def values(self) -> Withheld:
        """Itself, where ``Ragged`` has its tensor."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Withheld:
        """Itself."""
        return self

    def __repr__(self) -> str:
        return f"Withheld({self.name!r})"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(_untouchable(object.__getattribute__(self, "name"), f".{attribute}"))

    def __getitem__(self, place: Any) -> NoReturn:
        raise ValueError(_untouchable(self.name, "[...]"))

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(_untouchable(self.name, " in a computation"))

    __len__ = __bool__ = __float__ = __int__ = __contains__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _refuse
    __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next((value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Withheld)), None)
        raise ValueError(_untouchable("?" if found is None else found.name, f" in {getattr(function, '__name__', 'a function')}"))

    def __reduce__(self) -> Any:
        return Withheld, (self.name, self.counts)


def _untouchable(name: str, where: str) -> str:
    return (
        f"batch[{name!r}] was not sent to this rank, and its step reads it ({name}{where}): with share='model' only the ranks of the first "
        "pipeline stage get what only that stage is given. Hand it to the model as it is, or set share='none'"
    )


class SharedLoader:
    """A loader that one rank of a model replica reads, for all of its ranks.

    The reader iterates the loader and sends each batch, the end, or the error that stops it; the others only receive. Everybody plans and
    counts for itself: lengths, positions and checkpoints are those of the loader inside. Reading leaves no trace in the random numbers that
    the model draws, so that these stay alike on all ranks.

    Args:
        loader: of this rank; its attributes are seen through.
        trainer: whose ``strategy.model_replica`` says who reads, asked for when an iteration begins. Without one, or where it is None, the
            loader is read here.
        name: of the loader, for messages.

    Raises:
        ValueError, OSError, RuntimeError: on all ranks of the replica alike, naming the reader, when reading fails; ValueError when they
            are about to read different loaders.
    """

    def __init__(self, loader: BatchLoader, trainer: Any, name: str) -> None:
        self.loader, self.trainer, self.name = loader, trainer, name
        self.batch_sampler = None  # Lightning looks for one where there is a sampler

    @property
    def sampler(self) -> SharedLoader:
        """Itself: where Lightning looks for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Batch]:
        replica: Replica | None = getattr(getattr(self.trainer, "strategy", None), "model_replica", None)
        if replica is None:
            _log.info("share='model' changes nothing for the %s loader: its strategy names no ranks that work on the same rows", self.name)
            yield from self.loader
            return
        self._meet(replica)
        yield from self._read(replica) if dist.get_rank() == replica.reader else self._receive(replica)

    def _meet(self, replica: Replica) -> None:
        """All ranks begin the same loader, or all stop."""
        everyone: list[Any] = [None] * dist.get_world_size(replica.group)
        dist.all_gather_object(everyone, (self.name, len(self)), group=replica.group)
        if len(set(everyone)) > 1:
            begun = "; ".join(f"rank {rank}: {name}, {length} batches" for rank, (name, length) in zip(_ranks(replica), everyone))
            raise ValueError(f"the ranks of a model replica begin to read different loaders under share='model': {begun}")

    def _read(self, replica: Replica) -> Iterator[Batch]:
        batches: Iterator[Batch] | None = None
        while True:
            error: Exception | None = None
            try:
                with torch.random.fork_rng(devices=[]):
                    batches = iter(self.loader) if batches is None else batches
                    batch: Any = next(batches, _END)
                everybody, first = (None, {}) if batch is _END else _divided(batch, replica.first_inputs)
                message, more = pack(("end" if batch is _END else "batch", everybody)), pack(first)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks together
                error = caught
                kind = next((name for name, known in _KINDS.items() if isinstance(caught, known)), type(caught).__name__)
                words = f"rank {replica.reader}, which reads for ranks {_ranks(replica)}: {caught}"
                message = pack(("error", (kind, words)))
            _send(replica.group, replica.reader, message)
            if error is not None:
                raise _error(kind, words) from error
            if batch is _END:
                return
            if first and replica.first_group is not None:
                _send(replica.first_group, replica.reader, more)
            yield batch

    def _receive(self, replica: Replica) -> Iterator[Batch]:
        while True:
            kind, value = unpack(*_received(replica.group, replica.reader))
            if kind == "error":
                raise _error(*value)
            if kind == "end":
                return
            if replica.is_first and replica.first_group is not None and any(isinstance(entry, Withheld) for entry in _entries(value)):
                value = {**value, **unpack(*_received(replica.first_group, replica.reader))}
            yield value


def _ranks(replica: Replica) -> list[int]:
    return dist.get_process_group_ranks(replica.group)


def _error(kind: str, words: str) -> Exception:
    return _KINDS[kind](words) if kind in _KINDS else RuntimeError(f"{kind}: {words}")


def _entries(batch: Any) -> Sequence[Any]:
    return list(batch.values()) if isinstance(batch, dict) else []


def _divided(batch: Any, names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """What everybody gets, and the entries that only the first pipeline stage gets."""
    if not isinstance(batch, dict):
        return batch, {}
    first = {name: batch[name] for name in names if isinstance(batch.get(name), (Tensor, Ragged))}
    return {**batch, **{name: Withheld(name, value.counts if isinstance(value, Ragged) else None) for name, value in first.items()}}, first


# ---- messages ------------------------------------------------------------------------------------------------------------------------

Message = tuple[Tensor, int]  # (bytes, uint8), of which so many are the pickled rest


def pack(value: Any) -> Message:
    """A nest as one run of bytes: pickled, but for its tensors, which follow as they lie in memory."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    rest = file.getvalue()
    begin = _aligned(len(rest))
    message = torch.empty(begin + pickler.size, dtype=torch.uint8)
    message[: len(rest)] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    for offset, tensor in pickler.tensors:
        message[begin + offset :][: tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return message, len(rest)


def unpack(message: Tensor, rest: int) -> Any:
    """What was packed; its tensors lie in the message."""
    return _Unpickler(message[:rest].numpy().tobytes(), message[_aligned(rest) :]).load()


def _send(group: Any, reader: int, message: Message) -> None:
    dist.broadcast(torch.tensor([len(message[0]), message[1]]), reader, group=group)
    dist.broadcast(message[0], reader, group=group)


def _received(group: Any, reader: int) -> Message:
    sizes = torch.empty(2, dtype=torch.int64)
    dist.broadcast(sizes, reader, group=group)
    message = torch.empty(int(sizes[0]), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    dist.broadcast(message, reader, group=group)
    return message, int(sizes[1])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _Pickler(pickle.Pickler):
    """Leaves tensors out and notes where they will lie."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
            return None
        offset = self.size
        self.tensors.append((offset, value))
        self.size += _aligned(value.nbytes)
        return offset, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, rest: bytes, tensors: Tensor) -> None:
        super().__init__(io.BytesIO(rest))
        self.tensors = tensors

    def persistent_load(self, place: Any) -> Tensor:
        offset, dtype, shape = place
        own = self.tensors[offset:][: math.prod(shape) * dtype.itemsize]
        return own.view(dtype).view(shape).data  # .data: changing one in place is no change of the others in autograd's eyes
