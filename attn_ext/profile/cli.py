"""The command `attn-ext`, also `python -m attn_ext.profile`.

Exit status: 0, or 1 where no variant could run, or 2 with one line where the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from attn_ext.profile.case import DTYPES, VARIANTS, Case, CaseError, check_variants, default_case
from attn_ext.profile.table import render, write

_RUN_TEXT = """\
Profiles attention from its most naive to its fastest form, each beside torch's own backends, and
prints what one call of each costs. Writes DIR/<shape>_<variant>_<mode>.json.gz, a trace to open at
https://ui.perfetto.dev, for each variant, and DIR/summary.json.
"""
_RUN_EXAMPLES = """\
examples:
  attn-ext run
  attn-ext run naive inplace --seq 256 --backward
  attn-ext run flash sdpa_flash --heads 32 --kv-heads 8 --dtype bf16 --format json
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    commands = _Parser(prog="attn-ext", description="Makes attention readable in a profile.")
    subparsers = commands.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(subparsers)
    return commands


def _add_run(subparsers: argparse._SubParsersAction[_Parser]) -> None:
    command = subparsers.add_parser(
        "run",
        help="profile variants of attention side by side",
        description=_RUN_TEXT,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(handler=_run)
    command.add_argument(
        "variant", nargs="*", metavar="VARIANT", help=f"any of {' '.join(VARIANTS)}; default: all"
    )
    gpu, cpu = default_case("cuda"), default_case("cpu")
    shape = command.add_argument_group("the call")
    for name, meaning in (
        ("batch", "sequences"),
        ("heads", "heads of query"),
        ("kv_heads", "heads of key and value"),
        ("seq", "length of all sequences"),
        ("head_dim", "size of a head"),
    ):
        default = f"default: {getattr(gpu, name)}, on a CPU {getattr(cpu, name)}"
        if name == "kv_heads":
            default = "default: as --heads"
        shape.add_argument(_option(name), type=int, metavar="N", help=f"{meaning}; {default}")
    shape.add_argument(
        "--dtype",
        metavar="TYPE",
        help=f"one of {' '.join(DTYPES)}; default: {gpu.dtype}, on a CPU {cpu.dtype}",
    )
    shape.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="query i sees keys up to i; default: yes",
    )
    shape.add_argument("--backward", action="store_true", help="with the gradients")
    shape.add_argument("--compile", action="store_true", help="under torch.compile")
    how = command.add_argument_group("the run")
    how.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: cuda if any")
    how.add_argument("--steps", type=int, default=5, metavar="N", help="profiled calls; default: 5")
    how.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="calls before them; default: 3"
    )
    how.add_argument(
        "--out", default="profile", metavar="DIR", help="folder to write to; default: profile"
    )
    how.add_argument(
        "--format", default="table", choices=("table", "json"), help="of what is printed"
    )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _run(options: argparse.Namespace) -> int:
    # torch takes seconds to import: not for --help, nor for a command that is wrong.
    variants = options.variant or VARIANTS
    check_variants(variants)
    _case(options, "cpu")
    from attn_ext.profile import collect

    device = collect.pick_device(options.device)
    case = _case(options, device.type)
    with _progress_bar() as progress:
        summary = collect.run(
            variants,
            case,
            out=options.out,
            device=str(device),
            steps=options.steps,
            warmup=options.warmup,
            progress=progress,
        )
    if options.format == "json":
        print(json.dumps(summary.to_dict(), indent=1))
    else:
        write(render(summary, f"attention of {case}"))
        print(
            f"\nwrote traces (open them at https://ui.perfetto.dev) and summary.json: {options.out}"
        )
    return 0 if summary.base else 1


def _case(options: argparse.Namespace, device: str) -> Case:
    default = default_case(device)
    given = {
        name: getattr(options, name)
        for name in ("batch", "heads", "kv_heads", "seq", "head_dim", "dtype")
        if getattr(options, name) is not None
    }
    given.setdefault("kv_heads", given.get("heads", default.heads))
    return Case(
        **{name: getattr(default, name) for name in ("batch", "heads", "seq", "head_dim", "dtype")}
        | given,
        causal=options.causal,
        backward=options.backward,
        compile=options.compile,
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr while it is a terminal and rich is installed; else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield None
        return
    # No thread that redraws the bar: it would take the interpreter from the calls being timed.
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("starting")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what, refresh=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        status: int = options.handler(options)
    except CaseError as error:
        name = error.field if error.field.isupper() else _option(error.field)
        message = f"{name}: expected {error.expected}, got {error.got}"
        print(f"attn-ext {options.command}: {message}", file=sys.stderr)
        return 2
    return status
