"""Small random transformers models of every family that is proven, with global batches for each: what the parity tables are made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import lightning as L
import torch
import transformers
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS, IMAGE_TOKEN = 64, 12, 4, 63
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    pad_token_id=0,
)
_VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
)
_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2)


def _text(kind: str, **options: Any) -> nn.Module:
    given = {name: value for name, value in options.items() if name != "experts"}
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")(**{**_TEXT, **given})
    config._experts_implementation = options.get("experts", "eager")  # float64 has no grouped product
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _deepseek() -> nn.Module:
    latent = dict(q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8)
    routing = dict(n_routed_experts=4, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1)
    return _text("DeepseekV3", **latent, **routing, **_EXPERTS, num_key_value_heads=4)


def _llava() -> nn.Module:
    """The vision tower is frozen, as LLaVA trains it; the projector and the language model learn."""
    vision = transformers.SiglipVisionConfig(**_VISION)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


def _clip() -> nn.Module:
    text = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.CLIPConfig(
        text_config={**text, "max_position_embeddings": LENGTH, "eos_token_id": 2, "initializer_range": 0.2},
        vision_config={**_VISION, "initializer_range": 0.2},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=10, max_target_positions=LENGTH, pad_token_id=0,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, dropout=0.0, init_std=0.2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: _text("Llama"),
    "Qwen3": lambda: _text("Qwen3", head_dim=8),
    "GPT2": _gpt2,
    "Mixtral": lambda: _text("Mixtral", num_local_experts=4, **_EXPERTS),
    "Mixtral, grouped": lambda: _text("Mixtral", num_local_experts=4, **_EXPERTS, experts="grouped_mm"),
    "Mixtral, balanced": lambda: _text("Mixtral", num_local_experts=4, **_EXPERTS, output_router_logits=True, router_aux_loss_coef=1.0),
    "Llava": _llava,
    "Mistral": lambda: _text("Mistral", sliding_window=6),
    "Gemma": lambda: _text("Gemma", head_dim=8),
    "Gemma3": lambda: _text("Gemma3", head_dim=8, sliding_window=6),
    "Phi3": lambda: _text("Phi3"),
    "Qwen3Moe": lambda: _text("Qwen3Moe", head_dim=8, num_experts=4, moe_intermediate_size=16, **_EXPERTS),
    "DeepseekV3": _deepseek,
    "Siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_VISION)),
    "CLIP": _clip,
    "Whisper": _whisper,
}


def batches(family: str, count: int = 3) -> list[dict[str, Tensor]]:
    """Global batches of ROWS rows; some labels are masked, in unequal numbers, and some positions are padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY - 1, (ROWS, LENGTH), generator=generator)
        labels = ids.clone()
        labels[0, :5], labels[2, -3:] = -100, -100
        mask = torch.ones_like(ids)
        mask[2, -3:] = 0
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        if family in ("Llava", "CLIP", "Siglip"):
            batch["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=generator)
        if family == "Llava":
            ids[:, 1:5], labels[:, 1:5] = IMAGE_TOKEN, -100
        if family == "CLIP":
            ids[:, -1] = VOCABULARY - 1  # the end of the text is where the highest id stands
            del batch["labels"]
        if family == "Siglip":
            batch = {"pixel_values": batch["pixel_values"], "target": torch.randn(ROWS, 32, generator=generator)}
        if family == "Whisper":
            batch = {"input_features": torch.randn(ROWS, 8, 20, generator=generator), "labels": labels}
        found.append(batch)
    return found


class HuggingFaceModule(L.LightningModule):
    """An ordinary fine-tuning module: the model's own loss, nothing of ranks."""

    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.family, self.model = family, FAMILIES[family]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.family == "Siglip":
            return (self.model(batch["pixel_values"]).pooler_output - batch["target"]).square().mean()
        if self.family == "CLIP":  # each row against fixed texts would be as good: no negatives over rows, whose set depends on ranks
            output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], pixel_values=batch["pixel_values"])
            return -(output.text_embeds * output.image_embeds).sum(-1).mean() * self.model.logit_scale.exp()
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def build(family: str) -> tuple[HuggingFaceModule, list[dict[str, Tensor]]]:
    """(module, global batches), as ``megascale verify`` takes them."""
    return HuggingFaceModule(family), batches(family)


# targets of the command line: ``megascale verify target=tests.huggingface:llama ...``
llama, qwen3, gpt2, mixtral, llava = (partial(build, family) for family in ("Llama", "Qwen3", "GPT2", "Mixtral", "Llava"))
