"""What all commands share: errors of the user's making end in one line and exit status 2, never in a traceback."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parses the flags, calls `main` with what is left of the command line and exits with what it returns."""

    def guarded(argv: list[str]) -> int | None:
        try:
            return main(argv)
        except BrokenPipeError:                     # the reader of our output went away, as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (ValueError, OSError, FloatingPointError) as error:      # FileNotFoundError is an OSError
            fail(error)

    app.run(guarded, flags_parser=_parse)


def fail(error: object) -> None:
    """Ends the process with one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def with_config(argv: Sequence[str], folder: str, default: Callable[[str | None], str]) -> list[str]:
    """The command line with a `--config` that config_flags can open, in front of its overrides.

    `--config NAME` may be a path, or the bare name of a file in `folder` below the working directory, each with a
    `:variant`. Without one, `default(value of --method)` is put in front.
    """
    result, found = [argv[0]], False
    rest = list(argv[1:])
    while rest:
        word = rest.pop(0)
        match = re.fullmatch(r"--?config(?:=(.*))?", word)
        if not match:
            result.append(word)
            continue
        if match[1] is None and not rest:
            fail("--config needs a file")
        result.insert(1, "--config=" + _find_config(match[1] if match[1] is not None else rest.pop(0), folder))
        found = True
    if not found:
        given = " ".join(result)
        method = re.search(r"(?:^| )--?method[= ](\S+)", given)
        result.insert(1, "--config=" + default(method[1] if method else None))
    return result


def _find_config(name: str, folder: str) -> str:
    path, colon, variant = name.partition(":")
    for candidate in (path, f"{folder}/{path}.py"):
        if pathlib.Path(candidate).is_file():
            return candidate + colon + variant
    from parallax.models.config import nearest
    known = sorted(file.stem for file in pathlib.Path(folder).glob("*.py"))
    fail(f"there is no config {path!r}: expected a .py file" + (f" or one of {', '.join(known)}{nearest(path, known)}"
                                                               if known else ""))


def _parse(argv: Sequence[str]) -> list[str]:
    # Imports below are late because they bring jax, and --help should answer at once.
    try:
        return app.parse_flags_with_usage(argv) if _asks_for_help(argv) else flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        from parallax.models.config import nearest
        name = error.flagname
        key = name.removeprefix("config.")
        if name.startswith("config.") and "config" in flags.FLAGS:
            known = _config_keys(flags.FLAGS["config"].value)
            fail(f"the config has no key {key!r}{nearest(key, known)}; keys: {', '.join(known)}")
        fail(f"unknown flag --{name}{nearest(name, list(flags.FLAGS))}; --help lists them")
    except flags.Error as error:
        text = re.sub(r"\('(.*?)', .*\)", r"\1", str(error))     # absl prints some errors as tuples
        fail(text.removeprefix("flag ") + "; --help lists the flags")


def _config_keys(config, prefix: str = "") -> list[str]:
    import ml_collections
    keys = []
    for name, value in config.items():
        keys += (_config_keys(value, f"{prefix}{name}.") if isinstance(value, ml_collections.ConfigDict)
                 else [prefix + name])
    return keys


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(re.fullmatch(r"-?-(help|helpfull|helpshort|helpxml)|-\?", arg) for arg in argv)
