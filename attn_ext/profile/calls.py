"""An attention call of each variant, ready to be made, all of one Case on the same tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import attn_ext
from attn_ext.profile.case import DTYPES, Case, CaseError
from attn_ext.sdpa import TORCH_BACKENDS

#: Variants that torch has on CUDA alone.
NEEDS_CUDA = ("sdpa_efficient", "sdpa_cudnn")


@dataclass
class Call:
    """One call of a variant: forward, and backward where the case asks for it.

    The pin makes torch choose the variant's backend. It costs more CPU time than a fused call, so
    it is entered round many calls, never in what is timed.
    """

    variant: str
    make: Callable[[], Any]
    pin: Callable[[], AbstractContextManager[Any]]


class CannotRunError(Exception):
    """Why a variant does not take the case, in one line."""


def pick_device(asked: str | None) -> torch.device:
    """The device named, or CUDA where there is one.

    Raises:
        CaseError: neither cpu nor cuda, or CUDA where there is none.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise CaseError("device", "cpu, cuda or cuda:N", asked)
    if kind == "cuda" and torch.version.cuda is None:
        raise CaseError("device", f"cpu, since torch {torch.__version__} has no CUDA", asked)
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise CaseError("device", f"one of {torch.cuda.device_count()} CUDA devices", asked)
    return torch.device(asked)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the current one, where there is such a thing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value, which ask for gradients where the case does."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(
            (case.batch, heads, case.seq, case.head_dim),
            generator=generator,
            dtype=getattr(torch, DTYPES[case.dtype]),
            device=device,
            requires_grad=case.backward,
        )

    return normal(case.heads), normal(case.kv_heads), normal(case.kv_heads)


def prepare(variants: Sequence[str], case: Case, device: torch.device) -> list[Call]:
    """The variants' calls on the same random tensors.

    "sdpa" is F.scaled_dot_product_attention with no backend pinned, "auto" attn_ext's own choice.
    """
    query, key, value = inputs(case, device)
    grad_out = inputs(case, device)[0].detach() if case.backward else None
    calls = []
    for variant in variants:
        attention = _attention(variant, case)

        def make(attention: Callable[..., Tensor] = attention) -> Any:
            out = attention(query, key, value)
            if grad_out is None:
                return out
            return torch.autograd.grad(out, (query, key, value), grad_out)

        backend = TORCH_BACKENDS.get(variant)
        pin = nullcontext if backend is None else lambda backend=backend: sdpa_kernel(backend)
        calls.append(Call(variant, make, pin))
    return calls


def _attention(variant: str, case: Case) -> Callable[..., Tensor]:
    grouped = case.kv_heads != case.heads

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attn_ext.scaled_dot_product_attention(
            query, key, value, is_causal=case.causal, enable_gqa=grouped, backend=variant
        )

    def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=case.causal, enable_gqa=grouped
        )

    function = torchs if variant in (*TORCH_BACKENDS, "sdpa") else own
    if not case.compile:
        return function
    # Dynamo caches by code object and does not guard on the backend that is pinned: without a
    # code object of its own, a variant would run what was compiled for the one before it.
    alone = FunctionType(
        function.__code__.replace(), function.__globals__, variant, None, function.__closure__
    )
    compiled: Callable[..., Tensor] = torch.compile(alone, fullgraph=True, dynamic=False)
    return compiled


@contextmanager
def pinned(call: Call) -> Iterator[None]:
    """The variant's backend for the calls inside; what they raise becomes CannotRunError."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with call.pin():
                yield
        except RuntimeError as error:
            texts = [str(warning.message) for warning in caught]
            raise CannotRunError(reason(call.variant, error, texts)) from error


def reason(variant: str, error: Exception, warned: Sequence[str]) -> str:
    """One line. SDPA's error names no cause: that is in the warnings before it."""
    family = variant.removeprefix("sdpa_")
    causes, ours = [], False
    for text in warned:
        line = text.split(" (Triggered internally")[0].strip()
        if "not used because" in line:
            ours = line.lower().replace("memory efficient", "efficient").startswith(family)
        elif ours:
            causes.append(line)
    text = " ".join(causes) if variant in TORCH_BACKENDS and causes else str(error)
    return " ".join(text.strip().split("\n")[0].split()) or type(error).__name__
