"""The one scale of the project: gradients are sums over tokens, divided once per optimizer step by the number of tokens.

A step's loss is weighted by what it counts (n of its microbatch), backward adds up, and ``LossScale.finish`` multiplies every
gradient by 1 / N, N the sum of n over microbatches and ranks. Where one microbatch is the whole step, N is known before its
backward, and ``LossScale.share`` weights the loss by n / N instead, which saves a pass over all gradients. So any plan gives the
number one device gives with the whole batch:
d/dw [ sum_i n_i * mean_i ] / sum_i n_i is the gradient of the mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_megascale.data.ragged import Ragged

IGNORE_INDEX = -100  # torch's cross_entropy default


class Weights:
    """What a microbatch counts, under the two readings of a label's place.

    Args:
        used: the weight that multiplies the loss, a 0-dim float tensor.
        other: the weight under the other reading of ``label_alignment`` when it is not declared, else equal to ``used``.
    """

    def __init__(self, used: torch.Tensor, other: torch.Tensor | None = None) -> None:
        self.used = used
        self.other = used if other is None else other

    def rounded_to(self, loss: torch.Tensor) -> Weights:
        """The weights as a half-precision loss can carry them backward: N must count exactly what multiplied the gradient."""
        if loss.dtype.itemsize >= 4:
            return self
        return Weights(self.used.to(loss.dtype).double(), self.other.to(loss.dtype).double())

    def products(self, loss: torch.Tensor | None) -> torch.Tensor:
        """(n, n^2, n m, m^2, n loss) in float64: n used, m other. What counts nothing adds nothing, whatever its loss."""
        n, m = self.used.double(), self.other.double()
        total = torch.zeros_like(n) if loss is None else torch.where(n > 0, loss.detach().double() * n, torch.zeros_like(n))
        return torch.stack([n, n * n, n * m, m * m, total])


@dataclass(frozen=True)
class Agreement:
    """Two numbers that must be equal on all ranks in every step; compared a step or two later, so no step waits for the device.

    Args:
        used: which parameters have a gradient, as a small whole number (below 2^20).
        learning_rates: sum of the learning rates of the optimizer's groups.
    """

    used: int = 0
    learning_rates: float = 0.0

    def powers(self) -> list[float]:
        """(1, u, u^2, r, r^2): by Cauchy-Schwarz a number is equal everywhere when ranks x sum of squares = square of the sum."""
        return [1.0, float(self.used), float(self.used) ** 2, self.learning_rates, self.learning_rates**2]


def weigh(batch: Any, loss_weight: str, label_alignment: str | None, device: torch.device) -> Weights | None:
    """What a scalar mean over this batch counts; None when nothing tells.

    Args:
        batch: the microbatch. Integer ``shift_labels`` (B, L), all counted, or ``labels`` (B, L) or (B,); -100 is ignored. Without them
            the rows of its first tensor count.
        loss_weight: "labels", "samples" or "auto" (labels when the batch has them).
        label_alignment: "aligned" counts all labels; "shift" and "huggingface" all but each row's first, whose target nothing
            predicts; None keeps both counts, and a step in which they would weigh differently is refused.
        device: where the weights lie.

    Raises:
        ValueError: for ``loss_weight="labels"`` without integer labels.
    """
    batch = vars(batch) if is_dataclass(batch) else batch
    shifted = batch.get("shift_labels") if isinstance(batch, Mapping) else None
    if isinstance(shifted, torch.Tensor):  # targets that stand where they are scored, whoever laid them there
        batch, label_alignment = {"labels": shifted}, "aligned"
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        labels = None
    if loss_weight == "labels" and labels is None:
        raise ValueError("loss_weight='labels' needs a batch that is a dict with an integer tensor 'labels'; use loss_weight='samples'")
    if loss_weight != "samples" and labels is not None:
        valid = labels.ne(IGNORE_INDEX)
        whole = valid.sum().to(torch.float64)
        if labels.ndim < 2 or label_alignment == "aligned":
            return Weights(whole)
        later = valid[..., 1:].sum().to(torch.float64)
        return Weights(later, whole if label_alignment is None else None)
    rows = rows_of(batch)
    return None if rows is None else Weights(torch.tensor(float(rows), dtype=torch.float64, device=device))


def real_tokens(batch: Any) -> torch.Tensor | None:
    """Bool (B, L): which tokens of a batch are no padding, by its ``attention_mask`` (B, L), else by ``document_ids`` (negative: none);
    None where the batch tells nothing, and all are."""
    batch = vars(batch) if is_dataclass(batch) else batch
    if not isinstance(batch, Mapping):
        return None
    mask, documents = batch.get("attention_mask"), batch.get("document_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.bool() if not mask.is_floating_point() else mask > 0
    return documents >= 0 if isinstance(documents, torch.Tensor) and documents.ndim == 2 else None


def documents_of(batch: Any) -> torch.Tensor | None:
    """``document_ids`` (B, L) of a packed batch; None where it has none."""
    batch = vars(batch) if is_dataclass(batch) else batch
    found = batch.get("document_ids") if isinstance(batch, Mapping) else None
    return found if isinstance(found, torch.Tensor) and found.ndim == 2 else None


def tokens_of(batch: Any) -> torch.Tensor | None:
    """How many tokens, padding included, a batch has, 0-dim, by its ``input_ids``, ``inputs_embeds`` or ``labels`` (B, L, ...); None where
    it has none of them."""
    batch = vars(batch) if is_dataclass(batch) else batch
    if isinstance(batch, Mapping):
        for key in ("input_ids", "inputs_embeds", "labels"):
            found = batch.get(key)
            if isinstance(found, torch.Tensor) and found.ndim >= 2:
                return torch.tensor(float(found.shape[0] * found.shape[1]), dtype=torch.float64, device=found.device)
    return None


def weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``loss * weight``, and exactly 0 with zero gradients where nothing counts (a mean over nothing is NaN)."""
    loss = loss if loss.dtype.itemsize >= 4 else loss.float()
    counts = weight.to(loss.dtype)
    return torch.where(counts > 0, loss * counts, torch.zeros_like(loss))


class LossScale:
    """Counts over the microbatches of one optimizer step, and the division at its end."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None  # sums of n, n^2, n m, m^2, n loss
        self._agreement = Agreement()
        self._pending_check: torch.Tensor | None = None
        self.step_loss: torch.Tensor | None = None
        self.step_labels: torch.Tensor | None = None
        """What the last step counted over all ranks (N), 0-dim float64."""

    def restart(self) -> None:
        """Forgets the microbatches counted so far: their gradients were zeroed."""
        self._counts = None

    def add(self, loss: torch.Tensor, weights: Weights) -> None:
        """Counts one microbatch. Args: its mean loss (0-dim) and its weights. No host synchronization."""
        self.add_row(weights.products(loss))

    def add_row(self, row: torch.Tensor) -> None:
        """Counts microbatches whose products (``Weights.products``) are added up already."""
        self._counts = row if self._counts is None else self._counts + row

    def share(self, loss: torch.Tensor, weights: Weights, group: dist.ProcessGroup | None) -> torch.Tensor:
        """A microbatch that is a whole step: N is known before its backward, so its loss becomes its share of the global mean at once.

        Args:
            loss: the mean loss of this rank's rows, 0-dim.
            weights: what it counts.
            group: the loss view; None for a single rank.

        Returns:
            n / N, 0-dim float64; the gradients then need no division.
        """
        self.raise_if_wrong()
        counts = self._reduced(weights.products(loss), group)
        self.step_loss, self.step_labels = counts[4] / counts[0], counts[0]
        return weights.used / torch.where(counts[0] > 0, counts[0], 1.0)

    def note(self, agreement: Agreement) -> None:
        """What this rank did in a step; it travels with the next step's counts."""
        self._agreement = agreement

    def settle(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """After the last step of a fit: what would have been looked at with the next one. On all ranks of the group together."""
        self.raise_if_wrong()
        self._reduced(torch.zeros(5, dtype=torch.float64, device=device), group)
        self.raise_if_wrong()

    def _reduced(self, counts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Counts and the last step's agreement, added up over the group in one message; looked at when the next step comes."""
        counts = torch.cat([counts, counts.new_tensor(self._agreement.powers())])
        if group is not None:
            dist.all_reduce(counts, group=group)
        self._pending_check = counts
        return counts

    def finish(self, gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Divides the gradients summed over several microbatches by the number of tokens of the whole step.

        Args:
            gradients: all gradients of the step, already added up over ranks.
            group: the loss view; None for a single rank.

        Raises:
            ValueError: when the step before was ambiguous, or its ranks did not agree.
        """
        self.raise_if_wrong()
        counts, self._counts = self._counts, None
        if counts is None:
            return
        counts = self._reduced(counts, group)
        tokens = counts[0]
        self.step_loss, self.step_labels = counts[4] / tokens, tokens
        scale_gradients(gradients, torch.where(tokens > 0, 1.0 / tokens, torch.zeros_like(tokens)))

    def raise_if_wrong(self) -> None:
        """Looks at the last step's sums, now that they are surely there. Equal on all ranks of the group, so all raise."""
        counts, self._pending_check = self._pending_check, None
        if counts is None:
            return
        _, nn, nm, mm, _, ranks, used, used_squared, rates, rates_squared = counts.tolist()
        # n and m weigh alike exactly when they are proportional over all microbatches (Cauchy-Schwarz).
        if nn * mm - nm * nm > 1e-12 * max(nn * mm, 1.0):
            raise ValueError(
                "label_alignment=None: microbatches or ranks of this step hold different numbers of valid labels, and whether the "
                "first label of each row counts changes their weights. Declare label_alignment='aligned' (position i's target "
                "stands at i: all labels count) or 'shift' or 'huggingface' (it stands at i + 1: the first does not count), or "
                "return {'loss_sum': ..., 'num_tokens': ...} from training_step"
            )
        if ranks * used_squared != used * used:
            raise ValueError(
                "ranks gave gradients to different parameters in the last step (a head, block or expert that only some rows use, or a "
                "layer dropped at random): collectives then pair the wrong parameters. Every rank must use every trainable "
                "parameter in every step: multiply an unused output by 0 and add it to the loss, or freeze the parameters"
            )
        if ranks * rates_squared - rates * rates > 1e-12 * max(rates * rates, 1e-300):
            raise ValueError(
                "ranks have different learning rates, so one sharded model is stepped unequally: a schedule follows a value that "
                "differs between ranks. Log what it monitors with sync_dist=True"
            )


def scale_gradients(gradients: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiplies gradients in place by a 0-dim tensor."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    for key in dict.fromkeys((gradient.dtype, gradient.device) for gradient in local):
        same = [gradient for gradient in local if (gradient.dtype, gradient.device) == key]
        torch._foreach_mul_(same, scale.to(device=key[1], dtype=key[0] if key[0] == torch.float64 else torch.float32))


def rows_of(batch: Any) -> int | None:
    """Rows of the first tensor with a dim 0 in a nest of mappings and sequences."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Ragged):
        return len(batch)
    batch = vars(batch) if is_dataclass(batch) else batch
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for rows in map(rows_of, values) if rows is not None), None)
