"""What kind of work an event is, by its name: its colour and its place in the legend."""

from __future__ import annotations

import re
from typing import NamedTuple

from attn_ext.profile.event import Event
from attn_ext.profile.kernel_name import decode


class Class(NamedTuple):
    """`key` is its name in the style sheet."""

    key: str
    label: str
    pattern: str


#: In the order of the legend; the first whose pattern is found in a name is its class.
CLASSES = (
    Class(
        "attention", "fused attention", r"flash|fmha|sdpa|scaled_dot_product|dot_do_o|convert_dq"
    ),
    Class("gemm", "matrix product", r"gemm|nvjet|cutlass|xmma|cublas|matmul|::\w*mm\b"),
    Class("softmax", "softmax", r"softmax"),
    Class("mask", "mask", r"masked_fill|where|::tri[lu]"),
    Class("copy", "copy", r"copy|::clone|::contiguous"),
    Class("reduce", "reduction", r"reduce"),
    Class(
        "elementwise",
        "elementwise",
        r"elementwise|scale|dropout|triton_poi|::(add|sub|mul|div)_?\b",
    ),
    Class("fill", "fill", r"fill|::(zeros|ones|full)"),
    Class("other", "other", r""),
)
_BY_KEY = {one.key: one for one in CLASSES}
#: Families of kernels whose work needs no second look at the name.
_FAMILIES = {"gemm": "gemm", "softmax": "softmax", "reduce": "reduce", "copy": "copy",
             "memcpy": "copy", "fill": "fill", "memset": "fill"}  # fmt: skip


def class_of(event: Event) -> Class:
    """The class of an event of the device, or of an op."""
    if event.category != "cpu_op":
        kernel = decode(event.name)
        if kernel.attention or kernel.family in _FAMILIES:
            return _BY_KEY["attention" if kernel.attention else _FAMILIES[kernel.family]]
    return next(one for one in CLASSES if re.search(one.pattern, event.name, re.IGNORECASE))
