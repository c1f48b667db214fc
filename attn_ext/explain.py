"""Which backend a call of attention gets, and why not another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attn_ext.activate import is_active
from attn_ext.sdpa import TORCH_BACKENDS, why_not_flash


@dataclass
class Explanation:
    """What a call gets. print() shows it as a table.

    Attributes:
        sdpa: the backend that F.scaled_dot_product_attention takes.
        auto: the backend that attn_ext.scaled_dot_product_attention(backend="auto") takes.
        why: why "auto" leaves the call to torch, or None where it takes "flash".
        active: whether attn_ext.activate() has put our kernels under torch's flash backend.
        order: torch's backends, the first that takes the call runs; those switched off left out.
        refused: backend -> why it does not take the call, in one line.
    """

    sdpa: str
    auto: str
    why: str | None
    active: bool
    order: list[str]
    refused: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        under = " on attn_ext's kernels" if self.active and self.sdpa == "sdpa_flash" else ""
        rows = [
            ("F.sdpa", f"{self.sdpa}{under}"),
            ("auto", self.auto + (f": {self.why}" if self.why else ": measured fastest")),
            ("torch asks", ", then ".join(self.order)),
            *((name, f"refuses: {why}") for name, why in self.refused.items()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Explanation:
    """Asks torch and attn_ext what they would run for these arguments, without making the call.

    Args: as of attn_ext.scaled_dot_product_attention. Whether gradients are wanted is read off the
        tensors, as in the call itself.
    """
    names = {backend.value: name for name, backend in TORCH_BACKENDS.items()}
    ask: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009  it is in no stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        number = ask(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    sdpa = names.get(number, SDPBackend(number).name.lower())
    why = why_not_flash(query, key, value, attn_mask, dropout_p)
    internals: Any = torch._C
    return Explanation(
        sdpa=sdpa,
        auto="flash" if why is None else sdpa,
        why=why,
        active=is_active(),
        order=[names[n] for n in internals._get_sdp_priority_order() if n in names and _allowed(n)],
        refused=_refused(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa),
    )


def _allowed(backend: int) -> bool:
    flags: Any = torch.backends.cuda
    enabled = {
        SDPBackend.MATH.value: flags.math_sdp_enabled,
        SDPBackend.FLASH_ATTENTION.value: flags.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION.value: flags.mem_efficient_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION.value: flags.cudnn_sdp_enabled,
    }
    return bool(enabled[backend]())


def _refused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> dict[str, str]:
    """The fused backends that do not take the call."""
    refused = {}
    if max(query.shape[-1], value.shape[-1]) > 256:
        refused["flash"] = "takes head sizes up to 256"
    if query.device.type != "cuda":
        only = "torch has this backend on CUDA only"
        return refused | dict.fromkeys(("sdpa_efficient", "sdpa_cudnn"), only)
    if query.dtype == torch.float64:
        refused["flash"] = "takes float16, bfloat16 and float32 on CUDA"
    cuda: Any = torch.backends.cuda
    parameters = cuda.SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    for name in ("flash", "efficient", "cudnn"):
        can: Callable[..., bool] = getattr(cuda, f"can_use_{name}_attention")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fits = can(parameters, debug=True)
        if not fits:
            texts = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
            causes = [text for text in texts if "not used because" not in text]
            refused[f"sdpa_{name}"] = " ".join(causes) or "torch does not say why"
    return refused
