"""Any backend under an unedited model: `with attn_ext.use("naive"):`."""

from __future__ import annotations

import re
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attn_ext.sdpa import BACKENDS, scaled_dot_product_attention

# The function that torch shows to a mode, also where F's name for it has been patched.
_SDPA = torch._C._nn.scaled_dot_product_attention


def _unasking(func: Any) -> types.FunctionType:
    """A copy of a function of torch that does not ask whether there is a mode to hand itself to."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = func.__globals__ | {name: lambda *tensors: False for name in asks}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# Functions in which F.sdpa may be called: in the last two by the recomputation of checkpoints.
# torch hands each to a mode as a whole, and then runs its body outside of the mode.
_WHOLE: dict[Any, types.FunctionType] = {
    func: _unasking(func)
    for func in (F.multi_head_attention_forward, torch.Tensor.backward, torch.autograd.grad)
}


class _Modes(threading.local):
    """The blocks of `use` that this thread is in, the innermost last, as torch's own modes are."""

    def __init__(self) -> None:
        self.entered: list[_Use] = []


_modes = _Modes()


@contextmanager
def use(backend: str, *, strict: bool = False) -> Iterator[None]:
    """Runs every F.scaled_dot_product_attention of this thread on `backend` inside the block.

    The model is not edited. Of nested blocks the innermost decides. Under activation checkpointing
    the backward pass calls the model again, so it belongs inside the block as well.

    Args:
        backend: what attn_ext.scaled_dot_product_attention takes as backend=.
        strict: raise where the backend does not take a call. Without it torch's own choice runs
            that call, and one warning for each reason says so.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: under strict, from the call: what the backend expected and what came.

    Calls that do not go through F.scaled_dot_product_attention are out of reach:
    FlexAttention, varlen_attn, and the aten ops called by hand.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
    mode = _Use(backend, strict)
    outer = _modes.entered[-1] if _modes.entered else None
    _modes.entered.append(mode)
    if outer is not None:
        outer.shadowed = True
    try:
        with mode:
            yield
    finally:
        _modes.entered.remove(mode)
        if outer is not None:
            outer.shadowed = False


class _Use(TorchFunctionMode):
    def __init__(self, backend: str, strict: bool) -> None:
        super().__init__()
        self.backend = backend
        self.strict = strict
        self.shadowed = False  # an inner block decides; what it hands to torch passes through
        self.warned: set[str] = set()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.shadowed:
            return func(*args, **kwargs)
        if func in _WHOLE and all(map(_is_plain, types)):
            with self:
                return _WHOLE[func](*args, **kwargs)
        if func is not _SDPA:
            return func(*args, **kwargs)
        try:
            return scaled_dot_product_attention(*args, **kwargs, backend=self.backend)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.strict:
                raise
            reason = str(error)
        out = func(*args, **kwargs)
        self.warn(reason)
        return out

    def warn(self, reason: str) -> None:
        """Once for each reason, whatever the sizes in its text."""
        kind = re.sub(r"\d+", "0", reason)
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(
                f"attn_ext.use({self.backend!r}) left a call to torch's own attention: {reason}",
                stacklevel=3,
            )


def _is_plain(kind: Any) -> bool:
    """Whether this kind of tensor leaves functions of torch as they are."""
    own = kind.__torch_function__
    return kind is torch.Tensor or own is torch._C._disabled_torch_function_impl
