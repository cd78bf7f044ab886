"""What the commands share: how they find their config, and how they end."""

import pathlib
import subprocess
import sys

import pytest

from parallax import cli

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with configs/decode/{first,second}.py."""
    (tmp_path / "configs" / "decode").mkdir(parents=True)
    for name in ("first", "second"):
        (tmp_path / "configs" / "decode" / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_config(*arguments):
    return cli.with_config(["program", *arguments], "configs/decode", lambda method: f"default.py:{method}")


FIRST = "--config=configs/decode/first.py"


@pytest.mark.parametrize("arguments, expected", [
    ([], ["--config=default.py:None"]),
    (["--seed=3", "junk"], ["--config=default.py:None", "--seed=3", "junk"]),
    (["--config=first"], [FIRST]),
    (["--config", "first"], [FIRST]),
    (["-config", "first:smoke"], [FIRST + ":smoke"]),
    (["--config.seed=3", "--prompt", "x", "--config", "configs/decode/first.py"],
     [FIRST, "--config.seed=3", "--prompt", "x"]),
    (["--method=a"], ["--config=default.py:a", "--method=a"]),
    (["-method", "a", "--seed=3"], ["--config=default.py:a", "-method", "a", "--seed=3"]),
    (["--config.method=a"], ["--config=default.py:a", "--config.method=a"]),
    (["--method=a", "--method=b"], ["--config=default.py:b", "--method=a", "--method=b"]),
    (["--prompt", "say --method=a"], ["--config=default.py:None", "--prompt", "say --method=a"]),
    (["--config=first", "--method=a"], [FIRST, "--method=a"]),
    (["--help"], ["--help"]),
    (["--config=nope", "--helpfull"], ["--config=nope", "--helpfull"]),
])
def test_a_config_that_can_be_opened_stands_in_front_of_its_overrides(arguments, expected):
    assert with_config(*arguments) == ["program", *expected]


@pytest.mark.parametrize("arguments, message", [
    (["--config"], "error: --config needs a file\n"),
    (["--config=frist"],
     "error: there is no config 'frist': expected a .py file or one of first, second; did you mean 'first'?\n"),
    (["--config=frist:smoke"],
     "error: there is no config 'frist': expected a .py file or one of first, second; did you mean 'first'?\n"),
    (["--config=/nowhere/mine.py"],
     "error: there is no config '/nowhere/mine.py': expected a .py file or one of first, second\n"),
])
def test_a_config_that_is_not_there_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        with_config(*arguments)
    assert end.value.code == 2 and capsys.readouterr() == ("", message)


def test_without_a_folder_of_configs_only_files_are_expected(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SystemExit):
        with_config("--config=first")
    assert capsys.readouterr().err == "error: there is no config 'first': expected a .py file\n"


PROGRAM = """
import sys
from absl import flags
from parallax import cli
flags.DEFINE_integer("seed", None, "Number.")
flags.DEFINE_bool("loud", False, "Switch.")
flags.mark_flag_as_required("seed")

def main(argv):
    BODY

cli.run(main)
"""


def command(body, *arguments):
    return [sys.executable, "-c", PROGRAM.replace("BODY", body), *arguments]


def program(body, *arguments):
    return subprocess.run(command(body, *arguments), text=True, capture_output=True, cwd=ROOT)


@pytest.mark.parametrize("body, code, out, err", [
    ("print(flags.FLAGS.seed, argv[1:])", 0, "3 ['rest']\n", ""),
    ("return 7", 7, "", ""),
    ("raise ValueError('first\\n  second')", 2, "", "error: first second\n"),
    ("open('/nowhere/file')", 2, "", "error: [Errno 2] No such file or directory: '/nowhere/file'\n"),
    ("raise FloatingPointError('no numbers')", 2, "", "error: no numbers\n"),
    ("raise KeyboardInterrupt", 130, "", "interrupted\n"),
])
def test_a_command_ends_with_one_line_and_its_exit_status(body, code, out, err):
    result = program(body, "--seed=3", "rest")
    assert (result.returncode, result.stdout, result.stderr) == (code, out, err)


def test_a_bug_still_shows_where_it_is():
    result = program("{}['x']", "--seed=3")
    assert result.returncode == 1 and "Traceback" in result.stderr and "KeyError: 'x'" in result.stderr


@pytest.mark.parametrize("arguments, err", [
    (["--sed=3"], "error: unknown flag --sed; did you mean 'seed'?; --help lists them\n"),
    (["--seed=three"], "error: --seed=three: invalid literal for int() with base 10: 'three'; --help lists"),
    (["--seed"], "error: Missing value for flag --seed; --help lists the flags\n"),
    (["--seed=1", "--loud=maybe"], "--loud=maybe: Non-boolean argument to boolean flag"),
    ([], "--seed=None: Flag --seed must have a value other than None."),
])
def test_flags_that_cannot_be_parsed_are_one_line(arguments, err):
    result = program("print('ran')", *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert err in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_help_lists_the_flags_and_succeeds():
    result = program("print('ran')", "--help")
    assert result.returncode in (0, 1) and "--seed" in result.stdout and "ran" not in result.stdout


@pytest.mark.parametrize("body", ["for _ in range(100_000): print('line')", "print('short', flush=True)",
                                  "print('short')"])
def test_a_reader_that_goes_away_gets_no_traceback(body):
    with subprocess.Popen(command(body, "--seed=3"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=ROOT) as child:
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 1
