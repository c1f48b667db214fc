"""Guesses of `attn-ext run`: given with the command, or asked for before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any

from attn_ext.profile.fields import FIELDS
from attn_ext.profile.guess import Guess, GuessError, load, parse
from attn_ext.profile.saved import subjects
from attn_ext.profile.verdicts import MISS, UNKNOWN, Verdict, check


def given(texts: Sequence[str]) -> list[Guess]:
    """Guesses as text, or the names of TOML files with them.

    Raises:
        GuessError: a text or a file that cannot be read.
    """
    found = []
    for text in texts:
        is_file = text.endswith(".toml") or Path(text).is_file()
        found += load(text) if is_file else parse(text)
    return found


def ask(variants: Sequence[str]) -> list[Guess]:
    """Asks on the terminal for what each variant will show; an empty line is no guess.

    Ends where the input does.
    """
    _say(
        "What will one call show? FIELD=VALUE ..., such as kernels=5 memcpy=1 gpu_us<500; an empty "
        f"line is no guess.\nFields: {', '.join(FIELDS)}\n"
    )
    found: list[Guess] = []
    for variant in variants:
        while True:
            _say(f"{variant}: ")
            line = sys.stdin.readline()
            if not line:
                return found
            if not line.strip():
                break
            try:
                found += parse(f"{variant}: {line.strip()}")
                break
            except GuessError as error:
                _say(f"{error}\n")
    return found


def _say(text: str) -> None:
    # What is asked is no part of the output.
    sys.stderr.write(text)
    sys.stderr.flush()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def judge(guesses: Sequence[Guess], out: str | PathLike[str]) -> list[Verdict]:
    """Verdicts on the run whose folder this is."""
    return check(guesses, subjects([out]))


def record(guesses: Sequence[Guess], verdicts: Sequence[Verdict], stated: str) -> dict[str, Any]:
    """What summary.json keeps: what was guessed and when, and whether it held."""
    return {
        "stated": stated,
        "text": "; ".join(map(str, guesses)),
        "verdicts": [verdict.to_dict() for verdict in verdicts],
    }


def status(verdicts: Sequence[Verdict]) -> int:
    """1 with a MISS, 3 where none missed but something is UNKNOWN, else 0."""
    seen = {verdict.verdict for verdict in verdicts}
    return 1 if MISS in seen else 3 if UNKNOWN in seen else 0
