"""Sources of training data, and the corpus they become."""

import gzip
import json
import os
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallax.tokenizer import ByteTokenizer, FileTokenizer
from parallax.train import corpus, tokenize
from parallax.train.corpus import Corpus

BYTES = ByteTokenizer()


@pytest.fixture
def write(tmp_path):
    """Writes files by relative name into one folder and gives that folder, or the path of the only one."""
    def write(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path) if len(files) == 1 else str(tmp_path)
    return write


def read(source, tokenizer=BYTES, vocab_size=258, **options) -> Corpus:
    return corpus.read(source, tokenizer, vocab_size=vocab_size, **options)


def rows(c: Corpus) -> list[list[int]]:
    return [c.tokens[a:b].tolist() for a, b in zip(c.starts, c.starts[1:])]


def said(c: Corpus) -> list[str]:
    return [BYTES.decode(row) for row in rows(c)]


def lines(*values) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def same(a: Corpus, b: Corpus) -> bool:
    return rows(a) == rows(b) and a.prompts.tolist() == b.prompts.tolist() and a.digest == b.digest


def test_a_text_file_is_one_document_between_bos_and_eos(write):
    c = read(write(a_txt="é\r\n"))
    assert rows(c) == [[256, *"é\r\n".encode(), 257]] and c.prompts.tolist() == [0]
    assert c.tokens.dtype == np.uint16 and c.starts.dtype == np.int64 and c.prompts.dtype == np.int32


def test_a_folder_is_its_text_files_in_the_order_of_their_names(write):
    folder = write(b_md="b", a__z_py="az", a_rst="a", a__b__c_txt="abc", data_bin=b"\xff", _git__x_py="no",
                   empty_py="", blank_py=" \n")
    assert said(read(folder)) == ["a", "abc", "az", "b"]
    assert said(read(folder, glob="*.py")) == ["az"]
    assert said(read(folder, glob="b/*.txt")) == ["abc"]
    assert said(read(folder, limit=2)) == ["a", "abc"]
    assert said(read([f"{folder}/b.md", f"{folder}/a"])) == ["b", "abc", "az"]


def test_a_glob_makes_any_file_text(write):
    assert said(read(write(a_c="int x;", b_h="y"), glob="*.[ch]")) == ["int x;", "y"]


def test_a_byte_order_mark_is_not_text(write):
    assert said(read(write(a_txt=b"\xef\xbb\xbfhi"))) == ["hi"]
    assert said(read(write(a_jsonl=b'\xef\xbb\xbf{"text": "hi"}'))) == ["hi"]


def test_jsonl_has_texts_and_completions_whose_prompt_is_given(write):
    path = write(a_jsonl="\n" + lines({"text": "one"}, {"prompt": "two", "completion": "three", "text": "no"},
                                      {"prompt": "", "completion": "four"}))
    c = read(path)
    assert rows(c) == [[256, *b"one", 257], [256, *b"twothree", 257], [256, *b"four", 257]]
    assert c.prompts.tolist() == [0, 4, 1]
    assert rows(read(path, limit=2)) == rows(c)[:2]


def test_compressed_files_are_read_too(write):
    assert said(read(write(a_jsonl_gz=gzip.compress(lines({"text": "x\u2028y"}).encode())))) == ["x\u2028y"]
    assert said(read(write(b_txt_gz=gzip.compress(b"plain")))) == ["plain"]


def test_special_tokens_are_text_in_text_and_tokens_in_jsonl(write, tmp_path):
    tokenize.build("bytes", ()).save(tmp_path)
    tokenizer = FileTokenizer.from_folder(tmp_path)
    assert rows(read(write(a_txt="</s>"), tokenizer)) == [[256, *b"</s>", 257]]
    assert rows(read(write(a_jsonl=lines({"text": "a</s>b"})), tokenizer)) == [[256, 97, 257, 98, 257]]


def test_the_standard_library_is_there_without_its_tests():
    names = [path.as_posix() for path in corpus.documents.files("stdlib", None)]
    root = sysconfig.get_path("stdlib")
    inside = [os.path.relpath(name, root) for name in names]
    assert {"json/decoder.py", "argparse.py"} <= set(inside) and inside == sorted(inside)
    for name in inside:
        assert name.endswith(".py") and not {"test", "tests", "site-packages"} & set(name.split("/"))
    assert said(read("stdlib", glob="this.py"))[0].startswith("s = ")
    assert len(read("stdlib", limit=3).prompts) == 3


@pytest.mark.parametrize("kind", [np.uint16, np.int64, np.uint8])
def test_arrays_of_ids_are_one_document_or_one_a_row(kind, tmp_path):
    ids = np.arange(6, dtype=kind)
    np.save(tmp_path / "one.npy", ids)
    np.save(tmp_path / "two.npy", ids.reshape(2, 3))
    c = read([str(tmp_path / "one.npy"), str(tmp_path / "two.npy")], tokenizer=None, vocab_size=6)
    assert rows(c) == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5]] and c.tokens.dtype == np.uint16
    assert rows(read(str(tmp_path / "two.npy"), None, 6, limit=1)) == [[0, 1, 2]]


def test_large_vocabularies_have_32_bits(tmp_path):
    np.save(tmp_path / "a.npy", np.asarray([3, 70_000]))
    c = read(str(tmp_path / "a.npy"), None, 70_001)
    assert rows(c) == [[3, 70_000]] and c.tokens.dtype == np.int32


def test_saved_tokens_come_back_memory_mapped(tmp_path):
    c = corpus.from_documents([([5, 6, 7], 2), ([300], 0), ([], 0)])
    corpus.save(tmp_path / "a" / "part.npz", c)
    assert same(corpus.load(tmp_path / "a" / "part.npz"), c)
    assert isinstance(corpus.load(tmp_path / "a" / "part.npz").tokens, np.memmap)
    assert isinstance(read(str(tmp_path / "a"), None, 301).tokens, np.memmap)
    assert os.listdir(tmp_path / "a") == ["part.npz"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_token_files_of_others_need_tokens_and_starts_only(save, tmp_path):
    save(tmp_path / "x.npz", tokens=np.asarray([1, 2, 3]), starts=np.asarray([0, 1, 3]))
    c = corpus.load(tmp_path / "x.npz")
    assert same(c, corpus.from_documents([([1], 0), ([2, 3], 0)]))


def test_a_folder_of_token_files_is_all_of_them_in_order(tmp_path):
    parts = [corpus.from_documents([([i, i + 1], 1), ([i], 0)]) for i in range(12)]
    for i in reversed(range(12)):
        corpus.save(tmp_path / f"part-{i:05d}.npz", parts[i])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".part-00012.npz.1.ab").write_bytes(b"half")
    c = read(str(tmp_path), tokenizer=None)
    assert rows(c) == [row for part in parts for row in rows(part)] and c.prompts.tolist() == [1, 0] * 12
    assert rows(read(str(tmp_path), None, limit=3)) == rows(c)[:3]


def test_the_digest_depends_on_ids_documents_and_prompts_and_on_nothing_else():
    a = corpus.from_documents([([1, 2], 1), ([3], 0)])
    assert a.digest == corpus._corpus(np.asarray([1, 2, 3], np.int32), [2, 1], [1, 0]).digest
    others = [[([1, 2], 0), ([3], 0)], [([1], 1), ([2, 3], 0)], [([1, 2], 1), ([4], 0)], [([1, 2], 1)]]
    assert len({a.digest, *(corpus.from_documents(other).digest for other in others)}) == 5


@pytest.mark.parametrize("files, message", [
    (dict(a_txt=""), "a.txt is empty: expected text"),
    (dict(a_py="", b_py="\n"), "a.py, .*b.py are empty: expected text"),
    (dict(a_jsonl="\n"), "a.jsonl is empty"),
    (dict(a_txt=b"ab\xff"), r"a.txt is not UTF-8 text \(byte 2\): convert it first"),
    (dict(a_jsonl=b'{"text": "a"}\n{"text": "\xff"}'), r"a.jsonl is not UTF-8 text \(byte 24\)"),
    (dict(a_pt=b"x"), "a.pt is of no known kind: expected .txt, .md, .py, .rst, .jsonl, .npy, .npz"),
    (dict(a_c="x", b_c="y"), r"holds no file that matches \*.txt, \*.md, \*.py, \*.rst, or \*.npz: name another"),
    (dict(a_txt="x", b_npz=b"y"), r"holds text \(a.txt\) and token files \(b.npz\): say with a glob"),
    (dict(a_jsonl='{"text": "a"}\n{"text": \n'), "a.jsonl:2 is not JSON: Expecting value"),
    (dict(a_jsonl='{"txt": "a"}'), "a.jsonl:1 has no text: expected a field `text`, or .*did you mean 'text'"),
    (dict(a_jsonl='{"prompt": "a"}'), "a.jsonl:1 has no text: expected a field `text`, or `prompt` and `completion`"),
    (dict(a_jsonl='["a"]'), "a.jsonl:1 has no text: expected"),
    (dict(a_jsonl='{"text": ""}'), "a.jsonl:1 has no text in its field 'text'"),
    (dict(a_jsonl='{"prompt": "a", "completion": ""}'), "a.jsonl:1 has no text in its field 'completion'"),
    (dict(a_jsonl='{"prompt": 3, "completion": "a"}'), "a.jsonl:1 has no text in its field 'prompt'"),
    (dict(a_jsonl_gz=b"plain"), "a.jsonl.gz is not a whole gzip file"),
    (dict(a_jsonl_gz=gzip.compress(b'{"text": "a"}' * 99)[:-12]), "a.jsonl.gz is not a whole gzip file"),
    (dict(a_npz=b"PK"), r"a.npz is damaged or no .npz file of tokens \(File is not a zip file\): make it again"),
    (dict(a_npy=b"\x93NUMPY"), "a.npy is damaged or holds no plain array"),
    (dict(a_npy=b""), "a.npy is damaged or holds no plain array"),
])
def test_bad_files_are_one_line_that_says_which(files, message, write):
    with pytest.raises(ValueError, match=message) as error:
        read(write(**files))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arrays, message", [
    (dict(starts=[0]), "damaged or no .npz file of tokens .*tokens.npy"),
    (dict(tokens=[1]), "damaged or no .npz file of tokens .*starts.npy"),
    (dict(tokens=[1.0], starts=[0, 1]), r"tokens of shape \(1,\) and type float64: expected integers"),
    (dict(tokens=[[1]], starts=[0, 1]), r"tokens of shape \(1, 1\) and type int64"),
    (dict(tokens=[None], starts=[0, 1]), "damaged or no .npz file of tokens"),
    (dict(tokens=[1, 2], starts=[0, 1]), "starts that do not divide its 2 tokens: expected 0 .. 2"),
    (dict(tokens=[1, 2], starts=2), r"starts of shape \(\) and type int64: expected integers"),
    (dict(tokens=[1, 2], starts=[1, 2]), "starts that do not divide"),
    (dict(tokens=[1, 2], starts=[0, 3, 2]), "starts that do not divide"),
    (dict(tokens=[1, 2], starts=np.zeros(0, int)), "starts that do not divide"),
    (dict(tokens=[1, 2], starts=[0, 1, 2], prompts=[2, 0]), "prompts that do not fit its 2 documents"),
    (dict(tokens=[1, 2], starts=[0, 1, 2], prompts=[0]), "prompts that do not fit its 2 documents"),
    (dict(tokens=np.zeros(0, int), starts=[0, 0]), "is empty: expected token ids"),
    (dict(tokens=[1, 258], starts=[0, 2]), "holds the id 258, but the vocabulary has 258 tokens"),
    (dict(tokens=[-1, 2], starts=[0, 2]), "holds the id -1, but the vocabulary has 258 tokens"),
])
def test_bad_token_files_are_one_line_that_says_what(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **{name: np.asarray(value) for name, value in arrays.items()})
    with pytest.raises(ValueError, match=f"a.npz.*{message}") as error:
        read(str(tmp_path / "a.npz"), None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("array, message", [
    (np.zeros((1, 1, 1), int), r"array of shape \(1, 1, 1\) and type int64: expected integers \[N\] or \[D, N\]"),
    (np.zeros(3), "type float64"),
    (np.zeros(0, int), "is empty"),
    (np.asarray([999]), "holds the id 999"),
])
def test_bad_arrays_are_refused(array, message, tmp_path):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=f"a.npy .*{message}"):
        read(str(tmp_path / "a.npy"), None)


def test_what_does_not_fit_together_is_refused(write):
    path = write(a_txt="é")
    with pytest.raises(ValueError, match="the tokenizer gave the id 257, but the vocabulary has 200 tokens"):
        read(path, vocab_size=200)
    with pytest.raises(ValueError, match="a.txt is text, but the model has no tokenizer"):
        read(path, tokenizer=None)
    with pytest.raises(FileNotFoundError, match="none not found: expected stdlib, a folder, or a text"):
        read(f"{path}/none")
    with pytest.raises(ValueError, match="there is no source of text"):
        read(())
    with pytest.raises(ValueError, match="limit is a number of documents"):
        read(path, limit=-1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_a_token_file_is_found_or_harmless(data, tmp_path):
    c = corpus.from_documents([(range(40), 3), (range(9), 0)])
    corpus.save(tmp_path / "a.npz", c)
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    (tmp_path / "b.npz").write_bytes(raw)
    try:
        found = corpus.load(tmp_path / "b.npz")
    except ValueError as error:
        assert "b.npz" in str(error) and "\n" not in str(error)
    else:
        assert same(found, c)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="cannot write .*a.npz: No space left on device; nothing was left behind"):
        corpus.save(tmp_path / "a.npz", corpus.from_documents([([1], 0)]))
    assert not os.listdir(tmp_path)


def test_a_cached_corpus_is_read_once_until_something_changes(write, tmp_path, monkeypatch):
    folder, cache = write(a__a_txt="one", a__b_txt="two").removesuffix("/a") + "/a", tmp_path / "cache"
    calls = []
    monkeypatch.setattr(corpus, "read", lambda *args, read=corpus.read, **kwargs: (
        calls.append(1), read(*args, **kwargs))[1])

    def cached(tokenizer=BYTES, **options):
        before = len(calls)
        result = corpus.cached(cache, folder, tokenizer, **{"vocab_size": 258} | options)
        return result, len(calls) - before

    first, made = cached()
    assert made == 1 and isinstance(first.tokens, np.memmap) and said(first) == ["one", "two"]
    again, made = cached()
    assert made == 0 and same(again, first)
    for options in (dict(limit=1), dict(glob="b*"), dict(tokenizer=tokenize.build("bytes", ())), dict(vocab_size=300)):
        assert cached(**options)[1] == 1 and cached(**options)[1] == 0
    size = len(os.listdir(cache))
    write(a__a_txt="one!")
    changed, made = cached()
    assert made == 1 and said(changed) == ["one!", "two"]
    assert len(os.listdir(cache)) == size           # what is out of date is gone
    path = next(path for path in cache.iterdir() if corpus.load(path).digest == changed.digest)
    path.write_bytes(path.read_bytes()[:-30])
    mended, made = cached()
    assert made == 1 and same(mended, changed) and same(corpus.load(path), changed)


def test_token_files_are_not_copied_into_the_cache(tmp_path):
    corpus.save(tmp_path / "part.npz", corpus.from_documents([([1, 2], 0)]))
    assert rows(corpus.cached(tmp_path / "cache", str(tmp_path / "part.npz"), None, vocab_size=9)) == [[1, 2]]
    assert not (tmp_path / "cache").exists()


def test_texts_are_those_of_all_files_in_an_order_that_is_a_sample(write):
    folder = write(**{f"{c}_txt": c for c in "abcdefgh"}, z_py="zz")
    found = list(corpus.texts(folder))
    assert sorted(found) == [*"abcdefgh", "zz"] != found
    assert found == list(corpus.texts(folder))
    assert sorted(corpus.texts(folder, limit=3)) == [*"abc"] and list(corpus.texts(folder, glob="z*")) == ["zz"]
    path = write(x_jsonl=lines({"prompt": "p", "completion": "c"}, {"text": "t"}))
    assert list(corpus.texts(path)) == ["pc", "t"] and list(corpus.texts(path, limit=1)) == ["pc"]


def test_token_files_have_no_texts(tmp_path):
    corpus.save(tmp_path / "part.npz", corpus.from_documents([([1, 2], 0)]))
    with pytest.raises(ValueError, match="part.npz holds token ids, not text: name the tokenizer"):
        list(corpus.texts(str(tmp_path)))


DOCUMENTS = [(list(range(i, i + 5 + i % 3)), i % 4) for i in range(60)]


def test_the_split_depends_on_each_document_alone():
    train, apart = corpus.split(corpus.from_documents(DOCUMENTS), 0.3)
    assert 5 < len(apart.prompts) < 30 and len(train.prompts) + len(apart.prompts) == 60
    assert sorted(rows(train) + rows(apart)) == sorted(ids for ids, _ in DOCUMENTS)
    prompts = {tuple(ids): prompt for ids, prompt in DOCUMENTS}
    for part in (train, apart):
        assert [prompts[tuple(row)] for row in rows(part)] == part.prompts.tolist()
    held = set(map(tuple, rows(apart)))
    for other in (DOCUMENTS[::-1], DOCUMENTS[:40], DOCUMENTS * 2):
        found = set(map(tuple, rows(corpus.split(corpus.from_documents(other), 0.3)[1])))
        assert found == held & {tuple(ids) for ids, _ in other}
    assert held < set(map(tuple, rows(corpus.split(corpus.from_documents(DOCUMENTS), 0.6)[1])))


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 0.999999])
def test_each_side_of_a_split_has_a_document(fraction):
    for count in range(2, 6):
        for part in corpus.split(corpus.from_documents(DOCUMENTS[:count]), fraction):
            assert len(part.prompts)


def test_nothing_is_held_out_if_nothing_is_asked_for():
    c = corpus.from_documents(DOCUMENTS)
    train, apart = corpus.split(c, 0)
    assert train is c and not len(apart.tokens) and apart.starts.tolist() == [0] and not len(apart.prompts)


def test_of_a_single_document_the_end_is_held_out():
    for prompt, parts in ((0, (0, 0)), (9, (8, 1))):
        train, apart = corpus.split(corpus.from_documents([(range(10), prompt)]), 0.2)
        assert rows(train) == [[*range(8)]] and rows(apart) == [[8, 9]]
        assert (train.prompts[0], apart.prompts[0]) == parts


@pytest.mark.parametrize("documents, fraction, message", [
    (DOCUMENTS, 1.0, "expected 0 <= held_out < 1, got 1.0"),
    (DOCUMENTS, -0.1, "expected 0 <= held_out < 1"),
    ([([1, 2], 0)] * 3, 0.5, "all 3 documents are the same: none can be held out"),
    ([(range(9), 0)], 0.1, "a single document of 9 tokens is too short to hold out 0.1 of it"),
])
def test_an_impossible_split_is_refused(documents, fraction, message):
    with pytest.raises(ValueError, match=message):
        corpus.split(corpus.from_documents(documents), fraction)


def test_the_digest_of_parameters_sees_values_names_types_and_shapes():
    tree = {"a": jnp.arange(4, dtype=jnp.bfloat16), "b": [np.ones((2, 3), np.float32), 3]}
    others = [jax.tree.map(lambda x: x + 1, tree), {"a": tree["a"], "c": tree["b"]}, {"a": tree["a"]},
              {**tree, "a": tree["a"].astype(jnp.float32)}, {**tree, "b": [np.ones((3, 2), np.float32), 3]}]
    digests = {corpus.digest_of(x) for x in (tree, *others)}
    assert len(digests) == 6 and corpus.digest_of(jax.tree.map(lambda x: x, tree)) in digests
    assert corpus.digest_of([[1, 2], [3]]) != corpus.digest_of([[1], [2, 3]])
