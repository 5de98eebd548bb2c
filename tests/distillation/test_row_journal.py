"""A journal: whole entries, one order, one set of settings, and no output before all is there."""

import json
import os
from pathlib import Path

import pytest

from hf_dspark.distillation.row_journal import RowJournal

SETTINGS = {"seed": 1, "sampling": {"temperature": 0.7}}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out" / "rows.jsonl"


def journal_with(output, *numbers):
    journal = RowJournal(output, SETTINGS)
    for number in numbers:
        journal.add(number, f"f{number}", {"rows": [{"text": f"row {number}"}]})
    return journal


def flattened(journal):
    return (row for entry in journal.entries() for row in entry["rows"])


def test_rows_come_out_in_the_order_of_their_numbers_and_nothing_is_left_behind(output):
    journal = journal_with(output, 5, 1, 3)
    assert not output.exists()
    journal.finish(flattened(journal))
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["row 1", "row 3", "row 5"]
    assert [path.name for path in output.parent.iterdir()] == ["rows.jsonl"]


def test_what_was_written_is_there_after_a_kill(output):
    """Not closed, not flushed by hand: each entry is in the file when add() returns."""
    journal = journal_with(output, 2, 0)
    assert journal.unfinished.read_text().count("\n") == 3
    journal._file.close()
    with journal.unfinished.open("a") as file:
        file.write('{"row": 1, "fingerprint": "f1", "rows": [{"te')
    again = RowJournal(output, SETTINGS)
    assert again.fingerprints == {2: "f2", 0: "f0"}
    again.add(1, "f1", {"rows": [{"text": "row 1"}]})
    again.finish(flattened(again))
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["row 0", "row 1", "row 2"]


def test_an_entry_given_twice_counts_once_and_a_forgotten_one_not_at_all(output):
    journal = journal_with(output, 0, 1, 2)
    journal.add(1, "g1", {"rows": [{"text": "new"}]})
    journal.forget(2)
    assert [row["text"] for row in flattened(journal)] == ["row 0", "new"] and len(journal) == 2


def test_rows_of_other_settings_are_not_mixed_in_and_not_thrown_away(output):
    journal_with(output, 0).close()
    kept = output.with_name("rows.jsonl.unfinished").read_text()
    with pytest.raises(ValueError, match=r"begun with sampling \{'temperature': 0.7\} \(now \{'temperature': 1.0\}\); take these back .* or delete"):
        RowJournal(output, {**SETTINGS, "sampling": {"temperature": 1.0}})
    assert output.with_name("rows.jsonl.unfinished").read_text() == kept
    output.with_name("rows.jsonl.unfinished").write_text('{"input_ids": [7]}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl.unfinished was not begun by this version"):
        RowJournal(output, SETTINGS)


@pytest.mark.skipif(os.name == "nt", reason="files are not locked on Windows")
def test_two_runs_at_once_do_not_write_one_file(output):
    journal = journal_with(output, 0)
    journal._file.write(b'{"row": 1')  # half of an entry, which the other run would cut off
    journal._file.flush()
    with pytest.raises(ValueError, match=r"another run is writing .*rows\.jsonl\.unfinished; let it end, or name another output_file"):
        RowJournal(output, SETTINGS)
    assert journal.unfinished.read_text().endswith('{"row": 1')
    journal.close()
    assert RowJournal(output, SETTINGS).fingerprints == {0: "f0"}


def test_a_finished_output_is_not_written_over(output):
    journal = journal_with(output, 0)
    journal.finish(flattened(journal))
    with pytest.raises(ValueError, match=r"rows\.jsonl is there already, with all its rows; delete it to write it anew, or name another file"):
        RowJournal(output, SETTINGS)


def test_failures_keep_the_journal_for_the_next_try(output):
    journal = journal_with(output, 0)
    journal.add_failure(1, "HTTP 500: ü")
    journal.finish(flattened(journal))
    assert json.loads(journal.failures.read_text()) == {"row": 1, "error": "HTTP 500: ü"}
    journal.close()
    again = RowJournal(output, SETTINGS)
    assert list(again.fingerprints) == [0] and not again.failures.exists()
    again.add(1, "f1", {"rows": [{"text": "row 1"}]})
    again.finish(flattened(again))
    assert len(output.read_text().splitlines()) == 2 and [path.name for path in output.parent.iterdir()] == ["rows.jsonl"]


def test_an_error_while_the_output_is_written_leaves_no_output(output):
    def failing():
        yield {"text": "row 0"}
        raise OSError("disk full")

    journal = journal_with(output, 0)
    with pytest.raises(OSError, match="disk full"):
        journal.finish(failing())
    assert [path.name for path in output.parent.iterdir()] == ["rows.jsonl.unfinished"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_said_with_what_was_kept(output):
    journal = journal_with(output, 0)
    journal._file.close()
    journal._file = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device; 1 rows are kept in .*rows.jsonl.unfinished; the same command goes on"):
        journal.add(1, "f1", {"rows": []})
    journal.close()
    assert RowJournal(output, SETTINGS).fingerprints == {0: "f0"}


def test_a_run_that_fails_at_once_leaves_nothing(output):
    RowJournal(output, SETTINGS).close()
    assert list(output.parent.iterdir()) == []
