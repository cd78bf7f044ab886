"""Chat templates: the Jinja text that comes with a tokenizer, rendered in a sandbox because it is downloaded code."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a trainer learns from; for rendering it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def render(template: str, messages: list[dict[str, Any]], **names: Any) -> str:
    """The prompt text for `messages` (dicts with "role" and "content"), up to where the assistant begins to speak.

    Args:
      template: Jinja source.
      messages: the conversation so far, oldest first.
      **names: further values the template sees, such as `bos_token`.

    Raises:
      ValueError: malformed messages, a broken template, one that refuses these messages, or one that the sandbox stops.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f"chat message {i} must be a dict with 'role' and 'content', got {message!r:.200}")
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=True, tools=None, documents=None,
                                         **names)
    except jinja2.sandbox.SecurityError as error:
        raise ValueError(f"the chat template does something that is not allowed: {_line(error)}") from None
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses these messages or is broken: {_line(error)}") from None
    except Exception as error:  # a template is a program: it can fail in any way a program can
        raise ValueError(f"the chat template fails with {type(error).__name__}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
