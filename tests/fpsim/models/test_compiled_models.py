"""Quantised models under torch.compile: one graph, with the numbers of the emulation as it runs without a compiler."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiers
import torch
from module_functions import KeptOutput, Same, Square
from tiers import parametrize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fpsim import dequantize, quantize, record

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**size, **off, bos_token_id=1, eos_token_id=1)
    ids = torch.randint(0, 96, (2, 12))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "use_cache": False}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ids = torch.randint(0, 96, (2, 12))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads)), {
        "input_ids": ids,
        "use_cache": False,
    }


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4)
    return transformers.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def step(forward: Any, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The logits and the gradients, by one step of training."""
    logits = forward(**inputs).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


MODELS = {"gpt2": gpt2, "llama": llama, "resnet": resnet}


@tiers.parametrize(
    ("name", "fmt"),
    [
        ("gpt2", "fp16"),
        ("llama", "bf16"),
        ("resnet", "e5m2"),
        ("gpt2", "mxfp8_e4m3"),
        ("llama", "recipe:mxfp8"),
        ("resnet", "mxfp8_e5m2"),
    ],
    ids=str,
    keep=lambda *case: case == ("resnet", "e5m2"),
)
def test_a_compiled_model_is_one_graph_and_equals_the_emulation_bit_for_bit(name: str, fmt: str) -> None:
    model, inputs = MODELS[name]()
    expected_of, model = (quantize(model.train(), fmt) for _ in range(2))
    expected = step(expected_of, expected_of, inputs)
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True), model, inputs)
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))
    for mine, theirs in zip(model.buffers(), expected_of.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class Awkward(nn.Module):
    """What a program must keep: a tied weight, a buffer, a mode, float32 on purpose, an output that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.second(torch.exp(self.first(x))))
        wide = y.float().square().mean(-1, keepdim=True)  # float32 on purpose: not rounded until it is cast back
        if self.training:
            y = y * 2
        return {"y": torch.softmax(y * torch.rsqrt(wide + 1e-5).type_as(y), -1), "wide": [wide]}


@tiers.parametrize("backend", ["aot_eager", "inductor"], keep={"aot_eager"})
def test_stochastic_rounding_draws_what_it_draws_without_a_compiler(backend: str) -> None:
    plain = nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 8)
    )  # a program copies what it drops
    x, results = torch.randn(4, 8), []
    for compiler in (lambda model: model, partial(torch.compile, backend=backend, fullgraph=True)):
        model = quantize(plain, "e5m2", rounding="stochastic")
        run = compiler(model)
        torch.manual_seed(0)
        for _ in range(2):
            out = run(x)
            out.backward(torch.ones_like(out))
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    expected, found = results
    assert all(map(torch.equal, found, expected))


class OfFunction(nn.Module):
    """A Function that saves what it gives, between two operations."""

    def forward(self, x: Tensor) -> Tensor:
        return KeptOutput.apply(x * torch.ones(8)) * 1.5  # type: ignore[no-any-return]


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
def test_what_a_function_saves_is_rounded_once_in_a_program_too(rounding: str) -> None:
    results = []
    for compiler in (lambda model: model, partial(torch.compile, backend="aot_eager", fullgraph=True)):
        run = compiler(quantize(OfFunction(), "e4m3fn", rounding=rounding))
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 48).view(6, 8).requires_grad_()
        out = run(x)
        out.sum().backward()
        results.append((out.detach(), x.grad, torch.get_rng_state()))  # as many draws as well
    assert all(map(torch.equal, *results))


def test_tied_weights_modes_and_float32_on_purpose_survive() -> None:
    x = torch.randn(5, 6)
    expected_of, model = (quantize(Awkward(), "e4m3fn") for _ in range(2))
    model.load_state_dict(expected_of.state_dict())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for training in (True, False, True):
        for each in (expected_of, model):
            each.train(training)
            each.zero_grad()
        expected, found = expected_of(x), compiled(x)
        assert torch.equal(found["y"], expected["y"])
        assert torch.equal(found["wide"][0], expected["wide"][0])
        assert not torch.equal(
            expected["wide"][0], torch.tensor(expected["wide"][0].tolist()).to(torch.float8_e4m3fn).float()
        )
        for out in (expected, found):
            (out["y"].square().sum() + out["wide"][0].sum()).backward()
        for mine, theirs in zip(model.parameters(), expected_of.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(model.buffers(), expected_of.buffers(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_model_quantised_anew_is_compiled_anew() -> None:
    model, x = nn.Linear(6, 6), torch.randn(5, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for fmt in ("e5m2", "fp16", "e5m2"):
        quantize(model, fmt, inplace=True)
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x), quantize(dequantize(model), fmt)(x))
        dequantize(model, inplace=True)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "load"]
)
def test_a_copy_that_was_not_called_yet_is_compiled(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = quantize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), "bf16")
    x = torch.randn(2, 8)
    assert torch.equal(torch.compile(copied(model), fullgraph=True, backend="aot_eager")(x), model(x))


def test_what_is_recorded_runs_without_the_compiler_or_says_so() -> None:
    model, x = quantize(nn.Linear(6, 6), "e5m2"), torch.randn(5, 6)
    compiled = torch.compile(model, backend="aot_eager")
    with record(model) as recording:
        assert torch.equal(compiled(x), model(x))
    assert len(recording.rows()) > 0
    torch._dynamo.reset()
    with record(model), pytest.raises(torch._dynamo.exc.Unsupported, match="compile the whole quantised model"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


class Remembering(nn.Module):
    """Uses what it computed before. form: how it keeps that."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.before, self.calls = form, [] if form == "list" else None, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        before = self.before[-1] if self.form == "list" and self.before else self.before
        out = x * 0.9 if before is None or before == [] else x + before * 0.25
        if self.form == "list":
            self.before.append(out.detach())
        else:
            self.before = out.detach()
        return out


@pytest.mark.parametrize("form", ["attribute", "list"])
def test_a_tensor_that_a_forward_keeps_as_an_attribute_breaks_the_graph(form: str) -> None:
    plain, compiled = (quantize(nn.Sequential(Remembering(form)), "bf16") for _ in range(2))
    call = torch.compile(compiled, backend="aot_eager")
    for seed in range(3):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert torch.equal(call(x), plain(x))
        if not seed:
            assert "keeps a tensor as '0.before'" in str(said[0].message)
    assert compiled[0].calls == plain[0].calls == [3]


def test_a_buffer_put_in_the_place_of_another_is_an_error() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return x * self.seen

    compiled = torch.compile(quantize(Counts(), "e5m2"), backend="aot_eager", fullgraph=True)
    with (
        pytest.raises(torch._dynamo.exc.Unsupported),
        pytest.warns(UserWarning, match=r"assigns a new tensor to 'seen'.*self\.seen\.copy_"),
    ):
        compiled(torch.ones(2))


def tensors_of(x: Any) -> list[Tensor]:
    """All tensors in containers and in the attributes of objects."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple):
        return [tensor for item in x for tensor in tensors_of(item)]
    return tensors_of(vars(x)) if hasattr(x, "__dict__") and not isinstance(x, type) else []


@tiers.parametrize(
    ("config", "cache"),
    [
        (transformers.LlamaConfig(), "DynamicCache"),
        (transformers.MistralConfig(sliding_window=4), "DynamicCache"),
        (transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2), "EncoderDecoderCache"),
    ],
    ids=["llama", "sliding_window", "t5"],
    keep=lambda config, _: config.model_type == "mistral",
)
def test_a_language_model_with_its_cache_is_one_graph_and_the_cache_goes_on(config: Any, cache: str) -> None:
    ids, inputs = torch.randint(4, 96, (2, 8)), {}
    if cache == "DynamicCache":
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config.update({**size, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96})
        plain = transformers.AutoModelForCausalLM.from_config(config)
    else:
        plain, inputs = transformers.T5ForConditionalGeneration(config), {"decoder_input_ids": ids[:, :3]}
    model = quantize(plain.eval(), "bf16")
    expected = model(input_ids=ids, **inputs)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids, **inputs)
    assert torch.equal(found.logits, expected.logits)
    of_model, of_program = expected.past_key_values, found.past_key_values
    assert type(of_program) is type(of_model)
    assert type(of_program).__name__ == cache
    assert len(tensors_of(of_program)) == len(tensors_of(of_model)) >= 4
    assert all(map(torch.equal, tensors_of(of_program), tensors_of(of_model)))
    if cache == "DynamicCache":  # the next token, of either cache
        after, again = (model(input_ids=ids[:, :1], past_key_values=c).logits for c in (of_program, of_model))
        assert torch.equal(after, again)
        assert of_program.get_seq_length() == 9


class Holder:
    """An object of plain Python, with another in it."""

    def __init__(self, x: Tensor, inner: Holder | None = None) -> None:
        self.x, self.inner, self.kind, self.dtype, self.device = x, inner, Holder, x.dtype, x.device
        self.parts: dict[str, Any] = {"y": x + 1, "words": ["a", None, 1.5, 3]}


def test_objects_constants_and_gradients_come_back_from_a_program() -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"of": Holder(x * 3, Holder(x * 5)), "none": None, "words": ("a", 1.5, True)}

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = torch.compile(quantize(Wrapped(), "bf16"), backend="aot_eager", fullgraph=True)(x)
    assert (found["none"], found["words"]) == (None, ("a", 1.5, True))
    holder = found["of"]
    assert type(holder) is type(holder.inner) is Holder
    assert (holder.kind, holder.dtype, holder.device) == (Holder, torch.bfloat16, x.device)
    assert holder.inner.inner is None
    assert holder.parts["words"] == ["a", None, 1.5, 3]
    assert holder.parts["y"].tolist() == [4.0, 7.0]
    (holder.x.sum() + holder.inner.parts["y"].sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0]


def test_what_the_compiler_cannot_give_back_is_named() -> None:
    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return x * self.weight, iter([1])

    compiled = torch.compile(quantize(Gives(2, 1), "fp16"), backend="aot_eager")
    with pytest.warns(UserWarning, match=r"Got a list_iterator.*Expected tensors.*DynamicCache"):
        out = compiled(torch.ones(2))
    assert torch.equal(out[0][0], compiled.weight.half().float()[0])  # it ran without the compiler


class Draws(nn.Module):
    """Draws numbers in its forward, in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.w, self.kept = way, nn.Parameter(torch.ones(4)), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * DRAWS[self.way](self)


def seeded(way: Any) -> Tensor:
    torch.manual_seed(7)
    return torch.rand(4)


def forked(way: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return seeded(way)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "a generator that is made": lambda m: torch.rand(4, generator=torch.Generator().manual_seed(5)),
    "a generator that is kept": lambda m: torch.rand(4, generator=m.kept),
    "in place": lambda m: torch.empty(4).uniform_(generator=torch.Generator().manual_seed(5)),
    "an order": lambda m: torch.randperm(4, generator=torch.Generator().manual_seed(5)),
    "a seed": seeded,
    "a seed of the default generator": lambda m: torch.default_generator.manual_seed(7) and torch.rand(4),
    "a fork": forked,
    "random": lambda m: random.random(),
    "numpy.random": lambda m: float(np.random.rand()),  # noqa: NPY002
}


@parametrize("way", DRAWS, keep={"a generator that is made", "a fork", "numpy.random"})
def test_numbers_that_a_program_would_draw_once_break_the_graph(way: str) -> None:
    """As in torch.compile itself: the calls are those of eager code."""

    def calls(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        return [function(torch.ones(4)) for _ in range(3)]

    expected = calls(quantize(Draws(way), "bf16"))
    with pytest.warns(UserWarning, match="compiled program would"):
        found = calls(torch.compile(quantize(Draws(way), "bf16"), backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_a_thread(function: Callable[[], Tensor]) -> Tensor:
    given: list[Tensor] = []
    thread = threading.Thread(target=lambda: given.append(function()))
    thread.start()
    thread.join()
    return given[0]


BREAKING: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a reentrant checkpoint": (
        lambda m, x: checkpoint(lambda y: m.inner(y).tanh(), m.inner(x), use_reentrant=True),
        r"reentrant checkpoint at the top level.*use_reentrant=False",
    ),
    "another thread": (lambda m, x: in_a_thread(lambda: m.inner(x)), "A thread called inner while torch.compile made"),
    "a kept weight as it is": (lambda m, x: x @ Same.apply(m.kept[0]), "Function is given 'inner.weight' from a list"),
    "a kept weight": (lambda m, x: x @ Square.apply(m.kept[0]), "Function is given 'inner.weight' from a list"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", BREAKING)
def test_what_a_program_cannot_hold_is_named_and_runs_without_the_compiler(way: str) -> None:
    run, words = BREAKING[way]

    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.kept = [self.inner.weight]

        def forward(self, x: Tensor) -> Tensor:
            return run(self, x)

    q, x = quantize(Breaking(), "bf16"), torch.randn(3, 4)
    results = []
    for step in (q, torch.compile(q, backend="aot_eager")):
        q.zero_grad()
        if step is q:
            out = step(x)
        else:
            with pytest.warns(UserWarning, match=words):
                out = step(x)
        out.sum().backward()
        results.append((out, q.inner.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_transform_in_a_compiled_function_runs_the_model_without_the_compiler(transform: str) -> None:
    """With the tensors that it is given in the place of parameters, not with the model's own."""
    q, x = quantize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "bf16"), torch.randn(3, 4)
    given = {name: p.detach() * 2 for name, p in q.named_parameters()}

    def call(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(q, p, (x,)).square().sum()  # type: ignore[no-any-return]

    def step(p: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.grad(call)(p, x) if transform == "grad" else torch.func.vmap(partial(call, p))(x)

    expected = step(given, x)
    with pytest.warns(UserWarning, match=r"A transform of torch\.func.*calls the model inside of a compiled program"):
        found = torch.compile(step, backend="aot_eager")(given, x)
    if transform == "vmap":
        assert torch.equal(found, expected)
    else:
        assert expected["0.weight"].any()
        assert all(torch.equal(found[name], expected[name]) for name in given)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("fmt", [None, "bf16"])
def test_a_gradient_of_none_is_zeros_to_a_program_as_of_a_plain_model(fmt: str | None, backend: str | None) -> None:
    linear = nn.Linear(4, 4) if fmt is None else quantize(nn.Linear(4, 4), fmt)
    run = linear if backend is None else torch.compile(linear, backend=backend)
    other = torch.ones(3, 4, requires_grad=True)
    (WithoutGradient.apply(run(torch.ones(3, 4))) + other).sum().backward()
    gradient = linear.weight.grad
    assert gradient is None if backend is None else not gradient.any()
