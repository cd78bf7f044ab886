"""The same claims on a model of the user's, with prompts: token equality, and near-ties in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallax import prompts as prompt_files
from parallax.generate import LanguageModel, Run
from parallax.proof import ties
from parallax.proof.record import Record
from parallax.proof.subjects import Subject
from parallax.proof.tokens import parting, share

PROMPTS = (prompt_files.EDITING, "Why is the sky blue?", "Repeat this three times: the cat sat on the mat.")


class Real:
    """A loaded model and what plain decoding writes with it, which all methods are compared with.

    Args:
      name: for the table.
      lm: the model.
      texts: prompts, decoded together, as chats if the model has a template.
      new_tokens: per prompt, at most.
    """

    def __init__(self, name: str, lm: LanguageModel, texts: Sequence[str] = PROMPTS, new_tokens: int = 48):
        self.name, self._lm, self._new = name, lm, new_tokens
        self._prompts = [lm.encode(text, chat=lm.chats) for text in texts]
        self._plain: dict[str, Run] = {}

    def equal_tokens(self, subject: Subject, check: str) -> Record:
        """`greedy` or `seeded`, as `tokens.equal_tokens`."""
        sampling = {} if check == "greedy" else dict(subject.sampling)
        run, plain = self._runs(subject, sampling)
        pairs = [(ours.ids, theirs.ids) for ours, theirs in zip(run.completions, plain.completions)]
        parts = [parting(*pair) for pair in pairs]
        wrong = next((i for i, at in enumerate(parts) if at is not None), None)
        note = ""
        if wrong is not None and run.guarantee == "exact":
            note = f"prompt {wrong} differs from plain decoding at token {parts[wrong]}"
            if check == "greedy":
                gap = ties.divergences([self._texts(wrong, pairs)], self._logits)[0]["gap"]
                note += f", where one of the two logits is {gap:.1e} below the best"
        numbers = {"equal": parts.count(None), "of": len(parts), "equal_tokens": share(pairs),
                   "accepted_per_step": sum(c.accepted for c in run.completions) / run.target_forwards}
        return Record(self.name, subject.label, subject.verifier, run.guarantee, check, not note, numbers, note)

    def near_ties(self, subject: Subject) -> Record:
        """For a model that was loaded in bfloat16."""
        run, plain = self._runs(subject, {})
        pairs = [(ours.ids, theirs.ids) for ours, theirs in zip(run.completions, plain.completions)]
        found = ties.divergences([self._texts(i, pairs) for i in range(len(pairs))], self._logits)
        return ties.record(self.name, subject.label, subject.verifier, run.guarantee, found, len(pairs))

    def _runs(self, subject: Subject, sampling: dict[str, Any]) -> tuple[Run, Run]:
        key = repr(sorted(sampling.items()))
        if key not in self._plain:
            self._plain[key] = self._run("autoregressive", {}, "follow", sampling)
        return self._run(subject.method, dict(subject.options), subject.verifier, sampling), self._plain[key]

    def _run(self, method, options, verifier, sampling) -> Run:
        return self._lm.generate(self._prompts, method=method, options=options, verifier=verifier,
                                 max_new_tokens=self._new, batch_size=len(self._prompts), **sampling)

    def _texts(self, i: int, pairs) -> tuple[list[int], list[int]]:
        return tuple([*self._prompts[i], *ids] for ids in pairs[i])

    def _logits(self, tokens):
        return ties.logits_behind(self._lm.model, self._lm.params["target"], tokens)
