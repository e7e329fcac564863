"""The command line as a thing to read: every command has help with an example, and starts fast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from kveval.cli import _wants_color, main
from kveval.resources import data_path


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("path", [(), *commands(main)], ids=lambda path: " ".join(path) or "kveval")
def test_every_command_has_help_with_an_example(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*path, "--help"])
    assert shown.exit_code == 0
    assert " ".join(("kveval", *path)) in shown.output.split("Options:")[0].split("\n", 2)[2] or path == ("tasks",)


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_option_says_what_it_does(path: tuple[str, ...]) -> None:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in ("format", "kind"):
            assert parameter.help, parameter.name


def test_readme_names_every_command() -> None:
    readme = (data_path("tasks").parent / "README.md").read_text(encoding="utf-8")
    for path in commands(main):
        if path != ("models",):
            assert " ".join(("kveval", *path)) in readme


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_only_where_it_is_seen_and_wanted(
    settings: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert _wants_color() is wanted


def test_help_in_a_fresh_process() -> None:
    done = subprocess.run([sys.executable, "-m", "kveval.cli", "--help"], capture_output=True, text=True, check=True)
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize("arguments", [["rum"], ["run", "--kvv", "fp8"], ["gate"], ["report", "x", "--format", "pdf"]])
def test_misspelt_commands_are_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, arguments).exit_code == 2


@pytest.mark.parametrize("command", ["gate", "report"])
def test_a_directory_without_a_run_is_told(command: str, tmp_path: object) -> None:
    shown = CliRunner().invoke(main, [command, str(tmp_path)])
    assert shown.exit_code == 2
    assert "no run is there" in shown.output
