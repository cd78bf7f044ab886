"""The tokenizer inside a .gguf file: byte-level BPE (`gpt2`) or sentencepiece-like BPE (`llama`)."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from parallax.models.config import nearest
from parallax.tokenizer import FileTokenizer

# Token types of the format; the rest are normal (1), unused (5) and byte (6).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2_SPLIT = r"'(?:[sdmt]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Qwen 2 and Llama 3 differ only in how many digits stand together.
_MODERN_SPLIT = (r"(?i:'(?:[sdmt]|re|ve|ll))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                 r"\s+(?!\S)|\s+")

# How text is cut before BPE, by the name in `tokenizer.ggml.pre`: regexes, each cutting what the ones before it left.
_SPLITS = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_MODERN_SPLIT % "{1,3}",),
    "qwen2": (_MODERN_SPLIT % "",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9]{3}"),
}
_SPLITS |= {"gpt2": _SPLITS["gpt-2"], "starcoder": _SPLITS["smollm"], "llama3": _SPLITS["llama-bpe"],
            "llama-v3": _SPLITS["llama-bpe"], "deepseek-r1-qwen": _SPLITS["qwen2"]}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def build(metadata: dict[str, Any]) -> FileTokenizer | None:
    """The tokenizer that the metadata of a file describes, or None if there is none.

    Raises:
      ValueError: an unknown kind of tokenizer or of pre-tokenizer, or incomplete metadata.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    known = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in known:
        raise ValueError(f"the file has tokenizer.ggml.model={kind!r}, which is not supported: expected one of "
                         f"{', '.join(known)}{nearest(kind, known)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("the file names a tokenizer but has no tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    backend, adds_bos = known[kind](metadata, tokens, types)
    added = [AddedToken(token, special=type_ != _USER_DEFINED, normalized=False)
             for token, type_ in zip(tokens, types) if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    backend.add_tokens(added)

    def named(name: str) -> str | None:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not 0 <= i < len(tokens):
            raise ValueError(f"the file has tokenizer.ggml.{name}_token_id={i}, but only {len(tokens)} tokens")
        return None if i is None else tokens[i]

    bos, eos = named("bos"), named("eos")
    special = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    before = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    behind = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if before or behind:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind], pair=[*before, "$A", *behind, *before, "$B:1", *behind],
            special_tokens=list(special.items()))
    others = {"unk_token": named("unknown"), "pad_token": named("padding")}
    return FileTokenizer(backend, bos=bos, eos=tuple(dict.fromkeys(filter(None, (eos, named("eot"))))),
                         chat_template=metadata.get("tokenizer.chat_template"),
                         others={name: token for name, token in others.items() if token is not None})


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ValueError(f"the file has tokenizer.ggml.pre={pre!r}, which is not supported: expected one of "
                         f"{', '.join(_SPLITS)}{nearest(pre, _SPLITS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError("the file has a byte-level tokenizer but no tokenizer.ggml.merges")
    backend = tokenizers.Tokenizer(_bpe(tokens, [tuple(merge.split(" ")) for merge in merges],
                                        ignore_merges=pre in _LLAMA3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _LLAMA3


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Sentencepiece joins the neighbours that make the best-scored piece: merges in the order of the scores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ValueError("the file has a sentencepiece tokenizer but no tokenizer.ggml.scores")
    ids = {token: i for i, (token, type_) in enumerate(zip(tokens, types)) if type_ in (_NORMAL, _USER_DEFINED)}
    merges = []
    for piece, i in ids.items():
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        cuts = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        merges += [(-scores[i], i, order, cut[2:]) for order, cut in enumerate(cuts)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(_bpe(
        tokens, [merge[-1] for merge in sorted(merges)], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend, True


def _bpe(tokens: list[str], merges: list[tuple[str, ...]], **options: Any) -> models.BPE:
    try:
        return models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options)
    except Exception as error:          # the library raises nothing more specific
        raise ValueError(f"the file's merges do not fit its vocabulary: {' '.join(str(error).split())}") from None
