"""The numeric proof: what only numbers show is refused on both ranks before anything is trained; what is right trains to the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel import tensor_proof
from lightning_megascale.parallel.recompute import apply_recompute
from lightning_megascale.parallel.tensor import apply_tensor_parallel
from lightning_megascale.parallel.tensor_proof import ProvenOnFirstCall, prepare_proof, proved_modules
from lightning_megascale.parallel.tensor_roles import Roles
from tests import parity
from tests.harness import RankFailure, full, run_ranks, worst
from tests.parallel.tensor_runs import GELU, SWIGLU, batch, build, case, loss_sum
from tests.parallel.test_tensor import HABITS, Habits

D, HEADS, VOCABULARY, LENGTH = 8, 4, 6, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = D // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Any:
        return self.join(self.core(self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))))

    def join(self, heads: Tensor) -> Tensor:
        return self.o(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    attention_type: type = Attention
    mlp_type: type = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = self.attention_type(), self.mlp_type()

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self, block: type) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(VOCABULARY, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        condition, extra = self.encoder(x), torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, condition)
            if isinstance(x, tuple):
                x, extra = x[0], extra + x[1]
        return self.head(self.norm(x)).square().mean() + extra


LAYOUT = ModelLayout(
    blocks="layers.*", attention="layers.*.attention", mlp="layers.*.mlp",
    colwise=["layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v", "layers.*.mlp.up"],
    rowwise=["layers.*.attention.o", "layers.*.mlp.down"], norms=["layers.*.n1", "layers.*.n2", "norm", "encoder"],
    embedding="embed", head="head",
)  # fmt: skip


def block_of(attention: type = Attention, mlp: type = Mlp, block: type = Block) -> type:
    return type("Block", (block,), {"attention_type": attention, "mlp_type": mlp})


# ---- what is wrong without any error ---------------------------------------------------------------------------------------------


class FusedGlu(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class FusedKeyValue(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.k(x).chunk(2, -1)
        return self.join(self.core(self.heads(self.q(x)), self.heads(k), self.heads(v)))


class Normalized(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down((hidden - hidden.mean(-1, keepdim=True)) / (hidden.std(-1, keepdim=True) + 1e-5))


class WholeQueryNorm(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.RMSNorm(D, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        q = q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return self.join(self.core(self.heads(q), self.heads(self.k(x)), self.heads(self.v(x))))


class TopK(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        return self.down(hidden * (hidden >= hidden.topk(4, -1).values[..., -1:]))


class Alibi(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([2.0**-i for i in range(HEADS)]))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, place = q.shape[1], torch.arange(q.shape[2]).to(q.dtype)
        scores = q @ k.transpose(-1, -2) - self.slopes[:heads].view(1, heads, 1, 1) * (place[None] - place[:, None]).abs()
        return scores.softmax(-1) @ v


class TiledGroups(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(D, D // 2), nn.Linear(D, D // 2)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


class Slope(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class QueryNorm(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(self.head_dim)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(self.query_norm(q), k, v)


class CrossAttention(Attention):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))
        return self.join(F.scaled_dot_product_attention(q, k, v))


class CrossBlock(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.n1(x), condition)
        return x + self.mlp(self.n2(x))


class Modulated(Mlp):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return self.down(F.gelu(self.up(x * condition)))


class ModulatedBlock(Block):
    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x), condition)


class Statistic(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.join(weights @ v), weights.square().mean()


class StatisticBlock(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, statistic = self.attention(self.n1(x))
        x = x + y
        return x + self.mlp(self.n2(x)), statistic


class Residual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class PostNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.post = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.post(super().forward(x))


class AttentionDropout(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3 if self.training else 0.0)


class MlpDropout(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training))


class BlockDropout(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        x = x + F.dropout(self.attention(self.n1(x)), 0.3, self.training)
        return x + self.mlp(self.n2(x))


class TokenShift(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Cumulative(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.n1(x).cumsum(1))
        return x + self.mlp(self.n2(x))


class UpDown(nn.Module):
    """Column- and row-parallel linears, and whatever is between them, in the layout's blocks or in none."""

    def __init__(self, between: nn.Module, inner: int = 4 * D) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(D, 4 * D), between, nn.Linear(inner, D)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Drop(UpDown):
    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.3))


class Prelu(UpDown):
    def __init__(self) -> None:
        super().__init__(nn.PReLU())


class Glu(UpDown):
    def __init__(self) -> None:
        super().__init__(nn.GLU(), 2 * D)


BARE = ModelLayout(colwise="layers.*.up", rowwise="layers.*.down")
OVER = "goes over the heads or features"
DRAWN = "dropout is drawn inside attention or mlp"
SPLIT_PARAMETER = "not listed in layout.replicated"

# name -> (block, changes of the layout or a layout, sequence_parallel, parts of the message)
Wrong = tuple[type, Any, bool, tuple[str, ...]]
WRONG: dict[str, Wrong] = {
    "fused GLU, mlp not listed": (block_of(mlp=FusedGlu), dict(mlp=()), False, ("output 0", "fused projection")),
    "fused GLU, no blocks": (Glu, BARE, False, ("layers.0 (Glu)", "output 0")),
    "fused key and value": (
        block_of(FusedKeyValue),
        dict(colwise=[name for name in LAYOUT.colwise if not name.endswith(".v")], replicated="layers.*.attention.v"),
        False,
        ("output 0", "fused projection"),
    ),
    "normalization over split features": (block_of(mlp=Normalized), {}, False, ("output 0", OVER)),
    "query norm over all features": (block_of(WholeQueryNorm), {}, False, ("output 0", OVER)),
    "top-k over split features": (block_of(mlp=TopK), {}, False, ("output 0", "top-k")),
    "ALiBi slopes[:n]": (block_of(Alibi), {}, False, ("output 0", "slopes[:n]")),
    "tiled key/value heads": (block_of(TiledGroups), {}, False, ("output 0", "repeat_interleave")),
    "PReLU, mlp not listed": (block_of(mlp=Slope), dict(mlp=()), False, ("parameter 'mlp.act.weight'", SPLIT_PARAMETER)),
    "PReLU, no blocks": (Prelu, BARE, False, ("parameter 'between.weight'", SPLIT_PARAMETER)),
    "query norm, attention not listed": (
        block_of(QueryNorm),
        dict(attention=()),
        False,
        ("parameter 'attention.query_norm.weight'", SPLIT_PARAMETER),
    ),
    "attention's second output": (block_of(Statistic, block=StatisticBlock), {}, False, ("output 1",)),
    "residual inside mlp": (block_of(mlp=Residual), {}, False, ("layers.0.mlp: its input reaches its output",)),
    "norm behind the row linear": (
        block_of(mlp=PostNorm),
        dict(replicated="layers.*.mlp.post"),
        False,
        ("parameter 'mlp.post.weight'", "behind the row-parallel linear"),
    ),
    "dropout_p": (block_of(AttentionDropout), {}, False, ("output 0", DRAWN)),
    "F.dropout in mlp": (block_of(mlp=MlpDropout), {}, False, ("output 0", DRAWN)),
    "nn.Dropout, mlp not listed": (Drop, BARE, False, ("layers.0 (Drop)", "output 0", DRAWN)),
    "F.dropout in a block, sp": (block_of(block=BlockDropout), {}, True, ("output 0", "F.dropout: use nn.Dropout")),
    "token shift, sp": (block_of(block=TokenShift), {}, True, ("output 0", "mixes positions")),
    "cumsum, sp": (block_of(block=Cumulative), {}, True, ("output 0", "mixes positions")),
    "column without row": (Block, dict(colwise=[*LAYOUT.colwise, "head"], head=()), False, ("head (Linear)", "(4, 6, 3)", "(4, 6, 6)")),
}  # fmt: skip


def _layout(changes: Any) -> ModelLayout:
    return changes if isinstance(changes, ModelLayout) else replace(LAYOUT, **changes)


def _proven(model: nn.Module, layout: ModelLayout, sequence: bool, compiled: bool = False, recompute: str | None = None) -> nn.Module:
    """TP, compile, recompute and the proof, in the order of ``parallelize``."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    proof = prepare_proof(model, layout, mesh, sequence_parallel=sequence)
    apply_tensor_parallel(model, mesh, layout, sequence_parallel=sequence, recompute=recompute, compiled=compiled)
    if compiled:
        for block in model.layers:
            block.compile(backend="eager")
    apply_recompute(list(model.layers), recompute) if recompute else None
    proof.arm(model)
    return model


def _refused(block: type, changes: Any, sequence: bool, compiled: bool = False) -> str:
    torch.manual_seed(0)
    model = _proven(Model(block).double(), _layout(changes), sequence, compiled)
    for _ in range(2):  # a refused block stays refused
        with pytest.raises(ValueError) as caught:
            model(torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_silently_wrong_numbers_are_refused_alike_on_all_ranks(name: str) -> None:
    block, changes, sequence, parts = WRONG[name]
    messages = run_ranks(_refused, 2, block, changes, sequence)
    assert messages[0] == messages[1]
    for part in parts:
        assert part in messages[0]


def _trained(block: type) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model(block).double()
    if dist.is_initialized():
        model = _proven(model, LAYOUT, False)
    loss = model(torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY)
    loss.backward()
    return {"loss": loss.detach(), **{name: full(p.grad) for name, p in model.named_parameters()}}


@pytest.mark.parametrize("block", [block_of(CrossAttention, block=CrossBlock), block_of(mlp=Modulated, block=ModulatedBlock)])
def test_further_arguments_that_learn_get_the_sum_of_their_gradients(block: type) -> None:
    """Memory of a cross-attention, a condition that modulates an MLP: each rank's heads or features say a part about them."""
    wanted = _trained(block)
    for numbers in run_ranks(_trained, 2, block):
        assert worst(wanted, numbers)[0] < 1e-10


def test_compiled_blocks_are_proven_too() -> None:
    messages = run_ranks(_refused, 2, block_of(mlp=Residual), {}, False, True)
    assert messages[0] == messages[1]
    assert "layers.0.mlp: its input reaches its output without a row-parallel linear" in messages[0]


class Uncopyable(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.lines = (line for line in ())  # a generator


def test_a_block_that_cannot_be_copied_is_refused_before_the_split() -> None:
    with pytest.raises(ValueError, match=r"layers.0 \(Block\) cannot be copied with copy.deepcopy.*generator"):
        prepare_proof(Model(block_of(mlp=Uncopyable)), LAYOUT, None, sequence_parallel=False)  # type: ignore[arg-type]


class OwnDtype(Mlp):
    """Only runs in the dtype of its call, as some kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


class OwnDtypeWrong(OwnDtype):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return self.down(F.gelu(self.up(x)).softmax(-1))


class OwnAutocast(OwnDtype):
    """Rounds to bfloat16 inside: more noise than its dtype has."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).to(x.dtype)


class OwnAutocastWrong(OwnAutocast):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(hidden.softmax(-1)).to(x.dtype)


class NeverRuns(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("as the user wrote it")


def _in_float32(mlp: type) -> str:
    torch.manual_seed(0)
    model = _proven(Model(block_of(mlp=mlp)), LAYOUT, False)
    try:
        model(torch.zeros(4, LENGTH, dtype=torch.long)).backward()
    except ValueError as error:
        return str(error)
    return ""


def test_a_block_of_one_dtype_is_proven_in_it() -> None:
    assert run_ranks(_in_float32, 2, OwnDtype) == ["", ""]
    assert all("output 0" in message for message in run_ranks(_in_float32, 2, OwnDtypeWrong))
    assert run_ranks(_in_float32, 2, OwnAutocast) == ["", ""]
    assert all("output 0" in message for message in run_ranks(_in_float32, 2, OwnAutocastWrong))
    assert all("cannot run its copy" in m and "as the user wrote it" in m for m in run_ranks(_in_float32, 2, NeverRuns))


# ---- what is right -----------------------------------------------------------------------------------------------------------------


class Counting(Mlp):
    """Changes a buffer, an attribute, and draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        random.random()
        return super().forward(x)


def _untouched(recompute: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    hooked: list[int] = []
    model = Model(block_of(mlp=Counting)).double()
    model.layers[0].mlp.register_forward_hook(lambda *_: hooked.append(1))
    model = _proven(model, LAYOUT, False, recompute=recompute)
    armed = [isinstance(layer, ProvenOnFirstCall) for layer in model.layers]
    ids = torch.zeros(4, LENGTH, dtype=torch.long)
    with torch.no_grad():
        model(ids)
    waits = [isinstance(layer, ProvenOnFirstCall) for layer in model.layers]
    torch.manual_seed(1)
    loss = model(ids)
    before = [p.grad for p in model.parameters()]
    state = (torch.rand(3), random.random(), torch.get_default_dtype())
    loss.backward()
    left = [key for layer in model.layers for key in vars(layer) if key == "_tensor_proof"]
    names = [type(layer).__mro__[1].__name__ for layer in model.layers]
    counts = [(int(layer.mlp.calls), layer.mlp.seen) for layer in model.layers]
    return dict(
        armed=armed, waits=waits, loss=loss.detach(), grads=before, state=state, left=left, names=names, counts=counts, hooks=len(hooked)
    )


def _untouched_without(recompute: str | None) -> dict[str, Any]:
    tensor_proof._enabled = False  # in a forked rank, so nothing to put back
    return _untouched(recompute)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_real_block_and_the_generators_are_untouched(recompute: str | None) -> None:
    for got, wanted in zip(run_ranks(_untouched, 2, recompute), run_ranks(_untouched_without, 2, recompute)):
        assert got["armed"] == got["waits"] == [True, True]
        assert wanted["armed"] == [False, False]
        assert torch.equal(got["loss"], wanted["loss"])
        assert torch.equal(got["state"][0], wanted["state"][0]) and got["state"][1:] == wanted["state"][1:]
        assert all(grad is None for grad in got["grads"])
        assert not got["left"]
        for key in ("names", "counts", "hooks"):
            assert got[key] == wanted[key]


def _decoder_losses(shape: dict[str, Any], sequence: bool, recompute: str | None, enabled: bool) -> list[Tensor]:
    tensor_proof._enabled = enabled
    c = case({**shape, "dropout": 0.2}, sequence_parallel=sequence, recompute=recompute)
    model = _proven(build(c), build(c).megascale_layout, sequence, recompute=recompute)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(2):
        torch.manual_seed(step)
        loss = loss_sum(model, c, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(("shape", "recompute"), [(SWIGLU, "selective"), (GELU, "full"), (GELU, None)])
def test_own_decoder_passes_and_keeps_its_bits(shape: dict[str, Any], recompute: str | None, sequence: bool) -> None:
    wanted = run_ranks(_decoder_losses, 2, shape, sequence, recompute, False)
    for got, without in zip(run_ranks(_decoder_losses, 2, shape, sequence, recompute, True), wanted):
        assert all(torch.equal(a, b) for a, b in zip(got, without))


class _Reached(Exception):
    pass


def _reached(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise _Reached


@pytest.mark.parametrize("axes", ["tp", "tp+sp"])
def test_the_strategy_proves_and_equals_one_device(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parity.check(parity.default_case(axes=axes, dropout="dropout"))
    monkeypatch.setattr(ProvenOnFirstCall, "__call__", _reached)  # ranks are forked: they see it
    with pytest.raises(RankFailure, match="_Reached"):
        parity.check(parity.default_case(axes=axes, dropout="dropout"))


def _habits(sequence: bool) -> None:
    torch.manual_seed(1)
    model = Habits().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    proof = prepare_proof(model, HABITS, mesh, sequence_parallel=sequence)
    apply_tensor_parallel(model, mesh, HABITS, sequence_parallel=sequence, recompute=None)
    proof.arm(model)
    assert isinstance(model.block, ProvenOnFirstCall)
    model(batch(0)[0]).sum().backward()
    assert not isinstance(model.block, ProvenOnFirstCall)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_another_model_passes(sequence: bool) -> None:
    run_ranks(_habits, 2, sequence)


def _hugging_face(name: str, sequence: bool) -> Tensor:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
        max_position_embeddings=64, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    layout = ModelLayout(
        blocks="model.layers.*", attention=attention, mlp=mlp, embedding="model.embed_tokens", head="lm_head",
        colwise=[f"{attention}.{x}_proj" for x in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        rowwise=[f"{attention}.o_proj", f"{mlp}.down_proj"],
        norms=["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"],
        replicated=[f"{attention}.q_norm", f"{attention}.k_norm"] if name == "Qwen3" else [],
    )  # fmt: skip
    ids = batch(0)[0]
    kwargs = dict(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None])  # use_cache stays True: a cache goes through the blocks
    wanted = model(**kwargs).logits.detach()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    proof = prepare_proof(model, layout, mesh, sequence_parallel=sequence)
    apply_tensor_parallel(model, mesh, layout, sequence_parallel=sequence, recompute=None)
    proof.arm(model)
    assert isinstance(model.model.layers[1], ProvenOnFirstCall)
    got = model(**kwargs).logits
    assert not isinstance(model.model.layers[1], ProvenOnFirstCall)
    return (got - wanted).abs().max().detach()


@pytest.mark.parametrize(("name", "sequence"), [("Qwen3", True), ("Llama", False)])
def test_unmodified_hugging_face_class_passes(name: str, sequence: bool) -> None:
    pytest.importorskip("transformers")
    assert max(run_ranks(_hugging_face, 2, name, sequence)) < 1e-5


# ---- what is proven ----------------------------------------------------------------------------------------------------------------


def test_which_modules_are_proven() -> None:
    def names(model: nn.Module, layout: ModelLayout, sequence: bool = False) -> list[str]:
        return proved_modules(model, Roles.of(model, layout), sequence)

    assert names(Model(Block), LAYOUT) == ["layers.0", "layers.1"]
    parts = [f"layers.{i}.{part}" for i in range(2) for part in ("attention", "mlp")]
    assert sorted(names(Model(Block), replace(LAYOUT, blocks=()))) == parts
    assert names(Model(Prelu), BARE) == ["layers.0", "layers.1"]
    assert names(Habits(), HABITS) == ["block"]
    plain = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    assert names(plain, ModelLayout(colwise="0", rowwise="1")) == [""]
    assert names(Model(Block), replace(LAYOUT, blocks=["layers.0", "layers.1", "norm"]), True) == ["layers.0", "layers.1", "norm"]


def test_blocks_that_compute_alike_are_proven_once() -> None:
    model = Model(Block)
    assert [kind.names for kind in prepare_proof(model, LAYOUT, None, sequence_parallel=False).kinds] == [["layers.0", "layers.1"]]  # type: ignore[arg-type]
    model.layers[1].mlp.scaled = True
    kinds = prepare_proof(model, LAYOUT, None, sequence_parallel=False).kinds  # type: ignore[arg-type]
    assert [kind.names for kind in kinds] == [["layers.0"], ["layers.1"]]
    assert all(p.is_meta for kind in kinds for p in kind.structure.parameters())
