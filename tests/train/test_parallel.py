"""The same config on one device and on eight gives the same run."""

import numpy as np
import pytest

from tests.train.command import figures, train

_MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")


def assert_same_curve(found, expected):
    assert [(line["step"], list(line)) for line in found] == [(line["step"], list(line)) for line in expected]
    for name in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(*([line[name] for line in lines if name in line] for lines in (found, expected)),
                                   rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_eight_devices_give_the_curve_of_one(undisturbed, texts, tmp_path):
    ended = train(tmp_path / "run", texts, *_MESH, devices=8)
    assert ended.status == 0 and "8 x cpu" in ended.log, ended.log
    assert_same_curve(figures(tmp_path / "run"), figures(undisturbed))


@pytest.mark.slow
def test_a_run_begun_on_eight_devices_goes_on_on_one(undisturbed, texts, tmp_path):
    workdir = tmp_path / "run"

    def watch(process, log):
        if (workdir / "checkpoints" / "8").exists():
            process.kill()

    assert train(workdir, texts, *_MESH, devices=8, watch=watch).status == -9
    ended = train(workdir, texts)
    assert ended.status == 0 and "1 x cpu" in ended.log and "step 1/" not in ended.log, ended.log
    assert_same_curve(figures(workdir), figures(undisturbed))
