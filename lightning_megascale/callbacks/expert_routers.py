"""The routers of a model, whichever library they are of, and what they have counted: the source of ExpertBalanceMonitor.

Own routers count by themselves. Those of transformers are watched by forward hooks, by the names of their classes, so that transformers is
never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megascale.models.moe import Router
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, current_token_mask, weighed_as
from lightning_megascale.ops.balance import RoutingCounts, is_counted, token_mask

_SOFTMAX = """
AriaText DeepseekOcr2Text DeepseekV2 Ernie4_5_Moe Ernie4_5_VLMoeMoe FlexOlmo GptOss GraniteMoe GraniteMoeHybrid GraniteMoeSWA
GraniteMoeShared Jamba LaraMini Mellum MiniMax Mistral4 MistralLarge4Text Mixtral Olmoe OpenAIPrivacyFilter Phimoe Qwen2Moe
Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText Qwen3OmniMoeText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen3_5Moe Qwen4ExpText
UnlimitedOcrText
"""
_SIGMOID = """
AXK1 AXK2 BailingHybrid Beam DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Flint Glm4Moe Glm4MoeLite Glm4vMoeText
Glm5NextText GlmMoeDsa HYV3 HYV4 HYV4VL KimiLinear Kolibri1 Laguna Lfm2Moe MiMoV2Flash MiniMaxM2 MiniMaxM3VL NemotronH SolarOpen
Step3p7
"""
SCORES = {
    f"{model}{ending}": scores
    for scores, models in (("softmax", _SOFTMAX), ("sigmoid", _SIGMOID))
    for model in models.split()
    for ending in ("TopKRouter", "TopkRouter")
} | {"HunYuanMoEV1Gate": "softmax", "AfmoeTokenChoiceRouter": "sigmoid"}
"""What classes of transformers 5.24 make of their logits: those that return (logits (T, E), weights (T, K), indices (T, K)) and have
``num_experts`` and ``top_k``."""


@dataclass(frozen=True)
class RoutedLayer:
    """A router, as all ranks know it.

    Args:
        name: of the module.
        num_experts, top_k: E, K.
    """

    name: str
    num_experts: int
    top_k: int

    @property
    def size(self) -> int:
        """Numbers in its counts (``RoutingCounts``)."""
        return 2 * self.num_experts + 5


class RouterWatch:
    """The counts of a model's routers, of all layers of all pipeline stages, in one vector.

    Args:
        model: its routers are looked for.
        further: class name -> "softmax" or "sigmoid", beside those of ``SCORES``.
        device: where counts are.
        tensor: (rank, size) on the tensor-parallel axis.
        sequence_parallel: whether its ranks have other tokens; otherwise only the first one's are counted.
        is_distributed: other ranks have other layers or tokens. All of them must then make one.

    Attributes:
        layers: of all stages, in the order of their names; the same on all ranks.
        batch_mask: bool (B, L) of tokens that are no padding, where no strategy tells routers.
    """

    def __init__(
        self,
        model: nn.Module,
        further: Mapping[str, str],
        device: torch.device,
        *,
        tensor: tuple[int, int] = (0, 1),
        sequence_parallel: bool = False,
        is_distributed: bool = False,
    ) -> None:
        self._device, self._tensor, self._is_distributed = device, tensor, is_distributed
        self._counts_here = sequence_parallel or tensor[0] == 0
        self.batch_mask: Tensor | None = None
        self._own: dict[str, Callable[[], RoutingCounts | None]] = {}
        self._handles: list[Any] = []
        found = []
        for name, module in model.named_modules():
            scores = scores_of(module, further)
            if not (isinstance(module, Router) or scores):
                continue
            name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            found.append(RoutedLayer(name, int(module.num_experts), int(module.top_k)))  # type: ignore[arg-type]
            self._own[name] = self._watch(module, scores) if scores else (lambda module=module: module.counts)  # type: ignore[misc]
        self.layers = self._of_all_stages(found)
        self._sizes = [layer.size for layer in self.layers]

    def _of_all_stages(self, found: list[RoutedLayer]) -> list[RoutedLayer]:
        everyone: list[Any] = [found]
        if self._is_distributed:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
        return sorted({layer for layers in everyone for layer in layers}, key=lambda layer: _natural(layer.name))

    def _watch(self, router: nn.Module, scores: str) -> Callable[[], RoutingCounts]:
        counts = RoutingCounts(int(router.num_experts), self._device)  # type: ignore[arg-type]

        @torch.compiler.disable
        def count(module: nn.Module, args: Any, output: Any) -> None:
            if module is router and is_counted(module):  # a copy of the model has the hook as well
                self._count(counts, scores, output)

        self._handles.append(router.register_forward_hook(count))
        return lambda: counts

    @torch.no_grad()
    def _count(self, counts: RoutingCounts, scores: str, output: Any) -> None:
        whole = isinstance(output, (tuple, list)) and len(output) >= 3
        logits: Any
        indices: Any
        logits, _, indices = output[:3] if whole else (None, None, None)
        if logits is None or logits.shape[-1] != counts.num_experts:
            made = f"logits of shape {tuple(logits.shape)}" if logits is not None else f"{type(output).__name__} of {len(output)}"
            raise ValueError(
                f"a router with num_experts={counts.num_experts} returned {made}: a router that is watched "
                "returns (logits (T, E), weights (T, K), indices (T, K)); take it out of ExpertBalanceMonitor(routers=...)"
            )
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        p = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
        p = p if scores == "softmax" else p / (p.sum(-1, keepdim=True) + 1e-20)
        if self.batch_mask is None:
            mask = self._mask(len(logits))
        else:
            with weighed_as(MicrobatchWeight(tokens=self.batch_mask)):
                mask = self._mask(len(logits))
        if counts.vector.device != logits.device:
            counts.vector = counts.vector.to(logits.device)
        counts.add(indices.flatten(0, -2), p, logits, mask)

    def _mask(self, tokens: int) -> Tensor | None:
        """(T,): rows were flattened, perhaps without their last tokens, or are this rank's slices."""
        mask, (rank, size) = current_token_mask(), self._tensor
        if mask is None or mask.numel() == tokens:
            return token_mask((tokens,))
        if mask.numel() == tokens * size:
            return token_mask((tokens,), lambda mask_BL: mask_BL.chunk(size, dim=1)[rank])
        rows = len(mask)
        whole = token_mask((rows, tokens // rows) if tokens % rows == 0 else (tokens,))
        return None if whole is None else whole.flatten()

    def snapshot(self) -> Tensor:
        """All layers' counts so far of this rank, one after the other; zeros for layers of other stages."""
        flat = torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._device)
        for layer, part in zip(self.layers, flat.split(self._sizes)):
            counts = self._own[layer.name]() if layer.name in self._own and self._counts_here else None
            if counts is not None:
                part.copy_(counts.vector)
        return flat

    def since(self, snapshot: Tensor) -> tuple[Tensor, Tensor]:
        """What all ranks counted since then, on the host, and a new snapshot. One message; all ranks must call it together."""
        now = self.snapshot()
        difference = now - snapshot
        if self._is_distributed:
            dist.all_reduce(difference)
        return difference.cpu(), now

    def split(self, flat: Tensor) -> list[Tensor]:
        """The part of each layer."""
        return list(flat.split(self._sizes))

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def scores_of(module: nn.Module, further: Mapping[str, str]) -> str | None:
    """What a foreign router makes of its logits; None for any other module."""
    if isinstance(module, Router):
        return None
    for kind in type(module).__mro__:
        if kind.__name__ in further:
            return further[kind.__name__]
        if kind.__module__.startswith("transformers.") and kind.__name__ in SCORES:
            return SCORES[kind.__name__]
    return None


def labels_of(names: Sequence[str]) -> list[str]:
    """A short name for each router: ``layer_`` and its block's number, the first number in the names that tells all of them apart; where
    none does, the names."""
    numbers = [[int(part) for part in name.split(".") if part.isdecimal()] for name in names]
    for place in range(min(map(len, numbers), default=0)):
        if len({found[place] for found in numbers}) == len(names):
            return [f"layer_{found[place]}" for found in numbers]
    return list(names)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Numbers by size."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in name.split(".")]
