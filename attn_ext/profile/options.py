"""Options that subcommands share: each group in one place, and how they become a Case."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from attn_ext.profile.case import DTYPES, VARIANTS, Case, default_case

#: What a subcommand runs: options in, exit status out.
Handler = Callable[[argparse.Namespace], int]

_SIZES = ("batch", "heads", "kv_heads", "seq", "head_dim")


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Parser]


def add_command(
    subparsers: Subparsers,
    name: str,
    handler: Handler,
    *,
    help: str,
    text: str,
    examples: Sequence[str],
) -> Parser:
    """A subcommand with a line in the list of commands, a text and examples of its own help.

    `examples` are command lines without the program's name; a test runs each of them.
    """
    lines = [f"  attn-ext {example}".rstrip() for example in examples]
    command = subparsers.add_parser(
        name,
        help=help,
        description=text,
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(handler=handler)
    return command


def add_variants(command: Parser) -> None:
    command.add_argument(
        "variant", nargs="*", metavar="VARIANT", help=f"any of {' '.join(VARIANTS)}; default: all"
    )


def add_shape(command: Parser, without: Sequence[str] = ()) -> None:
    """The attention call, of which case_of makes a Case. `without` names fields of Case."""
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
        if name not in without:
            shape.add_argument(option(name), type=int, metavar="N", help=f"{meaning}; {default}")
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


def add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N; default: cuda if any")


def add_out(group: argparse._ActionsContainer, default: str = "profile") -> None:
    group.add_argument(
        "--out", default=default, metavar="DIR", help=f"folder to write to; default: {default}"
    )


def add_format(group: argparse._ActionsContainer) -> None:
    choices = ("table", "json")
    group.add_argument("--format", default="table", choices=choices, help="of what is printed")
    group.add_argument("--wide", action="store_true", help="every column, however wide the table")


def option(field: str) -> str:
    """The option that gives a field of Case: kv_heads is --kv-heads."""
    return "--" + field.replace("_", "-")


def case_of(options: argparse.Namespace, device: str) -> Case:
    """The call that add_shape's options describe, on a device of type "cpu" or "cuda".

    Raises:
        CaseError: a size that cannot be.
    """
    default = default_case(device)
    given = {
        name: value
        for name in (*_SIZES, "dtype")
        if (value := getattr(options, name, None)) is not None
    }
    given.setdefault("kv_heads", given.get("heads", default.heads))
    return Case(
        **{name: getattr(default, name) for name in (*_SIZES, "dtype")} | given,
        causal=options.causal,
        backward=options.backward,
        compile=options.compile,
    )


def shape_words(case: Case) -> list[str]:
    """The options of add_shape that describe this case."""
    words = [text for name in (*_SIZES, "dtype") for text in (option(name), str(vars(case)[name]))]
    words.append("--causal" if case.causal else "--no-causal")
    return words + ["--backward"] * case.backward + ["--compile"] * case.compile
