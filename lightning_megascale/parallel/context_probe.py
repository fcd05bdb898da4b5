"""Does a model mix tokens through attention only, and take positions from what it is given? A few tokens in two orders decide.

The same tokens are run in the order of the row and shuffled together with their positions, with an attention that masks by (document,
position). A model that may be cut along the sequence gives the same numbers, shuffled. Local counting of positions, a convolution, a
bias by index show up without knowing the class; and since tokens of a second document must not change the first, so does attention or
pooling that goes past ours. Queries, keys and values are compared too: a projection that starts at zero hides nothing there.

Shapes: B = 1 row, n tokens, N heads, G key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST = 1e-3
"""Relative difference that rounding explains: right models give 0 (float64, bfloat16) to 3e-7 (float32), others 1e-2."""


@dataclass
class Probe:
    """Attention of one probing forward.

    Args:
        documents, positions: (B, n).
        spare: places at the end that a step may cut off before it calls the model.
        gives_positions: the model gets ``positions``; False: it is left to count them.
    """

    documents: Tensor
    positions: Tensor
    spare: int = 0
    gives_positions: bool = True
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    bidirectional: bool = False
    """Some attention looks ahead."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int | None, scale: float | None, name: str) -> Tensor:
        """Attention by document and position, inside this rank; notes what came in. Arguments as ``Context.attend``."""
        tokens = q.shape[2]
        if any(x.shape[2] != tokens for x in (k, v)) or not 0 <= self.positions.shape[1] - tokens <= self.spare:
            raise ValueError(
                f"{name}: attention over {q.shape[2]} queries and {k.shape[2]} keys, for a row of {self.positions.shape[1]} tokens: "
                "cross-attention, a cache, or a sequence made inside of the model cannot be context parallel"
            )
        self.bidirectional |= not is_causal
        self.seen.setdefault(name, []).extend(x.detach() for x in (q, k, v))
        documents, positions = (x[0, :tokens].to(q.device) for x in (self.documents, self.positions))
        visible = documents[:, None] == documents
        ahead = positions[:, None] - positions
        if is_causal:
            visible = visible & (ahead >= 0)
        if window is not None:
            visible = visible & (ahead < window)
        groups = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
        scores = q.double() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).to(q.dtype)


def probe_layout(
    call: Callable[[Tensor, Probe], Tensor | None], largest_id: int, tokens: int, device: torch.device, counts: bool = True, unit: int = 1
) -> list[str]:
    """Runs a model four times and says what is wrong with it; may differ between pipeline stages.

    Args:
        call: (ids (1, n), probe) -> logits (1, n, ...) or another output, None where this rank has none.
        largest_id: a token number that exists, as every smaller one does.
        tokens: n, at least 8 and a multiple of ``unit``.
        device: of the ids.
        unit: what lengths are a multiple of.
        counts: the step leaves positions to the model, whose own must then be those that it will be given.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.arange(tokens) % (largest_id + 1)
    cut = max(1, tokens * 5 // 8 // unit) * unit
    documents = torch.tensor([0] * cut + [1] * (tokens - cut))
    positions = torch.cat([torch.arange(cut), torch.arange(tokens - cut)])
    order = torch.randperm(tokens, generator=generator)
    other = torch.where(documents == 1, (ids + 1) % (largest_id + 1), ids)

    def run(places: Tensor, values: Tensor, gives_positions: bool = True) -> tuple[Tensor | None, Probe]:
        probe = Probe(documents[places][None].to(device), positions[places][None].to(device), gives_positions=gives_positions)
        return call(values[places][None].to(device), probe), probe

    straight = torch.arange(tokens)
    first, seen = run(straight, ids)
    shuffled, seen_shuffled = run(order, ids)
    changed, _ = run(straight, other)
    alone, _ = run(straight[:cut], ids, gives_positions=not counts)
    wrong = []
    for name, tensors in seen.seen.items():
        others = seen_shuffled.seen.get(name, [])
        if len(tensors) != len(others) or any(_differ(x[:, :, order], y) for x, y in zip(tensors, others)):
            wrong.append(
                f"{name}: what attends depends on where a token stands in a rank's part of the row, and not on the position_ids that it is "
                "given: positions counted from the length of the input, or a convolution over it. Give forward an argument position_ids "
                "(B, L) and use it in the place of torch.arange"
            )
            break
    if first is None or shuffled is None or changed is None or alone is None:
        return wrong
    if first.ndim < 2 or first.shape[1] != tokens:
        return [f"the model's output has shape {tuple(first.shape)} for {tokens} tokens: under context parallelism it has one row for each"]
    if not wrong and _differ(first[:, order], shuffled):
        wrong.append(
            "the model's output depends on where a token stands in a rank's part of the row, and not on the position_ids that it is given: "
            "positions counted from the length of the input, a convolution over it, or attention that is not reached (a softmax by "
            "hand). Give forward an argument position_ids (B, L), and attend with F.scaled_dot_product_attention in a module named by "
            "layout.attention"
        )
    if not wrong and _differ(first[:, :cut], changed[:, :cut]):
        wrong.append(
            "tokens of one document change the model's output for another: something mixes tokens apart from the attention that context "
            "parallelism reaches (a mean over the row, a softmax by hand). Attend with F.scaled_dot_product_attention in a module named by "
            "layout.attention"
        )
    if not wrong and _differ(first[:, :cut], alone):
        wrong.append(
            "the model gives its first tokens other numbers when the row is longer, or when it is left to count position_ids itself: it "
            "looks at the length of its input, or counts from elsewhere than 0. Take what follows from the length out of it, and put "
            "position_ids (B, L) into the batch"
        )
    return wrong


def _differ(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool((a - b).norm() > LARGEST * a.norm())
