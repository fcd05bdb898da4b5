"""The parts that blocks are made of: attentions, feed-forwards and mixtures of experts as lists of matrices.

Letters: D model, N query heads, G key/value heads, H head dim, F feed-forward, E experts, K experts of a token.
"""

from __future__ import annotations

from lightning_megascale.planning.shape import AttentionCore, LayerKind, Matmul, Stream


def grouped_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    causal: bool = True,
    window: int | None = None,
    name: str = "attention",
    queries: Stream = "tokens",
    keys: Stream = "tokens",
) -> tuple[tuple[Matmul, ...], AttentionCore]:
    """Four projections and a core: multi-head attention (G = N), grouped-query (G < N), or cross-attention (keys of the other stream).

    Args:
        hidden, heads, kv_heads, head_dim: D, N, G, H.
        bias: of the query, key and value projections.
        out_bias: of the output projection; None: as ``bias``.
        causal, window, queries, keys: as ``AttentionCore``.
        name: part of the matrices.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.2; Ainslie et al. 2023, "GQA", section 2.2.
    """
    wide, narrow = heads * head_dim, kv_heads * head_dim
    matmuls = (
        Matmul(f"{name}.q_proj", hidden, wide, bias, stream=queries),
        Matmul(f"{name}.k_proj", hidden, narrow, bias, stream=keys),
        Matmul(f"{name}.v_proj", hidden, narrow, bias, stream=keys),
        Matmul(f"{name}.o_proj", wide, hidden, bias if out_bias is None else out_bias, stream=queries),
    )
    return matmuls, AttentionCore(name, heads, kv_heads, head_dim, head_dim, causal, window, queries, keys)


def latent_attention(
    hidden: int,
    heads: int,
    *,
    query_rank: int | None,
    kv_rank: int,
    plain_dim: int,
    rotary_dim: int,
    value_dim: int,
    bias: bool = False,
) -> tuple[tuple[Matmul, ...], AttentionCore, int]:
    """Multi-head latent attention as it is trained: keys and values are made whole from the latent.

    Args:
        hidden, heads: D, N.
        query_rank: width of the queries' latent; None: queries are projected at once.
        kv_rank: width of the latent of keys and values.
        plain_dim, rotary_dim: features of a query or key head without and with rotation; the rotated key is shared by all heads.
        value_dim: features of a value head.
        bias: of the projections into the latents and of the output.

    Returns:
        (matrices, core, parameters of the norms on the latents).

    Source: DeepSeek-AI 2024, "DeepSeek-V2", equations 37 to 47.
    """
    head = plain_dim + rotary_dim
    if query_rank is None:
        queries: tuple[Matmul, ...] = (Matmul("attention.q_proj", hidden, heads * head),)
    else:
        down = Matmul("attention.q_a_proj", hidden, query_rank, bias)
        queries = (down, Matmul("attention.q_b_proj", query_rank, heads * head))
    matmuls = (
        *queries,
        Matmul("attention.kv_a_proj", hidden, kv_rank + rotary_dim, bias),
        Matmul("attention.kv_b_proj", kv_rank, heads * (plain_dim + value_dim)),
        Matmul("attention.o_proj", heads * value_dim, hidden, bias),
    )
    return matmuls, AttentionCore("attention", heads, heads, head, value_dim), kv_rank + (query_rank or 0)


def feed_forward(
    hidden: int, width: int, *, gated: bool, bias: bool = False, name: str = "mlp", stream: Stream = "tokens"
) -> tuple[Matmul, ...]:
    """Up and down, and a gate.

    Args:
        hidden, width: D, F.
        gated: a third matrix (SwiGLU and its kin).
        bias: of all.
        name: part of the matrices.
        stream: whose tokens.

    Source: Shazeer 2020, "GLU variants improve Transformer", equations 1 and 5.
    """
    gate = (Matmul(f"{name}.gate_proj", hidden, width, bias, stream=stream),) if gated else ()
    return (
        *gate,
        Matmul(f"{name}.up_proj", hidden, width, bias, stream=stream),
        Matmul(f"{name}.down_proj", width, hidden, bias, stream=stream),
    )


def mixture(
    hidden: int, experts: int, per_token: int, width: int, *, shared_width: int = 0, shared_gate: bool = False, bias: bool = False
) -> tuple[Matmul, ...]:
    """A router, gated experts of which a token takes K, and a gated feed-forward that every token takes. No token is dropped.

    Args:
        hidden, experts, per_token, width: D, E, K, F of one expert.
        shared_width: F of the shared feed-forward; several shared experts are one of their summed width. 0: none.
        shared_gate: a scalar for each token multiplies the shared one's output (Qwen2-MoE).
        bias: of router and experts (gpt-oss).

    Source: Shazeer et al. 2017, "Outrageously large neural networks", equations 1 and 2; Dai et al. 2024, "DeepSeekMoE", equations 9 to 11.
    """
    shared = feed_forward(hidden, shared_width, gated=True, name="shared") if shared_width else ()
    gate = (Matmul("shared.gate", hidden, 1),) if shared_gate else ()
    return (
        Matmul("router.weight", hidden, experts, bias),
        Matmul("experts.gate_up_proj", hidden, 2 * width, bias, experts, per_token),
        Matmul("experts.down_proj", width, hidden, bias, experts, per_token),
        *shared,
        *gate,
    )


def block(name: str, attention: tuple[tuple[Matmul, ...], AttentionCore], inner: tuple[Matmul, ...], vectors: int) -> LayerKind:
    """A block of one attention and one feed-forward or mixture."""
    matmuls, core = attention
    return LayerKind(name, (*matmuls, *inner), (core,), vectors)
