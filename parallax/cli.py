"""What all commands share: errors of the user's making end in one line and exit status 2, never in a traceback."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags


def run(main: Callable[[list[str]], int | None]) -> None:
    """Parses the flags, calls `main` with what is left of the command line and exits with what it returns."""

    def guarded(argv: list[str]) -> int | None:
        try:
            return main(argv)
        except (ValueError, OSError) as error:      # FileNotFoundError is an OSError
            fail(error)

    app.run(guarded, flags_parser=_parse)


def fail(error: object) -> None:
    """Ends the process with one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return app.parse_flags_with_usage(argv) if _asks_for_help(argv) else flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        # Not above: it brings jax, and --help should answer at once.
        from parallax.models.config import nearest

        fail(f"unknown flag --{error.flagname}{nearest(error.flagname, list(flags.FLAGS))}; --help lists them")
    except flags.Error as error:
        text = re.sub(r"\('(.*?)', .*\)", r"\1", str(error))     # absl prints some errors as tuples
        fail(text.removeprefix("flag ") + "; --help lists the flags")


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(re.fullmatch(r"-?-(help|helpfull|helpshort|helpxml)|-\?", arg) for arg in argv)
