"""True claims stand, false ones fall, and the exit status says so."""

import json

import jax.numpy as jnp
import pytest

from parallax.decoding import METHODS, VERIFIERS, Follow, Greedy, Rejection
from parallax.decoding.base import policy
from parallax.proof import command, law, rules, table, tokens
from parallax.proof.record import CONTROL, TARGET, Record
from parallax.proof.subjects import Subject, everything, refusal
from parallax.testing import controls


@policy
class Overeager(Follow):
    """Wrong: takes the first drafted token whatever the target says, and calls that exact."""

    def __call__(self, draft, logits, hidden, ctx):
        verdict = super().__call__(draft, logits, hidden, ctx)
        offered = draft.valid[:, 1] & (verdict.count == 1)
        path = verdict.path.at[:, 1].set(jnp.where(offered, 1, verdict.path[:, 1]))
        node = jnp.where(offered, 1, verdict.node)
        following = jnp.take_along_axis(verdict.targets, node[:, None], 1)[:, 0]
        return verdict._replace(path=path, count=verdict.count + offered, node=node, next=following)


@policy
class Redrawing(Rejection):
    """Wrong: a rejected token is drawn anew from the target, not from the residual."""

    def judge(self, draft, logp, uniform):
        judgement = super().judge(draft, logp, uniform)
        behind = jnp.take_along_axis(logp, judgement.node[:, None, None], 1)[:, 0]
        return judgement._replace(weights=jnp.exp(behind))


@pytest.mark.slow
def test_a_wrong_rule_that_claims_to_be_exact_is_found_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(VERIFIERS, "overeager", Overeager)
    subject = Subject("prompt_lookup", {}, "overeager")
    assert command.prove([subject], quick=True, output=str(tmp_path / "proof.json")) == 1
    told = json.loads((tmp_path / "proof.json").read_text())
    fallen = {record["check"] for record in told["records"] if not record["passed"]}
    assert told["passed"] is False and {"greedy", "seeded"} <= fallen
    out = capsys.readouterr().out
    assert "FAILED" in out and "differs from plain decoding at token" in out


def test_the_same_rule_labelled_lossy_stands_with_its_distance_told(monkeypatch):
    monkeypatch.setattr(Overeager, "guarantee", "lossy")
    monkeypatch.setitem(VERIFIERS, "overeager", Overeager)
    record = tokens.equal_tokens(Subject("prompt_lookup", {}, "overeager"), "greedy", seeds=(0, 1))
    assert record.passed and record.claim == "lossy" and record.numbers["equal_tokens"] < 0.9


def test_a_wrong_law_is_found_out_by_enumeration_and_through_the_loop(monkeypatch):
    monkeypatch.setitem(VERIFIERS, "redrawing", Redrawing)
    records = [task.run() for task in rules.plan(["redrawing"], True) if task.label.split(": ")[1] in
               ("enumerated chain", "law")]
    assert [record.passed for record in records] == [False, False]
    assert records[0].numbers["tv"] > 0.01 and records[1].numbers["p"] < 1e-6


@pytest.mark.slow
def test_a_wrong_law_of_a_whole_method_is_found_out(monkeypatch):
    monkeypatch.setitem(VERIFIERS, "redrawing", Redrawing)
    wrong, right = (law.sampled_law(Subject("draft_model", {}, rule), draws=4000)
                    for rule in ("redrawing", "rejection"))
    assert not wrong.passed and wrong.numbers["p"] < 1e-6
    assert right.passed and right.numbers["accepted_per_step"] > 1


def test_a_right_rule_stands():
    records = [task.run() for task in rules.plan(["rejection"], True) if task.label.split(": ")[1] in
               ("enumerated chain", "law")]
    assert [record.passed for record in records] == [True, True]
    assert records[0].numbers["tv"] < 1e-12 and records[1].numbers["accepted_per_step"] > 0.5


def test_what_raises_is_a_fallen_claim_that_says_why(monkeypatch):
    monkeypatch.setattr(METHODS["prompt_lookup"].drafter, "find", lambda *_: 1 / 0)
    records = [task.run() for task in command.plan([Subject("prompt_lookup")], True)]
    assert not any(record.passed for record in records)
    assert "ZeroDivisionError" in records[0].note


def test_every_negative_control_is_caught_and_one_that_is_not_fails(monkeypatch, capsys):
    assert len(controls.CONTROLS) >= 8
    monkeypatch.setattr(controls, "CONTROLS", {"wrong": lambda: 0.2, "missed": lambda: 1e-12})
    assert command.prove([], controls=True) == 1
    out = capsys.readouterr().out
    assert "NOT CAUGHT" in out and "missed" in out and out.count("caught") >= 1


@pytest.mark.parametrize("name", ["weak drafted token dropped"])
def test_a_control_comes_out_as_wrong(name):
    (task,) = [task for task in rules.controls() if task.label.endswith(name)]
    record = task.run()
    assert record.on == CONTROL and record.passed and record.numbers["tv"] > 0.01


def test_only_what_fits_is_proven():
    assert refusal(Subject("draft_model", {}, "rejection")) is None
    assert "known law" in refusal(Subject("prompt_lookup", {}, "rejection"))
    assert "verifies chains" in refusal(Subject("draft_model", {"tree": "levels(2, 2)"}, "block"))


def test_what_does_not_fit_is_told(monkeypatch, capsys, tmp_path):
    pairs = [Subject("autoregressive"), Subject("prompt_lookup", {}, "rejection")]
    monkeypatch.setattr(command, "everything", lambda *_: pairs)
    monkeypatch.setattr(command, "plan", lambda subjects, quick: [subjects] * 0 if len(subjects) == 1 else 1 / 0)
    assert command.prove(output=str(tmp_path / "proof.json")) == 0
    told = json.loads((tmp_path / "proof.json").read_text())["refused"]
    assert list(told) == ["prompt_lookup rejection"] and "known law" in told["prompt_lookup rejection"]
    assert "1 combinations were refused" in capsys.readouterr().out


def test_all_methods_and_all_rules_are_among_everything():
    found = everything({"temperature": 0.8})
    assert {subject.method for subject in found} == set(METHODS)
    assert {subject.verifier for subject in found} == set(VERIFIERS)
    assert {"tree", "controller"} <= {option for subject in found for option in subject.options}


def test_bad_input_is_refused_before_work(tmp_path):
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    for output, message in ((str(taken), "exists"), (str(tmp_path / "no" / "x.json"), "existing folder")):
        with pytest.raises(ValueError, match=message):
            command.prove([Subject("prompt_lookup")], output=output)
    with pytest.raises(ValueError, match="known law"):
        command.prove([Subject("prompt_lookup", {}, "rejection")])


def test_the_tiny_targets_differ_in_how_soon_they_repeat_themselves():
    lively, looping = (len(set(tokens.reference(seed, ((3, 5, 7),), 24, 3, Greedy())[0][3:])) for seed in (0, 1))
    assert lively > 4 > looping


def test_what_is_drawn_repeats_itself_too_so_that_drafts_from_the_text_are_accepted():
    record = tokens.equal_tokens(Subject("prompt_lookup"), "seeded", seeds=(1,))
    assert record.passed and record.numbers["accepted_per_step"] > 0.1


def test_a_method_that_never_had_a_draft_accepted_is_not_called_proven():
    def verdict(method, accepted):
        record = Record(TARGET, method, "follow", "exact", "greedy", True, {"accepted_per_step": accepted})
        return table._verdict([record])

    assert "proven" in verdict("m", 0.1) and "proven" in verdict("autoregressive", 0.0)
    assert "no draft accepted" in verdict("m", 0.0)
