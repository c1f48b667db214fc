"""Registers, shared memory and spills of every CUDA kernel, from the logs of the last build.

python benchmarks/kernel_resources.py [PATTERN]    make build comes first
"""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

BUILD = Path(__file__).parent.parent / "build"
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def kernels() -> list[dict[str, str]]:
    """One entry for each kernel and architecture: name, arch, registers, smem, stack, stores."""
    found = []
    for log in sorted(BUILD.glob("*/_C_cuda/**/*.log")):
        for match in ENTRY.finditer(log.read_text()):
            smem = re.search(r"(\d+) bytes smem", match["rest"])
            found.append(match.groupdict() | {"smem": smem.group(1) if smem else "0"})
    return sorted(found, key=lambda kernel: (kernel["name"], kernel["arch"]))


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else "*"
    rows = [kernel for kernel in kernels() if fnmatch(kernel["name"], pattern)]
    if not rows:
        sys.exit(f"no kernel matches {pattern} below {BUILD}; run make build with nvcc first")
    columns = ("arch", "registers", "smem", "stack", "stores", "loads")
    width = max(len(row["name"]) for row in rows)
    print(f"{'kernel':{width}}" + "".join(f"{name:>10}" for name in columns))
    for row in rows:
        print(f"{row['name']:{width}}" + "".join(f"{row[name]:>10}" for name in columns))
    print("smem: static bytes; a kernel's dynamic shared memory stands in its head comment")


if __name__ == "__main__":
    main()
