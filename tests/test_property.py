"""Problems drawn at random from everything that the fused op takes, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import MASKS, problem, rng_state
from test_flash import check

LENGTHS = st.one_of(
    st.integers(1, 80), st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300])
)
DIMS = st.one_of(
    st.integers(1, 256), st.sampled_from([8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256])
)
WINDOWS = st.one_of(st.none(), st.integers(0, 200))


@st.composite
def cases(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim = draw(DIMS)
    case: dict = {
        "shape": (
            draw(st.integers(1, 3)), kv_heads * group, kv_heads, draw(LENGTHS), draw(LENGTHS), dim,
            draw(st.one_of(st.just(dim), DIMS)),
        ),
        "dtype": draw(st.sampled_from(dtypes)),
        "layout": draw(st.sampled_from(["bhsd", "bshd", "odd", "transposed"])),
        "bottom_right": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 4.0])),
        "scale": draw(st.sampled_from([None, None, 0.2, -0.1])),
    }  # fmt: skip
    kind = draw(st.sampled_from(["plain", "causal", "window", "mask"]))
    if kind == "causal":
        case["is_causal"] = True
        case["window_size_left"] = draw(WINDOWS)
    elif kind == "window":
        case |= {"window_size_left": draw(WINDOWS), "window_size_right": draw(WINDOWS)}
    elif kind == "mask":
        case["mask"] = draw(st.sampled_from(MASKS))
    if draw(st.integers(0, 3)) == 0:
        case["dropout_p"] = draw(st.sampled_from([0.1, 0.5]))
    return case | {"seed": draw(st.integers(0, 2**31))}


def run(case: dict, device: str) -> None:
    torch.manual_seed(case.pop("seed"))
    if "dropout_p" in case:
        case["rng_state"] = rng_state(torch.device(device))
    check(problem(device=torch.device(device), **case))


relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, max_examples=150
)


@relaxed
@given(cases([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_cpu(case) -> None:
    run(case, "cpu")


@pytest.mark.gpu
@settings(relaxed, max_examples=600)
@given(cases([torch.float32, torch.float16, torch.bfloat16]))
def test_cuda(case) -> None:
    run(case, "cuda")
