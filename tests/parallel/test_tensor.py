"""Tensor and sequence parallelism give the numbers of one device: losses, gradients and parameters over three optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_megascale.layout import ModelLayout
from lightning_megascale.models.layers import FeedForward
from lightning_megascale.ops import tensor_parallel as ops
from lightning_megascale.parallel.tensor import apply_tensor_parallel
from tests.harness import RankFailure, full, run_ranks, worst
from tests.parallel.tensor_runs import GELU, SWIGLU, Case, batch, build, case, sum_partial, train

DROPOUT = {**GELU, "dropout": 0.2}


def difference(c: Case, world: int, kinds: tuple[str, ...] = ("loss", "gradient", "parameter")) -> dict[str, float]:
    """Largest difference of any rank from one device, by kind of number."""
    wanted, ranks = train(c)[0], run_ranks(train, world, c, timeout=150)

    def of(kind: str, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in numbers.items() if name.startswith(kind)}

    return {kind: max(worst(of(kind, wanted), of(kind, numbers))[0] for numbers, _, _ in ranks) for kind in kinds}


# ---- the numbers of one device -----------------------------------------------------------------------------------------------------

CASES = {
    "tp2": (2, case(SWIGLU)),
    "tp2, biases, tied, learned positions": (2, case(GELU)),
    "tp2+sp": (2, case(SWIGLU, sequence_parallel=True)),
    "tp2+sp, biases, tied, learned positions": (2, case(GELU, sequence_parallel=True)),
    "tp4": (4, case(GELU)),
    "tp4+sp": (4, case(SWIGLU, sequence_parallel=True)),
    "tp2, loss in the head": (2, case(SWIGLU, loss="labels")),
    "tp2+sp, loss in the head, tied": (2, case(GELU, sequence_parallel=True, loss="labels")),
    "tp2, loss_parallel": (2, case(GELU, loss="shards")),
    "tp2+sp, loss_parallel": (2, case(SWIGLU, sequence_parallel=True, loss="shards")),
    "tp2, dropout": (2, case(DROPOUT)),
    "tp2+sp, dropout": (2, case(DROPOUT, sequence_parallel=True)),
    "tp2, selective": (2, case(SWIGLU, recompute="selective")),
    "tp2, full": (2, case(GELU, recompute="full")),
    "tp2+sp, selective, dropout": (2, case(DROPOUT, sequence_parallel=True, recompute="selective")),
    "tp2+sp, full, dropout": (2, case(DROPOUT, sequence_parallel=True, recompute="full")),
    "tp2+sp, classes": (2, case(SWIGLU, sequence_parallel=True, recompute=frozenset({FeedForward}))),
    "dp2 x tp2": (4, case(GELU, data=2)),
    "dp2 x tp2+sp": (4, case(SWIGLU, data=2, sequence_parallel=True)),
    "dp2 x tp2+sp, selective": (4, case(GELU, data=2, sequence_parallel=True, recompute="selective")),
    "dp2 x tp2+sp, full": (4, case(SWIGLU, data=2, sequence_parallel=True, recompute="full")),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str) -> None:
    world, c = CASES[name]
    assert max(difference(c, world).values()) < 1e-10


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_equals_one_device_in_float32(sequence_parallel: bool) -> None:
    c = case(SWIGLU, sequence_parallel=sequence_parallel, dtype=torch.float32, optimizer="sgd")
    assert max(difference(c, 2).values()) < 1e-5


def test_second_gather_is_really_used() -> None:
    assert difference(case(SWIGLU, sequence_parallel=True, spoil=_scale_second_gather), 2, ("gradient",))["gradient"] > 1e-5


def _scale_second_gather(model: nn.Module) -> None:
    ops.start_gather_again = lambda shard, _, axis: ops.start_gather(shard * 1.001, axis)  # in a forked rank, so nothing to put back


@pytest.mark.parametrize(("forget", "sequence_parallel"), [("q_norm", False), ("k_norm", True), ("mlp_norm", True), ("o_proj.bias", True)])
def test_a_partial_gradient_that_is_not_summed_shows(forget: str, sequence_parallel: bool) -> None:
    shape = GELU if "bias" in forget else SWIGLU
    assert difference(case(shape, sequence_parallel=sequence_parallel, forget=forget), 2, ("gradient",))["gradient"] > 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_names_tied_weight_and_partial_gradients(sequence_parallel: bool) -> None:
    for shape in ({**SWIGLU, "bias": True}, {**GELU, "qk_norm": True}):
        c = case(shape, sequence_parallel=sequence_parallel, data=1)
        wanted = list(build(c).state_dict())
        partial = ("q_norm", "k_norm") + (("norm", "o_proj.bias", "down_proj.bias") if sequence_parallel else ())
        for _, _, facts in run_ranks(train, 2, c):
            assert facts["state"] == wanted
            assert facts["tied"] == (shape.get("tie_embeddings", False))
            assert facts["partial"] == [name for name in _parameters(c) if any(part in name for part in partial)]


def _parameters(c: Case) -> list[str]:
    return [name for name, _ in build(c).named_parameters()]


def test_collectives_of_a_step() -> None:
    """Two layers, an embedding and a head: one collective per module and direction, whatever the number of its linears."""
    plain = run_ranks(train, 2, case(SWIGLU))[0][1]
    assert plain["forward"] == {"all_reduce": 5, "all_gather_into_tensor": 1}  # 2 rows per layer, embedding; logits
    assert plain["backward"] == {"all_reduce": 5}  # 2 modules per layer, head
    sequence = run_ranks(train, 2, case(SWIGLU, sequence_parallel=True))[0][1]
    assert sequence["forward"] == {"reduce_scatter_tensor": 5, "all_gather_into_tensor": 6}
    assert sequence["backward"] == {"reduce_scatter_tensor": 5, "all_gather_into_tensor": 10}  # 4 per layer, embedding, head again


def _parameters_of_one_rank() -> list[tuple[str, bool, Any, tuple[int, ...], float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, whole = build(case(GELU)), dict(build(case(GELU)).named_parameters())
    model.head.weight.requires_grad_(False)
    apply_tensor_parallel(model, mesh, model.megascale_layout, sequence_parallel=True, recompute=None)

    def facts(name: str, p: nn.Parameter) -> tuple[str, bool, Any, tuple[int, ...], float]:
        error = (full(p) - whole[name]).abs().max().item()
        return name, p.requires_grad, p.placements if isinstance(p, DTensor) else None, tuple(p.shape), error

    return [facts(name, p) for name, p in model.named_parameters()]


def test_parameters_are_dtensors_of_logical_shape_with_the_values_they_had() -> None:
    whole = dict(build(case(GELU)).named_parameters())
    for name, requires_grad, placements, shape, error in run_ranks(_parameters_of_one_rank, 2)[1]:
        assert shape == tuple(whole[name].shape)
        assert error == 0
        assert requires_grad == (name != "embed_tokens.weight")
        columns = any(part in name for part in ("q_proj", "k_proj", "v_proj", "up_proj", "embed"))
        row = "o_proj.weight" in name or "down_proj.weight" in name
        assert placements == ((Shard(0),) if columns else (Shard(1),) if row else None), name


# ---- a model of other habits -------------------------------------------------------------------------------------------------------


class Habits(nn.Module):
    """Attention called by keyword, with a norm of its own before a linear; frozen query; an MLP whose linears are the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32, padding_idx=5)
        self.drop = nn.Dropout(0.0)
        self.block = HabitBlock()
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 48)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.drop(self.embed(ids)))))


class HabitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key_norm = nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32, bias=i % 2 == 0) for i in range(4))
        self.query.weight.requires_grad_(False)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:
        q, k, v = self.query(hidden_states), self.key(self.key_norm(hidden_states)), self.value(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) * scale), None


class HabitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention, self.inner = nn.LayerNorm(32), nn.LayerNorm(32), HabitAttention(), HabitMlp()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(hidden_states=self.norm_1(x), scale=0.5)[0]
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x + self.inner(x)


class HabitMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.up(2 * x))  # the same linear twice, once on another tensor


HABITS = ModelLayout(
    blocks="block", attention="block.attention", mlp="block.inner",
    colwise=["block.attention.query", "block.attention.key", "block.attention.value", "block.up", "block.inner.up"],
    rowwise=["block.attention.out", "block.down", "block.inner.down"], replicated="block.attention.key_norm",
    norms=["block.norm_1", "block.norm_2", "norm"], embedding="embed", head="head",
)  # fmt: skip


def _habits(sequence_parallel: bool, autocast: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Habits() if autocast else Habits().double()
    mesh, partial = None, []
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        partial = apply_tensor_parallel(model, mesh, HABITS, sequence_parallel=sequence_parallel, recompute=None)
    ids, labels = batch(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    sum_partial(model, partial, {"tp": mesh})
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert "block.attention.query.weight" not in gradients
    assert gradients["embed.weight"][5].abs().max() == 0
    assert (ids == 5).any()
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_another_model(sequence_parallel: bool) -> None:
    wanted = _habits(sequence_parallel)
    for numbers in run_ranks(_habits, 2, sequence_parallel):
        assert worst(wanted, numbers)[0] < 1e-12


def test_autocast_reaches_own_functions() -> None:
    exact, wanted = _habits(False, autocast=False), _habits(False, autocast=True)
    noise = worst(exact, wanted)[0]
    assert noise > 1e-4  # bfloat16 shows
    for numbers in run_ranks(_habits, 2, True, True):
        assert worst(exact, numbers)[0] < 1.5 * noise


def _hugging_face(name: str, sequence_parallel: bool) -> dict[str, Tensor]:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
        max_position_embeddings=64, tie_word_embeddings=False, attn_implementation="sdpa", initializer_range=0.2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    layout = ModelLayout(
        blocks="model.layers.*", attention=attention, mlp=mlp, embedding="model.embed_tokens", head="lm_head",
        colwise=[f"{attention}.{x}_proj" for x in "qkv"] + [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        rowwise=[f"{attention}.o_proj", f"{mlp}.down_proj"],
        norms=["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"],
        replicated=[f"{attention}.q_norm", f"{attention}.k_norm"] if name == "Qwen3" else [],
    )  # fmt: skip
    mesh, partial = None, []
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        partial = apply_tensor_parallel(model, mesh, layout, sequence_parallel=sequence_parallel, recompute=None)
    ids, labels = batch(0)
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    sum_partial(model, partial, {"tp": mesh})
    return {"logits": logits.detach(), **{name: full(p.grad) for name, p in model.named_parameters()}}


@pytest.mark.parametrize(("name", "sequence_parallel"), [("Qwen3", True), ("Llama", False)])
def test_unmodified_hugging_face_class(name: str, sequence_parallel: bool) -> None:
    pytest.importorskip("transformers")
    wanted = _hugging_face(name, sequence_parallel)
    for numbers in run_ranks(_hugging_face, 2, name, sequence_parallel):
        assert worst(wanted, numbers)[0] < 1e-10


# ---- dropout on a shard, without ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 8, 6), (1, 8, 3), (8, 5)])
def test_dropout_of_shards_is_dropout_of_the_whole(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.manual_seed(3)
    wanted, after = F.dropout(x, 0.3), torch.rand(4)
    dim, pieces = len(shape) - 2, []
    for rank, shard in enumerate(x.chunk(4, dim)):
        torch.manual_seed(3)
        pieces.append(ops.sequence_dropout(shard, 0.3, ops.TensorAxis("", 4, rank)))
        assert torch.equal(torch.rand(4), after)  # every rank has consumed what one device would have
    assert torch.equal(torch.cat(pieces, dim), wanted)


# ---- errors of the first forward ---------------------------------------------------------------------------------------------------


def _error(model: nn.Module, layout: ModelLayout, sequence_parallel: bool, length: int, token: int = 0) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, layout, sequence_parallel=sequence_parallel, recompute=None)
    with pytest.raises(ValueError) as caught:
        model(torch.full((2, length), token))
    return str(caught.value)


def test_length_that_does_not_divide_is_refused_alike_on_all_ranks() -> None:
    model = build(case(SWIGLU))
    messages = run_ranks(_error, 2, model, model.megascale_layout, True, 15, timeout=20)
    assert messages[0] == messages[1]
    for part in ("embed_tokens", "L=15", "tensor_parallel_size=2", "14 or 16", "sequence_parallel=False"):
        assert part in messages[0]


def test_id_outside_the_vocabulary_is_refused() -> None:
    model = build(case(SWIGLU))
    for message in run_ranks(_error, 2, model, model.megascale_layout, False, 8, 48, timeout=20):
        assert "48" in message and "[0, 48)" in message


class Residual(nn.Module):
    """Adds its own input, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class HalfHeads(nn.Module):
    """Reshapes to the number of heads of the whole layer, and so halves their size."""

    head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in self.qkv)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _sequential(module: nn.Module, colwise: list[str], rowwise: str, role: str) -> tuple[nn.Module, ModelLayout]:
    model = nn.Sequential(nn.Embedding(48, 32), module)
    columns, rows = [f"1.{name}" for name in colwise], f"1.{rowwise}"
    return model, ModelLayout(**{role: "1"}, colwise=columns, rowwise=rows, embedding="0")


def test_residual_inside_a_module_is_refused() -> None:
    message = run_ranks(_error, 2, *_sequential(Residual(), ["up"], "down", "mlp"), False, 8, timeout=20)[0]
    assert "1: its input reaches its output without a row-parallel linear" in message


def test_heads_of_the_wrong_size_are_refused() -> None:
    model, layout = _sequential(HalfHeads(), ["qkv.0", "qkv.1", "qkv.2"], "out", "attention")
    message = run_ranks(_error, 2, model, layout, False, 8, timeout=20)[0]
    assert "queries of shape (2, 4, 8, 4) (batch, heads, length, head_dim) instead of head_dim=8" in message


def _call_without_hidden_state() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, layout = _sequential(Residual(), ["up"], "down", "mlp")
    apply_tensor_parallel(model, mesh, layout, sequence_parallel=False, recompute=None)
    model[1](hidden=torch.zeros(1, 2, 32))


def test_a_call_without_the_hidden_state_is_refused() -> None:
    with pytest.raises(RankFailure, match="1: called without 'x', the hidden state"):
        run_ranks(_call_without_hidden_state, 2, timeout=20)
