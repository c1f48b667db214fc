"""Finds the attention calls of any torch trace, by the names of ops, forward and backward apart.

A forward call is the outermost op that is an attention (aten's, ours, flash-attn's), or else a
chain that does the same unfused: a batched product, a softmax, a batched product of its result. A
backward call is the autograd nodes of a forward call's ops, which carry their sequence numbers;
where the forward is not in the trace (or torch.compile made the backward), the backward op itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attn_ext.profile.event import Event
from attn_ext.profile.shape import Shape, chain_shape, shape_of, sizes

NODE = "autograd::engine::evaluate_function: "


class Signature(NamedTuple):
    """Where an op takes what: positions among its arguments."""

    backend: str
    query: int = 0
    causal: int | None = None
    mask: int | None = None
    rows_of_heads: bool = False


#: Ops by name, without their namespace.
FORWARD = {
    "scaled_dot_product_attention": Signature("sdpa", 0, 5, 3),
    "_scaled_dot_product_attention_math": Signature("math", 0, 5, 3),
    "_scaled_dot_product_flash_attention": Signature("sdpa_flash", 0, 4),
    "_scaled_dot_product_flash_attention_for_cpu": Signature("sdpa_flash", 0, 4, 5),
    "_scaled_dot_product_efficient_attention": Signature("sdpa_efficient", 0, 6, 3),
    "_scaled_dot_product_cudnn_attention": Signature("sdpa_cudnn", 0, 6, 3),
    "_scaled_dot_product_fused_attention_overrideable": Signature("sdpa_overrideable", 0, 5, 3),
    "_flash_attention_forward": Signature("sdpa_flash", 0, 8, None, True),
    "_efficient_attention_forward": Signature("sdpa_efficient", 0, None, 3, True),
    "_cudnn_attention_forward": Signature("sdpa_cudnn", 0, 10, 3),
    "naive_attention": Signature("naive", 0, 5, 3),
    "inplace_attention": Signature("inplace", 0, 5, 3),
    "flash_attention_forward": Signature("flash", 0, 5, 3),
    "_flash_attn_forward": Signature("flash_attn", 0, 5, None, True),
}
BACKWARD = {
    "_scaled_dot_product_flash_attention_backward": Signature("sdpa_flash", 1, 11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Signature("sdpa_flash", 1, 7, 8),
    "_scaled_dot_product_efficient_attention_backward": Signature("sdpa_efficient", 1, 11, 4),
    "_scaled_dot_product_cudnn_attention_backward": Signature("sdpa_cudnn", 1, 14, 8),
    "_scaled_dot_product_fused_attention_overrideable_backward": Signature(
        "sdpa_overrideable", 1, 13, 4
    ),
    "_flash_attention_backward": Signature("sdpa_flash", 1, 11, None, True),
    "flash_attention_backward": Signature("flash", 1, 8, 6),
    "_flash_attn_backward": Signature("flash_attn", 1, 11, None, True),
}
# What else is an attention by its name; its arguments are not known.
_OTHERS = re.compile(r"flash_attn|flash_attention|fmha|scaled_dot_product|efficient_attention|sdpa")
_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_WRAPPERS = ("aten::matmul", "aten::einsum")


@dataclass
class Call:
    """One attention call on the host.

    Attributes:
        name: the op, or "unfused attention".
        backend: which one ran, as in `backend=`; "unfused" for a chain, "other" where the name does
            not tell.
        backward: whether it is the gradient.
        parts: the ops and autograd nodes that it is made of, in order of time.
        shape: None where the trace was taken without record_shapes, or of unequal lengths.
        forward: of a backward call, the call that it belongs to, where that is in the trace.
        node: the autograd node that the op runs in.
    """

    name: str
    backend: str
    backward: bool
    parts: list[Event] = field(repr=False)
    shape: Shape | None = None
    forward: Call | None = field(default=None, repr=False)
    node: Event | None = field(default=None, repr=False)

    @property
    def flops(self) -> int | None:
        """By torch's convention, causal or not."""
        return self.shape.flops(self.backward) if self.shape else None

    @property
    def useful_flops(self) -> int | None:
        """Without the pairs that a causal mask hides, where the trace says that it is causal."""
        return self.shape.flops(self.backward, seen=True) if self.shape else None

    @property
    def bytes(self) -> int | None:
        """The least that it moves to and from memory."""
        return self.shape.bytes(self.backward) if self.shape else None


def find(ops: Iterable[Event]) -> list[Call]:
    """The attention calls among the host events of a trace, in order of time."""
    threads: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
    for op in ops:
        threads[op.pid, op.tid].append(op)
    calls: list[Call] = []
    owner_of_sequence: dict[int, Call | None] = {}
    nodes: list[Event] = []
    for events in threads.values():
        events.sort(key=lambda op: (op.start_us, -op.duration_us))
        found, numbers = _of_thread(events)
        calls += found
        for number, call in numbers.items():
            # Each thread counts for itself: where two have a call by this number, none is sure.
            other = owner_of_sequence.get(number)
            owner_of_sequence[number] = None if call and other else call or other
        nodes += _outer_nodes(events)
    backward = _backward(sorted(nodes, key=lambda node: node.start_us), owner_of_sequence)
    linked = {id(part) for call in backward for part in call.parts}
    calls = [call for call in calls if not (call.backward and id(call.node) in linked)]
    return sorted([*calls, *backward], key=lambda call: call.parts[0].start_us)


def _of_thread(events: Sequence[Event]) -> tuple[list[Call], dict[int, Call | None]]:
    """The calls of a thread's sorted events, and the call of each autograd sequence number: that of
    the last op with it, since an op that makes no node shows the number of the next one."""
    calls: list[Call] = []
    numbers: list[tuple[int, Event]] = []
    chain = _Chain()
    end = -1.0  # of the call that is being read
    node: Event | None = None
    for op in events:
        number = op.args.get("Sequence number")
        if isinstance(number, int) and number >= 0 and not op.args.get("Fwd thread id"):
            numbers.append((number, op))
        if node is not None and op.start_us >= node.end_us:
            node = None
        if op.end_us <= end:
            _refine(calls[-1], op)
        elif (call := _fused(op)) is not None:
            call.node = node
            calls.append(call)
            end = op.end_us
            chain = _Chain()
        elif op.name.startswith(NODE):
            node = node or op
        elif node is None and (found := chain.add(op)) is not None:
            calls.append(found)
    return calls, _owners(numbers, calls)


def _owners(numbers: Sequence[tuple[int, Event]], calls: Sequence[Call]) -> dict[int, Call | None]:
    owners: dict[int, Call | None] = {}
    spans = [
        (call.parts[0].start_us, call.parts[-1].end_us, call) for call in calls if not call.backward
    ]
    at = 0
    for number, op in numbers:
        while at < len(spans) and spans[at][1] < op.start_us:
            at += 1
        inside = at < len(spans) and spans[at][0] <= op.start_us
        owners[number] = spans[at][2] if inside else None
    return owners


def _fused(op: Event) -> Call | None:
    namespace, _, name = op.name.partition("::")
    if not name or namespace == "autograd":
        return None
    for backward, table in ((False, FORWARD), (True, BACKWARD)):
        if signature := table.get(name):
            return Call(op.name, signature.backend, backward, [op], shape_of(op, *signature[1:]))
    if _OTHERS.search(name) and op.name.count("::") == 1:
        return Call(op.name, "other", re.search("backward|bwd", name) is not None, [op])
    return None


def _refine(call: Call, op: Event) -> None:
    """An op inside a call names the backend that ran, and may have the shape."""
    name = op.name.partition("::")[2]
    signature = (BACKWARD if call.backward else FORWARD).get(name)
    if signature is None:
        return
    call.backend = signature.backend
    if call.shape is None:
        call.shape = shape_of(op, *signature[1:])


class _Chain:
    """Watches for product, softmax, product, each working on the result of the one before."""

    def __init__(self) -> None:
        self._wrapper: Event | None = None
        self._scores: tuple[Event, Event] | None = None  # the outer op, the product
        self._softmax: Event | None = None

    def add(self, op: Event) -> Call | None:
        if op.name in _WRAPPERS:
            self._wrapper = op
        elif op.name in _PRODUCTS:
            wrapper = self._wrapper
            outer = wrapper if wrapper and op.end_us <= wrapper.end_us else op
            return self._product(outer, op)
        elif "softmax" in op.name and self._scores and self._softmax is None:
            self._softmax = op
        return None

    def _product(self, outer: Event, product: Event) -> Call | None:
        scores, softmax = self._scores, self._softmax
        self._scores, self._softmax = (outer, product), None
        if scores is None or softmax is None:
            return None
        shape = chain_shape(scores[1], product)
        recorded = sizes(scores[1], 0) is not None and sizes(product, 0) is not None
        if recorded and shape is None:
            return None  # the second product takes something else
        self._scores = None
        first, last = scores[0], outer
        span = first._replace(duration_us=last.end_us - first.start_us)
        return Call("unfused attention", "unfused", False, [span], shape)


def _outer_nodes(events: Sequence[Event]) -> list[Event]:
    nodes: list[Event] = []
    for op in events:
        if op.name.startswith(NODE) and not (nodes and op.end_us <= nodes[-1].end_us):
            nodes.append(op)
    return nodes


def _backward(nodes: Iterable[Event], owners: dict[int, Call | None]) -> list[Call]:
    """A call for each time that the nodes of a forward call run."""
    calls: list[Call] = []
    current: dict[int, tuple[Call, set[tuple[str, int]]]] = {}
    for node in nodes:
        number = node.args.get("Sequence number")
        forward = owners.get(number) if isinstance(number, int) else None
        if forward is None or node.start_us < forward.parts[-1].end_us:
            continue
        call, seen = current.get(id(forward), (None, set()))
        key = (node.name, node.args["Sequence number"])
        if call is None or key in seen:
            call = Call(forward.name, forward.backend, True, [], forward.shape, forward)
            calls.append(call)
            current[id(forward)] = (call, seen := set())
        seen.add(key)
        call.parts.append(node)
    return calls
