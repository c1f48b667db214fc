"""Guess first, then look: what a person expects of a trace, and whether it holds.

    naive: memcpy=1; inplace: memcpy=0; flash: kernels=1 gpu_us<150 occupancy>=10%

A guess has a scope, which names variants, ranges or attention calls (`*` and `?` match any; without
one it is `*`), and checks: a field, an operator, a value. Operators are = != < <= > >=, ~ and !~
(a regular expression is found, or not), and `in a..b`. A value may be quoted, and may have a unit.

A verdict is PASS, MISS, or UNKNOWN, which is never taken for a PASS: the trace recorded nothing of
the kind, the scope matches nothing, launches are without kernels, or the steps disagree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from attn_ext.profile.errors import InputError
from attn_ext.profile.fields import FIELDS, Field

_SCOPE = re.compile(r"\s*((?:[^:;\"'=<>~]|::)+?)\s*:(?!:)")
_CHECK = re.compile(
    r"""\s*(?P<field>\w+)\s*(?P<operator>!=|<=|>=|!~|==|=|<|>|~|\bin\b)\s*"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s;,]+)\s*,?"""
)
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)")
#: Units of a kind of field, as factors to what the field is in.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "us": {"us": 1, "ms": 1e3, "s": 1e6},
    "percent": {"%": 1},
    "bytes": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
}
_ORDERED = ("<", "<=", ">", ">=", "in")


class GuessError(InputError):
    """A guess that cannot be read: the text says where and what was expected."""


@dataclass(frozen=True)
class Check:
    """One comparison. `value` is a number, a text, or the two ends of `in`."""

    field: Field
    operator: str
    value: float | str | tuple[float, float]
    text: str

    def holds(self, seen: Any) -> bool:
        """Whether a known value of the field is as guessed."""
        if self.field.kind in ("text", "names"):
            names = seen if isinstance(seen, (list, tuple)) else [seen]
            if self.operator in ("~", "!~"):
                found = any(re.search(str(self.value), name) for name in names)
            else:
                found = str(self.value).lower() in [name.lower() for name in names]
            return bool(found) != self.operator.startswith("!")
        if isinstance(self.value, tuple):
            return bool(self.value[0] <= seen <= self.value[1])
        value = self.value
        assert isinstance(value, (int, float)), "a number, as _value made it"
        return bool(
            {
                "=": seen == value, "!=": seen != value, "<": seen < value,
                "<=": seen <= value, ">": seen > value, ">=": seen >= value,
            }[self.operator]
        )  # fmt: skip


@dataclass(frozen=True)
class Guess:
    """What is expected of everything that `scope` matches."""

    scope: str
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        return f"{self.scope}: {' '.join(check.text for check in self.checks)}"


def parse(text: str) -> list[Guess]:
    """Reads the language of this module.

    Raises:
        GuessError: text that is none, an unknown field, or a value or an operator that does not fit
            its field.
    """
    guesses: list[Guess] = []
    at = 0
    while at < len(text):
        scope = "*"
        if match := _SCOPE.match(text, at):
            scope, at = match[1].strip(), match.end()
        checks = []
        while at < len(text) and (match := _CHECK.match(text, at)):
            checks.append(_check(match["field"], match["operator"], _unquoted(match["value"])))
            at = match.end()
        rest = text[at:].lstrip()
        if rest and not rest.startswith(";"):
            raise GuessError(f"guess: expected FIELD=VALUE or another operator, got {rest!r}")
        if not checks and (scope != "*" or (not guesses and not rest)):
            raise GuessError(f"guess: expected a check after {scope!r}, got none")
        if checks:
            guesses.append(Guess(scope, tuple(checks)))
        at = text.index(";", at) + 1 if rest else len(text)
    if not guesses:
        raise GuessError(f"guess: expected SCOPE: FIELD=VALUE ..., got {text!r}")
    return guesses


def load(path: str | PathLike[str]) -> list[Guess]:
    """Reads guesses from a TOML file: a table guess.SCOPE for each scope, a key for each field.

        [guess.flash]
        kernels = 1
        gpu_us = "<150"
        kernel = '~attn_flash'

    Raises:
        GuessError: a file that cannot be read, is no TOML, or has no such table.
    """
    try:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise GuessError(f"{path}: Python 3.10 needs the package tomli to read TOML") from None
    try:
        tables = toml.loads(Path(path).read_text(encoding="utf-8")).get("guess")
    except OSError as error:
        raise GuessError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError, or bytes that are no UTF-8
        raise GuessError(f"{path}: expected TOML, got {error}") from error
    if not isinstance(tables, dict) or not tables:
        raise GuessError(f"{path}: expected tables [guess.SCOPE], got none")
    guesses = []
    for scope, fields in tables.items():
        if not isinstance(fields, dict) or not fields:
            raise GuessError(f"{path}: guess.{scope}: expected fields, got {fields!r}")
        checks = [_from_toml(name, value) for name, value in fields.items()]
        guesses.append(Guess(scope, tuple(checks)))
    return guesses


def _from_toml(name: str, value: Any) -> Check:
    if isinstance(value, bool):
        return _check(name, "=", "yes" if value else "no")
    text = str(value)
    if isinstance(value, str) and (match := _CHECK.fullmatch(f"x{text}")):
        return _check(name, match["operator"], _unquoted(match["value"]))
    return _check(name, "in" if re.fullmatch(r"[^.]\S*\.\.\S+", text) else "=", text)


def _unquoted(value: str) -> str:
    return value[1:-1] if value[0] in "\"'" else value


def _check(name: str, operator: str, value: str) -> Check:
    operator = "=" if operator == "==" else operator
    field = FIELDS.get(name)
    if field is None:
        raise GuessError(f"guess: expected a field out of {', '.join(FIELDS)}, got {name!r}")
    text = f"{name} in {value}" if operator == "in" else f"{name}{operator}{value}"
    if field.kind in ("text", "names"):
        if operator in _ORDERED:
            raise GuessError(f"guess: {name} has no order: expected = != ~ or !~, got {text!r}")
        if "~" in operator:
            try:
                re.compile(value)
            except re.error as error:
                raise GuessError(f"guess: {text!r} is no regular expression: {error}") from None
        return Check(field, operator, value, text)
    if "~" in operator:
        raise GuessError(f"guess: {name} is a number: expected = != < <= > >= or in, got {text!r}")
    if operator == "in":
        low, dots, high = value.partition("..")
        if not dots:
            raise GuessError(f"guess: expected {name} in LOW..HIGH, got {text!r}")
        return Check(field, operator, (_number(field, low), _number(field, high)), text)
    return Check(field, operator, _number(field, value), text)


def _number(field: Field, text: str) -> float:
    if field.kind == "yes" and text.lower() in ("yes", "no", "true", "false"):
        return float(text.lower() in ("yes", "true"))
    match = _NUMBER.fullmatch(text.strip())
    units = _UNITS.get(field.kind, {})
    if match is None or field.kind == "yes" or (match[2] and match[2] not in units):
        expected = "yes or no" if field.kind == "yes" else "a number"
        if units:
            expected += f", with {' or '.join(units)} or nothing after it"
        raise GuessError(f"guess: {field.name}: expected {expected}, got {text!r}")
    return float(match[1]) * units.get(match[2], 1)
