"""`attn-ext explain`: which backend a call gets, and why not another."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from attn_ext.profile import options as shared
from attn_ext.profile.case import Case, CaseError
from attn_ext.profile.kernel_name import decode

_TEXT = """\
Says which backend F.scaled_dot_product_attention and attn_ext's "auto" take for a shape, in which
order torch asks its backends, which of them refuse and why. torch's switches only allow a backend:
what runs is told by --probe, which makes one small call on each backend (a sequence and a group of
heads at the given length) and reads from a trace what it executed.
"""


def add(subparsers: shared.Subparsers) -> None:
    command = shared.add_command(
        subparsers,
        "explain",
        handle,
        help="which backend a shape gets, and why not another",
        text=_TEXT,
        examples=[
            "explain",
            "explain 8x16x1024x64 1x16x1x64 --dtype bf16",
            "explain --head-dim 300 --dtype fp32 --probe --json",
        ],
    )
    command.add_argument(
        "shape",
        nargs="*",
        metavar="SHAPE",
        help="BATCHxHEADSxSEQxHEAD_DIM; the options are for all of them",
    )
    shared.add_shape(command)
    how = command.add_argument_group("the answer")
    how.add_argument("--probe", action="store_true", help="make the calls and see what executes")
    shared.add_device(how)
    how.add_argument("--json", action="store_true", help="as JSON")


def handle(options: argparse.Namespace) -> int:
    shapes = [_sizes(text, options.kv_heads) for text in options.shape] or [{}]
    shared.case_of(options, "cpu")
    from attn_ext.profile import calls, choice

    device = calls.pick_device(options.device)
    case = shared.case_of(options, device.type)
    answers = []
    for sizes in shapes:
        one = replace(case, **sizes)
        answer: dict[str, Any] = {"case": vars(one), **choice.choice(one, device).to_dict()}
        if options.probe:
            answer["probe"] = [probed.to_dict() for probed in choice.probe(one, device)]
        answers.append(answer)
    if options.json:
        print(json.dumps(answers, indent=1))
    else:
        print("\n\n".join(_text(answer) for answer in answers))
    return 0


def _sizes(text: str, kv_heads: int | None) -> dict[str, Any]:
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise CaseError("SHAPE", "BATCHxHEADSxSEQxHEAD_DIM such as 8x16x1024x64", text)
    batch, heads, seq, head_dim = map(int, parts)
    kv_heads = kv_heads or heads
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq": seq, "head_dim": head_dim}


def _text(answer: dict[str, Any]) -> str:
    under = " on attn_ext's kernels: activate() is on" if answer["active"] else ""
    ours = under if answer["sdpa"] == "sdpa_flash" else ""
    lines = [
        f"attention of {Case(**answer['case'])}",
        f"  F.scaled_dot_product_attention takes {answer['sdpa']}{ours}",
        f'  attn_ext with backend="auto" takes {answer["auto"]}{_because(answer["why"])}',
        f"  torch asks in this order: {', '.join(answer['order'])}",
    ]
    lines += [f"  {name} refuses: {why}" for name, why in answer["refused"].items()]
    if "probe" in answer:
        lines.append("  asked for, and what executed:")
        width = max(len(probed["asked"]) for probed in answer["probe"])
        for probed in answer["probe"]:
            lines.append(f"    {probed['asked'].ljust(width)}  {_executed(probed)}")
    return "\n".join(lines)


def _because(why: str | None) -> str:
    return f": {why}" if why else ""


def _executed(probed: dict[str, Any]) -> str:
    if "error" in probed:
        return f"cannot run: {probed['error']}"
    text = ", ".join(probed.get("ran", ["nothing that is known as attention"]))
    kernels = [decode(name).title for name in probed.get("kernels", [])]
    more = f" and {len(kernels) - 3} more" if len(kernels) > 3 else ""
    return f"{text} ({'; '.join(kernels[:3])}{more})" if kernels else text
