"""What torch's private names are believed to mean, held against the installed torch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fpsim
from fpsim import torch_internals
from fpsim.torch_internals import (
    apart_from_compiler,
    base_of,
    blind_to_modes,
    calibrate_holders,
    called_module,
    computing_hooks,
    constant_under_compile,
    current_graph_task,
    direct_parameters,
    has_no_holes,
    hooks_of_gradient,
    is_called_functionally,
    is_compiled_wrapper,
    is_held_by_autograd_alone,
    is_legacy_batched,
    map_leaves,
    operation_homes,
    parametrization_lists,
    share_storage,
    standing_in,
    tensors_of,
    version_of,
    watched_seeds,
)
from fpsim.torch_modes import is_plain, is_watched, without_torch_function


def test_a_version_counts_writes_through_any_view() -> None:
    x = torch.zeros(4)
    before = version_of(x)
    x[1:].add_(1)
    assert version_of(x) == before + 1
    assert x.sum() == 3  # reading counts nothing
    assert version_of(x) == before + 1


def test_the_base_of_a_view_is_the_tensor_itself() -> None:
    x = torch.zeros(4)
    assert base_of(x[1:][1:]) is x
    assert base_of(x) is None
    assert base_of(x.clone()) is None


def test_a_zero_of_autograd_is_told_from_one_in_memory() -> None:
    assert not is_plain(torch._efficientzerotensor(3))
    assert is_plain(torch.zeros(3))


def test_tensors_of_one_storage_share_it_wherever_they_lie() -> None:
    x = torch.zeros(4)
    assert share_storage(x[:2], x[2:])
    assert share_storage(x, x.detach())
    assert not share_storage(x, x.clone())


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
    ],
    ids=["contiguous", "transposed", "channels last", "0-d", "empty", "slice", "expanded"],
)
def test_memory_has_no_holes_if_each_place_is_filled_once(x: Tensor, expected: bool) -> None:
    assert has_no_holes(x) is expected


def test_direct_parameters_are_those_of_the_module_alone_and_plain_tensors_that_stand_in_for_them() -> None:
    outer = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert list(direct_parameters(outer)) == []
    stand_in, seen = torch.ones(2, 2), []
    outer[0].register_forward_hook(lambda module, args, out: seen.extend(direct_parameters(module)))
    torch.func.functional_call(outer, {"0.weight": stand_in}, torch.ones(1, 2))
    assert len(seen) == 1
    assert seen[0] is stand_in


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_nobody_is_asked_without_torch_function() -> None:
    with Seen() as seen, without_torch_function():
        torch.ones(2).exp()
    assert seen.names == []
    with Seen() as seen:
        torch.ones(2).exp()
    assert "exp" in seen.names


def test_a_copy_that_is_blind_to_modes_shows_the_calls_inside() -> None:
    attention, x = nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    arguments = (x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0)
    arguments = (*arguments, attention.out_proj.weight, attention.out_proj.bias)
    expected = F.multi_head_attention_forward(*arguments)[0]
    with Seen() as seen:
        got = blind_to_modes(F.multi_head_attention_forward)(*arguments)[0]
    assert torch.equal(got, expected)
    assert {"linear", "softmax"} & {*seen.names}
    with Seen() as seen:
        F.multi_head_attention_forward(*arguments)
    assert seen.names[0] == "multi_head_attention_forward"


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_whoever_sees_each_call_is_noticed() -> None:
    x = torch.ones(2)
    assert not is_watched()
    assert is_plain(x)
    with Dispatch():
        assert is_watched()
        assert not is_plain(x)
    with forward_ad.dual_level():
        assert is_watched()
        assert not is_plain(x)
    found = []
    torch.func.vmap(lambda v: found.append((is_watched(), is_plain(x))) or v)(x)
    torch.func.grad(lambda v: found.append((is_watched(), is_plain(x))) or v.sum())(x)
    assert found == [(True, False)] * 2
    assert not is_watched()


def test_the_compiler_takes_a_marked_function_for_constants() -> None:
    calls = []

    @constant_under_compile
    def words(text: str) -> int:
        calls.append(text)
        return len(text)

    compiled = torch.compile(lambda x: x * words("four"), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 4.0
    compiled(torch.ones(1))
    assert calls == ["four"]


def test_the_compiler_never_traces_what_is_apart_from_it() -> None:
    traced = []

    @apart_from_compiler
    def twice(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return helper(x)

    def helper(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x * 2

    compiled = torch.compile(lambda x: twice(x + 1) + 1, backend="eager")
    assert compiled(torch.ones(1)).item() == 5.0
    assert compiled(torch.ones(1)).item() == 5.0
    assert traced == [False] * 4


def test_fpsim_is_imported_and_rounds_without_the_compiler_of_torch() -> None:
    """Its import takes two seconds, which are two thirds of what torch's own takes."""
    code = (
        "import sys, fpsim, torch; m = fpsim.quantize(torch.nn.Linear(2, 2), 'fp16'); m(torch.ones(2)).sum().backward()"
    )
    code += "; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_homes_of_operations_hold_atens_and_our_own() -> None:
    homes = operation_homes()
    assert torch.ops.aten in homes
    assert torch.ops.fpsim in homes


def test_a_graph_task_has_a_number_higher_than_the_one_before() -> None:
    assert current_graph_task() == -1
    found = []
    for _ in range(2):
        x = torch.ones(2, requires_grad=True) * 1
        x.register_hook(lambda gradient: found.append(current_graph_task()))
        x.sum().backward()
    assert 0 <= found[0] < found[1]


# Who holds a gradient's memory


def held(is_view: bool, hold: Callable[[Tensor], Any]) -> bool:
    """Whether a gradient is found to be autograd's alone, in its hook, while `hold(gradient)` is alive."""
    calibrate_holders(object())
    found = []

    class Hook:
        def __call__(self, gradient: Tensor) -> None:
            alive = hold(gradient)
            found.append(is_held_by_autograd_alone(gradient, object()))
            del alive

    x = torch.ones(6, requires_grad=True) * 1
    x.register_hook(Hook())
    ((x.view(2, 3) if is_view else x) * 2).sum().backward()
    return found[0]


WAYS = {
    "a name": lambda g: g,
    "an alias": lambda g: g.detach(),
    "a view": lambda g: g[1:],
    "a storage": lambda g: g.untyped_storage(),
    "numpy": lambda g: g.numpy(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "its base": lambda g: g._base if g._base is not None else g,
}


@pytest.mark.parametrize("is_view", [False, True], ids=["owner", "view"])
def test_a_gradient_that_nobody_holds_is_autograds_alone(is_view: bool) -> None:
    assert held(is_view, lambda gradient: None)


@pytest.mark.parametrize("is_view", [False, True], ids=["owner", "view"])
@pytest.mark.parametrize("way", WAYS)
def test_whoever_holds_a_gradient_is_noticed(way: str, is_view: bool) -> None:
    assert not held(is_view, WAYS[way])


@pytest.fixture
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch_internals, "_alone", {})
    return monkeypatch


def kept_views_after_a_step() -> tuple[Tensor, Tensor]:
    """A gradient that a user's hook keeps by an alias, after the emulation has rounded it; and what it was."""
    kept: list[Tensor] = []
    g = torch.tensor([0.3, 0.7])
    x = torch.ones(2, requires_grad=True)
    with fpsim.emulate("e4m3fn"):
        y = x * 1.0
    z = y + 0.0  # outside: its gradient is not rounded, and is handed on to y
    z.register_hook(lambda gradient: kept.append(gradient.detach()))
    z.backward(g.clone())
    return kept[0], g


def addresses_of_rounded_gradients(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each gradient of a training step is rounded: 'in place' or 'copied'."""
    from fpsim.emulation import backward

    ways: list[str] = []
    in_place, copied = backward.round_memory_, backward.rounded
    monkeypatch.setattr(backward, "round_memory_", lambda *a: ways.append("in place") or in_place(*a))
    monkeypatch.setattr(backward, "rounded", lambda *a: ways.append("copied") or copied(*a))
    model = fpsim.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "e5m2")
    model(torch.ones(3, 4)).square().sum().backward()
    return ways


def test_gradients_are_rounded_in_place_where_the_counts_are_trusted(measured_anew: pytest.MonkeyPatch) -> None:
    assert "in place" in addresses_of_rounded_gradients(measured_anew)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("_storage_uses", lambda pointer: 2), ("_uses", lambda tensor: 2)],
    ids=["storages are not counted", "tensors are not counted"],
)
def test_gradients_are_copied_where_a_holder_would_not_be_noticed(
    measured_anew: pytest.MonkeyPatch, name: str, broken: Callable[[Any], int]
) -> None:
    measured_anew.setattr(torch_internals, name, broken)
    ways = addresses_of_rounded_gradients(measured_anew)
    assert ways
    assert set(ways) == {"copied"}
    kept, before = kept_views_after_a_step()
    assert torch.equal(kept, before)


def test_nothing_is_measured_under_a_debugger(measured_anew: pytest.MonkeyPatch) -> None:
    measured_anew.setattr(torch_internals.sys, "gettrace", lambda: print)
    assert set(addresses_of_rounded_gradients(measured_anew)) == {"copied"}
    measured_anew.undo()
    calibrate_holders(object())
    assert held(False, lambda gradient: None)


def test_holders_are_known_after_an_error_of_the_compiler() -> None:
    # torch leaves its evaluation of frames on, where a call holds its arguments once more
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: torch._dynamo.graph_break() or x + 1, backend="eager", fullgraph=True)(torch.ones(2))
    for is_view in (False, True):
        assert held(is_view, lambda gradient: None)
        assert not any(held(is_view, hold) for hold in WAYS.values())


# A module


def test_the_module_that_was_called_is_known_with_hooks_and_without() -> None:
    def stands_in_forward(x: Tensor) -> object:
        return called_module()

    module = nn.Identity()
    module.forward = stands_in_forward  # type: ignore[method-assign, assignment]
    assert module(torch.ones(1)) is module
    assert stands_in_forward(torch.ones(1)) is None
    module.register_forward_hook(lambda module, args, out: None)
    assert module(torch.ones(1)) is module


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "norm",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_a_hook_of_torch_sets_the_weight_that_its_method_computes(norm: Callable[[nn.Module], nn.Module]) -> None:
    layer = norm(nn.Linear(3, 3)).eval()
    (found,) = computing_hooks(layer)
    assert {*found.sources, "bias"} == {name for name, _ in layer.named_parameters()}
    setattr(found.hook, found.method, lambda *args, **kwargs: torch.full((3, 3), 7.0))
    layer(torch.ones(1, 3))
    assert torch.equal(getattr(layer, found.weight), torch.full((3, 3), 7.0))
    assert list(computing_hooks(nn.Linear(3, 3))) == []


def test_what_computes_a_parametrised_tensor_is_a_list_of_parametrizations() -> None:
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    (found,) = parametrization_lists(layer)
    assert torch.equal(found(), layer.weight)
    assert list(parametrization_lists(nn.Sequential(layer))) == []


def test_a_batch_of_gradients_is_told_from_a_gradient() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    out = x * 2
    out.register_hook(lambda gradient: seen.append(is_legacy_batched(gradient)))
    torch.autograd.grad(out, x, torch.ones(2), retain_graph=True)
    torch.autograd.grad(out, x, torch.ones(3, 2), is_grads_batched=True)
    assert seen == [False, True]


def test_a_module_that_the_compiler_made_is_told_from_the_module() -> None:
    module = nn.Linear(2, 2)
    assert is_compiled_wrapper(torch.compile(module))
    assert not is_compiled_wrapper(module)


@pytest.mark.gpu
def test_the_handle_of_the_current_stream_is_that_of_torchs_object() -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert torch_internals.current_stream_handle(0) == stream.cuda_stream


class Pair(NamedTuple):
    values: Tensor
    name: str


def test_tensors_are_found_and_mapped_in_all_containers_of_torch_and_python_in_their_order() -> None:
    a, b, c, d, e = (torch.full((2,), float(i)) for i in range(5))
    tree = ([a, None, "word"], {"y": Pair(b, "b"), "x": OrderedDict(c=c)}, torch.sort(d), torch.Size([2, 3]), slice(e))
    found = tensors_of(tree)
    assert all(x is y for x, y in zip(found, (a, b, c, tree[2].values, tree[2].indices), strict=True))
    mapped = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, tree)
    assert [type(part) for part in mapped] == [list, dict, type(tree[2]), tuple, slice]
    assert (type(mapped[1]["y"]), mapped[1]["y"].name, [*mapped[1]]) == (Pair, "b", ["y", "x"])
    assert all(torch.equal(x, y + 1) for x, y in zip(tensors_of(mapped), found, strict=True))
    assert mapped[0][1:] == [None, "word"]
    assert (mapped[3], mapped[4].stop is e) == ((2, 3), True)  # a size becomes a tuple, which torch takes for one


def test_functional_call_is_known_to_the_module_that_it_calls() -> None:
    asked: list[bool] = []

    def stands_in_forward(x: Tensor) -> Tensor:
        asked.append(is_called_functionally())
        return x

    module, x = nn.Identity(), torch.ones(1)
    module.forward = stands_in_forward  # type: ignore[method-assign, assignment]
    torch.func.functional_call(module, {}, (x,))
    module(x)
    handle = module.register_forward_hook(lambda module, args, out: None)
    torch.func.functional_call(module, {}, (x,))
    handle.remove()
    torch.func.functional_call(nn.Sequential(module), {}, (x,))  # it was another module that it called
    assert asked == [True, False, True, False]


def test_what_stands_in_for_a_parameter_is_one_where_torch_asks() -> None:
    """To `isinstance`, so that a list of parameters takes it as it is; and it is none any more after the block."""
    module = nn.ParameterList([torch.ones(2), torch.ones(3)])
    with torch._subclasses.FakeTensorMode():
        tensors: dict[str, Tensor] = {name: torch.ones(2) for name, _ in module.named_parameters()}
    with standing_in(module, tensors) as stand_ins:
        assert [*stand_ins.values()] == [*tensors.values()]
        assert all(isinstance(x, nn.Parameter) for x in tensors.values())
        assert next(iter(module[:1])) is tensors["0"]
    assert not any(isinstance(x, nn.Parameter) for x in tensors.values())
    assert all(type(p) is nn.Parameter for p in module)


def set_back() -> None:
    with torch.random.fork_rng(devices=[]):
        pass


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (lambda: torch.manual_seed(7), "torch"),
        (set_back, "torch"),
        (random.random, "random"),
        (np.random.rand, "numpy.random"),
        (lambda: np.random.default_rng(1).random(), None),
        (lambda: random.Random(1).random(), None),
    ],
    ids=["torch", "a fork", "random", "numpy", "a generator of NumPy", "one of Python"],
)
def test_who_seeds_global_random_numbers_is_named_and_they_are_put_back(
    draw: Callable[[], object], source: str | None
) -> None:
    def states() -> list[Any]:
        of_numpy: Any = np.random.get_state()  # noqa: NPY002
        return [torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist()]

    torch.manual_seed(7)
    before = states()
    with watched_seeds() as drawn:
        draw()
        assert drawn() == source
    assert states() == before


def test_hooks_of_a_gradient_are_those_that_were_registered_and_not_removed() -> None:
    p = nn.Parameter(torch.ones(2))
    assert hooks_of_gradient(p) == hooks_of_gradient(nn.UninitializedParameter()) == ([], [])
    handle = p.register_hook(torch.abs)
    p.register_hook(torch.neg)
    p.register_post_accumulate_grad_hook(print)
    handle.remove()
    assert hooks_of_gradient(p) == ([torch.neg], [print])
