"""The folder: whose it is, what survives a cut, what is refused."""

import json

import pytest

from parallax.benchmark.folder import PAGES, Folder, units

ROWS = [{"process": "1"}, {"unit": [0, 0, 0], "n": 1}, {"unit": [0, 0, 1], "n": 2}]


@pytest.fixture
def path(tmp_path, settings):
    """A folder that holds a benchmark of two units."""
    folder = Folder(str(tmp_path / "bench"), settings())
    folder.start()
    for row in ROWS:
        folder.append(row)
    return folder.path


def test_nothing_is_written_before_the_start(tmp_path, settings):
    Folder(str(tmp_path / "new" / "bench"), settings()).records()
    assert not (tmp_path / "new").exists()


def test_the_same_benchmark_goes_on(path, settings):
    again = Folder(str(path), settings())
    assert again.records() == ROWS
    again.start()
    again.append({"unit": [1, 0, 0]})
    assert [*units(Folder(str(path), settings()).records())] == [(0, 0, 0), (0, 0, 1), (1, 0, 0)]


@pytest.mark.parametrize("kept", [1, 5, 20])
def test_a_line_that_was_cut_is_dropped_and_the_next_one_whole(path, settings, kept):
    runs = path / "runs.jsonl"
    lines = runs.read_bytes().splitlines(keepends=True)
    runs.write_bytes(b"".join(lines[:2]) + lines[2][:kept])
    folder = Folder(str(path), settings())
    assert folder.records() == ROWS[:2]
    folder.start()
    folder.append(ROWS[2])
    assert Folder(str(path), settings()).records() == ROWS


def test_a_damaged_line_in_the_middle_is_refused(path, settings):
    runs = path / "runs.jsonl"
    runs.write_text("{broken\n" + runs.read_text())
    with pytest.raises(ValueError, match="runs.jsonl is damaged: give another --output"):
        Folder(str(path), settings()).records()


@pytest.mark.parametrize("changes, message", [
    (dict(model="large"), "model is tiny there and large here"),
    (dict(repeats=3), "repeats is 2 there and 3 here"),
    (dict(seed=8), "seed is 7 there and 8 here"),
    (dict(baselines=("llama.cpp 1",)), r"baselines is \[\] there"),
    (dict(decoding={"max_new_tokens": 9}), "max_new_tokens is 8 there and 9 here"),
    (dict(contenders=()), "methods.autoregressive.name is autoregressive there and absent here"),
    (dict(prompts=()), "prompts.code.jsonl.prompts is 2 there and absent here"),
])
def test_another_benchmark_is_refused_with_the_first_difference(path, settings, changes, message):
    before = {file: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ValueError, match=f"holds another benchmark .{message}") as error:
        Folder(str(path), settings(**changes))
    assert "\n" not in str(error.value)
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def test_overwriting_starts_anew_and_only_then(path, settings):
    folder = Folder(str(path), settings(repeats=3), overwrite=True)
    (path / "index.html").write_text("old")
    (path / "notes.txt").write_text("mine")
    assert folder.records() == [] and (path / "runs.jsonl").exists()
    folder.start()
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "notes.txt"]
    assert json.loads((path / "config.json").read_text())["repeats"] == 3
    folder.append(ROWS[1])
    assert folder.records() == ROWS[1:2]


@pytest.mark.parametrize("name", ["config.json", "runs.jsonl", *PAGES])
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_stay(tmp_path, settings, name, overwrite):
    (tmp_path / name).write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match=f"has a {name} that is not of a benchmark"):
        Folder(str(tmp_path), settings(), overwrite=overwrite)


def test_an_output_that_is_a_file_is_refused(tmp_path, settings):
    (tmp_path / "bench").write_text("")
    for path in (str(tmp_path / "bench"), ""):
        with pytest.raises(ValueError, match="is not a folder"):
            Folder(path, settings())


def test_a_page_takes_its_place_when_it_is_whole(path, settings):
    folder = Folder(str(path), settings())
    folder.write("index.html", "page")
    with pytest.raises(UnicodeEncodeError):
        folder.write("index.html", "\ud800")
    assert (path / "index.html").read_text() == "page"
