"""Files within limits: what is read, and what is refused in a sentence that names the file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_realloc.common.errors import PlanError
from trl_realloc.common.files import MAX_BYTES, parse_json, parse_yaml, read_json_mapping, read_text, read_yaml_mapping


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_plain_values_are_read_as_they_were_written(value: Any) -> None:
    assert parse_yaml(yaml.safe_dump(value), "it") == value
    assert parse_json(json.dumps(value), "it") == value


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-16")))
def test_any_bytes_are_read_or_refused_with_the_files_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "given"
    path.write_bytes(data)
    for read in (lambda: read_yaml_mapping(path, "the recipe", "a: 1"), lambda: read_json_mapping(path, "the config")):
        try:
            assert isinstance(read(), dict)
        except PlanError as error:
            assert all(problem.startswith(str(path)) and len(problem) < 1000 for problem in error.problems)


@settings(deadline=None)
@given(st.text("{}[]:,-&*!|>?%@\"'#\n \tabc01.~<=", max_size=120))
def test_any_text_of_yamls_signs_is_a_value_or_no_yaml(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text, "it")
        except PlanError as error:
            assert len(str(error)) < 1000


def bomb(width: int, depth: int) -> str:
    """Aliases of aliases: width ** depth values in some hundred bytes."""
    levels = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(levels)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (bomb(9, 9), "more than 20,000 values"),
        (f"a: &a '{'x' * 60_000}'\nb: [{', '.join(['*a'] * 100)}]", "more than 20,000 values"),
        ("&a [*a]", "itself"),
        ("[" * 400, "nested more than 50 deep"),
        ("- " * 400 + "a", "nested more than 50 deep"),
        ("a: 1\na: 2", "'a' is written twice"),
        ("when: 2020-13-45", "not YAML: month must be in 1..12"),
        ("n: " + "9" * 5000, "not YAML"),
        ("n: 0x" + "f" * 5000, "more than 18 digits"),
        ("a: !!python/object/apply:os.system [ls]", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
        ("a: !!int x", "not YAML"),
        ("a: !!bool x", "not YAML"),
        ("a: !!set [b]", "not YAML"),
        ("? [a]\n: b", "not YAML: while constructing a mapping"),
        ("*none", "undefined alias"),
        ("a: 1\n---\nb: 2", "but found another document"),
        ("\x07", "special characters"),
    ],
)
def test_what_yaml_may_not_be_is_refused_at_once(text: str, told: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(PlanError) as refused:
        parse_yaml(text, "the plan")
    assert told in str(refused.value)
    assert time.perf_counter() - begun < 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON: it is empty"),
        ('{"a": 1', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_what_json_may_not_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_json(text, "the config")
    assert told in str(refused.value)


def test_what_is_no_text_file_is_refused_with_what_it_is(tmp_path: Path) -> None:
    def refusal(path: str | Path) -> str:
        with pytest.raises(PlanError) as refused:
            read_text(path, "the plan")
        return str(refused.value)

    path = tmp_path / "plan.yaml"
    assert "No such file" in refusal(path)
    assert "it is a folder" in refusal(tmp_path)
    assert "no regular file" in refusal("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "File name too long" in refusal("x" * 5000)
    assert len(refusal("x" * 5000)) < 600
    assert "no file has such a name" in refusal("a\0b")
    for data, told in [
        ("ä".encode("latin-1"), "byte 0xe4 at position 0 is not UTF-8); save it as UTF-8"),
        ("name: a".encode("utf-16"), "it is UTF-16); save it as UTF-8"),
        (b"\x7fELF\0\0", "it is a binary file"),
        (b"a" * (MAX_BYTES + 1), "1,048,577 bytes, and 1,048,576 are the most"),
    ]:
        path.write_bytes(data)
        assert told in refusal(path)
    path.write_bytes(b"\xef\xbb\xbfname: a")
    assert read_text(path, "the plan") == "name: a"
