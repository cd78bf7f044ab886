"""Parts by name in one line of text: `typical`, `typical(epsilon=0.1)`, `levels(4, 2, 2)`, `recycling(nodes=15)`.

The form in which configs and the command line name a part with its options. In Python one may as well give the object.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from parallax.models.config import nearest

PARTS = ("model", "sampler", "kind")           # fields that are no options: whoever builds the part fills them in


def fields(part: type) -> dict[str, Any]:
    """The options of a part's class and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(part) if field.name not in PARTS}


def parse(text: str, registry: Mapping[str, type], role: str) -> tuple[type, dict[str, Any]]:
    """(class, options) of a part.

    Args:
      text: a name of the registry, with its options in brackets. Options without a name are taken in the order of the
        fields; a class whose only positional option takes all of them says so with `star = "field"`.
      registry: name -> class.
      role: what the part is, for messages.

    Raises:
      ValueError: the text is not of that form, an unknown name or option, an option of another type.
    """
    if not isinstance(text, str):
        raise ValueError(f"a {role} must be named by a text, got {text!r}")
    article = "an" if role[0] in "aeiou" else "a"
    form = f"expected {article} {role} as name or name(option=value), one of {', '.join(registry)}"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        if not isinstance(call.func, ast.Name) or any(word.arg is None for word in call.keywords):
            raise SyntaxError
        name = call.func.id
        positional = [ast.literal_eval(arg) for arg in call.args]
        options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if len(options) < len(call.keywords):                       # a name that is given twice
            raise SyntaxError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{form}, got {text!r}") from None
    if name not in registry:
        raise ValueError(f"unknown {role} {name!r}: expected one of {', '.join(registry)}{nearest(name, registry)}")
    part = registry[name]
    known = fields(part)
    if positional:
        star = getattr(part, "star", None)
        given = {star: tuple(positional)} if star else dict(zip(known, positional))
        if len(positional) > len(given) and not star or set(given) & set(options):
            raise ValueError(f"{role} {name!r} takes {', '.join(known) or 'no options'}, got {text!r}")
        options = {**given, **options}
    check(options, known, f"{role} {name!r}")
    return part, options


def build(text: Any, registry: Mapping[str, type], role: str, **parts) -> Any:
    """The part that `text` names, with those of `parts` that it has fields for; an object is taken as it is.

    Raises:
      ValueError: as `parse`, or a value that the part refuses.
    """
    if not isinstance(text, str):
        return text
    part, options = parse(text, registry, role)
    names = {field.name for field in dataclasses.fields(part)}
    return part(**{name: value for name, value in parts.items() if name in names}, **options)


def check(options: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raises ValueError for an option that is not `known` (name -> default) or not of its default's type.

    An option whose default is None may have any type, and one whose default names a part may be the part itself.
    """
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{what} has no option {option!r}: expected one of {', '.join(known) or '(none)'}"
                             f"{nearest(option, known)}")
        default = known[option]
        if default is None or type(value) is type(default) or type(default) is str and dataclasses.is_dataclass(value):
            continue
        if not (type(default) is float and type(value) is int):
            raise ValueError(f"option {option!r} of {what} must be of type {type(default).__name__}, got {value!r}")


def drafters() -> dict[str, type]:
    """The drafters that text alone can name: those of the methods that need no draft model."""
    from parallax.decoding import METHODS  # late: the registry lists drafters that are made of drafters
    return {name: method.drafter for name, method in METHODS.items() if not method.needs_draft}
