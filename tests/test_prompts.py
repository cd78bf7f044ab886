"""Prompt files in the layouts of the field."""

import gzip
import json

import pytest

from parallax import prompts


@pytest.fixture
def file(tmp_path):
    """Writes a prompt file and gives its path."""
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)
    return write


def lines(*rows, **options):
    return "".join(json.dumps(row, **options) + "\n" for row in rows)


@pytest.mark.parametrize("text", ["one\ntwo\n", " kept as it is \n", '{"prompt": "not JSONL"}\n', "naïve 日本\r\n"])
def test_a_text_file_is_one_prompt_to_the_letter(text, file):
    assert prompts.read(file("in.txt", text)) == [text]


@pytest.mark.parametrize("row", [
    "hi",
    {"prompt": "hi"},
    {"task_id": "HumanEval/0", "prompt": "hi", "canonical_solution": "x", "test": "y", "entry_point": "z"},
    {"question": "hi", "answer": "#### 4"},
    {"question_id": 81, "category": "writing", "turns": ["hi", "and now in verse"]},
    {"text": "hi", "code": "x"},
    {"prompt": "hi", "question": "no", "text": "no"},
])
@pytest.mark.parametrize("name", ["in.jsonl", "in.json"])
def test_every_known_layout_has_its_prompt_found(name, row, file):
    assert prompts.read(file(name, lines(row, {"prompt": "last"}))) == ["hi", "last"]


def test_compressed_files_are_read_too(file):
    assert prompts.read(file("in.jsonl.gz", gzip.compress(lines("a", {"prompt": "b"}).encode(), mtime=0))) == ["a", "b"]
    assert prompts.read(file("in.txt.gz", gzip.compress(b"a\nb", mtime=0))) == ["a\nb"]


def test_blank_lines_count_as_lines_but_not_as_prompts(file):
    path = file("in.jsonl", "\n" + lines({"prompt": "a"}) + "  \n\n" + lines({"prompt": "b"}) + "{}")
    with pytest.raises(ValueError, match=r"in.jsonl:6 has no prompt"):
        prompts.read(path)


def test_only_a_newline_ends_a_line(file):
    text = "a\u2028b\x85c\x0bd"
    assert prompts.read(file("in.jsonl", lines({"prompt": text}, "e", ensure_ascii=False))) == [text, "e"]
    assert prompts.read(file("in.jsonl", '{"prompt": "a"}\r\n{"prompt": "b"}\r\n')) == ["a", "b"]


def test_a_byte_order_mark_is_not_text(file):
    assert prompts.read(file("in.txt", b"\xef\xbb\xbfhi")) == ["hi"]
    assert prompts.read(file("in.jsonl", b'\xef\xbb\xbf{"prompt": "hi"}')) == ["hi"]


@pytest.mark.parametrize("name, content, message", [
    ("in.txt", "", "in.txt is empty: it must hold at least one prompt"),
    ("in.txt", " \n\t", "is empty"),
    ("in.jsonl", "\n\n", "is empty"),
    ("in.txt", b"ab\xff", r"in.txt is not UTF-8 text \(byte 2\): convert it first"),
    ("in.jsonl", '{"prompt": "a"}\n{"prompt": \n', "in.jsonl:2 is not JSON: Expecting value"),
    ("in.jsonl", "[1, 2]", "in.jsonl:1 has no prompt: expected a field named prompt, question, turns, text"),
    ("in.jsonl", "3", "in.jsonl:1 has no prompt"),
    ("in.jsonl", '{"promt": "a"}', "in.jsonl:1 has no prompt.*did you mean 'prompt'?"),
    ("in.jsonl", '{"prompt": ""}', "in.jsonl:1 has an empty prompt in field 'prompt'"),
    ("in.jsonl", '{"prompt": null}', "has an empty prompt in field 'prompt'"),
    ("in.jsonl", '{"turns": []}', "has an empty prompt in field 'turns'"),
    ("in.jsonl", '{"turns": [{"content": "a"}]}', "has an empty prompt in field 'turns'"),
    ("in.jsonl.gz", b"plain", "in.jsonl.gz is not a whole gzip file"),
    ("in.jsonl.gz", gzip.compress(b'{"prompt": "a"}' * 99, mtime=0)[:-12], "is not a whole gzip file"),
    ("in.jsonl.gz", gzip.compress(b"abc", mtime=0)[:10] + b"\xff" * 20, "is not a whole gzip file"),
])
def test_a_bad_file_is_one_line_that_names_file_and_line(name, content, message, file):
    with pytest.raises(ValueError, match=message) as error:
        prompts.read(file(name, content))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_no_prompt_files(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ValueError, match="there is no prompt file .*: give a text or .jsonl file"):
            prompts.read(str(path))


def test_the_built_in_prompt_repeats_itself_so_that_lookup_finds_something():
    assert prompts.EDITING.count("items") > 5 and prompts.EDITING.isascii()
