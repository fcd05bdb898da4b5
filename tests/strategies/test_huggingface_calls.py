"""Habits around transformers models that would train with other numbers: each is refused by name, or right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.layouts import find_layout
from lightning_megascale.verification import Report, verify
from tests import huggingface
from tests.huggingface import HuggingFaceModule, batches

Step = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Habit(HuggingFaceModule):
    def __init__(self, family: str, step: Step) -> None:
        super().__init__(family)
        self.step = step

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.step(self.model, batch)


def prove(family: str, step: Step, axes: str, **options: Any) -> Report:
    options = {"label_alignment": "huggingface", "microbatch_size": 2, **options}
    (report,) = verify(lambda: (Habit(family, step), batches(family)), axes=[axes], **options)
    return report


def with_attentions(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.set_attn_implementation("eager")  # type: ignore[operator]
    output = model(**batch, output_attentions=True)
    return output.loss + 0.1 * output.attentions[0].square().mean()


def with_hidden_states(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch, output_hidden_states=True)
    return output.loss + 0.1 * output.hidden_states[1].square().mean()


def with_router_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, output_router_logits=True).loss


def embedded_apart(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"] % 16)  # type: ignore[operator]
    return model(inputs_embeds=embedded, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss


@pytest.mark.parametrize(
    ("family", "step", "axes", "part"),
    [
        ("Llama", with_attentions, "tp2", "attention maps of its own heads only"),
        ("Llama", with_attentions, "pp2", "attention maps of its own layers only"),
        ("Llama", with_hidden_states, "pp2", "hidden states of its own layers only"),
        ("Mixtral", with_router_logits, "fsdp2", "output_router_logits=True adds a balance loss"),
        ("Mixtral", with_router_logits, "pp2", "output_router_logits=True adds a balance loss"),
        ("Llama", embedded_apart, "fsdp2xtp2", "was called outside of its model's forward"),
    ],
)
def test_refused_by_name(family: str, step: Step, axes: str, part: str) -> None:
    report = prove(family, step, axes)
    assert not report.ok and part in f"{report.refused} {report.error}"


@pytest.mark.slow
@pytest.mark.parametrize(("step", "axes"), [(with_hidden_states, "tp2"), (embedded_apart, "tp2")])
def test_right_where_a_rank_has_them_whole(step: Step, axes: str) -> None:
    report = prove("Llama", step, axes)
    assert report.ok, str(report)


def checkpointed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model(**batch).loss


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tp2", "fsdp2", "pp2xtp2"])
def test_transformers_own_checkpointing(axes: str) -> None:
    report = prove("Llama", checkpointed, axes)
    assert report.ok, str(report)


# ---- classes ------------------------------------------------------------------------------------------------------------------------


def _qwen2_vl() -> nn.Module:
    """Positions in three axes, made from the grids of the images: every stage needs the grids, and only the first the pixels."""
    text = {**huggingface._TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = dict(embed_dim=16, hidden_size=32, depth=1, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=1)
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=huggingface.IMAGE_TOKEN, vision_start_token_id=62, vision_end_token_id=61
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    model.model.visual.requires_grad_(False)
    return model


def test_grids_of_images_reach_every_stage() -> None:
    layout = find_layout(_qwen2_vl(), "auto")
    assert layout is not None and layout.first_inputs == ("pixel_values", "pixel_values_videos")


class Deep(nn.Module):
    """An image adds something after several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision, self.head = nn.Embedding(16, 8), nn.Linear(3, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, ids: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        extra = None if image is None else self.vision(image)[:, None]
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if extra is not None and place % 2 == 0:
                x = x + extra
        return self.head(x)


class DeepModule(HuggingFaceModule):
    def __init__(self) -> None:
        super(HuggingFaceModule, self).__init__()
        self.net = Deep()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["ids"], image=batch["image"]).flatten(0, 1), batch["ids"].flatten())


DEEP = ModelLayout(first=["vision", "embed"], blocks="layers.*", last="head", first_inputs="image")


def deep() -> tuple[DeepModule, list[dict[str, Tensor]]]:
    return DeepModule(), [{"ids": torch.randint(16, (4, 6)), "image": torch.randn(4, 3)} for _ in range(3)]


def test_what_an_image_adds_between_layers_is_not_left_out_silently() -> None:
    (report,) = verify(deep, axes=["pp2"], layout=DEEP, microbatch_size=2, pipeline_split=["layers.2"])
    assert not report.ok and "changes the hidden state between 'layers.0' and 'layers.1'" in str(report.refused)


@pytest.mark.parametrize(
    ("layout", "axes", "part"),
    [
        (replace(DEEP, first_inputs="picture"), "pp2", "layout.first_inputs: 'picture' is no argument of Deep"),
        (ModelLayout(blocks="layers"), "fsdp2", "write 'layers.*'"),
        (ModelLayout(blocks="layers.*", units="layers.*.0"), "fsdp2", "layers.0.0 is a unit inside layers.0"),
    ],
)
def test_layouts_that_cannot_be_meant(layout: ModelLayout, axes: str, part: str) -> None:
    (report,) = verify(deep, axes=[axes], layout=layout, microbatch_size=2)
    assert part in str(report.refused)


def _bert() -> tuple[HuggingFaceModule, list[dict[str, Tensor]]]:
    module = HuggingFaceModule("Llama")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=huggingface.VOCABULARY
    )
    module.model = transformers.BertForMaskedLM(config)
    return module, batches("Llama")


def test_labels_of_a_class_that_does_not_shift_them() -> None:
    (report,) = verify(_bert, axes=["fsdp2"], label_alignment="huggingface")
    assert "the loss of BertForMaskedLM does not shift labels" in str(report.refused) and "'aligned'" in str(report.refused)
    (report,) = verify(_bert, axes=["fsdp2"], label_alignment="aligned")
    assert report.ok, str(report)


def test_a_pipelined_model_inside_another_is_refused() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **batch: Tensor) -> Any:
            return self.inner(**batch)

    def build() -> Any:
        module = HuggingFaceModule("Llama")
        module.model = Around(module.model)
        return module, batches("Llama")

    (report,) = verify(build, axes=["pp2"], module="model.inner", label_alignment="huggingface", microbatch_size=2)
    assert "module='model.inner': the pipelined module must be a child of HuggingFaceModule itself" in str(report.refused)


class Low(nn.Module):
    """A low-rank part beside a linear, by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def _low_rank() -> Any:
    module = HuggingFaceModule("Llama").requires_grad_(False)
    for layer in module.model.model.layers:
        layer.self_attn.q_proj = Low(layer.self_attn.q_proj)
    return module, batches("Llama")


def test_a_refused_layout_is_printed_to_be_corrected() -> None:
    (report,) = verify(_low_rank, axes=["tp2"], label_alignment="huggingface")
    assert "the layout that was read, to be corrected" in str(report.refused) and "ModelLayout(\n    blocks='model.layers.*'" in str(
        report.refused
    )


@pytest.mark.parametrize(
    "axes", ["fsdp2", "pp2", pytest.param("tp2", marks=pytest.mark.slow), pytest.param("pp2xtp2", marks=pytest.mark.slow)]
)
def test_low_rank_adapters_on_a_frozen_base(axes: str) -> None:
    attention = "model.layers.*.self_attn"
    layout: Any = "auto"
    if "tp" in axes:
        read = find_layout(huggingface.FAMILIES["Llama"](), "auto", tensor_parallel=True)
        assert read is not None
        columns = [name for name in read.colwise if not name.endswith("q_proj")]
        layout = replace(read, colwise=[*columns, f"{attention}.q_proj.base", f"{attention}.q_proj.b"], replicated=f"{attention}.q_proj.a")
    (report,) = verify(_low_rank, axes=[axes], layout=layout, label_alignment="huggingface", microbatch_size=2)
    assert report.ok, str(report)
