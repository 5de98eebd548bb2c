"""Tables and JSON files."""

import json

import pytest

from hf_dspark.evaluation.output import progress, table, write_json, write_whole


def test_columns_are_aligned():
    assert table(["", "tokens/s"], [["plain", "9.0"], ["with the draft", "100.5"]]).splitlines() == [
        "                tokens/s",
        "plain                9.0",
        "with the draft     100.5",
    ]


def test_json_knows_no_nan(tmp_path):
    write_json(str(tmp_path / "x.json"), {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": (True, "é")}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, None], "c": {"d": [True, "é"]}}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    write_whole(path, [b"one", b"two"])

    def interrupted():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted())
    assert path.read_bytes() == b"onetwo" and list(tmp_path.iterdir()) == [path]


def test_progress_yields_every_item():
    assert list(progress([1, 2, 3], "counting")) == [1, 2, 3]
