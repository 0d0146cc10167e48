"""Output: results and remarks apart, plain in a pipe, silent when quiet, JSON on demand."""

from __future__ import annotations

import json

import pytest

from graphpipe.cli.output import Output
from graphpipe.plan.stage import TaskTimes


def say_everything(output: Output) -> None:
    output.text("[red]a text[/red]")
    output.table("things", ("name", "count"), [("first", 1), ("second", 22)])
    output.note("a remark")
    with output.progress("working") as tick:
        tick(1, 3, note="so far")
    output.result({"times": TaskTimes(forward_ns=3)})


def test_plain_text_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(Output())
    out, err = capsys.readouterr()
    assert "[red]a text[/red]\n" in out
    assert "\x1b" not in out + err
    rows = [line.split() for line in out.splitlines()]
    assert ["name", "count"] in rows
    assert ["second", "22"] in rows
    assert err == "a remark\n"


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(Output(quiet=True))
    assert capsys.readouterr() == ("", "")


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    say_everything(Output(as_json=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"times": {"forward_ns": 3, "backward_ns": 0}}
    assert err == "a remark\n"


def test_json_holds_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(as_json=True).result(float("nan"))


def test_long_text_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    Output().text("x" * 1000)
    assert capsys.readouterr().out == "x" * 1000 + "\n"
