"""Where the commands write."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from attn_ext.profile.case import CaseError


def writable(out: str | os.PathLike[str]) -> Path:
    """The folder, made where it is missing.

    Raises:
        CaseError: it cannot be written to.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CaseError("out", "a folder to write to", f"{out} ({error.strerror})") from error
    return folder


def write_json(path: Path, document: dict[str, Any]) -> str:
    """Writes the document and returns its text."""
    text = json.dumps(document, indent=1)
    path.write_text(text + "\n")
    return text
