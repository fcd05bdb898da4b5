"""A small tokenizer and chat templates for the data tests."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from lightning_megascale.data.quickstart import END, PAD, train_tokenizer

IMAGE = "<image>"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", IMAGE]
TEXT = "The cat sees a red square and a blue circle. What is in the picture? It is round. user assistant system " * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (  # strips content, adds a system turn of its own
    "{% if messages[0]['role'] != 'system' %}{{ '<|header|>system<|/header|>\n\nBe short.<|eot|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
INST = (  # no generation prompt, roles must alternate
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
NO_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
LAST_ONLY = (  # writes an answer in another way once it is not the last
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '(think)' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def _trained() -> str:
    return train_tokenizer([TEXT], 300).to_str()


def make_tokenizer(template: str | None = CHATML, begin: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the special tokens above; with ``begin`` it adds a begin token to a text, as Llama's does."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIAL, "<|begin|>"]])
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair=None, special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        bos_token="<|begin|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def image_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of <image>."""
    return tokenizer.convert_tokens_to_ids(IMAGE)
