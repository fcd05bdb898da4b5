"""Conversations and captions: labels exactly on what the assistant says, placeholders expanded, cuts never inside a picture."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lightning_megascale.data.conversation import IGNORED, adds_begin_token, encode_caption, encode_conversation, label_mode, truncate
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.turns import read_turns
from tests.data import chat

TURNS = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "What is in the picture?"},
    {"from": "gpt", "value": "A red square."},
    {"from": "human", "value": "And what else? é 図"},
    {"from": "gpt", "value": "It is 🙂 round. "},
]


def labelled(encoded, tokenizer) -> list[str]:
    """The text of every run of labels."""
    inside = np.concatenate(([False], encoded.labels != IGNORED, [False]))
    edges = np.flatnonzero(np.diff(inside.astype(int)))
    return [tokenizer.decode(encoded.labels[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2])]


def test_labels_are_the_answers_and_their_end_tokens() -> None:
    for template, mode, end, strips in [
        (chat.CHATML, "prefix", "<|im_end|>", False),
        (chat.CHATML_GENERATION, "generation", "<|im_end|>", False),
        (chat.LLAMA, "prefix", "<|eot|>", True),
    ]:
        tokenizer = chat.make_tokenizer(template)
        assert label_mode(tokenizer) == mode
        encoded = encode_conversation(TURNS, tokenizer)
        last = "It is 🙂 round." if strips else "It is 🙂 round. "
        assert labelled(encoded, tokenizer) == [f"A red square.{end}", f"{last}{end}"], template
        kept = encoded.labels != IGNORED
        np.testing.assert_array_equal(encoded.labels[kept], encoded.input_ids[kept])
        messages = [{"role": {"gpt": "assistant", "human": "user"}.get(t["from"], t["from"]), "content": t["value"]} for t in TURNS]
        assert encoded.input_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
        assert encode_conversation(messages, tokenizer).labels.tolist() == encoded.labels.tolist()


def test_both_ways_of_finding_labels_agree() -> None:
    pair = [encode_conversation(TURNS, chat.make_tokenizer(template)) for template in (chat.CHATML, chat.CHATML_GENERATION)]
    np.testing.assert_array_equal(pair[0].input_ids, pair[1].input_ids)
    np.testing.assert_array_equal(pair[0].labels, pair[1].labels)


def test_a_template_without_a_generation_prompt_marks_what_follows_the_question() -> None:
    tokenizer = chat.make_tokenizer(chat.INST)
    encoded = encode_conversation(TURNS[1:], tokenizer)
    assert labelled(encoded, tokenizer) == [" A red square.<|end|>", " It is 🙂 round. <|end|>"]
    with pytest.raises(BadSample, match="the chat template refuses the conversation: roles must alternate"):
        encode_conversation(TURNS, tokenizer)


def test_templates_and_tokenizers_that_give_no_labels_are_refused() -> None:
    half = chat.CHATML_GENERATION.replace("{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'assistant' and loop.last %}")
    for template, message in [
        (chat.NO_PROMPT, r"by comparing prefixes: of the answers .* it labels .*assistant"),
        (chat.LAST_ONLY, "turn 1 in another way when turns follow"),
        (half, r"by \{% generation %\}: of the answers .* it labels \['No, red.<\|im_end\|>'\]"),
        (None, "has no chat_template"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            encode_conversation(TURNS, chat.make_tokenizer(template))
        assert not isinstance(caught.value, BadSample)
    with pytest.raises(ValueError, match="is no fast tokenizer"):
        encode_conversation(TURNS, object())


def test_a_changed_template_is_tried_again() -> None:
    tokenizer = chat.make_tokenizer(chat.CHATML)
    assert label_mode(tokenizer) == "prefix"
    tokenizer.chat_template = chat.CHATML_GENERATION
    assert label_mode(tokenizer) == "generation"


def test_images_expand_where_their_placeholders_stand() -> None:
    tokenizer = chat.make_tokenizer(chat.LLAMA)
    image = chat.image_id(tokenizer)
    turns = [{"from": "human", "value": "<image>\n<image>What is it? "}, {"from": "gpt", "value": "A cat <image> in red."}]
    encoded = encode_conversation(turns, tokenizer, [3, 1, 2], image)
    plain = encode_conversation(turns, tokenizer, [1, 1, 1], image)
    assert encoded.images == 3 and encoded.audios == 0
    places = np.flatnonzero(plain.input_ids == image)
    expected = np.repeat(
        plain.input_ids, np.where(plain.input_ids == image, 0, 1) + np.bincount(places, [3, 1, 2], len(plain.input_ids)).astype(int)
    )
    np.testing.assert_array_equal(encoded.input_ids, expected)
    assert (encoded.labels[encoded.input_ids == image] == IGNORED).all()
    assert labelled(encoded, tokenizer) == ["A cat ", " in red.<|eot|>"]


def test_parts_become_placeholders() -> None:
    tokenizer = chat.make_tokenizer()
    image = chat.image_id(tokenizer)
    parts = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat?"}]},
        {"role": "assistant", "content": "A cat."},
    ]
    plain = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    assert (
        encode_conversation(parts, tokenizer, [4], image).input_ids.tolist()
        == encode_conversation(plain, tokenizer, [4], image).input_ids.tolist()
    )


def test_another_token_may_stand_for_an_image_and_for_a_sound() -> None:
    tokenizer = chat.make_tokenizer()
    image, sound = (tokenizer.convert_tokens_to_ids(token) for token in ("<|header|>", "<|/header|>"))
    turns = [{"from": "human", "value": "<audio>What <image>?"}, {"from": "gpt", "value": "A cat."}]
    encoded = encode_conversation(turns, tokenizer, [2], image, audio_tokens=[3], audio_token_id=sound)
    assert (encoded.input_ids == image).sum() == 2 and (encoded.input_ids == sound).sum() == 3
    assert (encoded.images, encoded.audios) == (1, 1)
    with pytest.raises(BadSample, match="tokens hold 2 of <image> for 1"):  # the text names the token itself
        encode_conversation([{"from": "human", "value": "<image> <|header|>"}, turns[1]], tokenizer, [2], image)
    with pytest.raises(BadSample, match="tokens hold 1 of <image> for 0"):
        encode_conversation([{"from": "human", "value": "<|header|>"}, turns[1]], tokenizer, [], image)


def test_a_wrong_number_of_placeholders_is_a_bad_sample() -> None:
    tokenizer = chat.make_tokenizer()
    image = chat.image_id(tokenizer)
    for text, counts, message in [
        ("What?", [2], "0 <image> for 1"),
        ("<image> <image>", [2], "2 <image> for 1"),
        ("<image>", [], "1 <image> for 0"),
    ]:
        turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "A cat."}]
        with pytest.raises(BadSample, match=message):
            encode_conversation(turns, tokenizer, counts, image)


def test_an_image_token_must_be_the_tokenizers_own() -> None:
    tokenizer = chat.make_tokenizer()
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}]
    for token_id in (None, 5, 100_000):
        with pytest.raises(ValueError, match=r"is no special token of the tokenizer: call tokenizer.add_tokens\(") as caught:
            encode_conversation(turns, tokenizer, [2], token_id)
        assert not isinstance(caught.value, BadSample)


def test_truncation_never_cuts_an_image_and_never_loses_all_labels() -> None:
    tokenizer = chat.make_tokenizer(chat.CHATML)
    image = chat.image_id(tokenizer)
    turns = [
        {"from": "human", "value": "<image> What?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "<image><image>And?"},
        {"from": "gpt", "value": "A red circle."},
    ]
    whole = encode_conversation(turns, tokenizer, [5, 7, 6], image)
    runs = np.flatnonzero(whole.input_ids == image)
    starts, ends = runs[[0, 5, 12]], runs[[4, 11, 17]] + 1
    assert (ends[1] == starts[2]) and len(runs) == 18  # two pictures side by side
    first_label = int(np.flatnonzero(whole.labels != IGNORED)[0])
    lengths = set()
    for length in range(1, len(whole.input_ids) + 3):
        if length <= first_label:
            with pytest.raises(BadSample, match=f"no label left in the .* of {len(whole.input_ids)} tokens that fit max_length={length}"):
                encode_conversation(turns, tokenizer, [5, 7, 6], image, max_length=length)
            continue
        cut = encode_conversation(turns, tokenizer, [5, 7, 6], image, max_length=length)
        size = len(cut.input_ids)
        assert size <= length
        np.testing.assert_array_equal(cut.input_ids, whole.input_ids[:size])
        np.testing.assert_array_equal(cut.labels, whole.labels[:size])
        assert cut.images == (ends <= size).sum()
        assert (cut.input_ids == image).sum() == sum([5, 7, 6][: cut.images])
        inside = [start for start, end in zip(starts, ends) if start < length < end]
        assert size == (inside[0] if inside else min(length, len(whole.input_ids)))  # cut earlier only where a picture would be cut
        lengths.add(size)
    assert int(starts[1]) in lengths and int(starts[2]) in lengths and len(whole.input_ids) in lengths


def test_a_label_on_the_first_token_alone_is_none() -> None:
    ids = np.arange(4)
    with pytest.raises(BadSample, match="no label left in the sample"):
        truncate(ids, np.array([0, IGNORED, IGNORED, IGNORED]), [[], []], None)
    assert len(truncate(ids, np.array([IGNORED, 1, IGNORED, IGNORED]), [[], []], None).input_ids) == 4


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "no JSON"),
        (b"\xff[]", "not UTF-8: byte 0 is 0xff"),
        (b"[" * 100_000, "no JSON"),
        (b"[" + b"1" * 10_000 + b"]", "no JSON"),
        (b"3", "no list of turns"),
        (b'{"text": []}', "no list of turns"),
        (b"[]", "has no turns"),
        (b"[3]", "turn 0 is no mapping but int"),
        (b'[{"from": "cat", "value": "x"}]', "turn 0 has the role 'cat'"),
        (b'[{"from": ["gpt"], "value": "x"}]', r"turn 0 has the role \['gpt'\]"),
        (b'[{"value": "x"}]', "turn 0 has the role None"),
        (b'[{"from": "human"}]', "turn 0 has no text but NoneType"),
        (b'[{"from": "human", "value": [{"type": "video"}]}]', "turn 0 has no text but list"),
        (b'[{"from": "human", "value": "x"}, {"from": "gpt", "value": "a\\ud800"}]', "turn 1 holds half a surrogate pair"),
        (b'[{"from": "human", "value": "x"}]', "no label left in the sample"),
    ],
)
def test_what_is_no_conversation_is_a_bad_sample(content: bytes, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        encode_conversation(read_turns(content), chat.make_tokenizer())


def test_turns_may_stand_in_a_mapping() -> None:
    for key in ("conversations", "messages"):
        assert read_turns(json.dumps({"id": 3, key: TURNS}).encode()) == TURNS
    assert read_turns(b"\xef\xbb\xbf" + json.dumps(TURNS).encode()) == TURNS  # a byte order mark


def test_captions_are_labelled_whole() -> None:
    for begin in (False, True):
        tokenizer = chat.make_tokenizer(None, begin)
        image = chat.image_id(tokenizer)
        assert adds_begin_token(tokenizer) is begin
        words = tokenizer("A red circle.", add_special_tokens=False)["input_ids"]
        start = [tokenizer.bos_token_id] if begin else []
        encoded = encode_caption("A red circle.", tokenizer, [2, 3], image)
        assert encoded.input_ids.tolist() == start + [image] * 5 + words + [tokenizer.eos_token_id]
        assert encoded.labels.tolist() == start + [IGNORED] * 5 + words + [tokenizer.eos_token_id]
        inner = encode_caption("A <image>red circle.", tokenizer, [2], image)
        assert (inner.input_ids == image).sum() == 2 and inner.input_ids[len(start)] != image
        assert encode_caption("A red circle.", tokenizer).input_ids.tolist() == start + words + [tokenizer.eos_token_id]
        cut = encode_caption("A red circle.", tokenizer, [2, 3], image, max_length=len(start) + 6)
        assert cut.input_ids.tolist() == start + [image] * 5 + words[:1] and cut.images == 2


def test_bad_captions() -> None:
    tokenizer = chat.make_tokenizer(None)
    image = chat.image_id(tokenizer)
    with pytest.raises(BadSample, match="the text is empty"):
        encode_caption(" \n", tokenizer, [2], image)
    with pytest.raises(BadSample, match="2 <image> for 1"):
        encode_caption("<image> <image>", tokenizer, [2], image)
    with pytest.raises(BadSample, match="no label left"):
        encode_caption("A cat.", tokenizer, [8], image, max_length=8)
    with pytest.raises(ValueError, match="each takes at least one"):
        encode_caption("A cat.", tokenizer, [0], image)
