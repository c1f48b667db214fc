"""with attn_ext.use(backend): an unedited model runs on that backend, and only inside the block."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attn_ext

OWN_OPS = {
    "naive": "attn_ext::naive_attention",
    "inplace": "attn_ext::inplace_attention",
    "flash": "attn_ext::flash_attention_forward",
}


class Ops(TorchDispatchMode):
    """The names of the attention ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func._schema.name and "backward" not in func._schema.name:
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def ops_of(call) -> set[str]:
    with Ops() as ops:
        call()
    return ops.names


def operands(device, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape or (2, 4, 16, 8), dtype=dtype, device=device) for _ in range(3)]


@pytest.mark.parametrize("backend", OWN_OPS)
def test_only_inside_the_block(device, backend) -> None:
    operand = operands(device)
    plain = F.scaled_dot_product_attention(*operand, is_causal=True)
    native = ops_of(lambda: F.scaled_dot_product_attention(*operand))
    with attn_ext.use(backend):
        assert ops_of(lambda: F.scaled_dot_product_attention(*operand)) == {OWN_OPS[backend]}
        out = F.scaled_dot_product_attention(*operand, is_causal=True)
    torch.testing.assert_close(out, plain)
    assert ops_of(lambda: F.scaled_dot_product_attention(*operand)) == native


def test_every_argument_reaches_the_backend(device) -> None:
    q = torch.randn(2, 4, 5, 8, device=device)
    k, v = torch.randn(2, 2, 7, 8, device=device), torch.randn(2, 2, 7, 8, device=device)
    mask = torch.randn(5, 7, device=device)
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    with attn_ext.use("naive", strict=True):
        out = F.scaled_dot_product_attention(
            query=q, key=k, value=v, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        assert torch.equal(
            F.scaled_dot_product_attention(q, k, v, None, 1.0, enable_gqa=True), torch.zeros_like(q)
        )
    torch.testing.assert_close(out, expected)


def test_the_innermost_block_decides_and_the_outer_one_returns() -> None:
    operand = operands("cpu")

    def names() -> set[str]:
        return ops_of(lambda: F.scaled_dot_product_attention(*operand))

    with attn_ext.use("naive"):
        with attn_ext.use("flash"):
            assert names() == {OWN_OPS["flash"]}
            with attn_ext.use("math"):  # torch's own: no block around it may take it
                assert not names() & set(OWN_OPS.values())
            assert names() == {OWN_OPS["flash"]}
        assert names() == {OWN_OPS["naive"]}


def test_leaves_nothing_behind_an_exception() -> None:
    operand = operands("cpu")
    native = ops_of(lambda: F.scaled_dot_product_attention(*operand))
    with attn_ext.use("naive"):
        with pytest.raises(KeyError), attn_ext.use("flash"):
            raise KeyError
        assert ops_of(lambda: F.scaled_dot_product_attention(*operand)) == {OWN_OPS["naive"]}
    assert ops_of(lambda: F.scaled_dot_product_attention(*operand)) == native


def test_each_thread_has_its_own_blocks() -> None:
    operand = operands("cpu")
    seen: dict[str, set[str]] = {}
    meet = threading.Barrier(len(OWN_OPS) + 1)

    def work(backend: str | None) -> None:
        def call() -> None:
            meet.wait(20)  # all blocks are entered before the first call
            F.scaled_dot_product_attention(*operand)
            meet.wait(20)

        if backend is None:
            seen["none"] = ops_of(call)
            return
        with attn_ext.use(backend):
            seen[backend] = ops_of(call)

    threads = [threading.Thread(target=work, args=(backend,)) for backend in (*OWN_OPS, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {backend: seen[backend] for backend in OWN_OPS} == {
        backend: {op} for backend, op in OWN_OPS.items()
    }
    assert not seen["none"] & set(OWN_OPS.values())


def test_what_the_backend_refuses_goes_to_torch_with_one_warning(device) -> None:
    operand = operands(device, 1, 2, 4, 300)
    expected = F.scaled_dot_product_attention(*operand)
    longer = operands(device, 1, 2, 9, 400)
    with attn_ext.use("flash"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(F.scaled_dot_product_attention(*operand), expected)
        F.scaled_dot_product_attention(*operand)
        F.scaled_dot_product_attention(*longer)  # the same rule, other numbers
    (warning,) = caught
    text = str(warning.message)
    assert "use('flash')" in text and "torch's own attention" in text
    assert "expected head sizes up to 256, got 300 and 300" in text
    assert warning.filename == __file__


def test_strict_raises(device) -> None:
    operand = operands(device, 1, 2, 4, 300)
    with (
        attn_ext.use("flash", strict=True),
        pytest.raises(RuntimeError, match="head sizes up to 256, got 300 and 300"),
    ):
        F.scaled_dot_product_attention(*operand)


def test_input_that_is_wrong_for_both_raises_and_does_not_warn() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 7)
    with attn_ext.use("naive"), warnings.catch_warnings(), pytest.raises(RuntimeError, match="7"):
        warnings.simplefilter("error")
        F.scaled_dot_product_attention(q, k, k)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"expected one of naive, .*auto; got 'fast'"):
        attn_ext.use("fast").__enter__()


def test_nested_tensors_stay_torchs() -> None:
    values = [torch.randn(n, 2, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested).values()
    with attn_ext.use("naive"), pytest.warns(UserWarning, match="left a call to torch's own"):
        out = F.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(out.values(), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_torch_modules(device, grad) -> None:
    """nn.MultiheadAttention hands itself to function modes whole, and has a fast path besides."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    encoder = encoder.to(device).eval()
    x = torch.randn(2, 9, 32, device=device)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
    padding[0, 6:] = True
    with torch.set_grad_enabled(grad):
        expected = encoder(x, src_key_padding_mask=padding)
        with attn_ext.use("inplace", strict=True):
            names = ops_of(lambda: encoder(x, src_key_padding_mask=padding))
            out = encoder(x, src_key_padding_mask=padding)
    assert names == {OWN_OPS["inplace"]}
    torch.testing.assert_close(out[~padding], expected[~padding], atol=1e-5, rtol=1e-5)


def test_other_modes_see_what_runs() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    operand = operands("cpu", 1, 2, 4, 300)
    with Seen(), attn_ext.use("flash"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.scaled_dot_product_attention(*operand)
    assert "scaled_dot_product_attention" in names


def test_autocast(device) -> None:
    operand = operands(device)
    with attn_ext.use("flash", strict=True), torch.autocast(device.type, torch.bfloat16):
        assert F.scaled_dot_product_attention(*operand).dtype == torch.bfloat16


def test_checkpointed_training_step(device) -> None:
    """The recomputation in backward runs on the backend too."""
    layer = nn.Linear(8, 8, device=device)
    x = torch.randn(2, 4, 16, 8, device=device, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)

    (expected,) = torch.autograd.grad(block(x).sum(), x)
    with Ops() as ops, attn_ext.use("naive"):
        (grad,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    assert ops.names == {OWN_OPS["naive"]}
    torch.testing.assert_close(grad, expected)


def test_compiled(device) -> None:
    """A compiled model is compiled anew for the block, whole, and again without it."""
    operand = operands(device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    expected = model(*operand)
    for backend, op in OWN_OPS.items():
        with attn_ext.use(backend):
            torch.testing.assert_close(model(*operand), expected)
            assert ops_of_profile(lambda: model(*operand)) == {op}
    assert not ops_of_profile(lambda: model(*operand)) & set(OWN_OPS.values())


def ops_of_profile(call) -> set[str]:
    """For compiled code, which leaves a dispatch mode out."""
    with torch.profiler.profile() as profiler:
        call()
    return {event.key for event in profiler.key_averages()} & set(OWN_OPS.values())
