"""The one file format of results: a Record is a folder with `record.json` and `samples.jsonl`.

`samples.jsonl` is append-only, one JSON object a line, flushed as each is done: a kill loses what was under way and
nothing else. `record.json` says what was run and where, and at the end what came out; it is replaced as a whole. A
published Record has `samples.jsonl.gz` instead. Nothing here imports torch or another module of the package.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

try:
    import fcntl
except ImportError:  # not on Windows: two runs into one folder are not told apart there
    fcntl = None  # type: ignore[assignment]

SCHEMA_VERSION = 1
Kind = Literal["eval", "bench", "rollout", "train", "study"]
PUBLISHED_BYTES = 2_000_000
HEADER, SAMPLES, PUBLISHED_SAMPLES = "record.json", "samples.jsonl", "samples.jsonl.gz"
# What must be the same for two runs' samples to stand in one Record; machine and times may differ after a restart.
_IDENTITY = ("anydepth", "packages", "model", "tokenizer", "task", "seed")

Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run, read or finished. `samples` is empty where it was read without them.

    `settings_used` has every setting in force, `settings_passed` those that the caller gave. `aggregates` is a pure
    function of the samples. `samples_sha256` covers the uncompressed `samples.jsonl` of a complete run.
    """

    path: Path
    kind: Kind
    status: Literal["running", "complete"]
    settings_used: Mapping[str, Any]
    settings_passed: Mapping[str, Any]
    provenance: Mapping[str, Any]
    protocol_hash: str | None = None
    aggregates: Mapping[str, Any] = field(default_factory=dict)
    samples_sha256: str | None = None
    samples: tuple[Sample, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def read(cls, folder: str | Path, *, samples: bool = True) -> Record:
        """The Record in a folder. A half-written last line of an unfinished run is left out.

        Raises ValueError, naming file and line, for what is missing, malformed, of a newer version, doubled, or (when
        the run is complete) not what the checksum says. `samples=False` reads the header alone.
        """
        path = Path(folder)
        header = _read_header(path / HEADER)
        record = cls(path=path, **header)
        if not samples:
            return record
        content = _read_samples(path)
        if not content and header["samples_sha256"] not in (None, hashlib.sha256(b"").hexdigest()):
            raise ValueError(f"{path} has no samples (was it published without them?); read it with samples=False")
        if record.status == "complete" and (found := hashlib.sha256(content).hexdigest()) != record.samples_sha256:
            raise ValueError(
                f"{path}: the samples have the sha256 {found}, {HEADER} says {record.samples_sha256}; "
                f"they were changed after the run, get the Record again or run it again"
            )
        return replace(record, samples=tuple(_parse(content, path / SAMPLES)))

    def header(self) -> dict[str, Any]:
        """What stands in record.json."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("path", "samples")
        }


class RecordWriter:
    """Writes one Record, sample by sample, and goes on with one that was interrupted.

    `done` holds the (id, answer_index) that are in the file, `samples` all of its samples. Use it as a context
    manager, or call `close`.

    Raises ValueError where the folder holds a run of other settings, models or package versions.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        kind: Kind,
        settings_used: Mapping[str, Any],
        settings_passed: Mapping[str, Any],
        provenance: Mapping[str, Any],
        protocol_hash: str | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(get_args(Kind))}")
        path = Path(folder)
        record = Record(
            path=path,
            kind=kind,
            status="running",
            settings_used=_plain(settings_used),
            settings_passed=_plain(settings_passed),
            protocol_hash=protocol_hash,
            provenance={**_plain(provenance), "started": _now(), "finished": None},
        )
        if (path / HEADER).exists():
            previous = Record.read(path)
            if difference := _difference(previous, record):
                raise ValueError(
                    f"{path} holds a run of something else ({difference}); go on with the same, remove "
                    f"the folder, or give another one"
                )
            record = previous
        elif (path / SAMPLES).exists():
            raise ValueError(f"{path} has {SAMPLES} but no {HEADER}; give an empty folder or that of a Record")
        else:
            path.mkdir(parents=True, exist_ok=True)
            _write_header(record)
        self.record, self.samples = record, list(record.samples)
        self.done = {(sample["id"], sample["answer_index"]) for sample in self.samples}
        self._file = None if record.status == "complete" else _open_to_append(path / SAMPLES)

    def append(self, sample: Sample) -> None:
        """Add one sample; it is in the file when this returns. ValueError for one without id or already there."""
        key = _key(sample, where="the sample")
        if key in self.done:
            raise ValueError(f"{self.record.path} already has answer {key[1]} of question {key[0]!r}")
        if self._file is None:
            raise ValueError(f"{self.record.path} is complete; give another folder for another run")
        line = _line(sample)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            kept = f"{error.strerror}; the {len(self.samples)} answers before are kept, the same run goes on from them"
            raise OSError(error.errno, kept, str(self.record.path / SAMPLES)) from error
        self.samples.append(json.loads(line))
        self.done.add(key)

    def finish(self, aggregates: Mapping[str, Any]) -> Record:
        """Close the samples and write what came out; the finished Record. A complete one is returned as it is."""
        if self._file is None:
            return self.record
        os.fsync(self._file.fileno())
        self.close()
        path = self.record.path
        self.record = replace(
            self.record,
            status="complete",
            aggregates=_plain(aggregates),
            samples=tuple(self.samples),
            samples_sha256=hashlib.sha256((path / SAMPLES).read_bytes()).hexdigest(),
            provenance={**self.record.provenance, "finished": _now()},
        )
        _write_header(self.record)
        return self.record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def publish(folder: str | Path, target: str | Path, *, samples: bool = True) -> Path:
    """Copy a complete Record to `target` (results/<name>) with its samples compressed; the same bytes every time.

    Raises ValueError for an unfinished Record and for more than 2 MB of compressed samples: publish such a one with
    `samples=False`, which keeps header and checksum.
    """
    record, target = Record.read(folder), Path(target)
    if record.status != "complete":
        raise ValueError(f"{record.path} is {record.status}; finish the run before publishing it")
    if target.exists() and not (target / HEADER).exists() and any(target.iterdir()):
        raise ValueError(f"{target} has files that are no Record; give a folder that does not exist yet")
    packed = _compress(_read_samples(record.path)) if samples else b""
    if len(packed) > PUBLISHED_BYTES:
        raise ValueError(
            f"the samples of {record.path} have {len(packed):,} bytes compressed; allowed: "
            f"{PUBLISHED_BYTES:,}. Publish the header and checksum alone (samples=False)"
        )
    target.mkdir(parents=True, exist_ok=True)
    if samples:
        write_atomically(target / PUBLISHED_SAMPLES, packed)
    write_atomically(target / HEADER, (record.path / HEADER).read_bytes())
    return target


def remove(folder: str | Path) -> None:
    """Delete a Record's files, and its folder if nothing else is in it. A folder without a Record is left alone."""
    path = Path(folder)
    if not (path / HEADER).exists():
        return
    # The samples go first: what a kill leaves behind is then still known to be a Record.
    for name in (SAMPLES, PUBLISHED_SAMPLES, HEADER):
        (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


@lru_cache(maxsize=1 << 14)  # asked for a protocol, then for each answer
def ids_hash(ids: tuple[int, ...]) -> str:
    """sha256 (hex) of token ids, written as compact JSON: `prompt_ids_sha256` of a sample."""
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def files_hash(files: Iterable[Path]) -> str:
    """sha256 (hex) over the bytes of files, one after the other; read piece by piece."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all; a kill at any moment leaves the old content or the new."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_versioned(path: Path, *, what: str, version: int, key: str = "version", advice: str = "") -> dict[str, Any]:
    """The object in a JSON file that says of which version it is. ValueError for a file that has none, which `is what`,
    and for another version, with `advice`."""
    try:
        content = dict(json.loads(path.read_bytes()))
        found = content[key]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is {what} ({error!r})") from error
    if found != version:
        raise ValueError(f"{path} has {key} {found!r}; this anydepth reads {version}{advice}")
    return content


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps would make one for every line


def _line(value: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(value).encode() + b"\n"


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as it will be read again: tuples are lists, keys are strings."""
    plain: dict[str, Any] = json.loads(_line(value))
    return plain


def _write_header(record: Record) -> None:
    write_atomically(record.path / HEADER, json.dumps(record.header(), indent=1, allow_nan=False).encode() + b"\n")


def _read_header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; give the folder of a Record")
    header = read_versioned(
        path,
        what="not the header of a Record",
        key="schema_version",
        version=SCHEMA_VERSION,
        advice=": use the version of anydepth that wrote it",
    )
    wanted = set(Record.__dataclass_fields__) - {"path", "samples"}
    if wrong := wanted ^ header.keys():
        raise ValueError(f"{path} lacks or has beyond schema_version {SCHEMA_VERSION}: {', '.join(sorted(wrong))}")
    return header


def _read_samples(folder: Path) -> bytes:
    """The samples' bytes, decompressed where they were published; b"" before the first was written."""
    if (folder / PUBLISHED_SAMPLES).exists():
        try:
            return gzip.decompress((folder / PUBLISHED_SAMPLES).read_bytes())
        except (OSError, EOFError) as error:
            raise ValueError(f"{folder / PUBLISHED_SAMPLES} is damaged ({error}); get it again") from error
    return (folder / SAMPLES).read_bytes() if (folder / SAMPLES).exists() else b""


def _parse(content: bytes, path: Path) -> Iterator[Sample]:
    """Samples of the whole lines; what follows the last line end was not written to its end."""
    seen = set()
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error})") from error
        key = _key(sample, where=f"{path}, line {number}")
        if key in seen:
            raise ValueError(f"{path}, line {number} repeats answer {key[1]} of question {key[0]!r}")
        seen.add(key)
        yield sample


def _key(sample: Any, *, where: str) -> tuple[str, int]:
    if (
        not isinstance(sample, Mapping)
        or not isinstance(sample.get("id"), str)
        or not isinstance(sample.get("answer_index"), int)
    ):
        raise ValueError(f"{where} needs an id (a string) and an answer_index (a whole number)")
    return sample["id"], sample["answer_index"]


def _open_to_append(path: Path) -> io.BufferedWriter:
    """The samples, ready for the next line: a half-written last one is cut off. ValueError while another process, or
    another writer of this one, has them."""
    file = path.open("ab")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ValueError(
                f"{path.parent} is being written by another run; wait for it, or give another folder"
            ) from error
    content = path.read_bytes()
    file.truncate(content.rfind(b"\n") + 1)
    return file


def _difference(previous: Record, now: Record) -> str | None:
    """Where two runs are not the same, in words, or None."""
    pairs = {"kind": (previous.kind, now.kind), "protocol_hash": (previous.protocol_hash, now.protocol_hash)}
    for name in sorted({*previous.settings_used, *now.settings_used}):
        pairs[name] = previous.settings_used.get(name), now.settings_used.get(name)
    for name in _IDENTITY:
        pairs[f"provenance {name}"] = previous.provenance.get(name), now.provenance.get(name)
    return next((f"{name} is {old!r} there and {new!r} here" for name, (old, new) in pairs.items() if old != new), None)


def _compress(content: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()
