"""Tokenizers made for training."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from parallax.models import gguf_tokenizer
from parallax.tokenizer import ByteTokenizer, FileTokenizer
from parallax.train import tokenize

TEXTS = ["def add(a, b):\n    return a + b\n", "for item in items:\n    total = total + item\n", "naïve 日本 😀\n"] * 3
BYTES = tokenize.build("bytes", ())
BPE = tokenize.build("bpe:270", TEXTS)
ODD = ["", " ", "\x00\x7f\x80\xad\xff", "a\r\n\tb\u2028c", "<s>a</s> < s >", "naïve €5 日本 😀", "'s 12 \ud800 x"]


@pytest.mark.parametrize("text", ODD)
def test_bytes_have_the_ids_of_the_byte_tokenizer_on_odd_text(text):
    for special in (True, False):
        assert BYTES.encode(text, special=special) == ByteTokenizer().encode(text, special=special)


@given(st.text())
def test_bytes_have_the_ids_of_the_byte_tokenizer_on_any_text(text):
    assert BYTES.encode(text) == ByteTokenizer().encode(text)


def test_bytes_say_the_same_of_themselves_as_the_byte_tokenizer():
    for name in ("vocab_size", "bos_id", "eos_ids"):
        assert getattr(BYTES, name) == getattr(ByteTokenizer(), name)
    assert all(BYTES.decode([i]) == ByteTokenizer().decode([i]) for i in range(258))


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_it_is_the_same_after_saving(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = FileTokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids == [tokenizer.bos_id, *tokenizer.encode(text, special=False)]
        assert again.decode(ids + list(tokenizer.eos_ids)) == text
    for name in ("vocab_size", "bos_id", "eos_ids"):
        assert getattr(again, name) == getattr(tokenizer, name)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_it_is_the_same_in_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert (theirs.bos_token_id, (theirs.eos_token_id,), len(theirs)) == (
        tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size)


def test_a_bpe_has_the_size_asked_for_and_merges_what_is_frequent():
    assert BPE.vocab_size == 270
    assert len(BPE.encode(TEXTS[0])) < len(BYTES.encode(TEXTS[0]))


def test_training_twice_gives_the_same_bpe():
    assert tokenize.build("bpe:270", TEXTS).backend.to_str() == BPE.backend.to_str()


def test_a_bpe_is_trained_on_the_head_of_the_texts_only(monkeypatch):
    monkeypatch.setattr(tokenize, "TRAINING_BYTES", sum(len(text.encode()) for text in TEXTS) + 1)

    def texts():
        yield from TEXTS
        yield "é"               # only its first byte fits
        raise AssertionError("read on")

    assert tokenize.build("bpe:270", texts()).backend.to_str() == BPE.backend.to_str()


def test_a_folder_lends_its_tokenizer(tiny_folder):
    assert tokenize.build(str(tiny_folder), ()).backend.to_str() == FileTokenizer.from_folder(
        tiny_folder).backend.to_str()


@pytest.mark.parametrize("spec, message", [
    ("bpe:257", "bpe:257 has no room for the 256 bytes, <s> and </s>: expected bpe:258 or more"),
    ("bpe:1k", "expected bpe:N with a number of tokens, such as bpe:1024, got 'bpe:1k'"),
    ("bpe:9999", "the text gives only [0-9]+ of the 9999 tokens of bpe:9999: ask for bpe:[0-9]+, or train on more"),
    ("byte", "unknown tokenizer 'byte': expected bytes, bpe:N, .*smollm2-135m.*did you mean 'bytes'"),
])
def test_an_impossible_tokenizer_is_refused_in_one_line(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenize.build(spec, TEXTS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [".", "none/here"])
def test_a_folder_without_a_tokenizer_is_refused(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="not found: expected"):
        tokenize.build(str(tmp_path / name), ())


def encoded(documents, tokenizer=BYTES, literal=True):
    return [(ids.tolist(), prompt) for ids, prompt in tokenize.encode(documents, tokenizer, literal=literal)]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BYTES, BPE], ids=["plain", "bytes", "bpe"])
def test_documents_end_with_the_end_token_and_know_their_prompt(tokenizer):
    def ids(text, special):
        return tokenizer.encode(text, special=special)

    end = list(tokenizer.eos_ids)
    assert encoded([(None, "add"), ("def ", "add"), ("", "é")], tokenizer) == [
        (ids("add", True) + end, 0), (ids("def ", True) + ids("add", False) + end, len(ids("def ", True))),
        (ids("", True) + ids("é", False) + end, 1)]


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("part", [1, 7, 40])
def test_a_long_text_that_is_cut_has_the_same_ids(tokenizer, part, monkeypatch):
    text = "".join(TEXTS) + "\n\n  x;\ny \n\tz\r\n\nend"
    documents = [(None, text), ("prompt", text), (None, text[::-1])]
    whole = encoded(documents, tokenizer)
    pieces = []
    monkeypatch.setattr(tokenize, "PART", part)
    monkeypatch.setattr(tokenize, "_encode", lambda texts, *args, encode=tokenize._encode: (
        pieces.extend(texts), encode(texts, *args))[1])
    assert encoded(documents, tokenizer) == whole
    assert max(map(len, pieces)) < len(text) and len(pieces) > 2 * len(documents)


@pytest.mark.parametrize("splits", sorted(set(gguf_tokenizer._SPLITS.values())))
@given(text=st.text("a1_;' \n\r\té\u0301", min_size=5, max_size=40))
def test_no_pre_tokenizer_joins_anything_where_a_text_is_cut(splits, text):
    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in splits]
                                  ).pre_tokenize_str
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "PART", 1)
        parts = [part.text for part in tokenize._parts(None, text)]
    assert "".join(parts) == text
    assert [word for part in parts for word, _ in cut(part)] == [word for word, _ in cut(text)]


def test_special_tokens_in_the_text_are_text_if_literal(tmp_path):
    BYTES.save(tmp_path)
    tokenizer = FileTokenizer.from_folder(tmp_path)
    (literal, _), (special, _) = (encoded([(None, "a</s>")], tokenizer, literal=x)[0] for x in (True, False))
    assert literal == [256, *b"a</s>", 257]
    assert special == [256, ord("a"), 257]                  # and no second end token
    assert tokenizer.encode("</s>", special=False) == [257]     # the tokenizer itself is as before


def test_lone_surrogates_do_not_stop_it():
    assert encoded([(None, "a\ud800")]) == [([256, *b"a?", 257], 0)]


def test_a_tokenizer_without_an_end_token_ends_nothing(tiny_folder):
    backend = FileTokenizer.from_folder(tiny_folder).backend
    (ids, _), = tokenize.encode([(None, "the cat")], FileTokenizer(backend), literal=True)
    assert np.array_equal(ids, backend.encode("the cat").ids)
