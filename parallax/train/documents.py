"""Which files a source of training data has, and the documents in those that hold text."""

from __future__ import annotations

import gzip
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from parallax.models.config import nearest

TEXT, ROWS, TOKENS = (".txt", ".md", ".py", ".rst"), (".jsonl",), (".npy", ".npz")

# Not the library itself, data tables, or different on every machine.
_NOT_STDLIB = re.compile(r"tests?|idlelib|lib2to3|encodings|site-packages|dist-packages|__pycache__|config-.*|"
                         r"_sysconfigdata.*")
_HIDDEN = re.compile(r"\..*")


def files(source: str | Sequence[str], glob: str | None) -> list[Path]:
    """All files of the sources as `corpus.read` has them, those of a folder sorted by their relative path.

    Raises:
      FileNotFoundError: no such path.
      ValueError: a folder without such files, or a file of no known kind.
    """
    names = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    result = [path for name in names for path in _files_of(os.fspath(name), glob)]
    if not result:
        raise ValueError("there is no source of text: name a file, a folder, or stdlib")
    known = (*TEXT, *ROWS, *TOKENS)
    for path in result:
        if kind(path) not in known and not glob:
            raise ValueError(f"{path} is of no known kind: expected {', '.join(known)} (text also as .gz), or a folder "
                             "and a glob that says which of its files are text")
    return result


def _files_of(name: str, glob: str | None) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib")) if name == "stdlib" else Path(name).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(f"{name} not found: expected stdlib, a folder, or a text, .jsonl, .npy or .npz file")
    inside = _walk(root, _NOT_STDLIB if name == "stdlib" else _HIDDEN)
    if glob:
        found = [path for path in inside if PurePosixPath(path.relative_to(root).as_posix()).match(glob)]
    elif name == "stdlib":
        found = [path for path in inside if path.suffix == ".py"]
    else:
        found, tokens = ([path for path in inside if path.suffix in kinds] for kinds in (TEXT, (".npz",)))
        if found and tokens:
            raise ValueError(f"{name} holds text ({found[0].name}) and token files ({tokens[0].name}): say with a glob "
                             "such as '*.npz' which of them is meant")
        found = found or tokens
    if not found:
        raise ValueError(f"{name} holds no file that matches {glob or ', '.join('*' + kind for kind in TEXT)}"
                         f"{'' if glob else ', or *.npz'}: name another folder or glob")
    return found


def _walk(root: Path, left_out: re.Pattern) -> list[Path]:
    result = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not left_out.fullmatch(name)]
        for path in (Path(folder, name) for name in names if not left_out.fullmatch(name)):
            result[path.relative_to(root).as_posix()] = path
    return [result[name] for name in sorted(result)]


def kind(path: Path) -> str:
    """The end of a file's name that says what is in it."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def read(path: Path) -> Iterator[tuple[str | None, str]]:
    """The documents of a file as (prompt or None, text): a text file is one unless it is blank, JSONL has one per line.

    Raises:
      ValueError: it is not UTF-8, or a line has no text; the line is named.
    """
    at = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            if kind(path) not in ROWS:
                text = file.read().decode().removeprefix("\ufeff")
                if text.strip():
                    yield None, text
                return
            for number, line in enumerate(file, 1):
                row = line.decode().removeprefix("\ufeff")
                at += len(line)
                if row.strip():
                    yield _row(row, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {at + error.start}): convert it first") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path} is not a whole gzip file") from None


def _row(line: str, where: str) -> tuple[str | None, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg}") from None
    row = row if isinstance(row, dict) else {}
    names = ("prompt", "completion") if {"prompt", "completion"} <= set(row) else ("text",)
    for name in names:
        if name not in row:
            known = ("text", "prompt", "completion")
            raise ValueError(f"{where} has no text: expected a field `text`, or `prompt` and `completion`"
                             f"{''.join(nearest(key, known) for key in list(row)[:1] if key not in known)}")
        if not isinstance(row[name], str) or not row[name] and name != "prompt":
            raise ValueError(f"{where} has no text in its field {name!r}")
    return row["prompt"] if len(names) == 2 else None, row[names[-1]]


