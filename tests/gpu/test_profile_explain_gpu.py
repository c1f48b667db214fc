"""`attn-ext explain` on a GPU: what is chosen is what a trace shows."""

from __future__ import annotations

import pytest
import torch

import attn_ext
from attn_ext.profile import VARIANTS, Case
from attn_ext.profile.choice import choice, probe

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ARTICLE = Case()


def test_the_choice_is_what_executes() -> None:
    found = choice(ARTICLE, CUDA)
    probed = {one.asked: one for one in probe(ARTICLE, CUDA)}
    assert probed["sdpa"].ran == [found.sdpa] and probed["sdpa"].kernels
    assert found.refused == {}, "bf16, head size 64: every backend takes it"
    for variant in VARIANTS:
        assert probed[variant].ran == [variant], probed[variant]


def test_refusals_have_torchs_reasons() -> None:
    case = Case(batch=1, heads=2, kv_heads=2, seq=128, head_dim=64, dtype="fp32")
    found = choice(case, CUDA)
    assert set(found.refused) == {"sdpa_flash", "sdpa_cudnn"}
    assert all("dtype" in why.lower() for why in found.refused.values()), found.refused
    errors = {one.asked: one.error for one in probe(case, CUDA)}
    assert errors["sdpa_flash"] and errors["sdpa_cudnn"] and errors["sdpa_efficient"] is None


def test_activate_puts_our_kernels_under_the_pinned_flash() -> None:
    with attn_ext.activated():
        probed = {one.asked: one for one in probe(ARTICLE, CUDA)}
        assert choice(ARTICLE, CUDA).active
    assert probed["sdpa_flash"].ran == ["sdpa_flash on attn_ext"]
    assert probed["sdpa"].ran == ["sdpa_flash on attn_ext"], "the pin reaches an unpinned call"
