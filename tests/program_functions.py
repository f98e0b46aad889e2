"""Statements of random programs that leave code of their own to the backward pass: autograd Functions, and hooks.

What a Function returns there need be no derivative of its forward: native code runs the same lines.
"""

from __future__ import annotations

from collections.abc import Callable

from program_statements import NothingFits, Variable, Writer

SQUARE = (4, 4)
STEPS = (2, 3, 4, 5, 6)
# What a step computes of two tensors. Each kernel rounds once.
FORMS = (
    "{u} * {v}",
    "{u} + {v}",
    "{u} - {v}",
    "{u} * 1.1",
    "{u} * 0.7",
    "({u} * 3e2) * 1e-2",
    "-{u}",
    "{u}.abs()",
    "{u} / 3.0",
    "{u}.t()",
    "{u}.view(-1).flip(0).view(4, 4)",
    "torch.where({v} > 0.25, {u}, {v})",
    "torch.maximum({u}, {v})",
    "torch.cat([{u}[:2], {v}[2:]])",
    "torch.stack([{u}, {v}]).unbind()[1]",
    "{u}.clone().mul_(0.7)",
    "torch.zeros_like({u}).add_({v})",
    "torch.mul({u}, {v}, out=torch.empty_like({u}))",
    "{u}.masked_fill({v} > 0.25, 0.3)",
    "{u} * ({v} > 0)",
    "{u}.float() * 1.003",
    "({u}.float() * {v}).to({v}.dtype)",
    "{u}.to({v}.dtype) * 1.1",
    "{u} * (1.1 if {u}.dtype == torch.float32 else 0.7)",
    "Square.apply({u})",
    "{u}.addcmul({v}, torch.ones_like({v}))",
)


def steps(w: Writer, names: list[str], must_use: str) -> list[str]:
    """Lines that compute new names of those that there are, the last one of `must_use`."""
    lines, count = [], w.choose(STEPS)
    for i in range(count):
        u = must_use if i == 0 else w.choose([names[-1], *names])
        v = w.choose(names)
        names.append(f"t{len(names)}")
        lines.append(f"{names[-1]} = {w.choose(FORMS).format(u=u, v=v)}")
    return lines


def two_squares(w: Writer) -> tuple[Variable, Variable]:
    a, b = (w.operand(lambda v: v.shape == SQUARE) for _ in range(2))
    for v in (a, b):
        v.memory.first.runs_again = True  # it is saved
    return a, b


def own_function(w: Writer) -> list[str]:
    a, b = two_squares(w)
    if a.memory.first is b.memory.first:
        raise NothingFits
    name, names = f"Own{len(w.statements)}", ["p", "q"]
    forward = steps(w, names, "p")
    turned = dict(line.removesuffix(".t()").split(" = ") for line in forward if line.endswith(".t()"))
    seen = names[-1]
    while seen in turned:
        seen = turned[seen]
    memory = {"p": a.memory, "q": b.memory}.get(seen)
    z = w.new(SQUARE, memory if memory and memory.owner == "self.b" else None)  # a buffer's, which stays as computed
    result, kept = names[-1], w.choose(["p", "q", names[-2], names[-1]])
    has_setup, is_once, has_two = (w.choose([False, False, True]) for _ in range(3))
    kept = w.choose(["p", "q", result]) if has_setup else kept
    names = ["g", "p", "q", "s"]
    backward = steps(w, names, "g")
    second = w.choose(["None", "g", names[-2], names[-1], "torch.zeros_like(q)"])
    saving = f"ctx.save_for_backward(p, q, {kept})"
    materializes = w.choose(["", "ctx.set_materialize_grads(False)"])
    outputs = f"{result}, {result} * 0.5" if has_two else result
    if has_two and not has_setup:
        outputs, saving = f"{result}, other", f"{saving}; other = {result} > 0.25; ctx.mark_non_differentiable(other)"
    lines = [f"class {name}(torch.autograd.Function):"]
    if has_setup:
        lines += ["    generate_vmap_rule = True", "    @staticmethod", "    def forward(p, q):"]
        lines += [f"        {line}" for line in (*forward, f"return {outputs}")]
        lines += ["    @staticmethod", "    def setup_context(ctx, inputs, output):", "        p, q = inputs"]
        lines += [f"        {result} = output[0] if isinstance(output, tuple) else output"]
        lines += [f"        {line}" for line in (saving, materializes) if line]
    else:
        lines += ["    @staticmethod", "    def forward(ctx, p, q):"]
        lines += [f"        {line}" for line in (*forward, saving, materializes, f"return {outputs}") if line]
    lines += ["    @staticmethod", *(["    @once_differentiable"] if is_once else [])]
    lines += ["    def backward(ctx, g, _=None):", "        p, q, s = ctx.saved_tensors"]
    lines += [f"        {line}" for line in (*backward, f"return {names[-1]}, {second}")]
    ways = [f"{name}.apply({a.name}, {b.name})"] * 3
    ways += [f"checkpoint({name}.apply, {a.name}, {b.name}, use_reentrant={r})" for r in (False, True)]
    if has_setup and "(1.1 if" not in "".join(lines):
        ways += [f"torch.func.vmap({name}.apply)({a.name}.view(1, 4, 4), {b.name}.view(1, 4, 4))"]
    way = w.choose(ways)
    lines.append(f"{z} = {way}{'[0]' if has_two else ''}{'[0]' if 'vmap' in way else ''}")
    lines.append(f"{z} = {z}{w.choose(['', '.t()', ' * 1.1', '.detach()'])}")
    return lines


def own_hook(w: Writer) -> list[str]:
    a, b = w.operand(lambda v: v.shape == SQUARE), w.operand(lambda v: v.shape == SQUARE, is_used=False)
    a.memory.first.runs_again = b.memory.first.runs_again = True  # it is kept
    z = w.new(SQUARE)
    names = ["g", "s"]
    lines = [f"s = {b.name}.detach()", "def hook(g, s=s):", "    if g is None: return None"]
    lines += [f"    {line}" for line in steps(w, names, "g")]
    lines += [f"    return {w.choose([names[-1], names[-1], 'None'])}"]
    lines += [f"{z} = {a.name} * {w.choose(['1.1', '0.7'])}", f"if {z}.requires_grad: {z}.register_hook(hook)"]
    return lines


OWN_KINDS: tuple[Callable[[Writer], list[str]], ...] = (own_function, own_hook)
