"""Models as users have them, whole and with one thing wrong each; none is the package's own."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megascale import ModelLayout

WIDTH, HEADS, WORDS, ROWS, LENGTH = 16, 4, 32, 4, 9


class Attention(nn.Module):
    """Causal attention with a norm of the queries, which is whole on every rank and sees some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True).transpose(1, 2).flatten(2))


class Forward(nn.Module):
    """Computes its activation in float32, as norms of large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x).float()).to(x.dtype))


class Block(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Forward()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.between(self.mlp(self.norm2(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 2, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block(between() if number == layers - 1 else nn.Identity()) for number in range(layers))
        self.ln_f, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.out(self.ln_f(x))


LAYOUT = ModelLayout(
    blocks="h.*",
    first=["wte"],
    last=["ln_f", "out"],
    attention="h.*.attn",
    mlp="h.*.mlp",
    colwise=["h.*.attn.q_proj", "h.*.attn.k_proj", "h.*.attn.v_proj", "h.*.mlp.up"],
    rowwise=["h.*.attn.o_proj", "h.*.mlp.down"],
    norms=["h.*.norm1", "h.*.norm2", "ln_f"],
    replicated=["h.*.attn.q_norm"],
    embedding="wte",
    head="out",
)


class Words(L.LightningModule):
    """Next-word prediction; the loss is computed in float32 inside, as many do."""

    def __init__(self, layers: int = 2, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.model = Net(layers, between)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["ids"][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["ids"][:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-6)


def batches(rows: int = ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(WORDS, (rows, LENGTH), generator=generator)} for _ in range(3)]


def build() -> tuple[L.LightningModule, Any]:
    return Words(), batches()


# ---- wrong ones ----------------------------------------------------------------------------------------------------------------------


class Centered(nn.Module):
    """Takes the mean over the rows off."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def build_centered() -> tuple[L.LightningModule, Any]:
    return Words(between=Centered), batches()


class SumLoss(Words):
    """The loss is a sum over rows and is returned as if it were a mean."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * len(batch["ids"])


class ScaledOnRanks(Words):
    """The optimizer's step is another one on ranks."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if dist.is_initialized():
            with torch.no_grad():
                self.model.ln_f.weight.mul_(1.01)


class Noisy(Words):
    """Adds noise to the loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))


class Counting(Words):
    """Depends on how often anything of its kind was trained."""

    calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        Counting.calls += 1
        return super().training_step(batch, batch_idx) * Counting.calls


class Hanging(Words):
    """Rank 1 never comes back from its second step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 1 and dist.is_initialized() and dist.get_rank() == 1:
            wait_for_ever()
        return super().training_step(batch, batch_idx)


def wait_for_ever() -> None:
    import time

    while True:
        time.sleep(0.05)


class Failing(Words):
    """Rank 1 fails in its second step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 1 and dist.is_initialized() and dist.get_rank() == 1:
            raise KeyError("no such word")
        return super().training_step(batch, batch_idx)


# ---- other habits --------------------------------------------------------------------------------------------------------------------


class TwoOptimizers(L.LightningModule):
    """Manual optimization of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.two(self.one(batch).tanh()).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.one.parameters(), lr=0.1), torch.optim.SGD(self.two.parameters(), lr=0.2)]


class Sums(L.LightningModule):
    """Own data, dropout, a model that is made late, and a loss as sum and count."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"dropout": 0.3})

    def configure_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        x = F.dropout(x, self.hparams["dropout"], self.training)
        off = (self.model(x) - y).square()
        return {"loss_sum": off.sum(), "num_tokens": torch.tensor(float(off.numel()))}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.data = torch.utils.data.TensorDataset(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator))

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=4, shuffle=True)


class BatchNorm(Sums):
    """Takes statistics over a batch."""

    def configure_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class KeyBias(Words):
    """A bias of the keys: its gradient is 0 but for rounding, of which Adam with a tiny eps makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model.h[0].attn.k_proj = nn.Linear(WIDTH, WIDTH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-16)


class Tied(Words):
    """The output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model.out.weight = self.model.wte.weight


# ---- Hugging Face --------------------------------------------------------------------------------------------------------------------


def _decoder(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    import transformers

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=32, attention_dropout=0.1, **options)
    ids = batches()[0]["ids"]
    labels = ids.clone()
    labels[0, 2:6] = -100
    return getattr(transformers, f"{kind}ForCausalLM")(config), {"input_ids": ids, "labels": labels}


def build_llama() -> tuple[nn.Module, Any]:
    return _decoder("Llama")


def build_qwen3() -> tuple[nn.Module, Any]:
    return _decoder("Qwen3", head_dim=4)


def decoder_layout(**roles: Any) -> ModelLayout:
    """The roles of Llama's modules, and further ones."""
    layer = "model.layers.*."
    return ModelLayout(
        blocks="model.layers.*",
        first=["model.embed_tokens"],
        last=["model.norm", "lm_head"],
        attention=layer + "self_attn",
        mlp=layer + "mlp",
        colwise=[layer + f"self_attn.{name}_proj" for name in "qkv"] + [layer + f"mlp.{name}_proj" for name in ("gate", "up")],
        rowwise=[layer + "self_attn.o_proj", layer + "mlp.down_proj"],
        norms=[layer + "input_layernorm", layer + "post_attention_layernorm", "model.norm"],
        embedding="model.embed_tokens",
        head="lm_head",
        **roles,
    )
