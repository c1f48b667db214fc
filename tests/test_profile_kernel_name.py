"""Names of kernels as traces have them, and what each says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attn_ext.profile import cli
from attn_ext.profile.kernel_name import decode

TORCH_FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<{0}128, {0}128, {0}64, {0}4, "
    "false, false, cutlass::{1}, Flash_kernel_traits<{0}128, {0}128, {0}64, {0}4, cutlass::{1}> >, "
    "false, true, false, false>(pytorch_flash::Flash_fwd_params)"
)
FLASH3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, "
    "cute::tuple<cute::C<128>, cute::C<176>, cute::C<128> >, 128, cutlass::bfloat16_t, float"
)
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>, "
    "std::array<char*, 1ul> >(int, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul>)"
)
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float>"
MASKED = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar"
)

#: name -> family, direction, dtype, arch, tile, stages, head size, tensor cores
NAMES = {
    "attn_flash_fwd_sm90_d64_bf16_kernel":
        ("attn_ext", "forward", "bf16", "sm_90", None, None, 64, True),
    "attn_flash_bwd_sm80_d128_f16_general_kernel":
        ("attn_ext", "backward", "fp16", "sm_80", None, None, 128, True),
    "attn_flash_bwd_sm80_d64_f16_kernel_before":
        ("attn_ext", "backward", "fp16", "sm_80", None, None, 64, False),
    "attn_flash_fwd_sm80_d32_f32_kernel":
        ("attn_ext", "forward", "fp32", "sm_80", None, None, 32, False),
    "attn_masked_fill_cuda_bf16_kernel":
        ("attn_ext", None, "bf16", None, None, None, None, False),
    "attn_softmax_backward_cuda_f32_rows_kernel":
        ("attn_ext", "backward", "fp32", None, None, None, None, False),
    TORCH_FLASH.format("", "bfloat16_t"):
        ("flash2", "forward", "bf16", "sm_80", (128, 64), None, 128, True),
    TORCH_FLASH.format("(int)", "half_t"):
        ("flash2", "forward", "fp16", "sm_80", (128, 64), None, 128, True),
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8,":
        ("flash2", "backward", None, "sm_80", (128, 128), None, 64, False),
    FLASH3: ("flash3", "forward", "bf16", "sm_90", (128, 176), None, 128, True),
    "void flash::FlashAttnFwdCombine<cute::tuple<":
        ("flash3", "forward", None, "sm_90", None, None, None, False),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0":
        ("cudnn", "forward", None, "sm_90", (64, 128), None, 128, True),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0":
        ("cudnn", "backward", None, "sm_90", (64, 64), None, 128, True),
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::":
        ("efficient", "forward", "bf16", "sm_80", (64, 128), None, None, True),
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::":
        ("efficient", "backward", "fp32", "sm_80", (64, 64), None, None, None),
    "nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN":
        ("gemm", None, "bf16", "sm_90", (192, 192, 64), 4, None, True),
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT":
        ("gemm", None, "fp16", "sm_90", (128, 256, 64), 4, None, True),
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn":
        ("gemm", None, "bf16", "sm_80", (128, 256, 64), 3, None, True),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>":
        ("gemm", None, "bf16", None, (256, 128, 32), 3, None, True),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute":
        ("gemm", None, "bf16", "sm_90", (128, 128, 64), None, None, True),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4":
        ("gemm", None, "fp32", "sm_80", (128, 128, 8), None, None, False),
    "ampere_sgemm_128x64_tn": ("gemm", None, "fp32", "sm_80", (128, 64), None, None, False),
    "cutlass_80_simt_sgemm_256x128_8x4_nn_align1":
        ("gemm", None, "fp32", None, (256, 128, 8), 4, None, False),
    "triton_per_fused__softmax_masked_fill_mul_0":
        ("triton", None, None, None, None, None, None, False),
    "triton_tem_fused_bmm_3": ("triton", None, None, None, None, None, None, None),
    FILL: ("fill", None, "bf16", None, None, None, None, False),
    SOFTMAX: ("softmax", "forward", "bf16", None, None, None, None, False),
    MASKED: ("elementwise", None, None, None, None, None, None, False),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float,":
        ("reduce", None, "fp32", None, None, None, None, False),
    "Memcpy DtoD (Device -> Device)": ("memcpy", None, None, None, None, None, None, False),
    "Memset (Device)": ("memset", None, None, None, None, None, None, False),
    "my_very_own_kernel": ("other", None, None, None, None, None, None, None),
    "": ("other", None, None, None, None, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:40])
def test_names_of_traces(name: str) -> None:
    found = decode(name)
    assert (
        found.family, found.direction, found.dtype, found.arch, found.tile, found.stages,
        found.head_dim, found.tensor_cores,
    ) == NAMES[name]  # fmt: skip
    assert found.name == name and "\n" not in found.reading and "None" not in found.reading


def test_the_reading_is_a_sentence() -> None:
    assert decode("attn_flash_fwd_sm90_d64_bf16_kernel").reading == (
        "attn_ext's flash attention: forward, bf16, head size 64, for sm_90, tensor cores"
    )
    assert decode("nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN").reading == (
        "matrix product of cuBLAS: bf16, tile 192 x 192 x 64, 4 stages, for sm_90, tensor cores"
    )
    assert decode("kernel").reading == "a kernel of no known family: tensor cores not told"


def test_which_are_attention() -> None:
    whole = [name for name in NAMES if decode(name).attention]
    assert {decode(name).family for name in whole} == {
        "attn_ext", "flash2", "flash3", "cudnn", "efficient",
    }  # fmt: skip
    assert not decode("attn_softmax_cuda_bf16_rows_kernel").attention


def test_every_kernel_that_this_tree_builds_is_known_as_ours() -> None:
    """By the sources: whatever kernel comes, its name follows the rule that decode reads."""
    root = Path(__file__).parent.parent / "csrc" / "cuda" / "inst"
    dtypes = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}
    stems = [path.stem for path in root.glob("flash_*.cu")]
    assert len(stems) >= 30
    for stem in stems:
        found = decode(f"attn_{stem}_kernel")
        match = re.fullmatch(r"flash_(fwd|bwd)_(sm\d+)_d(\d+)_(\w+)", stem)
        assert match, stem
        assert found.family == "attn_ext" and found.attention
        assert found.direction == {"fwd": "forward", "bwd": "backward"}[match[1]]
        assert found.arch == match[2].replace("sm", "sm_") and found.head_dim == int(match[3])
        assert found.dtype == dtypes[match[4]]


def test_the_kernels_in_the_library() -> None:
    library = Path(__file__).parent.parent / "attn_ext" / "_C_cuda.abi3.so"
    if not library.is_file():
        pytest.skip("no CUDA library: it is built where nvcc is")
    names = set(re.findall(rb"\0(attn_\w+_kernel\w*)", library.read_bytes()))
    strange = [name for name in map(bytes.decode, names) if decode(name).family != "attn_ext"]
    assert names and strange == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["decode", "Memset (Device)"]) == 0
    assert capsys.readouterr().out == "a fill by the device: no tensor cores\n"
    assert cli.main(["decode", "a", "attn_flash_fwd_sm90_d64_bf16_kernel", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["family"] == "other" and second["head_dim"] == 64 and second["tensor_cores"]
