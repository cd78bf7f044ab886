"""Prompts in, text out: what the command line, the notebooks and scripts call.

    lm = parallax.LanguageModel.load("smollm2-135m")
    run = lm.generate(["Rewrite this: ..."], method="prompt_lookup", chat=True)
    print(run.completions[0].text, run.tokens_per_forward)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallax import zoo
from parallax.checkpoint import Checkpoint
from parallax.decoding import Speculative, loop, make_decoder, make_sampler
from parallax.decoding import method as method_of
from parallax.decoding.base import DecodeState, StepInfo
from parallax.decoding.corpus import load_corpus
from parallax.decoding.sampling import Sampler, of_rows, sequences
from parallax.kernels.dispatch import Kernels
from parallax.models import Model
from parallax.models.config import check_kernels
from parallax.tokenizer import Tokenizer

_STEPS_PER_LOOK = 8          # steps between two looks of the host, where it has to look (stop strings, streaming)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One prompt's result. `ids` end with the end-of-text token if there was one; `text` has neither that nor the stop
    string. `finish`: `eos`, `stop` (a stop string) or `length`. The counters are those of the steps that ran, which may
    be a few more than it took where the host looks for stop strings only now and then."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish: str
    target_forwards: int
    target_rows: int                      # block rows that these computed
    accepted: int
    proposed: int
    draft_forwards: int
    accepted_at: tuple[int, ...]          # steps that accepted a token at depth 1, 2, ...
    proposed_at: tuple[int, ...]          # steps that had one to offer there


@dataclasses.dataclass(frozen=True)
class Run:
    """All completions and where the time went, in seconds. Compile time is never part of the others."""

    method: str
    guarantee: str
    completions: tuple[Completion, ...]
    prefill: float
    decode: float
    compile: float

    @property
    def tokens(self) -> int:
        return sum(len(c.ids) for c in self.completions)

    @property
    def target_forwards(self) -> int:
        """Target forwards per sequence, summed over sequences."""
        return sum(c.target_forwards for c in self.completions)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.target_forwards, 1)

    @property
    def acceptance(self) -> float | None:
        """Accepted / proposed draft tokens; None for a method that proposes none."""
        proposed = sum(c.proposed for c in self.completions)
        return sum(c.accepted for c in self.completions) / proposed if proposed else None


class LanguageModel:
    """A model on the device with its tokenizer, perhaps a draft model for it, and the programs compiled for them."""

    def __init__(self, checkpoint: Checkpoint, draft: Checkpoint | None = None):
        """Raises ValueError if the draft model has another vocabulary than the target, or weights that are no numbers.
        """
        self.model = Model(checkpoint.config)
        self.tokenizer = checkpoint.tokenizer
        self.eos_ids = checkpoint.eos_ids
        self.params = {"target": jax.tree.map(jnp.asarray, checkpoint.params)}
        self.draft = None
        if draft is not None:
            check_vocabularies(checkpoint, draft)
            self.draft = Model(draft.config)
            self.params["draft"] = jax.tree.map(jnp.asarray, draft.params)
            _check_weights(self.params["draft"])
        self._programs: dict[Any, Any] = {}

    @classmethod
    def load(cls, name: str, *, draft: str | None = None, dtype: str | None = None,
             scan_layers: bool = False, kernels: Kernels = "auto") -> "LanguageModel":
        """From a zoo name, a Hugging Face folder, a GGUF file or a Hub id.

        draft: the same of a draft model, which the method `draft_model` needs.
        dtype: None takes float32 on CPU, where XLA's bfloat16 matrix-vector product is 8 times slower, else the
        checkpoint's own.
        kernels: `auto` takes the Pallas kernels on TPU and GPU, `xla` none; `pallas` also interprets them on a CPU.

        Raises:
          FileNotFoundError: no such path.
          ValueError: an unknown name, a damaged checkpoint, or a draft model with another vocabulary or with weights
            that are not finite numbers.
        """
        check_kernels(kernels)
        if dtype is None and jax.default_backend() == "cpu":
            dtype = "float32"
        options = dict(dtype=dtype, scan_layers=scan_layers, put=jnp.asarray)

        def read(source: str) -> Checkpoint:
            found = zoo.load(source, **options)
            return found._replace(config=found.config.replace(kernels=kernels))

        drafter = read(draft) if draft else None                              # first: it is the smaller one
        return cls(read(name), drafter)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def encode(self, prompt: str, *, chat: bool = False, system: str | None = None) -> list[int]:
        """Token ids of a prompt; with `chat`, of a user message in the model's chat template."""
        if not prompt:
            raise ValueError("the prompt is empty: give it at least one character")
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: give token ids, or add its tokenizer.json")
        if not chat:
            return self.tokenizer.encode(prompt)
        messages = [{"role": "system", "content": system}] if system else []
        text = self.tokenizer.chat([*messages, {"role": "user", "content": prompt}])
        return self.tokenizer.encode(text, special=False)

    def decoder(self, method: str = "prompt_lookup", options: dict[str, Any] | None = None, *,
                verifier: str = "follow", ignore_eos: bool = False, **sampling: Any) -> Speculative:
        """What `generate` decodes with, for the same arguments."""
        return self._decoder(method, options, verifier, ignore_eos, self._sampler(sampling))

    def _decoder(self, method, options, verifier, ignore_eos, sampler: Sampler) -> Speculative:
        options = {name: value for name, value in (options or {}).items() if value is not None}
        if isinstance(options.get("corpus"), str):
            options["corpus"] = load_corpus(options["corpus"], self.tokenizer)
        return make_decoder(method, self.model, sampler=sampler, eos=() if ignore_eos else self.eos_ids,
                            verifier=verifier, draft=self.draft if method_of(method).needs_draft else None,
                            **options)

    def _sampler(self, sampling: dict[str, Any]) -> Sampler:
        """Raises ValueError for a setting out of range, or a bias of a token that the model does not have."""
        sampler, size = make_sampler(**sampling), self.model.config.vocab_size
        if sampler.logit_bias is not None and sampler.logit_bias.tokens.max() >= size:
            raise ValueError(f"logit_bias names token {sampler.logit_bias.tokens.max()}, the model's vocabulary is 0 "
                             f"to {size - 1}")
        return sampler

    def generate(self, prompts: Sequence[str | Sequence[int]], *, method: str = "prompt_lookup",
                 options: dict[str, Any] | None = None, verifier: str = "follow", max_new_tokens: int = 128,
                 seed: int = 0, row_ids: Sequence[int] | None = None, chat: bool = False, system: str | None = None,
                 stop: Sequence[str] = (), ignore_eos: bool = False, batch_size: int = 1,
                 on_tokens: Callable[[int, Sequence[int]], None] | None = None,
                 on_completion: Callable[[int, Completion], None] | None = None, **sampling: Any) -> Run:
        """Decodes prompts in batches.

        Args:
          prompts: texts or token ids.
          method, options: a key of `decoding.METHODS` and its options.
          verifier: a key of `decoding.VERIFIERS`.
          max_new_tokens: per prompt, end of text included.
          seed: with the prompt's id it decides all noise, whatever the batch size and the exact method.
          row_ids: ids of the prompts, their indices by default. A job that is resumed gives those it had before.
          chat, system: wrap text prompts in the model's chat template.
          stop: strings that end a completion; they are left out of its text.
          ignore_eos: go on at end of text (for measurements).
          batch_size: prompts decoded together.
          on_tokens: called with (prompt index, its new ids) as they come.
          on_completion: called with (prompt index, completion) as soon as it is whole.
          **sampling: temperature (0, greedy, by default), top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff,
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias; each one value, or a list of one per
            prompt. See `decoding.make_sampler` and `decoding.warpers`.

        Raises:
          ValueError: bad arguments, before anything is compiled.
          FloatingPointError: logits that are not numbers.
        """
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not -2**31 <= seed < 2**32:                       # JAX would drop the upper bits
            raise ValueError(f"seed must be a number of 32 bits, got {seed}")
        for name, value in (("prompts", prompts), ("stop", stop)):
            if isinstance(value, str):                       # a sequence too: of one-character strings
                raise ValueError(f"{name} must be a list of strings, got the string {value[:40]!r}: put it in a list")
        if not len(prompts):
            raise ValueError("there are no prompts: give at least one")
        if any(not text for text in stop):
            raise ValueError("a stop string is empty: give it at least one character")
        if stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer and this checkpoint has none")
        names = np.arange(len(prompts)) if row_ids is None else np.asarray(row_ids)
        whole = names.shape == (len(prompts),) and names.dtype.kind in "iu"
        if not whole or not 0 <= names.min() <= names.max() < 2**31:
            raise ValueError(f"row_ids must be one whole number per prompt ({len(prompts)}), from 0 to 2**31 - 1, got "
                             f"{row_ids!r:.60}")
        sampler = self._sampler(sampling)
        for count in sequences(sampler) - {len(prompts)}:
            raise ValueError(f"a setting of the sampler has {count} values for {len(prompts)} prompts: give one value, "
                             "or one per prompt")
        decoder = self._decoder(method, options, verifier, ignore_eos, sampler)
        rows = [self.encode(p, chat=chat, system=system) if isinstance(p, str) else list(p) for p in prompts]
        longest, vocabulary = self.model.config.max_positions, self.model.config.vocab_size
        for i, row in enumerate(rows):
            if not row:
                raise ValueError(f"prompt {i} is empty: decoding starts from at least one token")
            if not 0 <= min(row) <= max(row) < vocabulary:
                wrong = next(token for token in row if not 0 <= token < vocabulary)
                raise ValueError(f"prompt {i} holds token {wrong}, the model's vocabulary is 0 to {vocabulary - 1}")
            if len(row) + max_new_tokens > longest:
                raise ValueError(f"prompt {i} has {len(row)} tokens and max_new_tokens={max_new_tokens}, together more "
                                 f"than the model's {longest} positions: shorten one of them")
        # What a method does not use would be part of its program all the same.
        params = self.params if method_of(method).needs_draft else {"target": self.params["target"]}
        key = jax.random.key(seed)
        done: list[Completion] = []
        seconds = np.zeros(3)
        for first in range(0, len(rows), batch_size):
            batch = rows[first:first + batch_size]
            own = of_rows(sampler, first, first + batch_size)
            decoder = self._decoder(method, options, verifier, ignore_eos, own)
            completions, spent = self._batch(decoder, params, batch, first, names[first:first + batch_size], key,
                                             max_new_tokens, tuple(stop), on_tokens)
            for i, completion in enumerate(completions, first):
                if on_completion is not None:
                    on_completion(i, completion)
            done += completions
            seconds += spent
        return Run(method, decoder.guarantee, tuple(done), *map(float, seconds))

    def _batch(self, decoder, params, batch, first, names, key, max_new_tokens, stop, on_tokens):
        """(completions, [prefill, decode, compile] seconds) of prompts first, first + 1, ..."""
        lengths = np.asarray([len(row) for row in batch])
        # Learned positions end with the table: there a bucket may not go beyond what the longest allowed prompt needs.
        width = min(_bucket(int(lengths.max())), self.model.config.max_positions - max_new_tokens)
        prompt = np.zeros((len(batch), width), np.int32)
        for i, row in enumerate(batch):
            prompt[i, :len(row)] = row
        capacity = width + max_new_tokens
        inputs = loop.cast(decoder, params, prompt, lengths, names, key, lengths + max_new_tokens, capacity=capacity)
        look = stop or on_tokens is not None
        steps = jnp.int32(_STEPS_PER_LOOK if look else np.iinfo(np.int32).max)
        prefill, compile_prefill = self._program(loop.prefill, inputs, capacity=capacity)
        began = time.perf_counter()
        state = jax.block_until_ready(prefill(inputs))
        prefilled = time.perf_counter() - began
        advance, compile_advance = self._program(loop.advance, inputs.decoder, inputs.params, state, steps)
        decoding = 0.0
        total = jax.tree.map(np.asarray, StepInfo.zeros(len(batch), decoder.depth))
        shown = lengths.copy()
        while True:
            began = time.perf_counter()
            state, info = advance(inputs.decoder, inputs.params, state, steps)
            finished = np.asarray(state.done)
            decoding += time.perf_counter() - began
            loop.check_finite(info)
            total = jax.tree.map(lambda a, b: a + np.asarray(b), total, info)
            if look:
                state, shown = self._look(state, lengths, shown, first, stop, on_tokens)
                finished = np.asarray(state.done)
            if finished.all():
                break
        tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
        completions = [self._completion(decoder, batch[i], tokens[i, lengths[i]:ends[i]], stop,
                                        jax.tree.map(lambda x, i=i: x[i].tolist(), total)) for i in range(len(batch))]
        return completions, (prefilled, decoding, compile_prefill + compile_advance)

    def _look(self, state: DecodeState, lengths, shown, first, stop, on_tokens):
        """Ends rows whose text holds a stop string; hands new tokens on."""
        tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
        stopped = np.zeros(len(ends), bool)
        for i, end in enumerate(ends):
            new = tokens[i, lengths[i]:end]
            cut = self._stop_at(new, stop)
            stopped[i] = cut is not None
            if on_tokens is not None and end > shown[i]:
                on_tokens(first + i, tokens[i, shown[i]:end if cut is None else lengths[i] + cut].tolist())
        return state._replace(done=state.done | jnp.asarray(stopped)), ends

    def _stop_at(self, ids: np.ndarray, stop: tuple[str, ...]) -> int | None:
        """How many of `ids` it takes until a stop string is there; None if it is not."""
        def holds(count):
            text = self.tokenizer.decode(ids[:count].tolist())
            return any(s in text for s in stop)

        if not stop or not holds(len(ids)):
            return None
        low, high = 0, len(ids)                        # holds(high) is true, holds(low) false
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def _completion(self, decoder, prompt, new, stop, info: StepInfo) -> Completion:
        cut = self._stop_at(new, stop)
        ids = tuple(int(t) for t in (new if cut is None else new[:cut]))
        text = self.tokenizer.decode(list(ids)) if self.tokenizer is not None else ""
        finish = "eos" if ids and ids[-1] in decoder.eos else "length"
        if cut is not None:
            text = text[:min(text.find(s) for s in stop if s in text)]
            finish = "stop"
        return Completion(tuple(prompt), ids, text, finish, info.target_forwards, info.target_rows, info.accepted,
                          info.proposed, info.draft_forwards, tuple(info.accepted_at), tuple(info.proposed_at))

    def _program(self, function, *args, **static):
        """(compiled function, seconds spent compiling): compiled once per structure and shape, timed apart."""
        leaves, structure = jax.tree.flatten(args)
        key = (function, tuple(static.items()), structure, tuple((x.shape, str(x.dtype)) for x in leaves))
        if key in self._programs:
            return self._programs[key], 0.0
        began = time.perf_counter()
        self._programs[key] = function.lower(*args, **static).compile()
        return self._programs[key], time.perf_counter() - began


def _bucket(length: int) -> int:
    """Prompt slots: a power of two from 16, so that prompts of similar length share one program."""
    return max(16, 1 << (length - 1).bit_length())


def check_vocabularies(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises ValueError unless every id stands for the same token in both."""
    theirs, ours = target.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft model must have the target's vocabulary: expected {theirs} tokens, got {ours}; "
                         "use a draft with the target's tokenizer")
    if target.tokenizer is None or draft.tokenizer is None:
        return
    theirs, ours = _vocabulary(target.tokenizer), _vocabulary(draft.tokenizer)
    different = sorted(i for i in theirs.keys() | ours.keys() if theirs.get(i) != ours.get(i))
    if different:
        i = different[0]
        raise ValueError(f"the draft model must have the target's tokenizer, but {len(different)} ids differ: expected "
                         f"{theirs.get(i)!r} for {i}, got {ours.get(i)!r}; use another draft")


def _check_weights(params: Any) -> None:
    """Raises ValueError for weights that are not finite: their drafts would all be rejected, and nobody would know."""
    finite = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree))(params)
    broken = [jax.tree_util.keystr(path) for path, fine in jax.tree_util.tree_leaves_with_path(finite) if not fine]
    if broken:
        raise ValueError(f"{len(broken)} weights of the draft model that are not finite numbers, first {broken[0]}: "
                         "give another draft model")


def _vocabulary(tokenizer: Tokenizer) -> dict[int, str]:
    """What every id stands for."""
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        return {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    return {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
