"""The rows of a long run, kept one by one as they come, so that an interrupted run goes on; at the end they become one file."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hf_dspark.evaluation.output import write_whole

__all__ = ["RowJournal"]


class RowJournal:
    """Rows of a run in `<output>.unfinished`, in the order in which they came, each entry whole or not there; failures in
    `<output>.failures.jsonl`.

    Args:
        output: the file that the rows become.
        settings: what the rows depend on; another run's are not mixed with these.

    Raises:
        ValueError: the output is there already and nothing is left to do for it, or the unfinished file is of other settings, or another run's
            that has not ended.
    """

    def __init__(self, output: Path, settings: dict):
        self.output, self.unfinished = output, output.with_name(output.name + ".unfinished")
        self.failures = output.with_name(output.name + ".failures.jsonl")
        self.settings = json.loads(json.dumps(settings))
        self.fingerprints: dict[int, str] = {}
        self._places: dict[int, int] = {}  # of a row's last entry in the file
        self.num_failed = 0
        if output.exists() and not self.unfinished.exists():
            raise ValueError(f"output_file {output} is there already, with all its rows; delete it to write it anew, or name another file")
        output.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.unfinished.open("ab")
        try:
            self._lock()
            if self.unfinished.stat().st_size:
                self._read()
            else:
                self._file.write(json.dumps({"settings": self.settings}).encode() + b"\n")
                self._file.flush()
        except BaseException:
            self._file.close()
            raise
        # What failed is asked again.
        self.failures.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self.fingerprints)

    def add(self, number: int, fingerprint: str, entry: dict) -> None:
        """Keeps what has come of row `number`, with the `fingerprint` of what was asked.

        Raises:
            OSError: it can't be written; what was written before stays usable.
        """
        line = json.dumps({"row": number, "fingerprint": fingerprint, **entry}) + "\n"
        try:
            place = self._file.tell()
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is still to be written would fail once more
                self._file.close()
            raise OSError(error.errno, f"{error.strerror}; {self.resume_hint()}", str(self.unfinished)) from error
        self.fingerprints[number], self._places[number] = fingerprint, place

    def forget(self, number: int) -> None:
        """Leaves out what had been added of row `number`."""
        self.fingerprints.pop(number, None)
        self._places.pop(number, None)

    def add_failure(self, number: int, error: str) -> None:
        """Writes aside that row `number` failed, and why."""
        with self.failures.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": number, "error": error}, ensure_ascii=False) + "\n")
        self.num_failed += 1

    def entries(self) -> Iterator[dict]:
        """What has been added, in the order of the rows."""
        with self.unfinished.open("rb") as file:
            for number in sorted(self._places):
                file.seek(self._places[number])
                yield json.loads(file.readline())

    def finish(self, rows: Iterator[dict]) -> None:
        """Writes `rows` to the output, all of them or none. Where rows have failed the unfinished file stays, for the next try."""
        write_whole(self.output, (json.dumps(row).encode() + b"\n" for row in rows))
        if not self.num_failed:
            self.close()
            self.unfinished.unlink()

    def resume_hint(self, num_rows: int | None = None) -> str:
        """How to go on after an interruption, in words. num_rows: of the whole run."""
        kept = f"{len(self)} of {num_rows} rows are" if num_rows else f"{len(self)} rows are"
        return f"{kept} kept in {self.unfinished}; the same command goes on with the others"

    def close(self) -> None:
        """Closes the file; an unfinished one without a row is removed."""
        self._file.close()
        if not self.fingerprints and not self.output.exists():
            self.unfinished.unlink(missing_ok=True)

    def _lock(self) -> None:
        """Until the file is closed no other run may open it, which would cut off what this one is writing. Not on Windows."""
        with suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another run is writing {self.unfinished}; let it end, or name another output_file") from error
            except OSError:
                return  # a file system without locks

    def _read(self) -> None:
        """Takes over the whole entries of an interrupted run and cuts off what comes behind them."""
        with self.unfinished.open("rb") as file:
            begun = _parsed(file.readline())
            self._check_settings(begun.get("settings") if begun else None)
            place = file.tell()
            while (entry := _parsed(file.readline())) is not None and "fingerprint" in entry:
                self.fingerprints[entry["row"]], self._places[entry["row"]] = entry["fingerprint"], place
                place = file.tell()
        self._file.truncate(place)
        self._file.seek(place)  # what is appended next is known by where it stands

    def _check_settings(self, begun: dict | None) -> None:
        if not isinstance(begun, dict):
            raise ValueError(f"{self.unfinished} was not begun by this version of hf-dspark regenerate; delete it to begin anew")
        names = [name for name in {**self.settings, **begun} if begun.get(name) != self.settings.get(name)]
        if names:
            changes = ", ".join(f"{name} {begun.get(name)!r} (now {self.settings.get(name)!r})" for name in names)
            raise ValueError(f"{self.unfinished} was begun with {changes}; take these back to go on, or delete the file to begin anew")


def _parsed(line: bytes) -> dict | None:
    """The entry of a line; None: it is none, or was not written to its end."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
