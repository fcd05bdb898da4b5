"""The trial of a loss: few targets in a short batch tell whether a step scores each at its token, and whether ranks may score parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_megascale.data.ragged import Ragged
from lightning_megascale.parallel.context_names import names_of
from lightning_megascale.parallel.loss_scale import IGNORE_INDEX
from lightning_megascale.parallel.microbatches import map_batch

Target = tuple[int, int, int]  # row, token whose logits are scored, label


class Trial:
    """The first tokens of the first rows of a batch, with few targets.

    Args:
        whole: a batch.
        tokens, rows: at most so many.
        aligned: a target stands at its token, else one later.
    """

    def __init__(self, whole: Any, tokens: int, rows: int, aligned: bool) -> None:
        names = names_of(whole)
        self._of, self._length = names.tokens.shape[:2]
        self.rows, self.tokens = min(rows, self._of), min(tokens, self._length)
        self.last = self.tokens - (1 if aligned else 2)
        self._later = 0 if aligned else 1
        self._ids_at, self._labels_at, self._whole = names.tokens_at, names.labels_at, whole
        self.rounding = 1e-4
        """Relative difference of losses that counts as none."""

    def batch(self, targets: Sequence[Target], changed: slice | None) -> Any:
        """Labels ignored but those of ``targets``; the tokens of ``changed`` are others."""

        def cut(name: str, leaf: Any) -> Any:
            if isinstance(leaf, (list, tuple, Ragged)):
                return leaf[: self.rows] if len(leaf) == self._of else leaf
            if leaf.ndim == 2 and tuple(leaf.shape) == (1, self._length) and name.endswith(("['position_ids']", ".position_ids")):
                return leaf[:, : self.tokens].expand(self.rows, -1)
            if leaf.ndim == 0 or leaf.shape[0] != self._of:
                return leaf
            is_of_tokens = leaf.ndim > 1 and leaf.shape[1] == self._length
            part = leaf[: self.rows, : self.tokens] if is_of_tokens else leaf[: self.rows]
            key = name.replace("['", ".").removesuffix("']").rpartition(".")[2]
            if name == self._labels_at:
                part = torch.full_like(part, IGNORE_INDEX)
                for row, place, label in targets:
                    part[row, place + self._later] = label
            elif name == self._ids_at and changed is not None:
                part = part.clone()
                part[:, changed] = part[:, changed] + 1 if leaf.is_floating_point() else torch.where(part[:, changed] == 0, 1, 0)
            elif key == "document_ids":
                part = torch.zeros_like(part)
            elif key == "attention_mask" or (is_of_tokens and ("mask" in key or "weight" in key)):
                part = torch.ones_like(part)
            elif key == "position_ids" and leaf.shape[0] == self._of:
                part = torch.arange(self.tokens, device=part.device, dtype=part.dtype).expand(self.rows, -1)
            return part

        return map_batch(self._whole, cut)


def judge(loss: Callable[..., tuple[float, float]], trial: Trial, looks_ahead: Callable[[], bool]) -> str | None:
    """What is wrong with a loss: "place" (it does not come from the target's token), "sum" (it is no sum over targets), "whole" (it is
    another one when the tokens lie otherwise, or than one device computes), "blind" (it is the same for all labels, so nothing can be
    said), or None. The loss is asked equally often whatever it says: ranks meet in it, and may judge otherwise.

    Args:
        loss: (targets, changed tokens) -> (sum, count).
        trial: makes the batches.
        looks_ahead: whether attention sees later tokens, asked after a run.
    """
    last = trial.last
    single = [loss([(0, 0, 0)]), loss([(0, last, 1)]), *([loss([(1, 0, 0)])] if trial.rows > 1 else [])]
    other = [loss([(0, 0, 1)]), loss([(0, last, 0)])]
    later, own = loss([(0, 0, 0)], slice(1, None)), loss([(0, last, 1)], slice(last, last + 1))
    together = loss([(0, 0, 0), (0, last, 1), *([(1, 0, 0)] if trial.rows > 1 else [])])
    first = 0 if trial.last == trial.tokens - 1 else -1  # -1: the label that no logits are scored against
    every = [(row, place, place % 2) for row in range(trial.rows) for place in range(first, trial.last + 1)]
    whole, shuffled = loss(every, None, "whole"), loss(every, None, "shuffled")

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= trial.rounding * max(abs(a), abs(b))

    values = torch.tensor([value for value, _ in (*single, *other, later, own, together)])
    if not bool(values.isfinite().all()) or not bool((values != 0).all()):
        return "place"
    if single[0] == other[0] and single[1] == other[1]:
        return "blind"
    if single[0] == other[0] or single[1] == other[1] or single[1] == own:
        return "place"
    if not looks_ahead() and not close(single[0][0], later[0]):
        return "place"
    sums, counts = sum(value for value, _ in single), sum(count for _, count in single)
    if not close(together[0], sums) or not close(together[1], counts):
        return "sum"
    return None if close(whole[0], shuffled[0]) and close(whole[1], shuffled[1]) else "whole"


NO_LABELS = (
    "the batch has no 'labels' (B, L), so what the step scores at the borders of this rank's tokens is unknown: put labels into the batch, "
    "made from the whole row"
)
NOT_ADDITIVE = (
    "a few targets were put into a short batch, and training_step's loss of all of them was not the mean of their single losses: a loss "
    "for each row, a preference or contrastive loss, a mean over something else than valid labels, weights by class. Under context "
    "parallelism each rank scores a part of each row: return {'loss_sum': ..., 'num_tokens': ...} whose two numbers are sums over tokens"
)
OTHERWISE = (
    "training_step's loss of a short batch changed when its tokens were laid in another order, with their positions and targets, as "
    "context parallelism lays them: something in the step depends on where a token stands (weights by place, the last token), counts "
    "labels that nothing is scored against, or calls another model whose attention is not reached (a teacher). Compute it from what "
    "belongs to a token, and return {'loss_sum': ..., 'num_tokens': ...} for other means"
)
_HOW = (
    "a target was put at a single token of a few, and training_step's loss did not come from the logits of that token alone. Under context "
    "parallelism each rank sees part of a row, so who shifts labels has to be right, other tokens must not count (a penalty over all of "
    "them), and labels are changed in on_after_batch_transfer, not in the step: "
)
LOSS = {
    "aligned": _HOW + "label_alignment='aligned' says that the step scores the logits at i against labels[:, i]. If it (or the model's own "
    "loss) shifts them, say label_alignment='shift', or 'huggingface' for a transformers model that takes shift_labels",
    "shift": _HOW + "label_alignment='shift' says that the step scores the logits at i against labels[:, i + 1], as "
    "cross_entropy(logits[:, :-1], labels[:, 1:]) does. If labels are aligned already say 'aligned'",
    "huggingface": _HOW + "label_alignment='huggingface' says that the model's loss takes shift_labels, which the batch holds: call "
    "self.model(**batch), or pass shift_labels=batch['shift_labels']. For a class that ignores it, and shifts labels itself, say 'shift'",
}
