"""The default encoder: what the fields say, tokens counted without decoding, stored samples believed only as far as their bytes go."""

from __future__ import annotations

import contextlib
import io
import json
import pickle

import numpy as np
import pytest
import torch

from lightning_megascale.data import encode as module
from lightning_megascale.data import images
from lightning_megascale.data.conversation import IGNORED, encode_caption, encode_conversation
from lightning_megascale.data.encode import EncodeContext, check_encoded, count_tokens, encode_sample, resolve_encode
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.stored import read_npy
from tests.data import chat
from tests.data.test_images import file, picture

TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


def context(**changes) -> EncodeContext:
    tokenizer = chat.make_tokenizer()
    arguments = dict(tokenizer=tokenizer, sequence_length=64, image_size=28, image_tokens=4, image_token_id=chat.image_id(tokenizer))
    return EncodeContext(**{**arguments, **changes})


def text_context(**changes) -> EncodeContext:
    return context(**{"image_size": None, "image_tokens": 0, "image_token_id": None, **changes})


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def turns(images_in_text: int) -> bytes:
    return json.dumps([{"from": "human", "value": "<image>" * images_in_text + "What?"}, TURNS[1]]).encode()


def test_text_alone() -> None:
    setting = text_context()
    sample = encode_sample({"text": "A cat é.".encode(), "__key__": "k"}, setting)
    expected = encode_caption("A cat é.", setting.tokenizer)
    assert set(sample) == {"input_ids", "labels", "__key__"} and sample["__key__"] == "k"
    assert sample["input_ids"].tolist() == expected.input_ids.tolist() == sample["labels"].tolist()
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    with pytest.raises(BadSample, match="not UTF-8: byte 2 is 0xe9"):
        encode_sample({"text": "A é".encode("latin1")}, setting)


def test_a_picture_with_its_caption_and_a_conversation_with_pictures() -> None:
    for mode in ("clip", "siglip"):
        setting = context(image_mode=mode)
        files = [file(picture(30, 50, seed=1), "PNG"), file(picture(70, 40, seed=2), "JPEG")]
        pixels = [images.resize(images.decode(data), 28, mode).transpose(2, 0, 1) for data in files]
        one = encode_sample({"text": b"A cat.", "image": files[0]}, setting)
        assert one["pixel_values"].shape == (1, 3, 28, 28) and one["pixel_values"].dtype == torch.uint8
        np.testing.assert_array_equal(one["pixel_values"][0].numpy(), pixels[0])
        assert one["image_sizes"].tolist() == [[30, 50]] and one["image_sizes"].dtype == torch.int64
        assert (one["input_ids"] == setting.image_token_id).sum() == 4
        several = encode_sample({"conversation": turns(2), "images": files}, setting)
        np.testing.assert_array_equal(several["pixel_values"].numpy(), np.stack(pixels))
        assert several["image_sizes"].tolist() == [[30, 50], [70, 40]]
        expected = encode_conversation(json.loads(turns(2)), setting.tokenizer, [4, 4], setting.image_token_id)
        assert several["labels"].tolist() == expected.labels.tolist()
        none = encode_sample({"conversation": turns(0), "images": []}, setting)
        assert set(none) == {"input_ids", "labels", "__key__"}


def test_a_picture_that_is_cut_off_takes_its_pixels_along_but_must_be_good() -> None:
    content = [*json.loads(turns(1)), {"from": "human", "value": "<image><image>"}, TURNS[1]]
    sample = {"conversation": json.dumps(content).encode(), "images": [file(picture(9 + n, 9, seed=n), "PNG") for n in range(3)]}
    setting = context(sequence_length=1000)
    places = torch.where(encode_sample(sample, setting)["input_ids"] == setting.image_token_id)[0]
    for length, kept in [(int(places[4]) + 3, 1), (int(places[8]) + 3, 2), (int(places[11]) + 1, 3)]:
        cut = encode_sample(sample, context(sequence_length=length))
        assert cut["image_sizes"].tolist() == [[9, 9], [10, 9], [11, 9]][:kept]
        assert (cut["input_ids"] == setting.image_token_id).sum() == 4 * kept and len(cut["pixel_values"]) == kept
    broken = {**sample, "images": [*sample["images"][:2], b"no picture"]}
    with pytest.raises(BadSample, match="no JPEG, PNG"):
        encode_sample(broken, context(sequence_length=int(places[4]) + 3))


def test_counting_is_the_length_and_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = context()
    data = file(picture(30, 50), "PNG")
    samples = [
        {"text": b"A cat.", "image": data},
        {"conversation": turns(2), "images": [data, data]},
        {"tokens": npy(np.arange(5, 15, dtype=np.uint16))},
        {"text": b"A red circle. " * 100},
    ]
    lengths = [len(encode_sample(sample, setting)["input_ids"]) for sample in samples]
    assert lengths[3] == 64
    monkeypatch.setattr(images, "decode", None)
    assert [count_tokens(sample, setting) for sample in samples] == lengths
    assert count_tokens({"text": b" "}, setting) == 0 and count_tokens({"conversation": turns(2), "images": [data]}, setting) == 0

    def own(sample, context):
        return {"input_ids": torch.zeros(7)}

    assert count_tokens({}, setting, own) == 7
    own.count = lambda sample, context: context.sequence_length + 1
    assert count_tokens({}, setting, own) == 65


def test_stored_samples() -> None:
    setting = context(sequence_length=12)
    image = setting.image_token_id
    ids = np.array([9, image, image, image, image, image, image, image, image, 5, 6, 7], dtype=np.uint16)
    pixels = np.stack([picture(28, 28, seed=n).transpose(2, 0, 1) for n in range(2)])
    sample = {"tokens": npy(ids), "spans": npy(np.array([[10, 12]], dtype=np.int32)), "pixels": npy(pixels)}
    result = encode_sample({**sample, "sizes": npy(np.array([[3, 4], [5, 6]], dtype=np.int32))}, setting)
    assert result["input_ids"].tolist() == ids.tolist() and result["labels"].tolist() == [IGNORED] * 10 + [6, 7]
    np.testing.assert_array_equal(result["pixel_values"].numpy(), pixels)
    assert result["image_sizes"].tolist() == [[3, 4], [5, 6]]
    assert encode_sample(sample, setting)["image_sizes"].tolist() == [[28, 28]] * 2
    whole = encode_sample({key: sample[key] for key in ("tokens", "pixels")}, setting)
    assert whole["labels"].tolist() == [9] + [IGNORED] * 8 + [5, 6, 7]
    order = np.concatenate([ids[:5], ids[9:], ids[5:9]])
    cut = encode_sample({**sample, "tokens": npy(order), "spans": npy(np.array([[5, 8]]))}, context(sequence_length=10))
    assert cut["input_ids"].tolist() == order[:8].tolist() and len(cut["pixel_values"]) == 1  # the second picture began at token 8
    cut["pixel_values"].add_(1)  # no view of the shard's bytes
    np.testing.assert_array_equal(encode_sample(sample, setting)["pixel_values"].numpy(), pixels)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": npy(np.array([], dtype=np.uint16))}, "0 stored tokens"),
        ({"tokens": npy(np.array([1, 60_000], dtype=np.uint16))}, r"not all of them in 0 .. 306, as this tokenizer's are"),
        ({"tokens": npy(np.array([1, 2**64 - 1], dtype=np.uint64))}, "not all of them in 0"),
        ({"tokens": npy(np.zeros((2, 2), np.uint16))}, r"tokens has shape \(2, 2\) and dtype uint16; \(T,\) integers are due"),
        ({"tokens": npy(np.zeros(3))}, r"dtype float64; \(T,\) integers are due"),
        ({"spans": npy(np.array([[2, 2]]))}, "a label span 2 .. 2 in 4 tokens"),
        ({"spans": npy(np.array([[0, 5]]))}, "a label span 0 .. 5 in 4 tokens"),
        ({"spans": npy(np.array([0, 5]))}, r"spans has shape \(2,\)"),
        ({"spans": npy(np.zeros((0, 2), np.int32))}, "no label left"),
        ({"pixels": npy(np.zeros((1, 3, 28, 28), np.uint8))}, "0 stored image tokens for 1 pictures of 4"),
        ({"images": [b""]}, "0 stored image tokens for 1 pictures of 4"),
    ],
)
def test_stored_samples_of_other_rules_are_bad(changes: dict, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        encode_sample({"tokens": npy(np.array([1, 2, 3, 4], dtype=np.uint16)), **changes}, context())


def test_stored_pictures_of_other_rules_are_bad() -> None:
    setting = context()
    tokens = npy(np.array([5, *[setting.image_token_id] * 4, 6], dtype=np.uint16))
    pixels = np.zeros((1, 3, 28, 28), np.uint8)
    for changes, message in [
        ({"pixels": npy(pixels[..., :27])}, r"stored pixels have shape \(1, 3, 28, 27\) and dtype uint8; \(N, 3, 28, 28\) uint8 are due"),
        ({"pixels": npy(pixels.astype(np.float32))}, "dtype float32"),
        ({"pixels": npy(pixels), "sizes": npy(np.zeros((2, 2), int))}, "2 stored sizes for 1 pictures"),
        (
            {"pixels": npy(pixels), "tokens": npy(np.array([5, *[setting.image_token_id] * 2, 6, *[setting.image_token_id] * 2]))},
            "another rule",
        ),
    ]:
        with pytest.raises(BadSample, match=message):
            encode_sample({"tokens": tokens, **changes}, setting)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_numpy_files_are_read_as_plain_numbers_only() -> None:
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3, np.uint8),
        np.zeros((0, 2), ">i4"),
    ):
        np.testing.assert_array_equal(read_npy(npy(array)), array)
    version3 = io.BytesIO()
    np.lib.format.write_array(version3, np.arange(3), version=(3, 0))
    np.testing.assert_array_equal(read_npy(version3.getvalue()), np.arange(3))
    good = npy(np.arange(6))
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    words, dates = npy(np.array(["ab", "c"])), npy(np.array([3, 4], dtype="datetime64[s]"))
    bomb = good[: good.index(b"(6,)")] + b"(1<<60,)"
    for data in (
        b"",
        good[:5],
        good[:30],
        good[:-1],
        good + b"x",
        pickled.getvalue(),
        words,
        dates,
        pickle.dumps([1]),
        bomb,
        good.replace(b"(6,)", b"(9,)"),
    ):
        with pytest.raises(BadSample, match="NumPy file"):
            read_npy(data)
    generator = np.random.default_rng(0)
    raw = np.frombuffer(good, dtype=np.uint8)
    for _ in range(500):
        damaged = raw.copy()
        damaged[generator.integers(0, 128, 3)] = generator.integers(0, 256, 3)
        with contextlib.suppress(BadSample):
            assert read_npy(damaged.tobytes()).nbytes == 48


def test_fields_that_do_not_go_together_are_refused() -> None:
    for sample in ({"text": b"a", "conversation": b"[]"}, {"image": b""}, {"text": b"a", "image": b"", "pixels": b""}, {"label": b"3"}):
        with pytest.raises(
            ValueError, match="exactly one of tokens, text, conversation and at most one of image, images, pixels"
        ) as caught:
            encode_sample(sample, context())
        assert not isinstance(caught.value, BadSample)
    with pytest.raises(ValueError, match="'k' has pictures and image_size is None") as caught:
        encode_sample({"text": b"a", "image": b"", "__key__": "k"}, text_context())
    assert not isinstance(caught.value, BadSample)


def test_arguments_out_of_range_are_listed() -> None:
    with pytest.raises(ValueError, match="(?s)sequence_length=1: .*image_tokens=0: with image_size=28 it must come.*image_mode='pad'"):
        context(sequence_length=1, image_tokens=0, image_mode="pad")
    with pytest.raises(ValueError, match="image_tokens=4: with image_size=None it must be left out"):
        context(image_size=None, image_token_id=None)


def test_identities_change_with_what_they_cover_and_only_with_it() -> None:
    base = context()
    used = context()
    used.tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=3)  # leaves padding and truncation set in the backend
    assert used.token_identity() == base.token_identity() == pickle.loads(pickle.dumps(base)).token_identity()
    other_template = context()
    other_template.tokenizer.chat_template = chat.LLAMA
    more_tokens = context()
    more_tokens.tokenizer.add_tokens(["new"])
    for changed in (context(sequence_length=63), context(image_tokens=5), other_template, more_tokens):
        assert changed.token_identity() != base.token_identity() and changed.identity() != base.identity()
    for changed in (context(image_size=14), context(image_mode="siglip"), context(limit_pixels=9), context(seed=1)):
        assert changed.token_identity() == base.token_identity() and changed.identity() != base.identity()


def test_encode_functions_by_name() -> None:
    assert resolve_encode(None) is encode_sample and resolve_encode(len) is len
    assert resolve_encode("lightning_megascale.data.encode.encode_sample") is encode_sample
    for path, message in [
        ("encode", "a dotted path as package.module.function"),
        ("no_such_package.encode", "no_such_package cannot be imported .*PYTHONPATH"),
        ("lightning_megascale.data.encode.missing", "lightning_megascale.data.encode has no 'missing'"),
        ("lightning_megascale.data.encode.TEXTS", "is a tuple: give fn"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve_encode(path)


def test_results_of_own_functions_are_checked() -> None:
    good = {"input_ids": torch.arange(3), "labels": torch.arange(3), "more": 1}
    assert check_encoded(good, "f", 400) is good
    for result, message in [
        (None, "f must return a dict, not NoneType"),
        ({**good, "labels": [1, 2, 3]}, r"'labels': a tensor \(T,\) of int64, not list"),
        ({**good, "input_ids": torch.zeros(1, 3)}, r"'input_ids': a tensor \(T,\) of int64, not \(1, 3\) torch.float32"),
        ({**good, "labels": torch.arange(2)}, "not 2 for 3"),
        ({"input_ids": torch.arange(0), "labels": torch.arange(0)}, "not empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_encoded(result, "f", 400)


def test_a_context_travels_to_workers() -> None:
    again = pickle.loads(pickle.dumps(context()))
    assert encode_sample({"text": b"A cat."}, again)["labels"].tolist() == encode_sample({"text": b"A cat."}, context())["labels"].tolist()
    assert module._TOKEN_VERSION == 1
