"""What all commands share: errors of the user's making end in one line and exit status 2, never in a traceback."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

SAMPLING = {        # flags of the commands that draw tokens: short for --config.NAME, and their types
    "temperature": (flags.DEFINE_float, "0 is greedy."),
    "top_k": (flags.DEFINE_integer, "Keep the k most likely tokens."),
    "top_p": (flags.DEFINE_float, "Keep the most likely tokens up to this probability."),
    "min_p": (flags.DEFINE_float, "Keep tokens of at least this fraction of the largest probability."),
    "typical_p": (flags.DEFINE_float, "Keep the tokens nearest to the entropy, up to this probability."),
    "epsilon_cutoff": (flags.DEFINE_float, "Drop tokens below this probability."),
    "eta_cutoff": (flags.DEFINE_float, "As epsilon_cutoff, lower where the model is unsure."),
    "repetition_penalty": (flags.DEFINE_float, "Divide positive logits of seen tokens by it, multiply negative ones."),
    "presence_penalty": (flags.DEFINE_float, "Take this off the logits of tokens seen so far."),
    "frequency_penalty": (flags.DEFINE_float, "Take this off the logits once per time that a token was seen."),
    "logit_bias": (flags.DEFINE_string, 'Add to the logits of tokens: JSON of token ids, {"50256": -100}.'),
}


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parses the flags, calls `main` with what is left of the command line and exits with what it returns."""

    def guarded(argv: list[str]) -> int | None:
        try:
            status = main(argv)
            sys.stdout.flush()
            return status
        except BrokenPipeError:                     # the reader of our output went away, as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except (ValueError, OSError, FloatingPointError) as error:      # FileNotFoundError is an OSError
            fail(error)

    logging.set_verbosity(logging.WARNING)          # not what backends JAX looked for
    app.run(guarded, flags_parser=_parse)


def fail(error: object) -> NoReturn:
    """Ends the process with one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def with_config(argv: Sequence[str], folder: str, default: Callable[[str | None], str]) -> list[str]:
    """The command line with a `--config` that config_flags can open, in front of its overrides.

    `--config NAME` may be a path, or the bare name of a file in `folder` below the working directory, each with a
    `:variant`. Without one, `default(value of --method or --config.method)` is put in front.
    """
    if _asks_for_help(argv):                        # answers at once: a config brings jax
        return list(argv)
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
        given = [re.fullmatch(r"--?(?:config\.)?method(?:=(.*))?", word) for word in result]
        methods = [match[1] or following for match, following in zip(given, [*result[1:], ""]) if match]
        result.insert(1, "--config=" + default(methods[-1] if methods else None))
    return result


def _find_config(name: str, folder: str) -> str:
    path, colon, variant = name.partition(":")
    for candidate in (path, f"{folder}/{path}.py"):
        if pathlib.Path(candidate).is_file():
            return candidate + colon + variant
    known = sorted(file.stem for file in pathlib.Path(folder).glob("*.py"))
    names = f" or one of {', '.join(known)}{_nearest(path, known)}" if known else ""
    fail(f"there is no config {path!r}: expected a .py file{names}")


def _parse(argv: Sequence[str]) -> list[str]:
    if _asks_for_help(argv):
        with contextlib.suppress(SystemExit):       # absl ends with status 1, as if help were an error
            app.parse_flags_with_usage(argv)
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        fail(f"unknown flag --{error.flagname}{_nearest(error.flagname, list(flags.FLAGS))}; --help lists them")
    except flags.Error as error:
        text = str(error)
        if "Error whilst parsing config file" in text:              # with a traceback, whose last line says it
            fail(f"the config cannot be read: {text.strip().splitlines()[-1]}")
        text = re.sub(r"\('(.*?)', .*\)", r"\1", text)             # absl prints some errors as tuples
        fail(text.removeprefix("flag ") + "; --help lists the flags")
    except Exception as error:                      # the config file is a program, and so are its overrides
        if "config" not in flags.FLAGS:
            raise
        _explain_config(argv, error)
    several = "config" in flags.FLAGS and isinstance(flags.FLAGS["config"], flags.MultiFlag)      # names of files
    if "config" in flags.FLAGS and not several and not hasattr(flags.FLAGS.config, "copy_and_resolve_references"):
        fail(f"{_config_path(argv)[0]}: get_config() must return a ConfigDict, got {flags.FLAGS.config!r}")
    return rest


def _config_path(argv: Sequence[str]) -> tuple[str, str]:
    """(path, variant) of the config that `with_config` put in front."""
    path, _, variant = argv[1].removeprefix("--config=").partition(":")
    return path, variant


def _explain_config(argv: Sequence[str], error: Exception) -> NoReturn:
    """Names the key that the config does not have, in the file or in an override, and the nearest that it has."""
    path, variant = _config_path(argv)
    known = []
    with contextlib.suppress(Exception):            # the config itself may be what is wrong
        known = _config_keys(runpy.run_path(path)["get_config"](*filter(None, [variant])))
    for name in re.findall(r"(?m)^--?config\.([\w.]+)", "\n".join(argv)):
        if known and name not in known:
            fail(f"the config has no key {name!r}: expected one of {', '.join(known)}{_nearest(name, known)}")
    locked = re.match(r"['\"]*Key \\*['\"](.+?)\\*['\"] does not exist", str(error))
    if locked:                                      # the message goes on with all of the config
        close = re.search(r"Did you mean \\*['\"](.+?)\\*['\"] instead", str(error))
        fail(f"{path}: the config has no key {locked[1]!r}" + (f"; did you mean {close[1]!r}?" if close else ""))
    fail(f"{path} cannot be read: {type(error).__name__}: {error}")


def _nearest(name: str, known: Sequence[str]) -> str:
    from parallax.models.config import nearest  # late: it brings jax, and --help should answer at once
    return nearest(name, known)


def _config_keys(config, prefix: str = "") -> list[str]:
    import ml_collections
    keys = []
    for name, value in config.items():
        keys += (_config_keys(value, f"{prefix}{name}.") if isinstance(value, ml_collections.ConfigDict)
                 else [prefix + name])
    return keys


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(re.fullmatch(r"-?-(help|helpfull|helpshort|helpxml)|-\?", arg) for arg in argv)
