"""What the terminal is told while something takes long."""

from __future__ import annotations

import re
import time

import pytest

from trl_realloc.common.notices import notice, working


def test_work_that_takes_long_is_named_while_it_goes_on_and_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with working("starting the engines", "usually half a minute", after_s=0.05, every_s=0.05):
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"trl_realloc: starting the engines \(0 s so far\); usually half a minute", lines[0])
    assert lines[1] == "trl_realloc: starting the engines (0 s so far)"
    assert re.fullmatch(r"trl_realloc: starting the engines: done after \d+ s", lines[-1])


def test_short_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with working("loading", after_s=30.0):
        pass
    assert capsys.readouterr().err == ""


def test_work_that_fails_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), working("loading", after_s=0.01, every_s=10.0):
        time.sleep(0.2)
        raise ValueError("broken")
    assert "done" not in capsys.readouterr().err


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    notice("hello")
    assert capsys.readouterr().err == ""
