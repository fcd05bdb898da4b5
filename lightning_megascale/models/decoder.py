"""Decoder: a causal language model for one device, whose names say to a layout what each part is.

Shapes: B batch, L sequence, D model, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.layers import Attention, DecoderBlock, FeedForward, LanguageModelHead, Rotation, make_norm
from lightning_megascale.models.moe import GroupedExperts, MixtureOfExperts, Router

__all__ = ["Decoder", "DecoderBlock", "DecoderConfig"]


class Decoder(nn.Module):
    """Embeddings, blocks, norm and head. Initialized at once, or with nothing drawn when built on the meta device.

    Args:
        config: the shape.

    Attributes:
        sums_loss: tells a training module that labels are expected aligned and that (loss_sum, num_tokens) comes back.
    """

    sums_loss = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.embed_dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config.norm, config.hidden_size, config.norm_eps, config.bias)
        self.head = LanguageModelHead(config.hidden_size, config.vocab_size, chunk_tokens=config.loss_chunk_tokens)
        self.tie_weights()
        drawn: set[int] = set()
        for name, module in self.named_modules():
            own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in drawn]
            drawn.update(id(parameter) for parameter in own)
            if own and not own[0].is_meta:
                self.init_module(module, name)

    def tie_weights(self) -> None:
        """Makes the head use the embedding's weight, where the config says so; also after a move that made copies of it."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed_tokens.weight

    @torch.no_grad()
    def init_module(self, module: nn.Module, name: str) -> None:
        """Draws the parameters that ``module`` owns itself, at their full shape, from the global generator.

        Args:
            module: one of this model's modules.
            name: its name, which says whether it writes to the residual stream.

        Source: Radford et al. 2019, "GPT-2", section 2.3: N(0, init_std), projections that write to the residual stream scaled by
            1 / sqrt(2 * num_layers), one for each of their additions.
        """
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.rpartition(".")[2] in ("o_proj", "down_proj")
            nn.init.normal_(module.weight, mean=0.0, std=residual_std if residual else std)
        elif isinstance(module, Router):
            module.reset_parameters(std)
        elif isinstance(module, GroupedExperts):
            module.reset_parameters(std, residual_std)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            nn.init.zeros_(bias)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of the next token at every position, or the loss against labels.

        Args:
            input_ids: (B, L) integer tokens.
            position_ids: (B, L) integer positions; None counts from 0 in every row.
            labels: (B, L) ALIGNED integer targets: labels[:, i] is what follows position i; -100 is not counted.

        Returns:
            logits (B, L, V), or (loss_sum, num_tokens), both 0-dim, when labels are given.

        Raises:
            ValueError: for a row longer than the table of learned positions.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        hidden_BLD = self.embed_tokens(input_ids)
        rotation = None
        if self.embed_positions is not None:
            self._check_length(input_ids.shape[1])
            hidden_BLD = hidden_BLD + self.embed_positions(position_ids)
        else:
            config = self.config
            rotation = Rotation.from_positions(position_ids, config.head_dim, config.rope_theta, hidden_BLD.dtype)
        hidden_BLD = self.embed_dropout(hidden_BLD)
        for block in self.layers:
            hidden_BLD = block(hidden_BLD, rotation)
        hidden_BLD = self.norm(hidden_BLD)
        return self.head(hidden_BLD) if labels is None else self.head(hidden_BLD, labels)

    def _check_length(self, length: int) -> None:
        longest = self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"input_ids have {length} tokens in a row, must be at most max_position_embeddings={longest}: cut the row")

    @property
    def megascale_layout(self) -> ModelLayout:
        """Which module plays which role; the embeddings, positions too, are split by rows."""
        config = self.config
        embeddings = ["embed_tokens"] + (["embed_positions"] if config.positions == "learned" else [])
        attention, moe, mlps = "layers.*.attention", _moe_layers(config), _feed_forwards(config)
        inner = (["gate_proj"] if config.mlp == "swiglu" else []) + ["up_proj"]
        return ModelLayout(
            blocks="layers.*",
            first=[*embeddings, "embed_dropout"],
            last=["norm", "head"],
            attention=attention,
            mlp=mlps,
            colwise=[f"{attention}.{name}_proj" for name in "qkv"] + [f"{mlp}.{name}" for mlp in mlps for name in inner],
            rowwise=[f"{attention}.o_proj"] + [f"{mlp}.down_proj" for mlp in mlps],
            norms=["layers.*.attention_norm", "layers.*.mlp_norm", "norm"],
            replicated=[f"{attention}.q_norm", f"{attention}.k_norm"] if config.qk_norm else [],
            embedding=embeddings,
            head="head",
            experts=[f"{layer}.mlp.experts" for layer in moe],
            router=[f"{layer}.mlp.router" for layer in moe],
        )


def _moe_layers(config: DecoderConfig) -> list[str]:
    """Patterns of the blocks with experts: one for all where all have them."""
    if not config.num_experts:
        return []
    return [f"layers.{layer}" for layer in range(config.num_dense_layers, config.num_layers)] if config.num_dense_layers else ["layers.*"]


def _feed_forwards(config: DecoderConfig) -> list[str]:
    """Patterns of the feed-forwards that every token takes: those of dense blocks, and shared experts."""
    if not config.num_experts:
        return ["layers.*.mlp"]
    dense = [f"layers.{layer}.mlp" for layer in range(config.num_dense_layers)]
    return dense + ([f"{layer}.mlp.shared" for layer in _moe_layers(config)] if config.num_shared_experts else [])


def _block(config: DecoderConfig, layer: int) -> DecoderBlock:
    attention = Attention(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        bias=config.bias,
        qk_norm=config.norm if config.qk_norm else None,
        norm_eps=config.norm_eps,
    )
    mlp = _mixture(config) if config.num_experts and layer >= config.num_dense_layers else _feed_forward(config, config.intermediate_size)
    attention_norm, mlp_norm = (make_norm(config.norm, config.hidden_size, config.norm_eps, config.bias) for _ in range(2))
    return DecoderBlock(attention, mlp, attention_norm, mlp_norm, config.dropout)


def _feed_forward(config: DecoderConfig, width: int) -> FeedForward:
    return FeedForward(config.hidden_size, width, kind=config.mlp, bias=config.bias, chunk_tokens=config.mlp_chunk_tokens)


def _mixture(config: DecoderConfig) -> MixtureOfExperts:
    router = Router(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_token,
        scores=config.router_scores,
        normalize=config.normalize_top_k,
        scale=config.router_scale,
        num_groups=config.num_expert_groups,
        groups_per_token=config.num_groups_per_token,
        capacity_factor=config.capacity_factor,
        balance_loss=config.balance_loss,
        balance_scope=config.balance_scope,
        z_loss=config.router_z_loss,
        bias_rate=config.balance_bias_rate,
    )
    experts = GroupedExperts(config.num_experts, config.hidden_size, config.expert_width)
    shared = _feed_forward(config, config.num_shared_experts * config.expert_width) if config.num_shared_experts else None
    return MixtureOfExperts(router, experts, shared)
