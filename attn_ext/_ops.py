"""Loads the compiled libraries. The only place that names the op namespace."""

from __future__ import annotations

import torch

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
