"""The loop's arguments, what compiles anew and what does not, and the edges of its buffers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import METHODS, Sample, decode, loop, make_decoder, make_sampler, options_of, stream
from parallax.models import Model
from parallax.testing import Case, MarkovModel, reference_decode, tiny_config, tiny_model

SIZE = 5
TABLE = np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32)
MODEL, TARGET = MarkovModel.create(TABLE)
PLAIN = make_decoder("autoregressive", MODEL)


def run(decoder=PLAIN, params=TARGET, prompt=((1, 2), (3, 0)), prompt_length=(2, 1), row_ids=None, key=0, limit=8,
        capacity=9, through=decode, **options):
    return through(decoder, {"target": params}, prompt, prompt_length, row_ids, key, limit, capacity=capacity,
                   **options)


@pytest.fixture(scope="module")
def case():
    return Case.tiny()


@pytest.mark.parametrize("through", [decode, stream])
@pytest.mark.parametrize("arguments, message", [
    (dict(prompt=[1, 2]), r"whole numbers \[batch, slots\], got int64 \[2\]"),
    (dict(prompt=[[1.0, 2.0]]), r"whole numbers .* got float64 \[1, 2\]"),
    (dict(prompt_length=[2, 0]), "prompt 1 is empty"),
    (dict(prompt_length=[2, 3]), "prompt_length 3 is longer than the prompt array, which has 2 slots"),
    (dict(limit=[8, 10]), "capacity=9 is too small: prompts have 2 slots and may grow to 10"),
    (dict(capacity=1, limit=1), "capacity=1 is too small: prompts have 2 slots"),
    (dict(prompt=[[1, 2], [SIZE, 0]]), "prompt holds token 5, the model's vocabulary is 0 to 4"),
    (dict(prompt=[[1, -1], [0, 0]]), "prompt holds token -1"),
    (dict(row_ids=[1]), r"row_ids must be \[2\], got \[1\]"),
])
def test_arguments_that_do_not_fit_are_refused_before_anything_compiles(through, arguments, message):
    with pytest.raises(ValueError, match=message):
        list(run(through=through, **arguments))


def test_slots_behind_a_prompt_may_hold_anything():
    base = run()
    for leftover in (SIZE + 3, -7, 2**40):
        assert run(prompt=np.asarray([[1, 2], [3, leftover]])).tokens.tolist() == base.tokens.tolist()


def test_learned_positions_bound_the_capacity():
    decoder = make_decoder("autoregressive", Model(tiny_config(positions="learned", max_positions=8)))
    with pytest.raises(ValueError, match="capacity=9 is longer than the model's 8 learned positions"):
        run(decoder)


@pytest.mark.parametrize("change", [dict(alignment="same"), dict(visibility="full"), dict(visibility="block_causal")])
@pytest.mark.parametrize("name", METHODS)
def test_models_that_do_not_decode_left_to_right_are_refused(name, change):
    draft = dict(draft=Model(tiny_config())) if METHODS[name].needs_draft else {}
    with pytest.raises(ValueError, match=f"causal model .* this one has .*{next(iter(change.values()))}"):
        make_decoder(name, Model(tiny_config(**change)), **draft)
    with pytest.raises(ValueError, match="causal model"):
        run(dataclasses.replace(PLAIN, model=Model(tiny_config(**change))))


def test_unknown_methods_and_options_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown method 'promptlookup': .*_recycling, .*did you mean 'prompt_lookup'"):
        make_decoder("promptlookup", MODEL)
    with pytest.raises(ValueError, match="'prompt_lookup' has no option 'max_ngrams': .*; did you mean 'max_ngram'"):
        make_decoder("prompt_lookup", MODEL, max_ngrams=3)
    with pytest.raises(ValueError, match=r"'autoregressive' has no option 'nodes': expected one of \(none\)"):
        make_decoder("autoregressive", MODEL, nodes=3)
    with pytest.raises(ValueError, match="unknown method"):
        options_of("nothing")
    assert options_of("token_recycling") == dict(nodes=7, max_depth=6, ranks=8, learn_prompt=True)


@pytest.mark.parametrize("broken", [[0, np.nan, 0, 0, 0], [np.nan] * SIZE, [0, 0, np.inf, 0, 0], [-np.inf] * SIZE])
@pytest.mark.parametrize("through", [decode, stream])
def test_logits_that_are_not_numbers_stop_the_run_and_name_the_sequence(broken, through):
    table = np.where(np.arange(SIZE)[:, None] == 3, np.asarray(broken, np.float32), TABLE)
    table[:3, 3], table[4, 3] = -np.inf, -np.inf                          # single tokens may be ruled out
    with pytest.raises(FloatingPointError, match="not finite numbers for sequence 1"):
        list(run(params={"table": table}, through=through))
    list(run(params={"table": table}, prompt=((1, 2), (4, 0)), through=through))


def test_a_single_broken_logit_is_noticed_in_a_vocabulary_of_common_size():
    model, params = tiny_model(vocab_size=49152, tie_embeddings=False)     # so wide that a maximum passes over a NaN
    params["head"] = params["head"].at[30000].set(np.nan)
    with pytest.raises(FloatingPointError):
        run(make_decoder("autoregressive", model), params)


def _warmed(temperature):
    sampler = Sample(temperature=temperature, top_p=np.float64(0.9), min_p=jnp.float32(0.01))
    return make_decoder("autoregressive", MODEL, sampler=sampler, eos=(4,))


def test_the_same_work_in_other_clothes_compiles_once():
    def sampled(temperature, eos=(4,), min_p=0.01):
        return make_decoder("autoregressive", MODEL, sampler=make_sampler(temperature, 0, 0.9, min_p), eos=eos)

    first = run(sampled(0.7), key=3)
    compiled = loop.run._cache_size()
    table = np.asarray(TARGET["table"])
    key = jax.random.key(3)
    for change in (
        dict(decoder=_warmed(np.float64(0.7))), dict(decoder=_warmed(np.float32(0.7))),
        dict(decoder=_warmed(jnp.float32(0.7))),
        dict(decoder=sampled(0.7, [np.int64(4)])), dict(decoder=sampled(0.7, (jnp.asarray(4),))),
        dict(key=np.int64(3)), dict(key=key), dict(key=jax.random.key_data(key)),
        dict(key=np.asarray(jax.random.key_data(key))),
        dict(params={"table": table}), dict(params={"table": jnp.asarray(table)}),
        dict(prompt=np.asarray([[1, 2], [3, 0]])), dict(prompt=jnp.asarray([[1, 2], [3, 0]], jnp.int16)),
        dict(prompt_length=np.asarray([2, 1])), dict(prompt_length=jnp.asarray([2, 1])),
        dict(row_ids=[0, 1]), dict(row_ids=jnp.arange(2)), dict(row_ids=np.arange(2, dtype=np.uint8)),
        dict(limit=[8, 8]), dict(limit=np.int16(8)), dict(limit=jnp.asarray(8)),
    ):
        again = run(**{"decoder": sampled(0.7), "key": 3, **change})
        assert again.tokens.tolist() == first.tokens.tolist(), change
        assert loop.run._cache_size() == compiled, change
    for change in (dict(decoder=sampled(1.9)), dict(decoder=sampled(2)), dict(decoder=sampled(0.7, (2,))),
                   dict(decoder=sampled(0.7, min_p=1)), dict(key=5), dict(limit=[9, 3]), dict(prompt_length=[1, 1]),
                   dict(row_ids=[7, 4])):
        run(**{"decoder": sampled(0.7), "key": 3, **change})
        assert loop.run._cache_size() == compiled, change


def test_a_number_that_is_left_out_is_another_program():
    run(make_decoder("autoregressive", MODEL, sampler=make_sampler(0.7)))
    compiled = loop.run._cache_size()
    run(make_decoder("autoregressive", MODEL, sampler=make_sampler(0.7, min_p=0.1)))
    assert loop.run._cache_size() == compiled + 1


def test_stop_ends_the_rows_it_names():
    parts = list(run(through=stream, steps=2, stop=lambda tokens, length: (length >= 4) & [True, False]))
    assert parts[-1].length.tolist() == [4, 8]
    whole = run()
    assert parts[-1].tokens[0, :4].tolist() == whole.tokens[0, :4].tolist()
    assert parts[-1].tokens[1].tolist() == whole.tokens[1].tolist()


def test_finished_rows_stay_as_they_are(case):
    decoder = make_decoder("token_recycling", case.model, nodes=5, max_depth=3, ranks=3)
    inputs = case.inputs(decoder, limits=[12, 6, 20])
    state = loop.prefill(inputs, case.capacity)
    frozen = {}
    while not np.asarray(state.done).all():
        state, _ = loop.advance(inputs.decoder, inputs.params, state, jnp.int32(1))
        for b in np.flatnonzero(state.done):
            now = _row(state, b)
            jax.tree.map(np.testing.assert_array_equal, frozen.setdefault(b, now), now)
    assert sorted(frozen) == [0, 1, 2]


def _row(state, b):
    end = int(state.length[b]) - 1
    cache = state.cache
    return jax.tree.map(np.asarray, (state.tokens[b], state.length[b], state.limit[b], state.own[b], cache.length[b],
                                     cache.k[:, b, :, :end], cache.v[:, b, :, :end]))


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling"])
def test_a_cache_that_is_exactly_full_is_not_overwritten(name, case):
    prompt = np.random.default_rng(1).integers(0, 8, (3, 16))
    lengths, states = np.asarray([16, 9, 3]), []
    decoder = dataclasses.replace(make_decoder(name, case.model), chunk=6)
    for capacity in (16, 40):
        inputs = loop.cast(decoder, case.params, prompt, lengths, None, 0, 16, capacity=capacity)
        state = loop.prefill(inputs, capacity)
        states.append(loop.advance(inputs.decoder, inputs.params, state, jnp.int32(100))[0])
    tight, roomy = states
    assert tight.length.tolist() == [16, 16, 16]
    for b in range(3):
        text = reference_decode(case.model, case.params["target"], prompt[b, :lengths[b]].tolist(), 16, row_id=b)
        assert tight.tokens[b].tolist() == text
        for ours, theirs in zip(tight.cache[:2], roomy.cache[:2]):
            np.testing.assert_allclose(ours[:, b, :, :15], theirs[:, b, :, :15], atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4])
def test_prompts_of_several_chunks_give_the_same_text(chunk, case):
    decoder = dataclasses.replace(make_decoder("prompt_lookup", case.model), chunk=chunk)
    result = loop.run(case.inputs(decoder), case.capacity)
    for ours, theirs in zip(np.asarray(result.tokens), case.reference(decoder.verifier.sampler)):
        assert ours[:len(theirs)].tolist() == theirs
