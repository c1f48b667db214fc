"""Reads a Chrome trace piece by piece, so that a file of gigabytes needs no more memory than the
events that are kept of it. Standard library alone."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

from attn_ext.profile.errors import InputError

#: Bytes read at a time, before decompression or after.
_CHUNK = 1 << 20
_EVENTS = "traceEvents"
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
# Op names may hold control characters.
_DECODE = json.JSONDecoder(strict=False).raw_decode


class TraceError(InputError):
    """A file that is not a trace, or only a part of one. The text names the file and the reason."""


def read(path: str | PathLike[str]) -> Iterator[tuple[str | None, Any]]:
    """The top level of a trace, gzip or not: (key, value) of what stands beside the events, and
    (None, event) for each event, in the order of the file. Starts when it is first asked.

    Raises:
        TraceError: not a file that can be read, damaged or truncated, or not a trace.
    """
    try:
        with Path(path).open("rb") as raw:
            zipped = raw.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.GzipFile(fileobj=raw) if zipped else raw
            yield from _Reader(path, file).document()
    except OSError as error:  # BadGzipFile is one, without a reason of the system
        reason = error.strerror or f"damaged or truncated gzip: {error}"
        raise TraceError(f"{path}: {reason}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: damaged or truncated gzip: {error}") from error


class _Reader:
    """A window on the text that moves forward; what is behind it is forgotten."""

    def __init__(self, path: str | PathLike[str], file: IO[bytes] | gzip.GzipFile) -> None:
        self._path, self._file = path, file
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._ended = "", 0, False

    def document(self) -> Iterator[tuple[str | None, Any]]:
        first = self._peek()
        if not first:
            raise TraceError(f"{self._path}: expected a Chrome trace, got an empty file")
        if first == "[":  # the format allows the bare array of events
            yield from self._array()
        elif first == "{":
            yield from self._object()
        else:
            self._value()
            raise TraceError(f"{self._path}: expected a Chrome trace, got JSON without {_EVENTS}")
        if self._peek():
            raise self._damaged("text after its end")

    def _object(self) -> Iterator[tuple[str | None, Any]]:
        self._at += 1
        found = False
        while self._peek(_COMMA) != "}":
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._damaged("expected a key and a colon")
            self._at += 1
            if key == _EVENTS and self._peek() == "[":
                found = True
                yield from self._array()
            else:
                yield key, self._value()
        self._at += 1
        if not found:
            raise TraceError(f"{self._path}: expected a Chrome trace, got JSON without {_EVENTS}")

    def _array(self) -> Iterator[tuple[None, Any]]:
        self._at += 1
        while self._peek(_COMMA) != "]":
            yield None, self._value()
        self._at += 1

    def _peek(self, skip: re.Pattern[str] = _BLANK) -> str:
        """The next character that is not skipped; "" at the end of the file."""
        while True:
            match = skip.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        while True:
            self._peek()
            try:
                value, end = _DECODE(self._text, self._at)
            except ValueError as error:
                if not self._more():
                    raise self._damaged(str(error)) from error
                continue
            if end < len(self._text) or not self._more():  # a number could go on
                self._at = end
                return value

    def _more(self) -> bool:
        """Reads on; the more is held, the more at once, so that a long value is decoded only a few
        times."""
        if self._ended:
            return False
        rest = self._text[self._at :]
        raw = self._file.read(max(_CHUNK, len(rest)))
        self._ended = not raw
        self._text, self._at = rest + self._utf8.decode(raw, final=self._ended), 0
        return True

    def _damaged(self, reason: str) -> TraceError:
        return TraceError(f"{self._path}: damaged or truncated JSON: {reason}")
