"""Reads the name of a CUDA kernel: who wrote it, what it does, and on which units of the GPU.

    decode("nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN").reading
    # matrix product of cuBLAS: bf16, tile 192 x 192 x 64, 4 stages, for sm_90, tensor cores

A name is a hint, not a contract: what it does not say stays None, and a kernel that fits no rule is
of family "other".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Kernel:
    """What a kernel's name says; None is "does not say".

    Attributes:
        name: as it was given.
        family: attn_ext, flash2, flash3, cudnn, efficient, gemm, triton, softmax, reduce,
            elementwise, copy, fill, memcpy, memset, or other.
        title: the family in words.
        direction: "forward" or "backward", of attention and softmax.
        dtype: fp16, bf16, fp32, fp64, tf32, fp8 or int8: of the operands.
        arch: such as "sm_90", what the kernel was written for.
        tile: rows and columns, of a GEMM with the depth, of what a block computes at a time.
        stages: tiles in flight at once.
        head_dim: of an attention kernel.
        tensor_cores: whether it multiplies on tensor cores.
        attention: whether it is a whole attention in one kernel, or a part of its backward.
    """

    name: str
    family: str
    title: str
    direction: str | None = None
    dtype: str | None = None
    arch: str | None = None
    tile: tuple[int, ...] | None = None
    stages: int | None = None
    head_dim: int | None = None
    tensor_cores: bool | None = None
    attention: bool = False

    @property
    def reading(self) -> str:
        """One line of text."""
        facts = [
            self.direction,
            self.dtype,
            f"head size {self.head_dim}" if self.head_dim else None,
            f"tile {' x '.join(map(str, self.tile))}" if self.tile else None,
            f"{self.stages} stages" if self.stages else None,
            f"for {self.arch}" if self.arch else None,
            {True: "tensor cores", False: "no tensor cores", None: "tensor cores not told"}[
                self.tensor_cores
            ],
        ]
        return f"{self.title}: {', '.join(fact for fact in facts if fact)}"


@lru_cache(maxsize=4096)
def decode(name: str) -> Kernel:
    """Reads a name as a trace has it, mangled or not."""
    for pattern, read in _RULES:
        if match := re.search(pattern, name):
            return read(name, match)
    return Kernel(name, "other", "a kernel of no known family", dtype=_dtype(name))


# A number among template arguments: nsys writes (int)64, Kineto 64.
_INT = r"(?:\(int\))?(\d+)"


def _numbers(texts: Iterable[str | None]) -> tuple[int, ...]:
    return tuple(int(text) for text in texts if text)


# In the order of the search: bfloat16 holds "float16", and an fp32 sum stands beside its operands.
_DTYPES = (
    ("bf16", r"bf16|[bB][fF]loat16"),
    ("fp16", r"(?<!b)fp?16(?!\d)|float16|[hH]alf|hgemm|_h\d+gemm"),
    ("tf32", r"tf32"),
    ("fp8", r"fp8|e4m3|e5m2|float8"),
    ("int8", r"int8|imma"),
    ("fp64", r"fp?64(?!\d)|double|dgemm"),
    ("fp32", r"fp?32(?!\d)|float|sgemm"),
)


def _dtype(name: str) -> str | None:
    return next((dtype for dtype, pattern in _DTYPES if re.search(pattern, name)), None)


def _arch(name: str) -> str | None:
    if match := re.search(r"[sS][mM]_?(\d{2,3})(?!\d)", name):
        return f"sm_{match[1]}"
    for word, arch in (("volta", "70"), ("turing", "75"), ("ampere", "80"), ("hopper", "90")):
        if word in name.lower():
            return f"sm_{arch}"
    return None


def _direction(name: str) -> str | None:
    lower = name.lower()
    if re.search(r"bwd|backward|bprop|dgrad", lower):
        return "backward"
    return "forward" if re.search(r"fwd|forward|fprop|fmha|sdpa", lower) else None


def _ours(name: str, match: re.Match[str]) -> Kernel:
    dtype = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}.get(match["dtype"])
    if match["op"] not in ("flash_fwd", "flash_bwd"):
        op = match["op"].replace("_", " ")
        return Kernel(
            name, "attn_ext", f"attn_ext's {op}", dtype=dtype, arch=_arch(name), tensor_cores=False,
            direction="backward" if op.endswith("backward") else None,
        )  # fmt: skip
    # The ends of the backward pass (row sums before, the sum of dq after) multiply no matrices.
    ends = re.search(r"_(before|after|delta)$", name) is not None
    title = "attn_ext's flash attention"
    return Kernel(
        name, "attn_ext", f"{title}, a step around it" if ends else title,
        "backward" if "bwd" in match["op"] else "forward", dtype, _arch(name),
        head_dim=int(match["dim"]), attention=True,
        tensor_cores=dtype in ("fp16", "bf16") and not ends,
    )  # fmt: skip


def _flash2(name: str, match: re.Match[str]) -> Kernel:
    traits = re.search(rf"kernel_traits<{_INT}, {_INT}, {_INT},", name)
    sizes = _numbers(traits.groups()) if traits else ()
    main = re.search(r"dot_do_o|convert_d|combine", name) is None
    whose = "as torch has it" if "pytorch_flash" in name else "of the flash-attn package"
    return Kernel(
        name, "flash2", f"FlashAttention-2 {whose}{'' if main else ', a step around it'}",
        _direction(name), _dtype(name), "sm_80", tile=sizes[1:] or None,
        head_dim=sizes[0] if sizes else None, tensor_cores=main, attention=True,
    )  # fmt: skip


def _flash3(name: str, match: re.Match[str]) -> Kernel:
    # The first tuple is the cluster of blocks, the second one rows, columns, head size.
    tuples = re.findall(rf"tuple<cute::C<{_INT}>, cute::C<{_INT}>, cute::C<{_INT}>", name)
    tile = _numbers(tuples[1]) if len(tuples) > 1 else ()
    main = re.search(r"Combine|Preprocess|Postprocess|prepare_", name) is None
    return Kernel(
        name, "flash3", f"FlashAttention-3{'' if main else ', a step around it'}",
        _direction(name), _dtype(name), _arch(name) or "sm_90", tile=tile[:2] or None,
        head_dim=tile[2] if tile else None, tensor_cores=main, attention=True,
    )  # fmt: skip


def _cudnn(name: str, match: re.Match[str]) -> Kernel:
    # Its "f16" is the width of the operands: kernels for bf16 carry it too.
    tile = re.search(r"_(\d+)x(\d+)x(\d+)_", name)
    sizes = _numbers(tile.groups()) if tile else ()
    return Kernel(
        name, "cudnn", "cuDNN's attention", _direction(name), None, _arch(name),
        tile=sizes[:2] or None, head_dim=sizes[2] if sizes else None,
        tensor_cores=True, attention=True,
    )  # fmt: skip


def _efficient(name: str, match: re.Match[str]) -> Kernel:
    sizes = re.search(r"_aligned_(\d+)x(\d+)_", name)
    dtype = _dtype(name)
    return Kernel(
        name, "efficient", "memory-efficient attention of torch (CUTLASS)",
        "backward" if "cutlassB" in name else _direction(name), dtype, _arch(name),
        tile=_numbers(sizes.groups()) if sizes else None, attention=True,
        tensor_cores=True if dtype in ("fp16", "bf16") else None,
    )  # fmt: skip


def _gemm(name: str, match: re.Match[str]) -> Kernel:
    letter = re.search(r"nvjet_(?:sm\d+_)?([a-z])[a-z]{2}_", name)
    of_letter = {"h": "fp16", "t": "bf16", "s": "fp32", "d": "fp64", "q": "fp8"}
    dtype = of_letter.get(letter[1]) if letter else _dtype(name)
    if dtype == "fp32" and "tf32" in name:
        dtype = "tf32"
    simt = re.search(r"simt|ffma|[sdhc]gemm_(?!relu)|gemv|gemmsn|f32f32_f32f32", name)
    cores = re.search(r"tensorop|s\d+gemm|hmma|imma|gmma|nvjet|tf32|xmma_gemm_(?:bf16|f16)", name)
    tile = re.search(r"(\d+)x(\d+)(?:x(\d+)|(?:_\w*?stages)?_(\d+)x(\d+)(?=_))?", name)
    sizes = tile.groups() if tile else ()
    return Kernel(
        name, "gemm", f"matrix product of {'cuBLAS' if letter else 'CUTLASS or cuBLAS'}",
        None, dtype, _arch(name) or ("sm_90" if letter else None),
        tile=_numbers(sizes[:4]) or None, stages=int(sizes[4]) if tile and sizes[4] else None,
        tensor_cores=True if cores else False if simt else None,
    )  # fmt: skip


def _triton(name: str, match: re.Match[str]) -> Kernel:
    kind = {"poi": "elementwise", "red": "reduction", "per": "reduction held in registers",
            "tem": "template, such as a matrix product"}.get(match["kind"] or "")  # fmt: skip
    ops = re.sub(r"^triton_\w{3}_fused_|_\d+$", "", name).strip("_")
    title = f"Triton, made by torch.compile ({kind}): {ops}" if kind else "a Triton kernel"
    return Kernel(name, "triton", title, tensor_cores=False if kind and kind[0] != "t" else None)


def _plain(family: str, title: str) -> Callable[[str, re.Match[str]], Kernel]:
    """Kernels of aten, and the device's own work: nothing is multiplied on tensor cores."""

    def read(name: str, match: re.Match[str]) -> Kernel:
        direction = _direction(name) if family == "softmax" else None
        if family == "softmax":
            direction = direction or "forward"
        dtype = None if family.startswith("mem") else _dtype(name)
        return Kernel(name, family, title, direction, dtype, tensor_cores=False)

    return read


#: The first pattern that is found in the name reads it.
_RULES: tuple[tuple[str, Callable[[str, re.Match[str]], Kernel]], ...] = (
    (r"^Memcpy", _plain("memcpy", "a copy by the device")),
    (r"^Memset", _plain("memset", "a fill by the device")),
    (r"^attn_(?P<op>\w+?)_(?:cuda|sm\d+|d\d+)_?(?:d(?P<dim>\d+)_)?(?P<dtype>bf16|f16|f32|f64)_",
     _ours),
    (r"cudnn_generated\w*(?:sdpa|flash|fmha|attention)|cudnn.*(?:sdpa|fmha)|sm\d+_flash_[fb]prop",
     _cudnn),
    (r"fmha_cutlass|AttentionKernel|AttentionBackwardKernel|PyTorchMemEffAttention", _efficient),
    (r"FlashAttn[FB]wd|prepare_varlen_num_blocks", _flash3),
    (r"flash_(?:fwd|bwd)|pytorch_flash|FLASH_NAMESPACE", _flash2),
    (r"^triton_(?P<kind>poi|red|per|tem)?", _triton),
    (r"nvjet|[a-z]gemm|gemm_|gemmsn|gemv|cutlass.*(?:gemm|Gemm)|xmma_gemm|cublasLt|GemmUniversal",
     _gemm),
    (r"[sS]oft_?[mM]ax", _plain("softmax", "softmax of torch")),
    (r"reduce_kernel|splitKreduce|reduction", _plain("reduce", "a reduction")),
    (r"CatArray|direct_copy|copy_kernel|transpose", _plain("copy", "a copying kernel")),
    (r"FillFunctor|(?<!masked_)fill_kernel", _plain("fill", "a filling kernel")),
    (r"elementwise|distribution_|triu_tril|masked|where_kernel",
     _plain("elementwise", "an elementwise kernel of torch")),
)  # fmt: skip
