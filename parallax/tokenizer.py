"""Text to token ids and back: plain bytes, or a tokenizer that comes with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from parallax import chat


class Tokenizer(Protocol):
    """What the rest of the framework needs of a tokenizer.

    Attributes:
      vocab_size: one more than the largest id.
      bos_id: the token that begins a text, if the vocabulary has one.
      eos_ids: the tokens that end a text.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around every text, such as the BOS token."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens."""

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a conversation; encode it with `special=False`, the template writes its own tokens."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then BOS and EOS. Needs no file and no training."""

    vocab_size = 258
    bos_id = 256
    eos_ids = (257,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [self.bos_id] * special + list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, Any]]) -> str:
        raise ValueError("the byte tokenizer has no chat template: pass the prompt as plain text")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, with its special tokens and chat template."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bos: str | None = None, eos: Sequence[str] = (),
                 chat_template: str | None = None, others: dict[str, str] | None = None):
        """`others` are further special tokens under their Hugging Face names, such as {"pad_token": "<pad>"}.

        Raises:
          ValueError: a special token is not in the vocabulary.
        """
        backend.no_truncation()         # a tokenizer.json may ask for both, which only suits training batches
        backend.no_padding()
        for token in filter(None, (bos, *eos)):
            if backend.token_to_id(token) is None:
                raise ValueError(f"the special token {token!r} is not in the tokenizer's vocabulary")
        self.backend = backend
        self.chat_template = chat_template
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = tuple(backend.token_to_id(token) for token in eos)
        self._bos, self._eos, self._others = bos, tuple(eos), dict(others or {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> FileTokenizer:
        """Reads tokenizer.json, and from the files beside it the special tokens and the chat template.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          ValueError: a file cannot be read.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder / 'tokenizer.json'} not found: expected the tokenizer in that form; "
                                    "transformers writes it with AutoTokenizer.from_pretrained(..).save_pretrained(..)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:      # the library raises nothing more specific
            raise ValueError(f"cannot read {folder / 'tokenizer.json'}: {' '.join(str(error).split())}") from None
        config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(name)
            tokens[name] = token["content"] if isinstance(token, dict) else token
        template = config.get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default", next(iter(named.values()), None))
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        bos, eos = tokens.pop("bos_token"), tokens.pop("eos_token")
        return cls(backend, bos=bos, eos=(eos,) if eos else (), chat_template=template,
                   others={name: token for name, token in tokens.items() if token})

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and a tokenizer_config.json with which `transformers.AutoTokenizer` loads it."""
        folder = Path(folder)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                  "bos_token": self._bos, "eos_token": self._eos[0] if self._eos else None, **self._others}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n",
                                                      encoding="utf-8")

    def limited(self, vocab_size: int) -> FileTokenizer:
        """This tokenizer without the added tokens that a model of `vocab_size` rows has no embedding for.

        Gemma 3's text models come with an image token of the vision models; it is text to them.

        Raises:
          ValueError: the vocabulary proper is larger than the model's.
        """
        if self.vocab_size <= vocab_size:
            return self
        state = json.loads(self.backend.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < vocab_size]
        try:
            result = FileTokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), bos=self._bos, eos=self._eos,
                                   chat_template=self.chat_template, others=self._others)
        except Exception:               # something else in the file needs the token that is gone
            result = self
        if result.vocab_size > vocab_size:
            raise ValueError(f"the tokenizer has {self.vocab_size} tokens but the model's vocabulary has {vocab_size}: "
                             "they do not belong together; use the tokenizer of this checkpoint")
        return result

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # Lone surrogates, as in a badly decoded command line, are no text: the library would raise a TypeError.
        return self.backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=special).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """Raises ValueError if there is no template, or if it fails."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: pass the prompt as plain text")
        return chat.render(self.chat_template, messages, bos_token=self._bos or "",
                           eos_token=self._eos[0] if self._eos else "", **self._others)


class TextStream:
    """Turns ids into text as they come. What `push` returned stays: half a character is held back."""

    # A character has at most four bytes, so a replacement character this many tokens old is in the text itself.
    _PATIENCE = 16

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []       # what was emitted last, as context (spaces depend on it), and what is pending
        self._context = 0               # how many of them are context
        self._sent = 0                  # how many characters of their text are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return "".join(map(self._push, map(int, ids)))

    def flush(self) -> str:
        """What is left at the end, with replacement characters for what never became a character."""
        return self._emit(self._tokenizer.decode(self._ids))

    def _push(self, i: int) -> str:
        self._ids.append(i)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._context < self._PATIENCE:
            out = text.rstrip("\ufffd")[self._sent:]
            self._sent += len(out)
            return out
        return self._emit(text)

    def _emit(self, text: str) -> str:
        out = text[self._sent:]
        if out:                         # a special token has no text, so it is no context either
            self._ids = self._ids[self._context:]
            self._context = len(self._ids)
            self._sent = len(self._tokenizer.decode(self._ids))
        return out


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file; ValueError if it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged or incomplete") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
