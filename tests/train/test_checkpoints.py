import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallax import sharding
from parallax.train.checkpoints import Checkpoints, read_params

_TX = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2)


@functools.cache
def shapes(hidden=8, layers=2):
    """(parameters, the rest), with the names, the tuples of layers and the mixed types of a model."""
    def init():
        params = {"embed": {"tokens": jnp.zeros((12, hidden))},
                  "layers": {"mlp": {"up": {"w": tuple(jnp.zeros((16, hidden)) for _ in range(layers))}}},
                  "final_norm": {"scale": jnp.zeros(hidden, jnp.bfloat16)}}
        return params, {"step": jnp.int32(0), "opt_state": _TX.init(params), "ema": params}
    return jax.eval_shape(init)


def state(seed):
    """Noise of these shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 9, leaf.shape).astype(leaf.dtype)), shapes())


def like(trees):
    return sharding.abstract(trees, sharding.make_mesh())


def same(a, b):
    """Structure, types and every bit."""
    equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(equal))


def write(workdir, *steps, **kwargs):
    with Checkpoints(workdir, **kwargs) as checkpoints:
        for step in steps:
            checkpoints.save(step, *state(step), {"at": step})
    return workdir / "checkpoints"


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_restored_is_what_was_saved_to_the_bit(tmp_path):
    write(tmp_path, 3)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 3
        found = checkpoints.restore(3, *like(shapes()))
        assert same(tuple(found[:2]), state(3)) and found[2] == {"at": 3}
        step, *again = checkpoints.resume(*like(shapes()))
        assert step == 3 and same(tuple(again[:2]), state(3)) and again[2] == {"at": 3}


def test_an_empty_folder_has_nothing_to_resume(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.resume(*like(shapes())) is None


def test_the_next_step_may_take_the_arrays_while_they_are_written(tmp_path):
    trees = state(1)
    step = jax.jit(lambda trees: jax.tree.map(lambda x: x * 0, trees), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *trees)
        step(trees)
        assert trees[0]["embed"]["tokens"].is_deleted()
    with Checkpoints(tmp_path) as checkpoints:
        assert same(checkpoints.restore(1, *like(shapes()))[:2], state(1))


def test_a_save_that_is_waited_for_is_on_disk(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *state(1), wait=True)
        assert names(tmp_path / "checkpoints") == ["1"]


def test_old_checkpoints_go_but_for_every_nth(tmp_path):
    assert names(write(tmp_path, 1, 2, 3, 4, 5, keep=2, keep_every=2)) == ["2", "4", "5"]


def test_to_keep_nothing_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1 checkpoint, got 0"):
        Checkpoints(tmp_path, keep=0)
    assert names(tmp_path) == []


def test_a_step_is_written_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *state(1))
        checkpoints.save(1, *state(2))
        assert same(checkpoints.restore(1, *like(shapes()))[:2], state(1))


def test_leftovers_of_a_killed_save_are_no_checkpoints_and_go_at_the_next_start(tmp_path):
    folder = write(tmp_path, 1)
    shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
        checkpoints.save(3, *state(3))
    assert names(folder) == ["1", "3"]


def test_an_old_checkpoint_whose_removal_was_cut_short_is_in_nobodys_way(tmp_path):
    folder = write(tmp_path, 1, 2)
    for item in ("params", "meta", "_CHECKPOINT_METADATA"):
        path = folder / "1" / item
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.resume(*like(shapes()))[0] == 2
        checkpoints.save(3, *state(3))
    assert names(folder) == ["2", "3"]


@pytest.mark.parametrize("trees, told", [
    (lambda: shapes(hidden=4), "params.embed.tokens is float32[12,8] there, float32[12,4] here"),
    (lambda: shapes(layers=3), "params.layers.mlp.up.w.2 is absent there, float32[16,8] here"),
    (lambda: (shapes()[0], {**shapes()[1], "ema": None}), "state.ema.embed.tokens is float32[12,8] there, absent here"),
    (lambda: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float16"), shapes()), "there, float16[12,8] here"),
])
def test_a_checkpoint_of_another_run_is_refused_by_its_first_leaf_that_differs(tmp_path, trees, told):
    folder = write(tmp_path, 1)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="another model or optimizer") as error:
            checkpoints.resume(*like(trees()))
    assert told in one_line(error)
    assert names(folder) == ["1"]


def cut(folder):
    path = max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-20])


def flip(folder):
    path = max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose(folder):
    shutil.rmtree(folder / "data")


def garble(folder):
    (folder / "sums.json").write_text("{")


@pytest.mark.parametrize("damage", [cut, flip, lose, garble])
def test_a_damaged_checkpoint_is_passed_over_and_its_step_can_be_saved_again(tmp_path, damage, capfd):
    folder = write(tmp_path, 1, 2)
    damage(folder / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OSError, match=r"checkpoint 2 in .* cannot be read: ") as error:
            checkpoints.restore(2, *like(shapes()))
        one_line(error)
        step, *found = checkpoints.resume(*like(shapes()))
        assert step == 1 and same(tuple(found[:2]), state(1))
        assert re.fullmatch(r"warning: checkpoint 2 in \S+ cannot be read: .*; it is now 2.damaged, going on from "
                            r"step 1\n", capfd.readouterr().err)
        checkpoints.save(2, *state(2), {"at": 2})
    assert names(folder) == ["1", "2", "2.damaged"]
    with Checkpoints(tmp_path) as checkpoints:
        assert same(checkpoints.resume(*like(shapes()))[1:3], state(2))


def test_if_no_checkpoint_can_be_read_nothing_is_touched(tmp_path, capfd):
    folder = write(tmp_path, 1, 2)
    flip(folder / "1")
    lose(folder / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(OSError, match="checkpoint 2 in .* cannot be read: data/.*, nor can any other") as error:
            checkpoints.resume(*like(shapes()))
    one_line(error)
    assert names(folder) == ["1", "2"] and capfd.readouterr().err == ""


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    write(tmp_path, 1, 2)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(OSError, match="no checkpoint 5 .*: expected one of 1, 2"):
        checkpoints.restore(5, *like(shapes()))


def test_parameters_can_be_read_alone_while_the_run_goes_on(tmp_path):
    folder = write(tmp_path, 1, 2)
    (folder / "3.orbax-checkpoint-tmp").mkdir()
    shutil.rmtree(folder / "2" / "state")
    found = read_params(tmp_path)
    assert same(found, state(2)[0]) and isinstance(found["embed"]["tokens"], jax.Array)
    assert same(read_params(tmp_path, 1), state(1)[0])
    assert names(folder) == ["1", "2", "3.orbax-checkpoint-tmp"]


def test_parameters_that_cannot_be_read_are_told_in_one_line(tmp_path):
    with pytest.raises(OSError, match="there is no checkpoint in"):
        read_params(tmp_path)
    flip(write(tmp_path, 1) / "1" / "params")
    with pytest.raises(OSError, match="checkpoint 1 in .* cannot be read: params/") as error:
        read_params(tmp_path)
    one_line(error)


def test_a_checkpoint_says_what_it_holds(tmp_path):
    folder = write(tmp_path, 1)
    meta = json.loads((folder / "1" / "meta" / "metadata").read_text())
    assert meta["leaves"]["params.layers.mlp.up.w.1"] == "float32[16,8]"
    assert meta["leaves"]["state.ema.final_norm.scale"] == "bfloat16[8]"
    assert meta["versions"]["jax"] == jax.__version__


def run(tmp_path, body):
    """What a process of its own ends with that runs `body` inside of `with Checkpoints`."""
    begin = """
        import os, resource, signal, sys
        import jax
        from parallax.train import checkpoints as module

        def trees(step):
            noise = jax.random.normal(jax.random.key(step), (300, 300))
            return {"w": jax.numpy.full((300, 300), step)}, {"noise": noise}

        def fill_disk():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

        sys.excepthook = lambda kind, error, _: print(f"{kind.__name__}: {error}", file=sys.stderr)
        with module.Checkpoints(sys.argv[1]) as checkpoints:
        """
    script = textwrap.dedent(begin) + textwrap.indent(textwrap.dedent(body), "    ")
    return subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path):
    ended = run(tmp_path, """
        checkpoints.save(1, *trees(1), wait=True)
        module._sums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)          # all is written, nothing has its name
        checkpoints.save(2, *trees(2), wait=True)
        """)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names(tmp_path / "checkpoints") == ["1", "2.orbax-checkpoint-tmp"]
    shapes = {"w": jax.ShapeDtypeStruct((300, 300), "int32")}, {"noise": jax.ShapeDtypeStruct((300, 300), "float32")}
    with Checkpoints(tmp_path) as checkpoints:
        step, found, *_ = checkpoints.resume(*like(shapes))
        assert step == 1 and (found["w"] == 1).all()


def test_a_full_disk_ends_in_one_line_and_leaves_the_checkpoint_before(tmp_path):
    ended = run(tmp_path, """
        checkpoints.save(1, *trees(1), wait=True)
        fill_disk()
        checkpoints.save(2, *trees(2))
        checkpoints.save(3, *trees(3))
        """)
    assert re.fullmatch(r"OSError: cannot write checkpoint 2 in \S+: File too large; the last good one is step 1\n",
                        ended.stderr)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 1
    assert (read_params(tmp_path)["w"] == 1).all()


def test_a_save_that_fails_at_the_end_of_a_run_is_told(tmp_path):
    ended = run(tmp_path, """
        fill_disk()
        checkpoints.save(2, *trees(2))
        """)
    assert re.fullmatch(r"OSError: cannot write checkpoint 2 in \S+: File too large; there is no earlier one\n",
                        ended.stderr)


def test_a_save_that_fails_does_not_hide_what_ended_the_run(tmp_path):
    ended = run(tmp_path, """
        fill_disk()
        checkpoints.save(2, *trees(2))
        raise FloatingPointError("the loss is nan")
        """)
    assert ended.stderr == "FloatingPointError: the loss is nan\n"
