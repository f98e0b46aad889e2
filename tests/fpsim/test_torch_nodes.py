"""What private names of torch at the nodes of autograd's graph are believed to mean."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import Tensor, nn

from fpsim import torch_nodes
from fpsim.emulation.calls import MOVE
from fpsim.torch_internals import tensors_of
from fpsim.torch_nodes import (
    call_at_the_end_of_backward,
    calls_of_backward,
    convolution_of,
    current_node,
    edge_of,
    graph_tasks_so_far,
    in_forward_mode,
    is_python_function,
    is_view_of_function,
    key_of,
    require_hooks_of_nodes,
    sends_sums_by_moving,
    slot_dtypes,
    slot_shapes,
    take_float32_gradients,
    will_run,
)


def test_a_call_at_the_end_of_backward_sees_all_gradients_and_raises_from_it() -> None:
    x = torch.ones(2, requires_grad=True)
    y, found = x * 2, []

    def end() -> None:
        found.append(x.grad.tolist())
        raise ZeroDivisionError

    y.grad_fn.register_prehook(lambda gradients: call_at_the_end_of_backward(end))
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert found == [[2.0, 2.0]]


def test_a_node_runs_in_a_pass_if_a_wanted_leaf_is_behind_it() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x, y = a * 2, b * 3
    z = x + y
    found: list[tuple[bool, bool]] = []
    z.grad_fn.register_prehook(lambda gradients: found.append((will_run(x.grad_fn), will_run(y.grad_fn))))
    z.sum().backward(retain_graph=True)
    z.sum().backward(inputs=[a], retain_graph=True)
    torch.autograd.grad(z.sum(), [b, y])
    assert found == [(True, True), (True, False), (False, True)]


def test_a_slot_has_the_dtype_of_the_result_and_the_engine_casts_before_post_hooks() -> None:
    x = torch.ones(2, requires_grad=True).half()
    z = x + torch.ones(2)  # promotes without a node of its own
    assert slot_dtypes(z.grad_fn) == [torch.float32]
    assert slot_dtypes(z.grad_fn.next_functions[0][0]) == [torch.float16]
    found: list[torch.dtype] = []
    z.grad_fn.register_hook(lambda into, out: found.append(into[0].dtype))
    z.sum().backward()
    assert found == [torch.float16]
    rows = torch.ones(4, 3, requires_grad=True).unbind()
    assert slot_dtypes(rows[0].grad_fn) == [torch.float32] * 4
    assert slot_shapes(rows[0].grad_fn) == [(3,)] * 4


def test_the_node_of_a_convolution_knows_its_groups() -> None:
    x = torch.ones(1, 4, 5, 5)
    assert convolution_of(nn.Conv2d(4, 6, 3, groups=2)(x).grad_fn) == (2, False)
    assert convolution_of(nn.ConvTranspose2d(4, 6, 3)(x).grad_fn) == (1, True)


def test_a_half_leaf_of_float32_gradients_gets_them_before_post_hooks_divide() -> None:
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    take_float32_gradients(x)
    y = x * 1
    # 2**-30 is 0 in float16, so a cast after the hook would lose it
    y.grad_fn.register_hook(lambda into, out: (into[0] * 2.0**-30, *into[1:]))
    y.sum().backward()
    assert x.grad.dtype is torch.float32
    assert x.grad.tolist() == [2.0**-30] * 2


def test_a_torch_without_one_of_the_names_is_refused_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hooks_of_nodes()
    with monkeypatch.context() as patched:
        patched.delattr(torch._C, "_will_engine_execute_node")
        with pytest.raises(NotImplementedError, match=r"lacks torch\._C\._will_engine_execute_node"):
            require_hooks_of_nodes()
    with monkeypatch.context() as patched:
        patched.setattr(torch_nodes, "ENGINE", object())
        with pytest.raises(NotImplementedError, match="lacks queue_callback"):
            require_hooks_of_nodes()
    require_hooks_of_nodes()


def test_a_half_leaf_is_refused_where_torch_has_no_dtype_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    assert torch_nodes.HAS_GRAD_DTYPE
    monkeypatch.setattr(torch_nodes, "HAS_GRAD_DTYPE", False)
    with pytest.raises(NotImplementedError, match="small ones would be lost"):
        take_float32_gradients(x)


def test_a_hook_knows_the_call_of_backward_that_it_runs_in() -> None:
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    h = x * w
    y, z = h.sum(), h.sum()
    found: list[tuple[list[int], list[int], bool]] = []

    def note(gradients: object) -> None:
        (call,) = calls_of_backward()
        edges = [[key_of(edge_of(t)[0])[1] if edge_of(t)[0] is not None else -1 for t in tensors] for tensors in call]
        found.append((edges[0], edges[1], current_node() is y.grad_fn))

    assert y.grad_fn is not None
    y.grad_fn.register_prehook(note)
    nr = [key_of(t.grad_fn)[1] for t in (y, z, h)]
    y.backward(retain_graph=True)
    torch.autograd.backward([z, y], retain_graph=True, inputs=[w])
    torch.autograd.grad(y, [torch.autograd.graph.get_gradient_edge(h), x], retain_graph=True)

    def inner(gradient: torch.Tensor) -> None:  # the innermost of two calls
        y.backward(retain_graph=True)

    z.register_hook(inner)
    z.backward()
    assert found == [([nr[0]], [], True), ([nr[1], nr[0]], [-1], True), ([nr[0]], [nr[2], -1], True), found[0]]
    assert [*calls_of_backward()] == []


def test_the_call_of_backward_is_found_from_another_thread_as_from_that_of_a_card() -> None:
    x = torch.ones(2, requires_grad=True)
    y, found = x.sum(), []

    def look() -> None:
        found.extend(edge_of(output)[0] is y.grad_fn for outputs, _ in calls_of_backward() for output in outputs)

    def note(gradients: object) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    assert y.grad_fn is not None
    y.grad_fn.register_prehook(note)
    y.backward()
    assert found == [True]


def test_each_backward_pass_has_the_next_number() -> None:
    x = torch.ones(2, requires_grad=True)
    before = graph_tasks_so_far()
    assert graph_tasks_so_far() == before + 1
    x.sum().backward()
    assert graph_tasks_so_far() == before + 3


def test_a_node_keeps_its_key_and_one_of_a_function_is_told_from_others() -> None:
    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            return dy

    x = torch.ones(2, requires_grad=True)
    y = (x * 2, Passed.apply(x), x * 2)
    keys = [key_of(t.grad_fn) for t in y]
    assert keys == [key_of(t.grad_fn) for t in y]
    assert len(set(keys)) == 3
    assert [is_python_function(t.grad_fn) for t in y] == [False, True, False]


def test_forward_mode_is_seen_under_dual_numbers_under_transforms_and_where_a_compiler_traces_them() -> None:
    x, found = torch.ones(2), []

    def ask(x: torch.Tensor) -> torch.Tensor:
        found.append(in_forward_mode())
        return x * 2 if in_forward_mode() else x * 3

    torch.func.grad(lambda x: ask(x).sum())(x)
    torch.func.jvp(ask, (x,), (x,))
    torch.func.jacfwd(ask)(x)
    with torch.autograd.forward_ad.dual_level():
        ask(x)
    ask(x)
    assert found == [False, True, True, True, False]

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if in_forward_mode() else x * 3

    for f, factor in ((lambda x: torch.func.jvp(doubled, (x,), (x,))[1], 2), (doubled, 3)):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(x), factor * x)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g.t()


def test_a_view_that_a_function_gave_is_one_that_torch_refuses_to_write_to() -> None:
    x = torch.ones(2, 2, requires_grad=True) * 1
    for view in (Turned.apply(x), Turned.apply(x)[None]):
        assert is_view_of_function(view)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            view.neg_()
    for other in (x, x.t(), x[0], torch.ones(2), Turned.apply(x) * 1):
        assert not is_view_of_function(other)


@pytest.mark.full
def test_where_a_moved_gradient_is_added_up_is_known_of_every_operation_that_moves() -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # it takes seconds

    tried, unknown = set(), {}
    for op in op_db:
        name = op.name.rpartition(".")[2]
        if name not in MOVE - {"embedding"} or torch.float32 not in op.supported_backward_dtypes("cpu"):
            continue  # of an embedding, the gradient is rounded where it arrives
        for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 20):
            out = op(sample.input, *sample.args, **sample.kwargs)
            for y in out if isinstance(out, tuple | list) else [out]:
                if y.grad_fn is None or y.is_complex() or not y.numel():
                    continue
                tried.add(op.name)
                leaves = [x for x in tensors_of((sample.input, sample.args)) if x.requires_grad]
                arriving = 1 + torch.rand_like(y)  # a sum of two is larger than all of them
                sent = torch.autograd.grad(y, leaves, arriving, allow_unused=True, retain_graph=True)
                numbers = {0.0, *arriving.flatten().tolist(), *(-arriving).flatten().tolist()}
                is_moved = all({*x.flatten().tolist()} <= numbers for x in sent if x is not None)
                is_shared = all((x.abs() <= arriving.max()).all() for x in sent if x is not None)  # among equal ones
                if not (is_moved or is_shared or sends_sums_by_moving(y)):
                    unknown[op.name] = y.grad_fn.name()
    assert {"expand", "index_select", "tile"} <= tried
    assert not unknown


def test_what_is_joined_with_itself_sends_a_sum_and_what_is_cut_sends_none() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    joined = torch.cat([x, x]), torch.stack([x[:2], x[:2]])
    for twice in (
        *joined,
        x.expand(2, 4).t().relu(),
        x.repeat(2).abs(),
        x.unfold(0, 2, 1),
        x.take(torch.tensor([0, 0])),
    ):
        assert sends_sums_by_moving(twice)
    for once in (x, x[1:], x.view(2, 2).t(), torch.cat([x, x * 2]), x.sum().expand(1) * 1, (x[[0, 0]] * 1).flip(0)):
        assert not sends_sums_by_moving(once)
