"""The ways in which `random_modules` has a model take training steps, and what each step gives."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import torch
from module_functions import WIDTH
from torch import Tensor, nn

SHAPE = (2, 3, WIDTH)
WRITTEN = "the model has written to"
Trace = dict[str, Tensor | None]  # what steps gave, by name
Call = Callable[[Tensor], Tensor]
TARGET = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(SHAPE)


def step(
    call: Call, parameters: dict[str, Tensor], x: Tensor, number: int, trace: Trace, target: Tensor = TARGET
) -> None:
    """One step of gradient descent on all parameters that have a gradient."""
    torch.manual_seed(number)
    x = x.clone().requires_grad_()
    before = {name: p.detach().clone() for name, p in parameters.items() if not nn.parameter.is_lazy(p)}
    out = call(x)
    (out * target.to(out.dtype)).sum().backward()
    written = {name: before[name] for name, p in parameters.items() if name in before and not equal(p, before[name])}
    trace.update({f"step {number}: {name}, which {WRITTEN}": x for name, x in written.items()})
    trace[f"step {number}: output"] = out.detach().clone()
    trace[f"step {number}: gradient of the input"] = x.grad
    with torch.no_grad():
        for name, p in parameters.items():
            trace[f"step {number}: gradient of {name}"] = p.grad
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
            p.grad = None


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def end(model: nn.Module, trace: Trace) -> Trace:
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        trace[f"{name} in the end"] = x.detach().clone()
    return trace


def eagerly(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    for number, x in enumerate(xs):
        step(model, named(model), x, number, trace)
    return end(model, trace)


def compiled(model: nn.Module, xs: list[Tensor]) -> Trace:
    torch._dynamo.reset()
    trace: Trace = {}
    call = torch.compile(model, backend="aot_eager")
    for number, x in enumerate(xs):
        step(call, named(model), x, number, trace)
    return end(model, trace)


def by_functional_call(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    model(xs[0])  # parameters that are made by the first call are made
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for number, x in enumerate(xs):
        step(lambda x: torch.func.functional_call(model, parameters, (x,)), parameters, x, number, trace)
        for name, p in model.named_parameters():  # where the model reaches its own nevertheless
            trace[f"step {number}: gradient of the model's {name}"] = p.grad
    return trace


def by_func_grad(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    model(xs[0])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(model, parameters, (x,))
        return (out * TARGET).sum(), out

    for number, x in enumerate(xs):
        torch.manual_seed(number)
        (of_parameters, of_x), out = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        trace[f"step {number}: output"], trace[f"step {number}: gradient of the input"] = out, of_x
        for name, gradient in of_parameters.items():
            trace[f"step {number}: gradient of {name}"] = gradient
            parameters[name] = parameters[name] - gradient * 0.05
    return trace


def under_vmap(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    model(xs[0])
    call = torch.vmap(model, randomness="same")
    for number, x in enumerate(xs):
        step(call, named(model), x, number, trace)
    return end(model, trace)


def in_threads(model: nn.Module, xs: list[Tensor]) -> Trace:
    """Two copies train at once."""
    traces: dict[int, Trace] = {}
    errors: list[BaseException] = []

    def train(number: int, model: nn.Module) -> None:
        try:
            traces[number] = eagerly(model, xs)
        except BaseException as error:  # is raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=train, args=one) for one in enumerate((model, copy.deepcopy(model)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    first, second = traces[0], traces[1]
    return {**first, **{f"thread 2, {name}": x for name, x in second.items() if not equal(x, first[name])}}


def copied_in_the_middle(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    for number, x in enumerate(xs):
        step(model, named(model), x, number, trace)
        model = copy.deepcopy(model)
    return end(model, trace)


def pickled_in_the_middle(model: nn.Module, xs: list[Tensor]) -> Trace:
    trace: Trace = {}
    for number, x in enumerate(xs):
        step(model, named(model), x, number, trace)
        if number % 2:
            model = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            model = torch.load(file, weights_only=False)
    return end(model, trace)


WAYS: dict[str, Callable[[nn.Module, list[Tensor]], Trace]] = {
    "eager": eagerly,
    "compiled": compiled,
    "functional_call": by_functional_call,
    "func.grad": by_func_grad,
    "vmap": under_vmap,
    "threads": in_threads,
    "deepcopy": copied_in_the_middle,
    "pickle": pickled_in_the_middle,
}


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def has(gradient: Tensor | None) -> bool:
    """A compiled program and a transform give zeros where there is no gradient."""
    return gradient is not None and bool(gradient.count_nonzero())
