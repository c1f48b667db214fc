"""The names of `import attn_ext`; importing this registers the ops with torch."""

from attn_ext import register as _register  # noqa: F401  what torch must know of the ops
from attn_ext._ops import cpu_isa, cuda_missing, ops
from attn_ext.activate import activate, activated, deactivate, is_active
from attn_ext.explain import Explanation, explain
from attn_ext.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from attn_ext.merge import merge_attention
from attn_ext.sdpa import BACKENDS, dropout_state, sac_ops, scaled_dot_product_attention
from attn_ext.use import use

__all__ = [
    "BACKENDS",
    "Explanation",
    "activate",
    "activated",
    "cpu_isa",
    "cuda_missing",
    "deactivate",
    "dropout_state",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "is_active",
    "merge_attention",
    "ops",
    "sac_ops",
    "scaled_dot_product_attention",
    "use",
]
