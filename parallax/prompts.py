"""Prompt files: plain text, or JSONL in the layouts that the field's prompt sets use."""

from __future__ import annotations

import gzip
import json
import pathlib
import zlib

from parallax.models.config import nearest

# The field that holds the prompt, per layout: our own and HumanEval, GSM8K, MT-bench and Spec-Bench (first turn).
_FIELDS = ("prompt", "question", "turns", "text")

EDITING = '''Rename the function `total` to `sum_of_prices` and the argument `items` to `prices` everywhere in this \
code. Answer with the changed code only.

```python
def total(items):
    """Returns the sum of all items."""
    result = 0
    for item in items:
        result = result + item
    return result


def average(items):
    """Returns the mean of all items."""
    return total(items) / len(items)


def report(items):
    """Prints the sum and the mean of all items."""
    print("total:", total(items))
    print("average:", average(items))
```'''


def read(path: str) -> list[str]:
    """The prompts of a file: one per line of a .jsonl (or .jsonl.gz) file, else the whole text as one prompt.

    Raises:
      ValueError: missing, empty, not UTF-8, or a line without a prompt; the line is named.
    """
    file = pathlib.Path(path)
    if not file.exists() or file.is_dir():
        raise ValueError(f"there is no prompt file {path!r}: give a text or .jsonl file")
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path} is not a whole gzip file") from None
    if not text.strip():
        raise ValueError(f"{path} is empty: it must hold at least one prompt")
    if not path.removesuffix(".gz").endswith((".jsonl", ".json")):
        return [text]
    return [_prompt(line, f"{path}:{i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg}") from None
    if isinstance(row, str):
        row = {"prompt": row}
    name = next((field for field in _FIELDS if isinstance(row, dict) and field in row), None)
    if name is None:
        keys = list(row) if isinstance(row, dict) else []
        raise ValueError(f"{where} has no prompt: expected a field named {', '.join(_FIELDS)}"
                         f"{''.join(nearest(key, _FIELDS) for key in keys[:1])}")
    value = row[name][0] if isinstance(row[name], list) and row[name] else row[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} has an empty prompt in field {name!r}")
    return value
