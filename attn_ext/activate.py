"""Our kernels under torch's own flash attention: `attn_ext.activate()`, and a model runs on them.

The ops of aten that F.scaled_dot_product_attention calls for flash attention get our kernels, with
torch's autograd, autocast and compile rules on top as before. A call that ours does not take, one
with dropout for example, runs on torch's kernel. torch keeps a registry of such implementations,
one of which is active at a time; ours is "ATTN_EXT" there. ATTN_EXT_ACTIVATE=1 in the environment
activates it with torch's import, in a script that knows nothing of attn_ext too where attn_ext is
installed (attn_ext_autoload.py).

The switch is one for the whole process, to be thrown while no thread is in attention: torch's
dispatcher takes no lock. It reaches what calls these ops through the dispatcher:
F.scaled_dot_product_attention where torch chooses flash, nn.MultiheadAttention outside of its fast
path, torch.compile, and on CUDA varlen_attn and context parallelism. AOTInductor and inductor's
cpp_wrapper call torch's kernels by their C names and are out of reach.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend

from attn_ext import _C
from attn_ext._ops import NAMESPACE, cuda_missing

NAME = "ATTN_EXT"

# The ops of each library, and the arguments that our kernels know; later versions of torch may
# append some.
_LIBRARIES: dict[str, Any] = {"CPU": _C}
if cuda_missing is None:
    from attn_ext import _C_cuda

    _LIBRARIES["CUDA"] = _C_cuda
_OPS = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": (
            "query key value dropout_p is_causal attn_mask scale"
        ),
        "_scaled_dot_product_flash_attention_for_cpu_backward": (
            "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
        ),
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": (
            "query key value dropout_p is_causal return_debug_mask scale"
        ),
        "_scaled_dot_product_flash_attention_backward": (
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
            "is_causal philox_seed philox_offset scale"
        ),
        "_flash_attention_forward": (
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "return_debug_mask scale window_size_left window_size_right seqused_k alibi_slopes"
        ),
        "_flash_attention_backward": (
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
            "is_causal rng_state unused scale window_size_left window_size_right"
        ),
    },
}

_registry: Any = attention
_has_registry = all(
    hasattr(attention, f"{verb}_flash_attention_impl")
    for verb in ("register", "activate", "current", "restore")
)
_cuda: Any = torch.cuda
_backends: Any = torch.backends.cuda

_lock = threading.RLock()
_installed = False
_holders: dict[object, bool] = {}  # who wants our kernels in place, each with its pin
_replaced: str | None = None  # the implementation that was active before ours
_native: dict[str, Any] = {}  # torch's own kernels by op
_native_library: Any = None
_unpinned: tuple[list[int], bool] | None = None  # priorities and flash's flag before the pin
_waits_for_cuda = False


def activate(*, pin: bool = True) -> None:
    """Runs torch's flash attention on our kernels from here on, everywhere in the process.

    Calling it twice is calling it once. A compiled model keeps the backend that torch chose when it
    was compiled, so activate first.

    Args:
        pin: also put flash first among the backends that torch chooses from, and enable it. On
            Hopper and later GPUs torch takes cuDNN first, and flash is never reached. Blocks of
            sdpa_kernel(..., set_priority=True) in the model still have their own order.

    Raises:
        RuntimeError: this torch declares the ops otherwise than any version known here; nothing
            has changed then.
    """
    _hold("activate", pin)


def deactivate() -> None:
    """Undoes activate(): every op, and the order of torch's backends, is as it was.

    Without an activate() before it does nothing. Blocks of activated() that are open in other
    threads keep the kernels in place until they end.
    """
    _release("activate")


@contextmanager
def activated(*, pin: bool = True) -> Iterator[None]:
    """activate() for a block. Blocks nest; the last one to end undoes it."""
    holder = object()
    _hold(holder, pin)
    try:
        yield
    finally:
        _release(holder)


def is_active() -> bool:
    """Whether torch's flash attention runs on our kernels."""
    return _installed


def _hold(holder: object, pin: bool) -> None:
    global _replaced
    with _lock:
        if not _holders:
            _replaced = _registry.current_flash_attention_impl() if _has_registry else None
        if not _installed:
            _switch_on()
        _holders[holder] = pin
    try:
        _settle_pin()
    except BaseException:
        _release(holder)
        raise


def _switch_on() -> None:
    if not _has_registry:
        _install()
        return
    try:
        _registry.activate_flash_attention_impl(NAME)
    except BaseException:  # the registry has taken out the one before by now
        if _replaced is not None:
            _registry.activate_flash_attention_impl(_replaced)
        raise


def _release(holder: object) -> None:
    global _replaced
    with _lock:
        _holders.pop(holder, None)
        # Another implementation may have been activated over ours by now: then it stays.
        if not _holders and _installed and _replaced != NAME:
            if _has_registry:
                _registry.restore_flash_attention_impl()
            else:
                _Handle().remove()
            if _replaced is not None:
                _registry.activate_flash_attention_impl(_replaced)
        if not _holders:
            _replaced = None
    _settle_pin()


class _Handle:
    """What torch's registry keeps of an active implementation."""

    def remove(self) -> None:
        global _installed
        with _lock:
            for library in _LIBRARIES.values():
                library.remove_overrides()
            _installed = False


class _Install(torch.autograd.Function):
    """Under a function of torch, so that its one warning that a kernel is replaced, which goes to
    stderr from anywhere else, can be caught: that is what was asked for."""

    @staticmethod
    def forward(ctx: Any) -> None:
        for library in _LIBRARIES.values():
            library.install_overrides()


def _install() -> _Handle:
    """Puts our kernels in place; torch's registry calls this to activate "ATTN_EXT"."""
    global _installed
    with _lock:
        for key, ops in _OPS.items():
            if key in _LIBRARIES:
                for name, arguments in ops.items():
                    _keep_native(key, name, arguments.split())
        handle = _Handle()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                _Install.apply()  # type: ignore[no-untyped-call]
        except BaseException:
            handle.remove()
            raise
        _installed = True
        return handle


def _keep_native(key: str, name: str, arguments: list[str]) -> None:
    """Makes torch's kernel an op of ours, which the override calls for what it does not take."""
    global _native_library
    op = getattr(torch.ops.aten, name).default
    declared = [argument.name for argument in op._schema.arguments]
    if declared[: len(arguments)] != arguments:
        raise RuntimeError(
            f"attn_ext.activate: expected aten::{name} with arguments {', '.join(arguments)}, got "
            f"{', '.join(declared)} in torch {torch.__version__}"
        )
    known = name in _native
    _native[name] = torch.library.get_kernel(op, key)
    if known:
        return
    if _native_library is None:
        fragment: Any = torch.library.Library
        _native_library = fragment(NAMESPACE, "FRAGMENT")

    mixed = name == "_scaled_dot_product_flash_attention"

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        results = _native[name].call_boxed(keys, *args, **kwargs)
        if mixed:
            results = (*results[:3], results[4], results[3], *results[5:])
        return results

    _native_library.define(_native_schema(name))
    _native_library.impl(f"native{name}", call, key, with_keyset=True)


def _native_schema(name: str) -> str:
    """The schema of the op that keeps torch's kernel. Its results' types read the same backwards:
    override.h says why."""
    schema = str(getattr(torch.ops.aten, name).default._schema)
    schema = schema.replace(f"aten::{name}", f"native{name}")
    return schema.replace("Tensor cum_seq_k, SymInt max_q,", "SymInt max_q, Tensor cum_seq_k,")


def _settle_pin() -> None:
    """Pins or unpins, as the holders want it. Called without our lock: CUDA's has to come first."""
    global _waits_for_cuda
    with _lock:
        if any(_holders.values()):
            if _unpinned is None:
                _pin(_backends.flash_sdp_enabled(), on_cuda=_cuda.is_initialized())
        elif _unpinned is not None:
            _unpin()
    early = torch.version.cuda is not None and not _cuda.is_initialized()
    if _unpinned is not None and early and not _waits_for_cuda:
        _waits_for_cuda = True
        _cuda._lazy_call(_pin_anew)


def _pin(flash_enabled: bool, on_cuda: bool) -> None:
    global _unpinned
    if on_cuda:
        _settle_order()
    order = torch._C._get_sdp_priority_order()
    _unpinned = order, flash_enabled
    flash = int(SDPBackend.FLASH_ATTENTION)  # type: ignore[call-overload]
    torch._C._set_sdp_priority_order([flash, *(other for other in order if other != flash)])
    _backends.enable_flash_sdp(True)


def _unpin() -> bool:
    """Whether flash was enabled before the pin."""
    global _unpinned
    assert _unpinned is not None
    order, flash_enabled = _unpinned
    torch._C._set_sdp_priority_order(order)
    _backends.enable_flash_sdp(flash_enabled)
    _unpinned = None
    return flash_enabled


def _pin_anew() -> None:
    """When CUDA is initialised: torch would settle its order of backends at its first choice there,
    over a pin of before."""
    with _lock:
        if _unpinned is not None:
            _pin(_unpin(), on_cuda=True)


def _settle_order() -> None:
    """Lets torch choose a backend on CUDA once. The kernel of the choice looks at sizes alone, so
    that a meta tensor will do, and no memory is touched."""
    from torch._C import DispatchKey, DispatchKeySet

    choice = torch.library.get_kernel("aten::_fused_sdp_choice", "CUDA")
    tensor = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="meta")
    with suppress(RuntimeError):  # no backend that is allowed takes it: the order is settled before
        choice.call_boxed(DispatchKeySet(DispatchKey.CUDA), tensor, tensor, tensor)


if _has_registry:
    _registry.register_flash_attention_impl(NAME, register_fn=_install)
if (_asked := os.environ.get("ATTN_EXT_ACTIVATE", "")) == "1":
    activate()
elif _asked not in ("", "0"):
    raise ValueError(f"ATTN_EXT_ACTIVATE: expected 0 or 1, got {_asked!r}")
