"""JSON with comments, YAML, base64 and mappings are read, or refused with the position."""

import base64
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from plait.config.source import parse_override, read, scalar
from plait.errors import ConfigError

TREE = {"zero_optimization": {"stage": 2}, "note": "// no # comment /* here */, }"}


def test_comments_and_trailing_commas_are_tolerated(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        """// first
{
  # hash
  "zero_optimization": { "stage": 2, }, /* block
     over lines */
  "note": "// no # comment /* here */, }",
}
"""
    )
    assert read(path).tree == TREE
    assert read(str(path)).name == str(path)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 5e8, "b": 1e-5, "c": -0.5}')
    assert read(path).tree == {"a": 5e8, "b": 1e-5, "c": -0.5}


YAML = {
    "5e-5": 5e-5,
    "1E+8": 1e8,
    ".5": 0.5,
    "2024-01-01": "2024-01-01",
    "[1, 2.5, x]": [1, 2.5, "x"],
    "true": True,
    "False": False,
    "12": 12,
    "v1.2.3": "v1.2.3",
    "-3": -3,
    "no": "no",
    "010": 10.0,
    "1:30": "1:30",
}


def test_yaml_has_the_numbers_of_json_and_no_dates(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(f"a{index}: {text}" for index, text in enumerate(YAML)))
    values = list(read(path).tree.values())
    assert values == list(YAML.values())
    assert list(map(type, values)) == list(map(type, YAML.values()))


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans()


@hypothesis.given(st.dictionaries(st.text("abc", min_size=1), NUMBERS))
def test_yaml_reads_what_json_writes(tree):
    assert scalar(json.dumps(tree)) == tree
    for value in tree.values():
        assert scalar(json.dumps(value)) == value


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode])
def test_base64(encode):
    text = encode(json.dumps(TREE).encode()).decode()
    assert read(text).tree == TREE


def test_a_mapping_is_copied():
    tree = {"zero_optimization": {"stage": 2}}
    read(tree).tree["zero_optimization"]["stage"] = 3
    assert tree == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("name", "text", "position", "message"),
    [
        ("a.json", '{"a": 1\n "b": 2}', "line 2, column 2", "delimiter"),
        ("a.json", '{"a": 1,\n // remark\n "b": ]}', "line 3, column 7", '"b": ]'),
        ("a.json", '{"a": ', "line 1, column 7", "Expecting value"),
        ("a.json", "", "line 1, column 1", "Expecting value"),
        ("a.yml", "a: 1\nb: [1, 2\n", "line 3, column 1", ""),
    ],
)
def test_syntax_errors_have_line_and_column(tmp_path, name, text, position, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert f"{path}, {position}: " in str(error.value)
    assert message in str(error.value)


def test_duplicate_keys_are_refused_with_both_values(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1, "s": {"b": true, "b": false}, "a": 2}')
    with pytest.raises(ConfigError) as error:
        read(path)
    assert [str(problem) for problem in error.value.problems] == [
        f"{path}, b: is given twice in one object, as true and as false; keep one of them",
        f"{path}, a: is given twice in one object, as 1 and as 2; keep one of them",
    ]
    path = tmp_path / "run.yaml"
    path.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ConfigError, match=r"run.yaml, line 3, a: is given twice in one object"):
        read(path)


def test_a_missing_file_suggests_a_similar_name(tmp_path):
    (tmp_path / "ds_zero2.json").write_text("{}")
    message = r"ds_zer2\.json: there is no such file; did you mean .*ds_zero2\.json"
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "ds_zer2.json")
    with pytest.raises(ConfigError, match="there is no such file; pass the path"):
        read("nowhere/at/all.json")
    with pytest.raises(ConfigError, match="there is no such file|cannot be read"):
        read("x" * 5000)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder and not a file"):
        read(tmp_path)
    path = tmp_path / "x.json"
    for content, message in (
        (b"[1]", "is a list"),
        (b"3", "is a number"),
        (b"null", "is empty"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(path)


OVERRIDES = {
    "3": 3,
    "5e8": 5e8,
    "true": True,
    "null": None,
    "auto": "auto",
    "": None,
    "[1, 2]": [1, 2],
    "[a, b]": ["a", "b"],
    '{"stage": 3}': {"stage": 3},
    "def foo(): ": "def foo():",
    "a: b": "a: b",
    '"3"': "3",
    "runs/x=y": "runs/x=y",
    "[unclosed": "[unclosed",
}


def test_values_of_overrides():
    for text, value in OVERRIDES.items():
        assert parse_override(f"a.b={text}") == (("a", "b"), value)
    for text in ("a.b", "=3", "a..b=3", ".a=3", "a.=3"):
        with pytest.raises(ConfigError, match="an override is a dotted key"):
            parse_override(text)
