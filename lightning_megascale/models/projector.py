"""Projectors: the features of a vision or audio encoder made as wide as the decoder, one token each or by learned queries.

Shapes: B images (or clips; 0 is allowed), S features of one, I their width, O width of the decoder. In the Q-Former Q queries, D width,
N heads, H head dim, K width of what is attended to (D or I). A mask is boolean (B, S), True where there is a feature and no padding.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NORM_EPS, _MLP_RATIO = 1e-12, 4
"""Source: Devlin et al. 2018, "BERT", from which BLIP-2's Q-Former starts: published configuration; section 3 (a feed-forward of 4 D)."""


class Projector(nn.Module, ABC):
    """What all kinds share: the check of the features, masking, initialization. Parameters on the meta device are not drawn.

    Args:
        inputs, outputs: I, O.
        init_std: standard deviation of the initial weights and queries.

    Raises:
        ValueError: listing the sizes that are wrong.
    """

    def __init__(self, inputs: int, outputs: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        wrong = _wrong_sizes(inputs=inputs, outputs=outputs)
        if not init_std > 0:
            wrong.append(f"init_std={init_std}: must be positive, or all that is drawn would be the same")
        _refuse(type(self).__name__, wrong)
        self.inputs, self.outputs, self.init_std = inputs, outputs, init_std

    def tokens_out(self, tokens_in: int) -> int:
        """How many tokens of the decoder come from ``tokens_in`` features of an image; uses no weights.

        Raises:
            ValueError: for no features, or what is no count.
        """
        _refuse(type(self).__name__, _wrong_sizes(tokens_in=tokens_in))
        return tokens_in

    def forward(self, features_BSI: Tensor, mask_BS: Tensor | None = None) -> Tensor:
        """Tokens of the decoder. What stands in the padding, even NaN, changes neither them nor a gradient.

        Args:
            features_BSI: (B, S, I) features of the encoder, floating, of the parameters' dtype.
            mask_BS: (B, S) boolean, True for features that count; None: all do.

        Returns:
            (B, tokens_out(S), O). Where a token stands for one feature, those of the padding are 0; the Q-Former's all count.

        Raises:
            ValueError: for features or a mask of another shape, or a mask that is not boolean.
        """
        self._check(features_BSI, mask_BS)
        return self._project(_without_padding(features_BSI, mask_BS), mask_BS)  # already here: a weight of 0 times NaN is NaN

    @torch.no_grad()
    def init_module(self, module: nn.Module, name: str, generator: torch.Generator | None = None) -> None:
        """Draws the parameters that ``module`` owns itself: weights and queries N(0, init_std), norms 1, biases 0.

        Args:
            module: one of this projector's modules, or the projector.
            name: its name, for the message.
            generator: on the parameters' device; None: the global one.

        Raises:
            ValueError: for a module of another class.

        Source: Devlin et al. 2018, "BERT", published code (initializer_range 0.02); assumed for the other kinds, whose papers name none.
            Nothing is scaled by depth: the Q-Former norms after each addition.
        """
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.init_std, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, QFormerProjector):
            nn.init.normal_(module.queries, std=self.init_std, generator=generator)
        else:
            raise ValueError(f"module {name!r} is a {type(module).__name__}: a projector draws Linear, LayerNorm and queries only")

    @abstractmethod
    def _project(self, features_BSI: Tensor, mask_BS: Tensor | None) -> Tensor:
        """(B, tokens_out(S), O), of features whose padding is 0."""

    def _init_all(self, generator: torch.Generator | None) -> None:
        for name, module in self.named_modules():
            own = next(module.parameters(recurse=False), None)
            if own is not None and not own.is_meta:
                self.init_module(module, name, generator)

    def _check(self, features_BSI: Tensor, mask_BS: Tensor | None) -> None:
        shape = tuple(features_BSI.shape)
        if len(shape) != 3 or shape[2] != self.inputs or shape[1] < 1:
            raise ValueError(f"features of shape {shape}: must be (images, features of each, inputs={self.inputs}), one feature at least")
        if mask_BS is not None and (tuple(mask_BS.shape) != shape[:2] or mask_BS.dtype != torch.bool):
            raise ValueError(f"mask of shape {tuple(mask_BS.shape)}, {mask_BS.dtype}: must be {shape[:2]}, torch.bool, True for a feature")


class LinearProjector(Projector):
    """One linear layer with bias on each feature.

    Source: Liu et al. 2023, "Visual instruction tuning", equation 1; the bias from its published code.
    """

    def __init__(self, inputs: int, outputs: int, *, init_std: float = 0.02, generator: torch.Generator | None = None) -> None:
        super().__init__(inputs, outputs, init_std=init_std)
        self.linear = nn.Linear(inputs, outputs)
        self._init_all(generator)

    def _project(self, features_BSI: Tensor, mask_BS: Tensor | None) -> Tensor:
        return _without_padding(self.linear(features_BSI), mask_BS)


class MLPProjector(Projector):
    """linear_2(gelu(linear_1(x))) on each feature, the exact GELU, O wide inside. Named as transformers' LlavaMultiModalProjector.

    Source: Liu et al. 2023, "Improved baselines with visual instruction tuning", "MLP vision-language connector"; Hendrycks & Gimpel 2016.
    """

    def __init__(self, inputs: int, outputs: int, *, init_std: float = 0.02, generator: torch.Generator | None = None) -> None:
        super().__init__(inputs, outputs, init_std=init_std)
        self.linear_1 = nn.Linear(inputs, outputs)
        self.linear_2 = nn.Linear(outputs, outputs)
        self._init_all(generator)

    def _project(self, features_BSI: Tensor, mask_BS: Tensor | None) -> Tensor:
        return _without_padding(self.linear_2(F.gelu(self.linear_1(features_BSI))), mask_BS)


class QFormerProjector(Projector):
    """Learned queries that attend to each other and to the features of one image, then a linear layer to the decoder's width.

    Blocks are BERT's, normed after each addition, without dropout. An image whose features are all padding is seen as one of zeros.

    Args:
        inputs, outputs, init_std: as of every projector.
        num_queries: Q, the tokens that any image becomes.
        num_layers: blocks.
        num_heads, hidden_size: N, which divides D.
        cross_attention_every: block 0 and each so-manyth block after it attend to the features.
        generator: of the initial values; None: the global one.

    Source: Li et al. 2023, "BLIP-2", sections 3.1 (32 queries 768 wide, BERT-base's 12 blocks of 12 heads, cross-attention in every other
        block) and 3.3 (the linear layer).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        num_queries: int = 32,
        num_layers: int = 12,
        num_heads: int = 12,
        hidden_size: int = 768,
        cross_attention_every: int = 2,
        init_std: float = 0.02,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(inputs, outputs, init_std=init_std)
        wrong = _wrong_sizes(num_queries=num_queries, num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size,
                             cross_attention_every=cross_attention_every)  # fmt: skip
        if not wrong and hidden_size % num_heads:
            wrong = [f"num_heads={num_heads}: must divide hidden_size={hidden_size}, so that all heads are as wide"]
        _refuse(type(self).__name__, wrong)
        self.num_queries = num_queries
        self.queries = nn.Parameter(torch.empty(num_queries, hidden_size))
        self.norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.layers = nn.ModuleList(
            QFormerBlock(hidden_size, num_heads, None if layer % cross_attention_every else inputs) for layer in range(num_layers)
        )
        self.out_proj = nn.Linear(hidden_size, outputs)
        self._init_all(generator)

    def tokens_out(self, tokens_in: int) -> int:
        super().tokens_out(tokens_in)  # its check
        return self.num_queries

    def _project(self, features_BSI: Tensor, mask_BS: Tensor | None) -> Tensor:
        if mask_BS is not None:
            # A softmax over nothing is NaN in some kernels: a row without any feature attends to its features, which are 0 by now.
            mask_BS = mask_BS | ~mask_BS.any(-1, keepdim=True)
        hidden_BQD = self.norm(self.queries).expand(features_BSI.shape[0], -1, -1)
        for block in self.layers:
            hidden_BQD = block(hidden_BQD, features_BSI, mask_BS)
        return self.out_proj(hidden_BQD)


class QFormerBlock(nn.Module):
    """Self-attention among queries, cross-attention to features where asked, feed-forward: norm(x + part(x)) each.

    Arguments: D, N, and I or None, which leaves the cross-attention out.
    Source: Vaswani et al. 2017, "Attention is all you need", section 3.1; Li et al. 2023, "BLIP-2", figure 2.
    """

    def __init__(self, hidden_size: int, num_heads: int, feature_size: int | None) -> None:
        super().__init__()
        self.self_attention = QFormerAttention(hidden_size, hidden_size, num_heads)
        self.self_attention_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.cross_attention = QFormerAttention(hidden_size, feature_size, num_heads) if feature_size is not None else None
        self.cross_attention_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS) if feature_size is not None else None
        self.up_proj = nn.Linear(hidden_size, _MLP_RATIO * hidden_size)
        self.down_proj = nn.Linear(_MLP_RATIO * hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)

    def forward(self, hidden_BQD: Tensor, features_BSI: Tensor, mask_BS: Tensor | None = None) -> Tensor:
        hidden_BQD = self.self_attention_norm(hidden_BQD + self.self_attention(hidden_BQD, hidden_BQD))
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            hidden_BQD = self.cross_attention_norm(hidden_BQD + self.cross_attention(hidden_BQD, features_BSI, mask_BS))
        return self.mlp_norm(hidden_BQD + self.down_proj(F.gelu(self.up_proj(hidden_BQD))))


class QFormerAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v of queries over themselves or over features, with biases; arguments D, K, N.

    Not the decoder's core: that one keeps apart the documents of the microbatch that runs, and those are of tokens, not of features.

    Source: Vaswani et al. 2017, "Attention is all you need", equation 1.
    """

    def __init__(self, hidden_size: int, source_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(source_size, hidden_size)
        self.v_proj = nn.Linear(source_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_BQD: Tensor, source_BSK: Tensor, mask_BS: Tensor | None = None) -> Tensor:
        flat = (self.q_proj(hidden_BQD), self.k_proj(source_BSK), self.v_proj(source_BSK))
        q_BNQH, k_BNSH, v_BNSH = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in flat)
        mask_B11S = None if mask_BS is None else mask_BS[:, None, None, :]
        o_BNQH = F.scaled_dot_product_attention(q_BNQH, k_BNSH, v_BNSH, attn_mask=mask_B11S)
        return self.o_proj(o_BNQH.transpose(1, 2).flatten(2))  # (B, Q, N, H) -> (B, Q, D)


def build_projector(
    kind: str,
    inputs: int,
    outputs: int,
    *,
    num_queries: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    hidden_size: int | None = None,
    cross_attention_every: int | None = None,
    init_std: float = 0.02,
    generator: torch.Generator | None = None,
) -> Projector:
    """A projector of a kind, initialized; on the meta device with nothing drawn.

    Args:
        kind: "linear", "mlp2x_gelu" or "qformer".
        inputs: width of the encoder's features; with features of several layers side by side that of all.
        outputs: width of the decoder.
        num_queries, num_layers, num_heads, hidden_size, cross_attention_every: of "qformer" alone; None: BLIP-2's.
        init_std: standard deviation of the initial weights and queries.
        generator: of the initial values; None: the global one.

    Raises:
        ValueError: for a kind that does not exist, sizes that are wrong, or settings that the kind does not have.
    """
    kinds: dict[str, type[Projector]] = {"linear": LinearProjector, "mlp2x_gelu": MLPProjector, "qformer": QFormerProjector}
    if kind not in kinds:
        near = difflib.get_close_matches(str(kind), kinds, 1)
        raise ValueError(f"projector kind={kind!r}: must be one of {', '.join(kinds)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    sizes = dict(num_queries=num_queries, num_layers=num_layers, num_heads=num_heads, hidden_size=hidden_size,
                 cross_attention_every=cross_attention_every)  # fmt: skip
    given = {name: value for name, value in sizes.items() if value is not None}
    if given and kind != "qformer":
        unused = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"{unused}: of no use to a projector of kind={kind!r}; leave out, or take kind='qformer'")
    return kinds[kind](inputs, outputs, init_std=init_std, generator=generator, **given)  # type: ignore[call-arg]


def _without_padding(x_BSX: Tensor, mask_BS: Tensor | None) -> Tensor:
    return x_BSX if mask_BS is None else x_BSX.masked_fill(~mask_BS.unsqueeze(-1), 0.0)


def _wrong_sizes(**sizes: object) -> list[str]:
    wrong = [(name, value) for name, value in sizes.items() if not isinstance(value, int) or isinstance(value, bool) or value < 1]
    return [f"{name}={value!r}: must be an integer of at least 1" for name, value in wrong]


def _refuse(what: str, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(f"{what}: {'; '.join(wrong)}")
