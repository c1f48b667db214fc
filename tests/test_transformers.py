"""Real transformers models, small and random, give with attn_ext what they give with eager."""

from __future__ import annotations

import inspect

import pytest
import torch
from frameworks import framework

transformers = framework("transformers", "5.0")

from attn_ext.integrations.transformers import attention, mask, register  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZE, **HEADS, num_key_value_heads=2, **NO_END),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, **NO_END
    ),
    "gemma2": lambda: transformers.Gemma2Config(  # softcap, sliding window, own scaling
        **SIZE, **HEADS, num_key_value_heads=2, head_dim=16, sliding_window=5,
        query_pre_attn_scalar=10, attn_logit_softcapping=2.0, **NO_END
    ),
    "bert": lambda: transformers.BertConfig(
        **SIZE, **HEADS, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, pad_token_id=0
    ),
    "t5": lambda: transformers.T5Config(  # position bias, cross-attention
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None
    ),
}  # fmt: skip
DECODERS = ("llama", "gpt2", "gemma2")
# gemma2's softcap is flash's alone.
PAIRS = [
    (name, backend)
    for name in MODELS
    for backend in ("auto", "naive", "inplace", "flash", "math")
    if name != "gemma2" or backend in ("auto", "flash")
]


def build(name: str, device: torch.device) -> torch.nn.Module:
    kind = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    model = kind.get(name, transformers.AutoModelForCausalLM).from_config(MODELS[name]())
    if name != "t5":  # attention that is far from uniform, as t5's is from the start
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4.0 if weight.dim() == 2 else 1.0)
    return model.to(device).train()


def evaluate(model, how: str, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the tokens that are no padding, and the gradients of a loss of them."""
    model.set_attn_implementation(how)
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    seen = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    logits = logits if seen is None else logits[seen.bool()]
    logits.log_softmax(-1)[..., 0].sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def assert_same(ours, truth) -> None:
    torch.testing.assert_close(ours[0], truth[0], rtol=1e-4, atol=1e-4)
    assert ours[1].keys() == truth[1].keys()
    for name, grad in truth[1].items():
        atol = 2e-5 * grad.abs().max().item() + 1e-6
        torch.testing.assert_close(ours[1][name], grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize(("name", "backend"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_logits_and_gradients(device, name, backend, padded) -> None:
    model = build(name, device)
    ids = torch.randint(1, 61, (3, 12), device=device)
    inputs = {"input_ids": ids}
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, :7]
    if padded:
        keep = torch.ones_like(ids)
        for row, count in enumerate((0, 3, 8)):
            keep[row, : count if padded == "left" else 0] = 0
            keep[row, 12 - count if padded == "right" else 12 :] = 0
        inputs["attention_mask"] = keep
        if name == "t5":
            inputs["decoder_attention_mask"] = keep[:, :7] if padded == "right" else keep[:, 5:]
    ours = evaluate(model, register(backend), **inputs)
    assert_same(ours, evaluate(model, "eager", **inputs))


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(device, name, cache, backend) -> None:
    """Prompts of two lengths, then one token at a time against all keys before it."""
    model = build(name, device).eval()
    ids = torch.randint(1, 61, (2, 9), device=device)
    keep = torch.ones_like(ids)
    keep[1, :4] = 0

    def generate(how: str) -> torch.Tensor:
        model.set_attn_implementation(how)
        return model.generate(
            ids, attention_mask=keep, max_new_tokens=12, do_sample=False,
            cache_implementation=cache, disable_compile=True,
        )  # fmt: skip

    assert torch.equal(generate(register(backend)), generate("eager"))


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_pieces(device, name) -> None:
    """The second piece has fewer queries than keys, and sees all of the first."""
    model = build(name, device).eval()
    ids = torch.randint(1, 61, (2, 14), device=device)
    model.set_attn_implementation("eager")
    whole = model(ids, use_cache=False).logits
    model.set_attn_implementation(register("flash"))
    first = model(ids[:, :8], use_cache=True)
    cache = "cache" if "cache" in first else "past_key_values"  # the newer name, and the older
    second = model(ids[:, 8:], **{cache: first[cache]}, use_cache=True)
    pieces = torch.cat([first.logits, second.logits], dim=1)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


def test_compiled_as_one_graph(device) -> None:
    model = build("llama", device)
    model.set_attn_implementation(register("flash"))
    ids = torch.randint(1, 61, (2, 10), device=device)
    keep = torch.ones_like(ids)
    keep[1, 6:] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": keep}):
        results = []
        for call in (compiled, model):
            model.zero_grad()
            logits = call(**inputs, use_cache=False).logits
            logits[:, :6].square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            results.append([logits.detach()[:, :6], *grads])
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain)


def test_a_causal_model_does_not_see_what_follows(device) -> None:
    model = build("llama", device).eval()
    model.set_attn_implementation(register("flash"))
    ids = torch.randint(1, 61, (1, 10), device=device)
    changed = ids.clone()
    changed[0, 6:] = (changed[0, 6:] + 7) % 61
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3


def test_dropout_is_passed_on_and_seeded(device) -> None:
    config = MODELS["llama"]()
    config.attention_dropout = 0.5
    model = transformers.LlamaForCausalLM(config).to(device).train()
    model.set_attn_implementation(register("flash"))
    ids = torch.randint(1, 61, (1, 10), device=device)

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(ids).logits

    assert torch.equal(logits(0), logits(0)) and not torch.equal(logits(0), logits(1))
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_two_models_with_two_backends() -> None:
    device = torch.device("cpu")
    first, second = build("gpt2", device), build("gpt2", device)
    first.set_attn_implementation(register("naive", "attn_ext_one"))
    second.set_attn_implementation(register("flash", "attn_ext_two"))
    ids = torch.randint(1, 61, (1, 10))
    for model, op in ((first, "naive_attention"), (second, "flash_attention_forward")):
        with torch.profiler.profile() as profiler:
            model(ids)
        called = [e.count for e in profiler.key_averages() if e.key == f"attn_ext::{op}"]
        assert called == [2]


def test_heads_beside_each_other_are_not_copied(device) -> None:
    """[B, S, H, D] in memory, seen as [B, H, S, D]: flash's result needs no transposing copy."""
    q, k = (torch.randn(2, 9, h, 16, device=device).transpose(1, 2) for h in (4, 2))
    with torch.profiler.profile() as profiler:
        out, weights = attention(torch.nn.Module(), q, k, k, None, backend="flash")
    assert out.shape == (2, 9, 4, 16) and out.is_contiguous() and weights is None
    assert not [event for event in profiler.events() if event.name == "aten::copy_"]


def test_what_cannot_be_right_is_refused(device) -> None:
    layer, x = torch.nn.Module(), torch.randn(1, 2, 5, 8, device=device)
    with pytest.raises(
        ValueError, match=r"expected a mask for causal attention .* got None with 3"
    ):
        attention(layer, x[:, :, :3], x, x, None)
    with pytest.raises(ValueError, match="s_aux: expected None"):
        attention(layer, x, x, x, None, s_aux=torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r"softcap: expected None with backend='naive', got 3.0"):
        attention(layer, x, x, x, None, softcap=3.0, backend="naive")
    with pytest.raises(ValueError, match=r"backend: expected one of naive, .*; got 'fast'"):
        register("fast")
    with pytest.raises(ValueError, match=r"name: expected none of flash, .*; got 'my_flash'"):
        register("flash", "my_flash")


def test_the_mask_is_left_out_where_it_says_no_more_than_is_causal() -> None:
    newer = "q_length" in inspect.signature(transformers.masking_utils.sdpa_mask).parameters

    def made(q: int, k: int) -> torch.Tensor | None:
        rows = {"q_length": q, "q_offset": k - q, "device": "cpu"}
        return mask(
            batch_size=1, kv_length=k,
            **rows if newer else {"cache_position": torch.arange(k - q, k)},
        )  # fmt: skip

    assert made(4, 4) is None and made(1, 4) is None
    assert torch.equal(made(3, 4)[0, 0], torch.ones(3, 4, dtype=torch.bool).tril(1))
