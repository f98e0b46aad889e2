"""Policy(cache=...): keys and values as caches of transformers store them, beside subclasses of these written by hand.

What is written by hand rounds with torch's own casts: e4m3fn by `to(torch.float8_e4m3fn)`, and the MX blocks of a head
of 8 numbers by the formula of OCP MX v1.0, 6.3.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from zoo import ZOO
from zoo_more import MORE

import fpsim

pytestmark = pytest.mark.filterwarnings("ignore")

KV = {"k": "e4m3fn", "v": "mxfp8_e4m3"}
POLICY = fpsim.Policy(cache=KV)
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def made(model: type, config: Any) -> Any:
    torch.manual_seed(0)
    return model(config).eval()


def llama() -> Any:
    return made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **HEADS))


def mistral() -> Any:  # its window is shorter than the prompt
    return made(transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, **HEADS, sliding_window=5))


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, resid_pdrop=0, attn_pdrop=0)
    config.embd_pdrop = 0
    return made(transformers.GPT2LMHeadModel, config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0
    )
    return made(transformers.T5ForConditionalGeneration, config)


def bert() -> Any:
    return made(transformers.BertForMaskedLM, transformers.BertConfig(**SIZES, num_attention_heads=4))


def native(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).to(x.dtype)


def native_mx(x: Tensor) -> Tensor:
    """Blocks of a head of at most 32 numbers: the scale is 2^(exponent of the largest - 8)."""
    scale = torch.exp2(torch.floor(torch.log2(x.abs().amax(-1, keepdim=True))) - 8)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """The numbers of `rounded` with the gradient of `x`."""
    out = x.clone()
    out.data.copy_(rounded)
    return out


def by_hand(cache: type) -> Any:
    """A subclass that rounds what it is given."""

    class ByHand(cache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            keys = straight(key_states, native(key_states.detach()))
            values = straight(value_states, native_mx(value_states.detach()))
            return super().update(keys, values, *args, **kwargs)

    return ByHand


def generated(model: Any, **options: Any) -> Any:
    return model.generate(
        IDS,
        max_new_tokens=8,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **options,
    )


def require_equal(a: Any, b: Any) -> None:
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.logits) == len(b.logits)
    assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def require_equal_steps(a: Any, model: nn.Module, b: Any, other: nn.Module) -> None:
    """Logits and gradients of two steps."""
    assert torch.equal(a.logits, b.logits)
    for network, out in ((model, a), (other, b)):
        network.zero_grad()
        out.loss.backward()
    for x, y in zip(gradients(model), gradients(other), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [llama, mistral, gpt2])
def test_generate_gives_what_a_cache_written_by_hand_gives(make: Callable[[], Any]) -> None:
    model = make()
    expected = generated(model, past_key_values=by_hand(DynamicCache)(config=model.config))
    require_equal(generated(fpsim.quantize(model, POLICY)), expected)
    plain = generated(model)
    assert not torch.equal(plain.logits[0], expected.logits[0])  # the formats can be seen at all


@pytest.mark.parametrize("make", [llama, mistral])
def test_a_static_cache_stores_rounded_keys_and_values(make: Callable[[], Any]) -> None:
    model = make()
    caches = [c(config=model.config, max_cache_len=20) for c in (StaticCache, by_hand(StaticCache))]
    require_equal(
        generated(fpsim.quantize(model, POLICY), past_key_values=caches[0]), generated(model, past_key_values=caches[1])
    )


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
def test_a_quantised_cache_is_given_rounded_keys_and_values(backend: str) -> None:
    package = {"quanto": "optimum.quanto", "hqq": "hqq"}.get(backend)
    if package is not None:
        pytest.importorskip(package)
    model = llama()
    options = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 8, "residual_length": 4}
    caches = [c(backend, model.config, **options) for c in (QuantizedCache, by_hand(QuantizedCache))]
    require_equal(
        generated(fpsim.quantize(model, POLICY), past_key_values=caches[0]), generated(model, past_key_values=caches[1])
    )


def test_both_caches_of_an_encoder_with_a_decoder_store_rounded_keys_and_values() -> None:
    model, cache = t5(), by_hand(DynamicCache)
    expected = generated(model, past_key_values=EncoderDecoderCache(cache(), cache()))
    quantised = fpsim.quantize(model, POLICY)
    require_equal(generated(quantised), expected)
    step = {"input_ids": IDS, "labels": IDS}
    trained = model(**step, past_key_values=EncoderDecoderCache(cache(), cache()))
    require_equal_steps(quantised(**step, use_cache=False), quantised, trained, model)
    # the keys of the encoder itself are in no cache
    assert torch.equal(quantised.encoder(IDS).last_hidden_state, model.encoder(IDS).last_hidden_state)


@pytest.mark.parametrize("make", [llama, mistral, gpt2])
def test_a_step_without_a_cache_reads_the_keys_and_values_that_a_cache_would_store(make: Callable[[], Any]) -> None:
    model = make().train()
    quantised = fpsim.quantize(model, POLICY)
    out = quantised(IDS, labels=IDS, use_cache=False)
    assert out.past_key_values is None
    expected = model(IDS, labels=IDS, past_key_values=by_hand(DynamicCache)(config=model.config))
    assert not torch.equal(out.logits, model(IDS).logits)
    require_equal_steps(out, quantised, expected, model)


def test_a_trainer_replays_what_the_rollout_read() -> None:
    """In float64 the order of sums moves no key across a tie of e4m3fn."""
    model = fpsim.quantize(llama().double(), POLICY)
    rollout = generated(model)
    replayed = model(rollout.sequences[:, :-1], use_cache=False).logits[:, IDS.shape[1] - 1 :]
    # half an ulp of float32 below 1 is 2^-25: generate gives its logits in float32
    assert torch.allclose(torch.stack(rollout.logits, 1).double(), replayed, rtol=0, atol=2**-24)
    plain = fpsim.dequantize(model)(rollout.sequences[:, :-1]).logits[:, IDS.shape[1] - 1 :]
    assert (plain - replayed).abs().max() > 2**-14  # what a trainer without the cache's formats would be off by


@pytest.mark.parametrize("fmt", ["nvfp4", "e4m3fn per tensor fp32", "e4m3fn per 8x8 fp32"])
def test_a_scale_over_tokens_is_warned_of(fmt: str) -> None:
    with pytest.warns(UserWarning, match=r"cache has v=.*, with a scale for all tokens that come together"):
        fpsim.quantize(llama(), fpsim.Policy(cache={"k": "e4m3fn", "v": fmt}))


@pytest.mark.parametrize("fmt", ["nvfp4_row", "mxfp4", "int4 per row fp32", "e4m3fn per 1x4 fp32", "hif8"])
def test_a_scale_of_each_token_is_the_same_whatever_comes_with_it(fmt: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fpsim.quantize(llama().double(), fpsim.Policy(cache=fmt))
    whole, parts = DynamicCache(), DynamicCache()
    x = IDS[:, :3]
    model(x, past_key_values=whole)
    for i in range(3):
        model(x[:, i : i + 1], past_key_values=parts)
    assert torch.equal(whole.layers[0].keys, parts.layers[0].keys)
    assert torch.equal(whole.layers[0].values, parts.layers[0].values)


def test_a_key_is_rounded_once_and_read_as_it_was_stored() -> None:
    model, cache = fpsim.quantize(llama(), fpsim.Policy(cache={"k": "e2m1fn per tensor fp32"})), DynamicCache()
    model(IDS, past_key_values=cache)
    before = [layer.keys.clone() for layer in cache.layers]
    model(IDS[:, :1], past_key_values=cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :9], keys)  # a second rounding, of all, would have another scale
        assert layer.keys.shape[2] == 10


def test_keys_alone_are_rounded_where_nothing_is_said_of_values() -> None:
    cache, plain, model = DynamicCache(), DynamicCache(), llama()
    fpsim.quantize(model, fpsim.Policy(cache={"k": "e4m3fn", "v": None}))(IDS, past_key_values=cache)
    model(IDS, past_key_values=plain)
    assert torch.equal(cache.layers[0].keys, native(plain.layers[0].keys))
    assert torch.equal(cache.layers[0].values, plain.layers[0].values)


BF16 = {"weight": "bf16", "activation": "bf16", "error": "bf16", "weight_grad": "bf16"}
PRODUCTS = fpsim.Products.all("mxfp4", attention=True)


@pytest.mark.parametrize("roles", [BF16, {"products": PRODUCTS}, {**BF16, "products": PRODUCTS}], ids=["r", "p", "rp"])
def test_roles_and_products_of_the_model_hold_beside_its_cache(roles: dict[str, Any]) -> None:
    model = llama().train()
    both, alone = fpsim.quantize(model, fpsim.Policy(**roles, cache=KV)), fpsim.quantize(model, fpsim.Policy(**roles))
    out = both(IDS, labels=IDS, use_cache=False)

    class ByHand(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            rounded = [
                fpsim.round_to(x.float(), fmt).to(x.dtype)
                for x, fmt in ((key_states, KV["k"]), (value_states, KV["v"]))
            ]
            return super().update(*rounded, *args, **kwargs)

    expected = alone(IDS, labels=IDS, past_key_values=ByHand(config=model.config))
    require_equal_steps(out, both, expected, alone)
    assert torch.equal(out.logits, out.logits.to(torch.bfloat16).float()) == ("weight" in roles)
    assert not torch.equal(out.logits, alone(IDS).logits)


def test_a_model_of_real_bfloat16_stores_what_its_dtype_holds() -> None:
    model = llama().bfloat16()
    expected = generated(model, past_key_values=by_hand(DynamicCache)(config=model.config))
    require_equal(generated(fpsim.quantize(model, POLICY)), expected)


def test_beam_search_reorders_what_was_stored() -> None:
    model = llama()
    cache = by_hand(DynamicCache)(config=model.config)
    expected = generated(model, num_beams=3, past_key_values=cache)
    require_equal(generated(fpsim.quantize(model, POLICY), num_beams=3), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_compute_the_same_keys_and_values_again(use_reentrant: bool) -> None:
    noisy = fpsim.Policy(cache=fpsim.Operand("e4m3fn", "stochastic"))
    plain, saving = fpsim.quantize(llama().train(), noisy), fpsim.quantize(llama().train(), noisy)
    saving.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    torch.manual_seed(3)
    expected = plain(IDS, labels=IDS)
    torch.manual_seed(3)
    require_equal_steps(saving(IDS, labels=IDS), saving, expected, plain)


@pytest.mark.parametrize("use_cache", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_compiled_model_stores_the_same(use_cache: bool) -> None:
    model = fpsim.quantize(llama(), fpsim.Policy("bf16", "bf16", cache={**KV, "v": lambda x, axis: x.sign()}))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    a, b = (m(IDS, labels=IDS, use_cache=use_cache) for m in (compiled, model))
    assert torch.equal(a.logits, b.logits)
    if use_cache:
        assert torch.equal(a.past_key_values.layers[1].keys, b.past_key_values.layers[1].keys)
        assert set(a.past_key_values.layers[1].values.unique().tolist()) <= {-1.0, 0.0, 1.0}
    plain = llama()  # which is none of ours, and whose caches have our update too
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS, use_cache=True).logits, plain(IDS).logits)


def test_a_module_has_the_cache_of_its_override() -> None:
    class OfLayer1(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            keys = native(key_states) if layer_idx == 1 else key_states
            return super().update(keys, value_states, layer_idx, *args, **kwargs)

    model = llama()
    expected = model(IDS, past_key_values=OfLayer1(config=model.config)).logits
    one = fpsim.Policy(cache={"k": "e4m3fn"})
    alone = fpsim.Policy(overrides={"model.layers.1.self_attn": one})
    but = fpsim.Policy(cache={"k": "e4m3fn"}, overrides={"model.layers.0": None})
    for policy in (alone, but):
        assert torch.equal(fpsim.quantize(model, policy)(IDS).logits, expected)
    with pytest.warns(UserWarning, match="cache= changes nothing: each module that stores keys and values, such as "):
        fpsim.quantize(model, fpsim.Policy(cache=KV, overrides={"model.layers.*": None}))


def test_a_cache_is_set_and_taken_off_and_goes_with_copies() -> None:
    model = llama()
    expected = model(IDS, past_key_values=by_hand(DynamicCache)(config=model.config)).logits
    plain = model(IDS).logits
    quantised = fpsim.quantize(model, POLICY)
    file = io.BytesIO()
    torch.save(quantised, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(quantised)), copy.deepcopy(quantised), torch.load(file, weights_only=False)]
    for each in (quantised, *copies):
        assert torch.equal(each(IDS).logits, expected)
    fpsim.set_policy(quantised, None)
    assert torch.equal(quantised(IDS).logits, plain)
    fpsim.set_policy(quantised, POLICY)
    assert torch.equal(quantised(IDS).logits, expected)
    assert torch.equal(fpsim.dequantize(quantised)(IDS).logits, plain)
    assert torch.equal(model(IDS, past_key_values=DynamicCache(config=model.config)).logits, plain)


def test_a_subclass_that_calls_its_parent_is_rounded_and_another_one_is_named() -> None:
    class Logging(DynamicCache):
        seen = 0

        def update(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().update(*args, **kwargs)

    class OfItsOwn(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return self.layers[layer_idx].update(key_states, value_states)

    model, cache = fpsim.quantize(llama(), POLICY), Logging()
    assert torch.equal(model(IDS, past_key_values=cache).logits, model(IDS).logits)
    assert cache.seen == 2
    with pytest.raises(TypeError, match=r"The cache of model\.layers\.0\.self_attn is a .*OfItsOwn, whose update does"):
        model(IDS, past_key_values=OfItsOwn(config=model.config))


@pytest.mark.parametrize("cache", [((torch.zeros(1),) * 2,) * 2, object()], ids=["tuple", "object"])
def test_what_is_no_cache_of_transformers_is_named(cache: Any) -> None:
    name = type(cache).__name__
    with pytest.raises(TypeError, match=rf"LlamaForCausalLM is given a builtins\.{name} as past_key_values"):
        fpsim.quantize(llama(), POLICY)(IDS, past_key_values=cache)


@pytest.mark.parametrize(("model", "x"), [(bert(), IDS), (nn.Linear(2, 2), torch.ones(1, 2))], ids=["bert", "linear"])
def test_a_model_that_stores_no_keys_is_an_error_and_not_an_idle_policy(model: Any, x: Tensor) -> None:
    quantised = fpsim.quantize(model, POLICY)
    with pytest.raises(RuntimeError, match=r"stored no keys and values, and its policy rounds those that are stored"):
        quantised(x)
    fpsim.set_policy(quantised, "bf16")
    quantised(x)


def test_what_is_stored_is_recorded_and_shown() -> None:
    model = fpsim.quantize(llama(), POLICY)
    with fpsim.record(model) as recording:
        model(IDS)
    rows = {(row["site"], row["role"]): row for row in recording.rows()}
    sites = [f"model.layers.{i}.self_attn:cache" for i in range(2)]
    assert [*rows] == [(site, role) for site in sites for role in ("cache.k", "cache.v")]
    assert {row["count"] for row in rows.values()} == {2 * 2 * 9 * 8}
    shown = {row.module: row.cache for row in fpsim.summary(model)}
    assert {name for name, words in shown.items() if words} == {site.partition(":")[0] for site in sites}
    assert shown["model.layers.0.self_attn"] == "k=e4m3fn nearest_even, v=mxfp8_e4m3 nearest_even"


def test_modules_are_tried_by_themselves_without_an_error_or_a_warning() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, **HEADS)
    model = made(transformers.LlamaForCausalLM, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranking = fpsim.sensitivity(model, lambda m: m(IDS, labels=IDS).loss, fpsim.Policy(cache="e2m1fn"))
    costs = {row["module"] for row in ranking if row["loss_alone"] != ranking.float32}
    assert costs == {"model.layers.0.self_attn"}


def test_gradients_that_are_scaled_pass_through_the_cache() -> None:
    import ada_loss

    model = fpsim.quantize(llama(), fpsim.Policy(error="fp16", weight_grad="fp16", cache=KV))
    scaled = ada_loss.AdaLossScaled(model)
    model(IDS, labels=IDS).loss.backward()
    found = gradients(model)
    scaled.detach()
    plain = fpsim.quantize(llama(), POLICY)
    plain(IDS, labels=IDS).loss.backward()
    for x, y in zip(found, gradients(plain), strict=True):
        assert x is not None
        assert y is not None
        assert (x - y).norm() < 0.02 * y.norm()  # some tens of roundings to 11 bits; true sizes without underflow


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"q": "e4m3fn"}, "cache names 'q', which no cache stores. Known: k, v."),
        ({"k": "e9m99"}, "cache: k='e9m99' is not an operand."),
        (fpsim.Operand("fp16", hadamard=fpsim.Hadamard(8)), "which is of a product. Expected: a format"),
        (fpsim.Operand("fp16", ste="clip"), "which is of a product. Expected: a format"),
        ("e4m3fn per tensor fp32 delayed", "whose scale follows from earlier steps"),
    ],
    ids=["name", "format", "hadamard", "clip", "delayed"],
)
def test_a_cache_that_cannot_be_is_refused_in_words(cache: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        fpsim.Policy(cache=cache)


def test_a_policy_with_a_cache_is_one_of_modules() -> None:
    with pytest.raises(ValueError, match=r"the policy has cache=, which is that of the attention of a model"):
        fpsim.emulate(POLICY).__enter__()
    assert fpsim.Policy(cache={}) == fpsim.Policy(cache={"v": None}) == fpsim.Policy()
    assert fpsim.Policy(cache="fp16") == fpsim.Policy(cache={"v": "fp16", "k": torch.float16})


EVERY = {**ZOO, **MORE}
STORE_NOTHING = ("mamba", "mamba2", "falcon-mamba")  # state spaces
REFUSES_CACHES = ("switch",)  # in an encoder with the configuration of a decoder


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("llama", "deepseek-v3", "whisper", "vit") else pytest.mark.slow) for n in EVERY],
)
def test_each_architecture_reads_what_a_cache_written_by_hand_stores(name: str) -> None:
    model = EVERY[name].make().eval()
    inputs = EVERY[name].inputs("")
    quantised = fpsim.quantize(model, POLICY)
    if name in STORE_NOTHING or not getattr(model, "can_generate", bool)():
        with pytest.raises(RuntimeError, match="stored no keys and values"):
            quantised(**inputs)
        return
    with torch.no_grad():
        out = quantised(**inputs, use_cache=False)
        if name in REFUSES_CACHES:
            assert not torch.equal(out.logits, model(**inputs, use_cache=False).logits)
            return
        config = model.config.get_text_config(decoder=True)
        cache = by_hand(DynamicCache)(config=config)
        if model.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, by_hand(DynamicCache)(config=config))
        expected = model(**inputs, past_key_values=cache, use_cache=True)
    assert torch.equal(out.logits, expected.logits)
