"""Public scripts that read text: fine-tuning a Hugging Face classifier, sequence to sequence, low-rank adapters over a frozen model."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.strategies.script_runs import ROWS, STEPS, Pool, Script

VOCAB, WIDTH, CLASSES, LENGTH = 11, 8, 3, 6


class Texts(Dataset):
    """Rows of unequal length with a class and a translation, as a tokenizer gives them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(6)
        lengths = torch.randint(2, LENGTH + 1, (STEPS * ROWS, 2), generator=generator).tolist()
        draw = [[torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in pair] for pair in lengths]
        classes = torch.randint(CLASSES, (STEPS * ROWS,), generator=generator).tolist()
        self.rows = [{"input_ids": ids, "target": target, "label": label} for (ids, target), label in zip(draw, classes)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def pad(rows: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def classification_batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the batch's longest row, which differs between ranks."""
    ids = [row["input_ids"] for row in rows]
    mask = [[1] * len(row) for row in ids]
    return {"input_ids": pad(ids, 0), "attention_mask": pad(mask, 0), "labels": torch.tensor([row["label"] for row in rows])}


def translation_batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Labels padded with -100, so ranks count different numbers of tokens."""
    batch = classification_batch(rows)
    return {**batch, "labels": pad([row["target"] for row in rows], -100)}


# ---- fine-tuning a Hugging Face model --------------------------------------------------------------------------------------


class SequenceClassifier(L.LightningModule):
    def __init__(self, learning_rate: float = 1e-2, weight_decay: float = 0.1, warmup_steps: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(7)
        size = dict(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config = BertConfig(**size, **dropout, num_labels=CLASSES, max_position_embeddings=LENGTH, attn_implementation="sdpa")
        self.model = BertForSequenceClassification(config).double()

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(**batch)[0]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, logits = self(**batch)[:2]
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == batch["labels"]).double().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        plain = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named if not any(part in n for part in plain)], "weight_decay": self.hparams.weight_decay},
            {"params": [p for n, p in named if any(part in n for part in plain)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


# ---- sequence to sequence --------------------------------------------------------------------------------------------------


class Translator(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BartConfig, BartForConditionalGeneration

        torch.manual_seed(8)
        layers = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
        size = dict(d_model=WIDTH, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=VOCAB, max_position_embeddings=LENGTH)
        special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)
        self.model = BartForConditionalGeneration(BartConfig(**layers, **size, **special, dropout=0.0)).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# ---- low-rank adapters -----------------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """Hu et al. 2021 as tutorials write it: a frozen linear and two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)  # not 0, so that a test sees all gradients

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T * self.scaling


class Wrapped(nn.Module):
    """The layout of peft: ``base_layer`` beside dicts of adapters by name."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.active_adapters:
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class LoRATuning(L.LightningModule):
    wrapper: type[nn.Module] = LoRALinear

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.model = Reader()
        for parameter in self.model.parameters():
            parameter.requires_grad = False
        for layer in self.model.layers:
            layer.up, layer.down = self.wrapper(layer.up), self.wrapper(layer.down)
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        return loss.view(len(logits), -1).mean(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class PeftStyle(LoRATuning):
    wrapper = Wrapped


def reading_batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = [(row["input_ids"] + row["target"] + row["input_ids"])[:5] for row in rows]
    return {"input_ids": pad([(row * 3)[:5] for row in ids], 0)}


FINE_TUNING = Script(SequenceClassifier, Texts, classification_batch, evaluates=True, options=dict(max_epochs=2, gradient_clip_val=1.0))
TRANSLATION = Script(Translator, Texts, translation_batch)
LORA = Script(LoRATuning, Texts, reading_batch)
PEFT = Script(PeftStyle, Texts, reading_batch)

PIPELINE: dict[str, Any] = dict(pipeline_parallel_size=2, microbatch_size=2)
BERT_STAGES = dict(first=["bert.embeddings"], blocks="bert.encoder.layer.*", last=["bert.pooler", "dropout", "classifier"])
BERT_SPLIT = dict(
    blocks="bert.encoder.layer.*",
    colwise=[
        *(f"bert.encoder.layer.*.attention.self.{name}" for name in ("query", "key", "value")),
        "bert.encoder.layer.*.intermediate.dense",
    ],
    rowwise=["bert.encoder.layer.*.attention.output.dense", "bert.encoder.layer.*.output.dense"],
)
READER_STAGES = dict(first=["embed"], blocks="layers.*", last=["head"])
PEFT_SPLIT = dict(
    blocks="layers.*",
    colwise=["layers.*.up.base_layer", "layers.*.up.lora_B.default"],
    rowwise=["layers.*.down.base_layer", "layers.*.down.lora_A.default"],
)
EQUAL = {
    "fine-tuning dp2": (FINE_TUNING, dict(data_parallel_replicate_size=2)),
    "fine-tuning fsdp2": (FINE_TUNING, dict()),
    "translation fsdp2": (TRANSLATION, dict(label_alignment="aligned")),
    "LoRA dp2": (LORA, dict(data_parallel_replicate_size=2)),
    "LoRA fsdp2": (LORA, dict()),
    "LoRA pp2": (LORA, dict(**PIPELINE, layout=READER_STAGES)),
    "peft fsdp2": (PEFT, dict()),
    "peft tp2": (PEFT, dict(tensor_parallel_size=2, layout=PEFT_SPLIT)),
    "peft pp2": (PEFT, dict(**PIPELINE, layout=READER_STAGES)),
    "fine-tuning pp2": (FINE_TUNING, dict(**PIPELINE, layout=BERT_STAGES)),
    "fine-tuning tp2": (FINE_TUNING, dict(tensor_parallel_size=2, layout=BERT_SPLIT)),
}
POOL = Pool(EQUAL)


@pytest.mark.parametrize("name", EQUAL)
def test_script_equals_one_device(name: str) -> None:
    POOL.assert_equals_one_device(name)
