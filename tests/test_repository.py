"""The repository keeps its own rules."""

import ast
import pathlib
import re
import runpy

import pytest

import parallax
from parallax.decoding import METHODS
from parallax.train.objectives import OBJECTIVES

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted(p for folder in ("parallax", "benchmarks", "configs", "tests") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_imported_through_the_links(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", ())
                                                                        if isinstance(node, ast.Import)]
        for name in filter(None, names):
            assert name.split(".")[0] not in ("models", "decoding", "train"), f"import parallax.{name} instead"


def test_the_links_lead_into_the_package():
    for name in ("models", "decoding", "train"):
        assert (ROOT / name).is_symlink() and (ROOT / name).resolve() == ROOT / "parallax" / name


def test_modules_are_short_and_commands_shorter():
    for path in SOURCES:
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path} has {lines} lines: make it two modules"
    for command in ("aot", "bench", "convert", "decode", "prove", "trim", "train/__main__"):
        assert len((ROOT / "parallax" / f"{command}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_in_the_readme_and_has_a_config(name):
    assert f"| `{name}` |" in (ROOT / "README.md").read_text()
    assert name == "autoregressive" or (ROOT / "configs" / "decode" / f"{name}.py").is_file()


def test_the_version_is_the_same_everywhere():
    assert re.search(rf"version: {re.escape(parallax.__version__)}", (ROOT / "CITATION.cff").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_says_how_to_run_it_and_has_a_smoke_variant(path):
    module = runpy.run_path(str(path))
    command = {"decode": "parallax.decode", "train": "parallax.train", "bench": "parallax.bench"}[path.parent.name]
    assert f"python -m {command} --config {path.stem}" in module["__doc__"]
    assert module["get_config"]("smoke").to_dict() != module["get_config"]().to_dict()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_a_config(name):
    configs = [runpy.run_path(str(p))["get_config"]() for p in (ROOT / "configs" / "train").glob("*.py")]
    assert name in {config.get("objective") for config in configs}
