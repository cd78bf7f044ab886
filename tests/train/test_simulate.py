"""The simulated accepted length is what the decoder then measures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import decode, make_decoder
from parallax.testing import tiny_model
from parallax.train import simulate

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]
NEW = 20


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def near_target(target):
    """A drafter that is sometimes right: the target with its weights shaken."""
    model, params = target
    keys = iter(jax.random.split(jax.random.key(7), len(jax.tree.leaves(params))))
    return model, jax.tree.map(lambda x: x + 0.12 * x.std() * jax.random.normal(next(keys), x.shape), params)


def measured(target, draft, texts, draft_length, eos=()):
    """(tokens emitted, target forwards) of the decoder itself."""
    decoder = make_decoder("draft_model", target[0], draft=draft[0], draft_length=draft_length, eos=eos)
    lengths = [len(p) for p in PROMPTS]
    prompt = np.zeros((len(PROMPTS), max(lengths)), np.int32)
    for i, ids in enumerate(PROMPTS):
        prompt[i, :len(ids)] = ids
    result = decode(decoder, {"target": target[1], "draft": draft[1]}, prompt, lengths, None, 0,
                    np.asarray(lengths) + NEW, capacity=max(lengths) + NEW)
    np.testing.assert_array_equal(result.tokens, texts.tokens)
    return result.info.emitted.tolist(), result.info.target_forwards.tolist()


def simulated(draft, texts, draft_length):
    guesses = jax.jit(simulate.guesses, static_argnums=0)(*draft, texts.tokens)
    return [x.tolist() for x in simulate.walk(guesses, texts, draft_length)]


@pytest.mark.often("1")
@pytest.mark.parametrize("draft_length", [1, 4])
def test_the_simulated_walk_is_that_of_the_decoder(target, near_target, draft_length):
    texts = simulate.greedy_texts(*target, PROMPTS, NEW)
    emitted, forwards = simulated(near_target, texts, draft_length)
    assert (emitted, forwards) == measured(target, near_target, texts, draft_length)
    assert NEW / (draft_length + 1) < min(forwards) and max(forwards) < NEW           # neither all right nor all wrong


def test_it_is_also_where_texts_end_early(target, near_target):
    plain = simulate.greedy_texts(*target, PROMPTS, NEW)
    eos = (int(plain.tokens[0, 10]),)
    texts = simulate.greedy_texts(*target, PROMPTS, NEW, eos)
    assert int(texts.length[0]) < int(plain.length[0])
    assert tuple(simulated(near_target, texts, 4)) == measured(target, near_target, texts, 4, eos)


def test_a_drafter_that_is_the_target_is_always_right(target):
    texts = simulate.greedy_texts(*target, PROMPTS, NEW)
    assert simulated(target, texts, 4) == [[NEW] * 3, [NEW // 5] * 3]


def test_a_drafter_that_is_always_wrong_emits_one_token_per_forward(target):
    texts = simulate.greedy_texts(*target, PROMPTS, NEW)
    wrong = jnp.roll(texts.tokens, -1, 1) + 1
    assert [x.tolist() for x in simulate.walk(wrong, texts, 4)] == [[NEW] * 3, [NEW] * 3]
