"""What kind of work an event is, by its name: its colour and its place in the legend."""

from __future__ import annotations

import re
from typing import NamedTuple

from attn_ext.profile.trace import Event


class Class(NamedTuple):
    """`key` is its name in the style sheet."""

    key: str
    label: str
    pattern: str


#: In the order of the legend; the first whose pattern is found in a name is its class.
CLASSES = (
    Class("attention", "fused attention", r"flash|fmha|sdpa|scaled_dot_product"),
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
_BY_CATEGORY = {"gpu_memcpy": _BY_KEY["copy"], "gpu_memset": _BY_KEY["fill"]}


def class_of(event: Event) -> Class:
    """The class of an event of the device, or of an op."""
    return _BY_CATEGORY.get(event.category) or next(
        one for one in CLASSES if re.search(one.pattern, event.name, re.IGNORECASE)
    )
