"""Reading text into a tree: JSON with comments, YAML, base64, mappings, overrides, and what is said about text that cannot be read."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config.source import parse_override, read, scalar
from plait.errors import ConfigError

TREE = {"zero_optimization": {"stage": 2}, "note": "// no # comment /* here */, }"}


def message(error):
    return str(error.value)


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
    path.write_bytes(b'\xef\xbb\xbf{"a": 5e8, "b": 1e-5, "c": -0.5}')  # a byte order mark
    assert read(path).tree == {"a": 5e8, "b": 1e-5, "c": -0.5}


def test_yaml_with_the_numbers_of_json_and_without_dates(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "j: no\nk: 010\nl: 1:30\nm: False\na: 5e-5\nb: 1E+8\nc: .5\nd: 2024-01-01\ne: [1, 2.5, x]\nf: true\ng: 12\nh: v1.2.3\ni: -3\n"
    )
    tree = read(path).tree
    assert {key: tree.pop(key) for key in "jklm"} == {"j": "no", "k": 10, "l": "1:30", "m": False}
    assert tree == {
        "a": 5e-5,
        "b": 1e8,
        "c": 0.5,
        "d": "2024-01-01",
        "e": [1, 2.5, "x"],
        "f": True,
        "g": 12,
        "h": "v1.2.3",
        "i": -3,
    }


@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans(),
    )
)
def test_yaml_reads_what_json_writes(tree):
    assert scalar(json.dumps(tree)) == tree
    for value in tree.values():
        assert scalar(json.dumps(value)) == value


@pytest.mark.parametrize("encode", [base64.urlsafe_b64encode, base64.b64encode])
def test_base64(encode):
    text = encode(json.dumps(TREE).encode()).decode()  # type: ignore[operator]
    assert read(text).tree == TREE


def test_a_mapping_is_copied():
    tree = {"zero_optimization": {"stage": 2}}
    read(tree).tree["zero_optimization"]["stage"] = 3
    assert tree == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ('{"a": 1\n "b": 2}', "line 2, column 2", "delimiter"),
        ('{"a": 1,\n // remark\n "b": ]}', "line 3, column 7", '"b": ]'),
        ('{"a": ', "line 1, column 7", "Expecting value"),
        ("", "line 1, column 1", "Expecting value"),
    ],
)
def test_broken_json_names_line_and_column_of_the_file(tmp_path, text, where, said):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert f"{path}, {where}: " in message(error)
    assert said in message(error)


def test_broken_yaml_names_line_and_column(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text("a: 1\nb: [1, 2\n")
    with pytest.raises(ConfigError, match=r"run\.yml, line 3, column 1"):
        read(path)


def test_keys_given_twice_are_refused_with_both_values(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"a": 1, "s": {"b": true, "b": false}, "a": 2}')
    with pytest.raises(ConfigError) as error:
        read(path)
    assert [str(problem) for problem in error.value.problems] == [
        "b: is given twice in one object, as true and as false; keep one of them",
        "a: is given twice in one object, as 1 and as 2; keep one of them",
    ]
    path = tmp_path / "run.yaml"
    path.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ConfigError, match="line 3, a: is given twice in one object, as 1 and as 3"):
        read(path)


def test_a_missing_file_suggests_a_near_one(tmp_path):
    (tmp_path / "ds_zero2.json").write_text("{}")
    words = r"ds_zer2\.json: there is no such file; did you mean .*ds_zero2\.json"
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "ds_zer2.json")
    with pytest.raises(ConfigError, match="there is no such file; pass the path"):
        read("nowhere/at/all.json")
    with pytest.raises(ConfigError, match="there is no such file|cannot be read"):
        read("x" * 5000)


def test_a_folder_a_list_and_binary_data_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="is a folder and not a file"):
        read(tmp_path)
    for content, said in (("[1]", "is a list"), ("3", "is a number"), ("null", "is empty")):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read(tmp_path / "x.json")


def test_override_values():
    for text, value in {
        "3": 3, "5e8": 5e8, "5e-5": 5e-5, "true": True, "null": None, "auto": "auto", "": None, "[1, 2]": [1, 2], "[a, b]": ["a", "b"],
        '{"stage": 3}': {"stage": 3}, "def foo(): ": "def foo():", "a: b": "a: b", '"3"': "3", "runs/x=y": "runs/x=y", "[unclosed": "[unclosed",
    }.items():  # fmt: skip
        assert parse_override(f"a.b={text}") == (("a", "b"), value)
    for text in ("a.b", "=3", "a..b=3", ".a=3", "a.=3"):
        with pytest.raises(ConfigError, match="an override is a dotted key"):
            parse_override(text)
