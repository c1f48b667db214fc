"""Loads the compiled libraries. The only place that names the op namespace."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

try:
    import attn_ext._C as _C
except ImportError as error:
    raise ImportError(
        f"attn_ext's compiled library does not load with torch {torch.__version__} "
        f"(it needs torch >= 2.10): {error}. In a source tree, run make first."
    ) from error

NAMESPACE = "attn_ext"
ops = torch.ops.attn_ext

#: The instruction set of the CPU kernels in use: base, avx2 or avx512.
cpu_isa: str = _C.isa()

#: Why there are no CUDA kernels, or None where there are.
cuda_missing: str | None = None
if torch.version.cuda is None:
    cuda_missing = f"torch {torch.__version__} was built without CUDA"
else:
    try:
        import attn_ext._C_cuda  # noqa: F401
    except ImportError as error:
        cuda_missing = f"attn_ext._C_cuda does not load: {error}"


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """op(*args, **kwargs), straight to its kernel where nothing asks for a gradient.

    The gradients of this package's ops are registered from Python, and the way past them costs a
    call half of its time on the host (20 us against 10), also where they have nothing to do.

    Raises:
        RuntimeError: under forward-mode AD or torch.func.grad, which those gradients do not serve.
    """
    # A function mode or a subclass may bring in tensors that want a gradient.
    if torch.compiler.is_compiling() or torch.overrides.has_torch_function(args):
        return op(*args, **kwargs)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None or forward_ad._current_level >= 0:
        _refuse_transforms(level, tensors)
        return op(*args, **kwargs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return op(*args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def _refuse_transforms(level: Any, tensors: list[torch.Tensor]) -> None:
    """What would drop a tangent in silence, or end in an error that names none of this package."""
    functorch = torch._C._functorch
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(
        unpack(tensor).tangent is not None for tensor in tensors
    ):
        raise RuntimeError(
            "attn_ext: forward-mode derivatives of attention are not supported; "
            'backend="math" has them'
        )
    grad = level is not None and level.key() == functorch.TransformType.Grad
    if grad and any(functorch.is_gradtrackingtensor(tensor) for tensor in tensors):
        raise RuntimeError(
            "attn_ext: torch.func.grad and its like are not supported by these ops, torch.autograd "
            'is; backend="math" serves both'
        )
