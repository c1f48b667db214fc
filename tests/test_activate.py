"""attn_ext.activate(): torch's own flash attention runs on our kernels, and later does not."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from problems import problem
from reference import assert_accurate, baseline, reference
from torch import nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parent.parent
aten = torch.ops.aten
registry = sys.modules["attn_ext.activate"]  # attn_ext.activate is the function
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def inactive():
    """Every test starts and ends with torch's own kernels, flags and order."""
    if torch.cuda.is_available():
        torch.cuda.init()
        registry._settle_order()  # or torch does at its first choice of a backend
    state = torch_state()
    assert not attn_ext.is_active()
    yield
    assert not attn_ext.is_active()
    assert torch_state() == state


def torch_state() -> list:
    kernels = [
        kernel_of(f"aten::{name}", key)
        for key in registry._LIBRARIES
        for name in registry._OPS[key]
    ]
    order, enabled = torch._C._get_sdp_priority_order(), torch.backends.cuda.flash_sdp_enabled()
    return [attention.current_flash_attention_impl(), order, enabled, *kernels]


def kernel_of(op: str, key: str = "CPU") -> str:
    """Where the kernel that the dispatcher would run was registered."""
    return repr(torch.library.get_kernel(op, key))


def ours() -> bool:
    return "override_cpu.h" in kernel_of("aten::_scaled_dot_product_flash_attention_for_cpu")


def fell_back(call) -> bool:
    """Whether torch's own kernel ran under ours."""
    with torch.profiler.profile() as profiler:
        call()
    return any("native_" in event.key for event in profiler.key_averages())


def flash_sdpa(*args, **kwargs):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


def operands(device, shape=(2, 4, 33, 64), dtype=torch.float32, layout="bhsd", kv_heads=None):
    def one(heads: int) -> torch.Tensor:
        batch, _, rows, dim = shape
        if layout == "bshd":
            return torch.randn(batch, rows, heads, dim, device=device).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, rows, dim, device=device).to(dtype)

    return [one(h).requires_grad_() for h in (shape[1], *(kv_heads or shape[1],) * 2)]


CASES = [
    ((2, 4, 4, 33, 33, 64, 64), {"is_causal": True}),
    ((1, 6, 2, 65, 65, 32, 32), {}),
    ((1, 6, 2, 50, 50, 80, 80), {"is_causal": True, "scale": 0.3}),
    ((2, 3, 3, 17, 70, 8, 8), {}),
    ((2, 2, 2, 9, 20, 72, 72), {"mask": "bool"}),
    ((1, 2, 2, 20, 9, 64, 64), {"mask": "float_2d"}),
    ((1, 2, 2, 20, 30, 16, 16), {"mask": "bool_rows_dead"}),
]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_forward_and_backward(device, shape, options, dtype, layout) -> None:
    """Against fp64, through F.scaled_dot_product_attention and torch's own autograd."""
    if device.type == "cuda" and ("mask" in options or dtype == torch.float32):
        pytest.skip("torch's flash attention on CUDA has no masks and no float32")
    p = problem(shape, dtype, device, layout, **options)
    grad_out = torch.randn(*p.query.shape[:3], shape[-1], device=device).to(dtype)
    inputs = [t.detach().requires_grad_() for t in (p.query, p.key, p.value)]
    with attn_ext.activated():
        out = flash_sdpa(
            *inputs, p.attn_mask, is_causal=p.is_causal, scale=p.scale,
            enable_gqa=shape[1] != shape[2],
        )  # fmt: skip
        grads = torch.autograd.grad(out, inputs, grad_out)
    truth, plain = reference(p, grad_out), baseline(p, grad_out)
    for name, result, index in zip(
        ("out", "query", "key", "value"), (out.detach(), *grads), (0, 2, 3, 4), strict=True
    ):
        assert_accurate(result, plain[index], truth[index], name)


def differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two kernels computed these: in 16 bits some of the results may be equal."""
    return not all(map(torch.equal, some, others))


def test_our_kernel_runs_and_then_torchs_does_again(device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    inputs = operands(device, dtype=dtype)

    def run() -> list[torch.Tensor]:
        out = flash_sdpa(*inputs, is_causal=True)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    before = run()
    with attn_ext.activated():
        inside = run()
        assert not fell_back(run)
    after = run()
    direct = attn_ext.scaled_dot_product_attention(*inputs, is_causal=True, backend="flash")
    assert torch.equal(inside[0], direct)
    assert all(map(torch.equal, after, before)) and differ(inside, before)


# Which calls ours takes, and which go to torch's kernel.


def flash_for_cpu(*args, **kwargs):
    return aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("shape", [(2, 4, 16, 8), (1, 1, 16, 8), (2, 1, 1, 8), (3, 2, 5, 1)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda d: str(d)[6:])
def test_results_lie_in_memory_as_torchs_do(shape, dtype, layout) -> None:
    """Sizes, strides and dtypes: compiled code relies on what the fake kernels promise."""
    batch, heads, rows, dim = shape
    if layout == "packed":  # a slice of one projection of query, key and value: gaps between rows
        packed = torch.randn(batch, rows, 3, heads, dim).to(dtype)
        inputs = list(packed.permute(2, 0, 3, 1, 4))
    else:
        inputs = [t.detach() for t in operands("cpu", shape, dtype, layout)]

    def run() -> list[torch.Tensor]:
        out, logsumexp = flash_for_cpu(*inputs, 0.0, True)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            torch.ones_like(out), *inputs, out, logsumexp, 0.0, True
        )
        return [out, logsumexp, *grads]

    native = run()
    with attn_ext.activated():
        own = run()
    for mine, theirs in zip(own, native, strict=True):
        assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype
        tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


REFUSED = {
    "head size over 256": lambda q: ((*[torch.randn(1, 2, 5, 300)] * 3,), {}),
    "mask and causal": lambda q: ((q, q, q, 0.0, True), {"attn_mask": torch.randn(16, 16)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ours_does_not_take_is_torchs(name) -> None:
    """Bit-equal: it is torch's kernel that runs, on the same tensors."""
    args, kwargs = REFUSED[name](torch.randn(2, 4, 16, 8))
    native = flash_for_cpu(*args, **kwargs)
    with attn_ext.activated():
        own = flash_for_cpu(*args, **kwargs)
        assert fell_back(lambda: flash_for_cpu(*args, **kwargs))
    for mine, theirs in zip(own, native, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


def test_a_call_that_both_refuse_has_torchs_error() -> None:
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 7)
    with attn_ext.activated(), pytest.raises(RuntimeError, match="same head size"):
        flash_for_cpu(q, q, v)


def test_dropout_is_torchs_with_torchs_pattern() -> None:
    q = torch.randn(1, 2, 16, 8)
    torch.manual_seed(0)
    native = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    with attn_ext.activated():
        torch.manual_seed(0)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), native)


@pytest.mark.parametrize("ours_first", [True, False])
def test_forward_and_backward_may_be_of_two_kinds(ours_first) -> None:
    """The switch may be thrown between them, also with rows that see no key."""
    inputs = operands("cpu", (1, 2, 8, 8))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    expected = torch.autograd.grad(flash_sdpa(*inputs, mask).sum(), inputs)
    if ours_first:
        with attn_ext.activated():
            out = flash_sdpa(*inputs, mask)
        grads = torch.autograd.grad(out.sum(), inputs)
    else:
        out = flash_sdpa(*inputs, mask)
        with attn_ext.activated():
            grads = torch.autograd.grad(out.sum(), inputs)
    for grad, truth in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, truth)


# The switch itself.


def test_twice_is_once() -> None:
    attn_ext.activate()
    attn_ext.activate()
    assert attn_ext.is_active() and ours()
    attn_ext.deactivate()
    assert not attn_ext.is_active() and not ours()
    attn_ext.deactivate()


def test_blocks_nest_and_keep_what_stood_before() -> None:
    with attn_ext.activated():
        with attn_ext.activated(pin=False):
            assert ours()
        assert ours()
        attn_ext.activate()
        attn_ext.deactivate()
        assert ours(), "a block outlives deactivate()"
    assert not ours()
    attn_ext.activate()
    with attn_ext.activated():
        pass
    assert ours(), "activate() outlives a block"
    attn_ext.deactivate()


def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError), attn_ext.activated():
        assert ours()
        raise KeyError


def test_threads_share_the_switch() -> None:
    """Blocks that open and close in many threads: active while any is open, off after the last."""
    q = torch.randn(1, 2, 16, 8)
    expected = F.scaled_dot_product_attention(q, q, q)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                with attn_ext.activated():
                    assert ours()
                    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert not ours()


def test_pin_puts_flash_first_and_back() -> None:
    order = torch._C._get_sdp_priority_order()
    cudnn_first = [3, 1, 2, 0, 4]
    torch._C._set_sdp_priority_order(cudnn_first)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with attn_ext.activated(pin=False):
            assert torch._C._get_sdp_priority_order() == cudnn_first
            with attn_ext.activated():
                assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
                assert torch.backends.cuda.flash_sdp_enabled()
            assert torch._C._get_sdp_priority_order() == cudnn_first
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch._C._set_sdp_priority_order(order)
        torch.backends.cuda.enable_flash_sdp(True)


def test_torchs_registry_knows_ours() -> None:
    assert "ATTN_EXT" in attention.list_flash_attention_impls()
    with attn_ext.activated():
        assert attention.current_flash_attention_impl() == "ATTN_EXT"
    attention.activate_flash_attention_impl("ATTN_EXT")
    assert ours() and attn_ext.is_active()
    with attn_ext.activated():
        pass
    assert ours(), "it was active before the block"
    attention.restore_flash_attention_impl()
    assert not ours()


def test_another_implementation_returns_after_ours() -> None:
    class Handle:
        def remove(self) -> None:
            state.remove("other")

    def register() -> Handle:
        state.append("other")
        return Handle()

    state: list[str] = []
    attention.register_flash_attention_impl("OTHER", register_fn=register)
    attention.activate_flash_attention_impl("OTHER")
    with attn_ext.activated():
        assert state == [] and ours()
    assert state == ["other"] and attention.current_flash_attention_impl() == "OTHER"
    with attn_ext.activated():
        attention.activate_flash_attention_impl("OTHER")  # over ours: it stays
        assert not ours()
    assert attention.current_flash_attention_impl() == "OTHER"
    attention.restore_flash_attention_impl()
    del attention._registry._FLASH_ATTENTION_IMPLS["OTHER"]


def test_a_failure_to_install_changes_nothing(monkeypatch) -> None:
    ops = {"CPU": {"_scaled_dot_product_flash_attention_for_cpu": "query key other"}}
    monkeypatch.setattr(registry, "_OPS", ops)
    with pytest.raises(RuntimeError, match=r"expected aten::_scaled.* query, key, other, got"):
        attn_ext.activate()
    assert not ours()


def test_activation_is_quiet(run_python) -> None:
    done = run_python(
        "import attn_ext, torch, torch.nn.functional as F\n"
        "attn_ext.activate(); q = torch.randn(1, 1, 4, 8)\n"
        "F.scaled_dot_product_attention(q, q, q); attn_ext.deactivate()"
    )
    assert done.returncode == 0 and done.stderr == ""


USES_TORCH_ALONE = """
import torch
print(torch.nn.attention.current_flash_attention_impl())
q = torch.randn(1, 2, 8, 16)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_script_that_cannot_be_edited(asked, run_python, tmp_path) -> None:
    """torch finds attn_ext by its entry point, as where it is installed."""
    info = tmp_path / "attn_ext-0.1.0.dist-info"
    info.mkdir()
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"{name} = {target}" for name, target in group["torch.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attn_ext\nVersion: 0.1.0\n")
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = run_python(USES_TORCH_ALONE, ATTN_EXT_ACTIVATE=asked, PYTHONPATH=path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip() == ("ATTN_EXT" if asked == "1" else "None")


def test_the_variable_takes_0_and_1(run_python) -> None:
    done = run_python("import attn_ext", ATTN_EXT_ACTIVATE="yes")
    assert "ATTN_EXT_ACTIVATE: expected 0 or 1, got 'yes'" in done.stderr


def test_native_results_read_the_same_backwards() -> None:
    """torch_call_dispatcher takes the type of a result from the mirrored place of the schema."""
    for ops in registry._OPS.values():
        for name in ops:
            schema = torch._C.parse_schema(f"attn_ext::{registry._native_schema(name)}")
            types = [str(result.type) for result in schema.returns]
            assert types == types[::-1]


# Models.


def test_multihead_attention(device) -> None:
    """In training; in inference torch's fast path does not come to these ops."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device)
    x = torch.randn(2, 9, 32, device=device)
    if device.type == "cuda":
        layer, x = layer.half(), x.half()
    expected = layer(x)
    with attn_ext.activated(), torch.profiler.profile() as profiler:
        out = layer(x)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert any("flash_attention" in event.key for event in profiler.key_averages())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(device, backend) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    inputs = operands(device, dtype=dtype)

    def model(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) * 4

    def run(call) -> list[torch.Tensor]:
        out = call(*inputs)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        native = run(model)
    torch.compiler.reset()
    with attn_ext.activated():
        own = run(model)
        compiled = run(torch.compile(model, fullgraph=True, backend=backend))
    assert torch.equal(compiled[0], own[0]) and differ(own, native)
    for c, o in zip(compiled, own, strict=True):
        torch.testing.assert_close(c, o)
        assert c.stride() == o.stride()


def test_vmap_and_autocast() -> None:
    q = torch.randn(3, 2, 4, 16, 8)
    expected = torch.func.vmap(F.scaled_dot_product_attention)(q, q, q)
    with attn_ext.activated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.func.vmap(F.scaled_dot_product_attention)(q, q, q),
                                   expected)  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q[0], q[0], q[0]).dtype == torch.bfloat16
