"""Text generation in batches, on a tiny random model."""

import jax
import numpy as np
import pytest
import tokenizers

from parallax import checkpoint
from parallax.checkpoint import Checkpoint
from parallax.decoding import METHODS, loop
from parallax.generate import LanguageModel
from parallax.models.config import ModelConfig
from parallax.models.transformer import Model
from parallax.tokenizer import ByteTokenizer, FileTokenizer

PROMPTS = ["the quick brown fox", "a cat", "x = 1\nx = 1\nx ="]
SAMPLED = {"temperature": 0.9, "top_k": 50, "seed": 7}
NEW = 24                # everywhere, so that few programs are compiled


def ids(run):
    return [completion.ids for completion in run.completions]


@pytest.fixture(scope="module")
def draft_folder(tiny_folder, tmp_path_factory):
    """A draft model that often agrees with the tiny model: its weights are a little off."""
    tiny, random = checkpoint.load(tiny_folder), np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: leaf * (1 + random.normal(0, 0.05, leaf.shape).astype(leaf.dtype)), tiny.params)
    folder = tmp_path_factory.mktemp("draft") / "model"
    checkpoint.save(tiny._replace(params=params), folder)
    return folder


@pytest.fixture(scope="module")
def tiny_lm(tiny_folder, draft_folder):
    return LanguageModel.load(str(tiny_folder), draft=str(draft_folder))


@pytest.fixture(scope="module")
def plain(tiny_lm):
    """Plain decoding of PROMPTS, one by one: the reference."""
    return tiny_lm.generate(PROMPTS, method="autoregressive", max_new_tokens=NEW)


@pytest.fixture(scope="module")
def plain_sampled(tiny_lm):
    return tiny_lm.generate(PROMPTS, method="autoregressive", max_new_tokens=NEW, **SAMPLED)


@pytest.fixture
def eos(tiny_lm, plain, monkeypatch):
    """Makes a token that the first completion holds the end of text; returns how many tokens that leaves."""
    tokens = plain.completions[0].ids
    at = next(i for i in range(9, NEW) if tokens.index(tokens[i]) == i)
    monkeypatch.setattr(tiny_lm, "eos_ids", (tokens[at],))
    return at + 1


CORE = ("autoregressive", "prompt_lookup", "draft_model", "combined")         # the others: tests/decoding/test_kit.py
EACH = [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", EACH)
def test_greedy_text_is_that_of_plain_decoding(method, batch_size, tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS, method=method, max_new_tokens=NEW, batch_size=batch_size)
    assert ids(run) == ids(plain)
    assert [c.text for c in run.completions] == [tiny_lm.tokenizer.decode(c.ids) for c in plain.completions]
    assert [c.prompt_ids for c in run.completions] == [tuple(tiny_lm.encode(prompt)) for prompt in PROMPTS]
    assert (run.method, run.guarantee, run.tokens) == (method, "exact", 3 * NEW)
    assert run.target_forwards <= 3 * NEW and run.tokens_per_forward == 3 * NEW / run.target_forwards
    for completion in run.completions:
        assert completion.finish == "length"
        assert completion.target_forwards + completion.accepted >= NEW and completion.accepted <= completion.proposed


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", EACH)
@pytest.mark.often("3$")
def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(method, batch_size, tiny_lm, plain, plain_sampled):
    run = tiny_lm.generate(PROMPTS, method=method, max_new_tokens=NEW, batch_size=batch_size, **SAMPLED)
    assert ids(run) == ids(plain_sampled) != ids(plain)


def test_plain_decoding_takes_one_forward_per_token_and_drafts_nothing(plain):
    assert plain.tokens_per_forward == 1 and plain.acceptance is None
    assert plain.target_forwards == plain.tokens == 3 * NEW


@pytest.mark.parametrize("method", ["token_recycling", "draft_model"])
def test_drafts_that_come_true_save_forwards(method, tiny_lm):
    run = tiny_lm.generate(PROMPTS, method=method, max_new_tokens=NEW)
    accepted = sum(completion.accepted for completion in run.completions)
    assert 3 * NEW - accepted <= run.target_forwards < 3 * NEW             # a last draft may be cut at the end
    assert run.acceptance == accepted / sum(completion.proposed for completion in run.completions)


def test_text_does_not_depend_on_the_order_of_the_prompts(tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS[::-1], max_new_tokens=NEW, batch_size=3)
    assert ids(run) == ids(plain)[::-1]


def test_noise_depends_on_the_seed_and_the_place_of_a_prompt_only(tiny_lm, plain_sampled):
    def sample(prompts, **changes):
        return ids(tiny_lm.generate(prompts, method="autoregressive", max_new_tokens=NEW, **{**SAMPLED, **changes}))

    assert sample([PROMPTS[2], PROMPTS[1]])[1] == ids(plain_sampled)[1]
    first, second = sample([PROMPTS[1]] * 2)
    assert first != second == ids(plain_sampled)[1]
    assert sample([PROMPTS[0]], seed=8) != ids(plain_sampled)[:1]


def test_a_job_that_is_resumed_in_the_middle_draws_the_same_noise(tiny_lm, plain_sampled):
    settings = dict(method="autoregressive", max_new_tokens=NEW, **SAMPLED)
    assert ids(tiny_lm.generate(PROMPTS[1:], row_ids=[1, 2], **settings)) == ids(plain_sampled)[1:]
    assert ids(tiny_lm.generate(PROMPTS[::-1], row_ids=(2, 1, 0), batch_size=3, **settings)) == ids(plain_sampled)[::-1]
    assert ids(tiny_lm.generate(PROMPTS[:1], row_ids=[5], **settings)) != ids(plain_sampled)[:1]


@pytest.mark.slow
def test_rejection_sampling_does_not_depend_on_the_batch(tiny_lm, plain_sampled):
    settings = dict(method="draft_model", verifier="rejection", max_new_tokens=NEW, **SAMPLED)
    together = tiny_lm.generate(PROMPTS, batch_size=3, **settings)
    assert together.guarantee == "distribution" and together.tokens_per_forward > 1.2
    assert ids(tiny_lm.generate(PROMPTS[1:], row_ids=[1, 2], **settings)) == ids(together)[1:] != ids(plain_sampled)[1:]
    assert together.completions[0].draft_forwards == 4 * together.completions[0].target_forwards


def test_rejection_sampling_at_temperature_zero_is_greedy(tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS[:1], method="draft_model", verifier="rejection", max_new_tokens=NEW)
    assert (run.guarantee, ids(run)) == ("exact", ids(plain)[:1])


def test_the_draft_model_is_only_handed_to_programs_that_use_it(tiny_lm, monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "cast", lambda decoder, params, *rest, **options: seen.append(sorted(params)) or 1 / 0)
    for method in METHODS:
        with pytest.raises(ZeroDivisionError):
            tiny_lm.generate(PROMPTS[:1], method=method)
    assert seen == [["draft", "target"] if METHODS[method].needs_draft else ["target"] for method in METHODS]


def test_a_model_without_a_draft_model_says_that_one_is_needed(tiny_folder):
    lm = LanguageModel(checkpoint.load(tiny_folder))
    with pytest.raises(ValueError, match="method 'draft_model' needs a draft model: give one .* as draft"):
        lm.generate(PROMPTS, method="draft_model")


def test_a_draft_model_with_another_vocabulary_is_refused(tiny_folder):
    tiny = checkpoint.load(tiny_folder)
    small = tiny._replace(config=tiny.config.replace(vocab_size=299))
    with pytest.raises(ValueError, match="expected 300 tokens, got 299; use a draft with the target's tokenizer"):
        LanguageModel(tiny, small)
    other = FileTokenizer(tokenizers.Tokenizer.from_str(tiny.tokenizer.backend.to_str().replace('"</s>"', '"<end>"')))
    with pytest.raises(ValueError, match="but 1 ids differ: expected '</s>' for 1, got '<end>'; use another draft"):
        LanguageModel(tiny, tiny._replace(tokenizer=other))
    with pytest.raises(ValueError, match="must have the target's tokenizer, but .* ids differ"):
        LanguageModel(tiny, tiny._replace(tokenizer=ByteTokenizer()))
    LanguageModel(tiny, tiny._replace(tokenizer=None))                     # nothing to compare


def test_token_ids_are_prompts_too_and_need_no_tokenizer(tiny_lm, plain, monkeypatch):
    rows = [tiny_lm.encode(prompt) for prompt in PROMPTS]
    assert ids(tiny_lm.generate(rows, method="autoregressive", max_new_tokens=NEW)) == ids(plain)
    monkeypatch.setattr(tiny_lm, "tokenizer", None)
    run = tiny_lm.generate(np.asarray(rows[:1]), method="autoregressive", max_new_tokens=NEW)
    assert ids(run) == ids(plain)[:1] and run.completions[0].text == ""


def test_a_chat_is_written_in_the_template_of_the_model(tiny_lm):
    decode = tiny_lm.tokenizer.decode
    assert decode(tiny_lm.encode("hi", chat=True)) == "[user] hi\n[assistant] "
    assert decode(tiny_lm.encode("hi", chat=True, system="Be brief.")) == "[system] Be brief.\n[user] hi\n[assistant] "


@pytest.mark.parametrize("max_new_tokens", [1, NEW - 1, NEW])
def test_text_is_as_long_as_was_asked_for(max_new_tokens, tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS[:1], method="autoregressive", max_new_tokens=max_new_tokens)
    assert ids(run) == [plain.completions[0].ids[:max_new_tokens]]
    assert run.target_forwards == max_new_tokens


@pytest.mark.parametrize("method", EACH)
def test_end_of_text_ends_a_completion(method, eos, tiny_lm, plain):
    first, second, third = tiny_lm.generate(PROMPTS, method=method, max_new_tokens=NEW, batch_size=3).completions
    assert first.ids == plain.completions[0].ids[:eos] and first.finish == "eos"
    for ours, theirs in ((second, plain.completions[1]), (third, plain.completions[2])):
        assert ours.ids == theirs.ids[:len(ours.ids)]
        assert ours.finish == ("length" if len(ours.ids) == NEW else "eos")


def test_end_of_text_can_be_ignored(eos, tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS[:1], method="autoregressive", max_new_tokens=NEW, ignore_eos=True)
    assert run.completions[0].ids == plain.completions[0].ids and run.completions[0].finish == "length"


def test_the_text_has_no_end_token(tiny_lm, monkeypatch):
    head = np.zeros_like(tiny_lm.params["target"]["head"])
    params = {"target": {**tiny_lm.params["target"], "head": jax.numpy.asarray(head)}}     # all equal: token 0 wins
    monkeypatch.setattr(tiny_lm, "params", params)
    monkeypatch.setattr(tiny_lm, "eos_ids", (0,))
    completion, = tiny_lm.generate(["a cat"], method="autoregressive", max_new_tokens=NEW).completions
    assert (completion.ids, completion.text, completion.finish) == ((0,), "", "eos")


def pieces_of(tiny_lm, **settings):
    """(run, all that on_tokens got, how often it was called), per prompt."""
    got = {}
    run = tiny_lm.generate(PROMPTS, max_new_tokens=NEW, on_tokens=lambda i, new: got.setdefault(i, []).append(new),
                           **settings)
    return run, [tuple(sum(got[i], [])) for i in range(3)], [len(got[i]) for i in range(3)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("method", ["autoregressive", "prompt_lookup"])
def test_tokens_come_in_pieces_that_make_up_the_completion(method, batch_size, tiny_lm, plain):
    run, pieces, calls = pieces_of(tiny_lm, method=method, batch_size=batch_size)
    assert pieces == ids(run) == ids(plain)
    assert min(calls) > 1


def stop_string(tiny_lm, completion, first, last):
    """The text of tokens first to last without the outer halves of the outer ones: it spans several tokens."""
    pieces = [tiny_lm.tokenizer.decode([token]) for token in completion.ids]
    text = pieces[first][-1] + "".join(pieces[first + 1:last]) + pieces[last][0]
    assert len(text) >= 3 and completion.text.count(text) == 1
    return text


@pytest.mark.parametrize("first", [2, 10, 20])
@pytest.mark.parametrize("method", ["autoregressive", "prompt_lookup"])
def test_a_stop_string_ends_a_completion_and_is_cut_off(method, first, tiny_lm, plain):
    whole = plain.completions[0]
    stop = stop_string(tiny_lm, whole, first, first + 2)
    settings = dict(method=method, stop=("does not occur", stop))
    run = tiny_lm.generate(PROMPTS, max_new_tokens=NEW, **settings)
    completion = run.completions[0]
    assert completion.text == whole.text[:whole.text.index(stop)]
    assert completion.ids == whole.ids[:first + 3] and completion.finish == "stop"
    assert ids(run)[1:] == ids(plain)[1:]
    streamed, pieces, _ = pieces_of(tiny_lm, **settings)
    assert streamed.completions == run.completions and pieces == ids(run)
    together, pieces, _ = pieces_of(tiny_lm, **settings, batch_size=3)
    assert ids(together) == pieces == ids(run)
    assert [c.text for c in together.completions] == [c.text for c in run.completions]


def test_the_earliest_of_several_stop_strings_counts(tiny_lm, plain):
    whole = plain.completions[0]
    early, late = stop_string(tiny_lm, whole, 3, 5), stop_string(tiny_lm, whole, 4, 6)
    completion, = tiny_lm.generate(PROMPTS[:1], method="autoregressive", max_new_tokens=NEW,
                                   stop=[late, early]).completions
    assert completion.text == whole.text[:whole.text.index(early)] and completion.ids == whole.ids[:6]


def test_compilation_is_timed_apart_and_happens_once(tiny_folder):
    lm = LanguageModel.load(str(tiny_folder))
    settings = dict(method="autoregressive", max_new_tokens=NEW + 1)                       # a shape of its own
    first = lm.generate(PROMPTS, **settings)
    assert first.compile > 10 * (first.prefill + first.decode) > 0
    programs = len(lm._programs)
    assert programs == 2                                        # prefill and steps, for all three prompts
    for prompts, changes in ((PROMPTS, {}), (["another one"], {}), (PROMPTS, {"seed": 3, "stop": ["none"]})):
        assert lm.generate(prompts, **settings, **changes).compile == 0.0
    assert len(lm._programs) == programs
    for batch_size in (3, 1):
        lm.generate(PROMPTS, **settings, batch_size=batch_size)
    assert len(lm._programs) == 2 * programs


def test_learned_positions_can_be_used_to_the_last():
    config = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4,
                         intermediate_size=8, max_positions=40, positions="learned", norm="layernorm", gated_mlp=False)
    params = jax.jit(Model(config).init)(jax.random.key(0))
    lm = LanguageModel(Checkpoint(config, params, None, ()))
    run = lm.generate([[1] * 33], max_new_tokens=7)             # 33 tokens would take a bucket of 64
    assert len(run.completions[0].ids) == 7


PER_PROMPT = {"temperature": [0.0, 0.8, 1.2], "top_p": [1.0, 0.9, 1.0], "frequency_penalty": [1.5, 0.0, 1.0],
              "logit_bias": [{}, {65: 3.0}, {}]}


def test_each_prompt_may_have_its_own_settings_in_any_batch(tiny_lm):
    ours = {size: tiny_lm.generate(PROMPTS, max_new_tokens=NEW, batch_size=size, seed=7, **PER_PROMPT)
            for size in (2, 3)}
    for i, prompt in enumerate(PROMPTS):
        settings = {name: values[i] for name, values in PER_PROMPT.items()}
        alone = tiny_lm.generate([prompt], method="autoregressive", max_new_tokens=NEW, row_ids=[i], seed=7, **settings)
        assert [ids(run)[i] for run in ours.values()] == ids(alone) * 2


def test_a_lossy_rule_is_named_so(tiny_lm, plain):
    run = tiny_lm.generate(PROMPTS[:1], method="draft_model", verifier=f"min_block({NEW})", max_new_tokens=NEW)
    assert run.guarantee == "lossy" != plain.guarantee and ids(run)[0] != plain.completions[0].ids
    assert run.completions[0].accepted == run.completions[0].proposed


@pytest.mark.parametrize("prompts, settings, message", [
    ([], {}, "there are no prompts: give at least one"),
    ([""], {}, "the prompt is empty"),
    (["a", []], {}, "prompt 1 is empty"),
    ("a text", {}, "prompts must be a list of strings, got the string 'a text'"),
    ([[1, 300]], {}, "prompt 0 holds token 300, the model's vocabulary is 0 to 299"),
    ([[1], [2, -1]], {}, "prompt 1 holds token -1"),
    (["a", [1] * 240], {}, "prompt 1 has 240 tokens and max_new_tokens=24, together more than .* 256 positions"),
    (["a"], {"max_new_tokens": 256}, "max_new_tokens=256, together more than"),
    (["a"], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    (["a"], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (["a"], {"seed": 2**32}, "seed must be a number of 32 bits, got 4294967296"),
    (["a"], {"method": "prompt_lokup"}, "unknown method 'prompt_lokup': .*autoregressive.*mean 'prompt_lookup'"),
    (["a"], {"options": {"draft_lenght": 3}}, "has no option 'draft_lenght': .*did you mean 'draft_length'"),
    (["a"], {"options": {"draft_length": 0}}, "draft_length must be at least 1, got 0"),
    (["a"], {"method": "autoregressive", "options": {"nodes": 3}}, r"no option 'nodes': expected one of \(none\)"),
    (["a"], {"temperature": -1}, "temperature must be 0 .* or from 1e-30 to 1e30, got -1"),
    (["a"], {"temperature": float("nan")}, "temperature must be 0 .* or from 1e-30 to 1e30, got nan"),
    (["a"], {"temperature": 1, "top_k": -1}, "top_k must be .*, got -1"),
    (["a"], {"temperature": 1, "top_k": 1.5}, "top_k must be .*, got 1.5"),
    (["a"], {"temperature": 1, "top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
    (["a"], {"temperature": 1, "top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    (["a"], {"temperature": 1, "min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
    (["a"], {"temperature": [0.5, 1.0]}, "a setting of the sampler has 2 values for 1 prompts: give one value, or one"),
    (["a", "b"], {"logit_bias": [{1: 1.0}] * 3}, "a setting of the sampler has 3 values for 2 prompts"),
    (["a"], {"logit_bias": {300: 1.0}}, "logit_bias names token 300, the model's vocabulary is 0 to 299"),
    (["a"], {"repetition_penalty": 0}, "repetition_penalty must be from 1e-6 to 1e6, 1 for none, got 0"),
    (["a"], {"verifier": 3}, "a verifier must be named by a text, got 3"),
    (["a"], {"verifier": "typical(epsilon=0.1, epsilon=0.2)"}, "expected a verifier as name or name.option=value.*got"),
    (["a"], {"verifier": "typical(epsilon=2)"}, r"epsilon must be in \[0, 1\], got 2"),
    (["a"], {"method": "draft_model", "verifier": "follw"}, "unknown verifier 'follw': .*; did you mean 'follow'"),
    (["a"], {"verifier": "rejection"}, "of 'prompt_lookup' have none: expected method draft_model.* verifier follow"),
    (["a"], {"row_ids": [1, 2]}, r"row_ids must be one whole number per prompt \(1\), .* got \[1, 2\]"),
    (["a"], {"row_ids": [-1]}, r"row_ids .* from 0 to 2\*\*31 - 1, got \[-1\]"),
    (["a"], {"row_ids": [0.5]}, r"row_ids .* got \[0.5\]"),
    (["a"], {"stop": ["end", ""]}, "a stop string is empty"),
    (["a"], {"stop": "end"}, "stop must be a list of strings, got the string 'end'"),
])
def test_bad_arguments_are_refused_before_anything_is_compiled(prompts, settings, message, tiny_lm, monkeypatch):
    monkeypatch.setattr(tiny_lm, "_program", None)
    with pytest.raises(ValueError, match=message) as error:
        tiny_lm.generate(prompts, **{"max_new_tokens": NEW, **settings})
    assert "\n" not in str(error.value)


def test_texts_need_a_tokenizer_and_chats_a_template(tiny_lm, monkeypatch):
    monkeypatch.setattr(tiny_lm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template: pass the prompt as plain text"):
        tiny_lm.generate(["a"], chat=True)
    monkeypatch.setattr(tiny_lm, "tokenizer", None)
    for prompts, settings in ((["a"], {}), ([[1]], {"stop": ["end"]})):
        with pytest.raises(ValueError, match="this checkpoint has no(ne| tokenizer)"):
            tiny_lm.generate(prompts, **settings)


def test_a_draft_model_whose_weights_are_not_numbers_is_refused(tiny_folder):
    tiny = checkpoint.load(tiny_folder)
    broken = {**tiny.params, "final_norm": jax.tree.map(lambda leaf: leaf * np.nan, tiny.params["final_norm"])}
    with pytest.raises(ValueError, match="weights of the draft model that are not finite numbers.*final_norm") as error:
        LanguageModel(tiny, tiny._replace(params=broken))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["autoregressive", "token_recycling"])
def test_weights_that_are_not_numbers_are_an_error_and_not_a_text(method, tiny_lm, monkeypatch):
    target = tiny_lm.params["target"]
    broken = {**target, "final_norm": jax.tree.map(lambda leaf: leaf * np.nan, target["final_norm"])}
    monkeypatch.setattr(tiny_lm, "params", {"target": broken})
    got = []
    with pytest.raises(FloatingPointError, match="logits that are not finite numbers.*check the weights") as error:
        tiny_lm.generate(PROMPTS[:1], method=method, max_new_tokens=NEW, on_tokens=lambda *new: got.append(new))
    assert "\n" not in str(error.value) and not got
