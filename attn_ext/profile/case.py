"""What is profiled: the shape of one attention call and how it is called. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_ext.profile.errors import InputError

#: The variants of a run, from naive to fused, then torch's own: the values of `backend=`.
VARIANTS = ("naive", "inplace", "flash", "math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn")
#: Names on the command line and in files -> torch's.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class CaseError(InputError):
    """A field that cannot be: `field`, what was expected and what came."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field = field
        self.expected = expected
        self.got = got


@dataclass(frozen=True)
class Case:
    """One attention call: query [batch, heads, seq, head_dim], key and value with kv_heads.

    The default is the shape of a small language model's layer. `backward` adds the gradients of
    query, key and value; `compile` runs the call under torch.compile.

    Raises:
        CaseError: a size that is not positive, heads that kv_heads does not divide, an unknown
            dtype.
    """

    batch: int = 8
    heads: int = 16
    kv_heads: int = 16
    seq: int = 1024
    head_dim: int = 64
    dtype: str = "bf16"
    causal: bool = True
    backward: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for field in ("batch", "heads", "kv_heads", "seq", "head_dim"):
            if getattr(self, field) < 1:
                raise CaseError(field, "at least 1", getattr(self, field))
        if self.heads % self.kv_heads:
            raise CaseError("kv_heads", f"a divisor of heads = {self.heads}", self.kv_heads)
        if self.dtype not in DTYPES:
            raise CaseError("dtype", f"one of {', '.join(DTYPES)}", self.dtype)

    @property
    def mode(self) -> str:
        return "compile" if self.compile else "eager"

    def tag(self, variant: str) -> str:
        """The stem of a trace's file, such as 8_16_1024_64_flash_eager."""
        parts = [self.batch, self.heads, self.seq, self.head_dim, variant, self.mode]
        return "_".join(map(str, parts + ["backward"] * self.backward))

    def __str__(self) -> str:
        kv_heads = "" if self.kv_heads == self.heads else f" (kv {self.kv_heads})"
        shape = f"batch {self.batch}, heads {self.heads}{kv_heads}, seq {self.seq}"
        causal = ", causal" if self.causal else ""
        passes = "forward + backward" if self.backward else "forward"
        return f"{shape}, head size {self.head_dim}, {self.dtype}{causal}: {passes}, {self.mode}"


def check_variants(variants: Sequence[str]) -> None:
    """Raises CaseError unless there is a variant and all of them are known."""
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if unknown or not variants:
        raise CaseError("VARIANT", f"some of {', '.join(VARIANTS)}", ", ".join(unknown) or "none")


def default_case(device: str) -> Case:
    """The shape that a run takes by default: on a CPU all variants finish within seconds."""
    if device == "cuda":
        return Case()
    return Case(batch=2, heads=8, kv_heads=8, seq=512, head_dim=64, dtype="fp32")
