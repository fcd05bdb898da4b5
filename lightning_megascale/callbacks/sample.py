"""TextSample: lets a language model continue a prompt when training ends."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class TextSample(Callback):
    """Keeps in ``text`` what the trained model makes of a prompt. All ranks take part, since each holds a part of the parameters.

    Under a pipeline and under context parallelism ``text`` stays None: they run training and evaluation steps only.

    Args:
        prompt: the beginning of the text.
        tokens: how many tokens to add.
        temperature: 0 takes the likeliest token; higher is more varied.
    """

    def __init__(self, prompt: str, tokens: int = 48, temperature: float = 0.7) -> None:
        if not prompt or tokens < 1 or not temperature >= 0:
            raise ValueError(f"prompt={prompt!r}, tokens={tokens}, temperature={temperature}: must be a text, at least 1, and at least 0")
        self.prompt, self.tokens, self.temperature = prompt, tokens, temperature
        self.text: str | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None or not hasattr(pl_module, "generate"):
            raise ValueError("TextSample needs a data module with a tokenizer and a module with generate(); ~callbacks.sample removes it")
        plan = getattr(trainer.strategy, "plan", None)
        if max(getattr(plan, "pipeline_parallel_size", 1), getattr(plan, "context_parallel_size", 1)) > 1:
            return  # no rank holds the whole model or the whole text, and only steps run over several
        device = trainer.strategy.root_device
        prompt = torch.tensor([tokenizer(self.prompt)["input_ids"]], device=device)
        generator = torch.Generator(device).manual_seed(0)  # equal draws on all ranks
        text = pl_module.generate(prompt, self.tokens, self.temperature, generator)
        self.text = tokenizer.decode(text[0].tolist())
