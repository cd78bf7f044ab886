"""What every command does with its config: completed by the defaults, and refused where it does not fit them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from parallax.models.config import nearest

_FITTING = {float: (float, int), tuple: (tuple, list)}          # other types that a value may have


def complete(config: dict[str, Any], base: dict[str, Any], *, extensible: Container[str] = ()) -> dict[str, Any]:
    """`base` with the values of `config` over it. Lists become tuples where the default is one.

    Args:
      config, base: nested dicts, as `ConfigDict.to_dict` gives them.
      extensible: names of nested dicts that may have keys of their own.

    Raises:
      ValueError: a key that `base` has not, or a value of another type than its own.
    """
    return _merged(config, base, "", extensible)


def _merged(config, base, prefix, extensible):
    result = dict(base)
    for key, value in config.items():
        name = prefix + key
        if key not in base:
            if prefix.removesuffix(".") in extensible:
                result[key] = value
                continue
            known = [prefix + other for other in base]
            raise ValueError(f"the config has no key {name!r}: expected one of {', '.join(known)}"
                             f"{nearest(name, known)}")
        default = base[key]
        if isinstance(default, dict):
            if not isinstance(value, dict):
                raise ValueError(f"the config's {name} must be a ConfigDict, got {value!r}")
            result[key] = _merged(value, default, f"{name}.", extensible)
        elif default is not None and type(value) not in _FITTING.get(type(default), (type(default),)):
            raise ValueError(f"the config's {name} must be of type {type(default).__name__}, got {value!r}")
        else:
            result[key] = tuple(value) if isinstance(default, tuple) else value
    return result
