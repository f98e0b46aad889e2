"""How long `why` takes, in the time of steps: `python tests/planted_time.py`.

Prints, for causes in a Llama of 8 layers, the processor time of the step and that of `why` as a multiple of it. At most
30 are allowed where it speaks before the comparison with float32, and 100 where it reaches that.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from planted_models import llama_of
from torch import Tensor, nn

import fpsim

IDS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))


def llama(gain: float = 1.0) -> nn.Module:
    """gain: of the queries and keys of a layer, whose product then overflows in half."""
    model = llama_of(128, 8, 4, 256, attn_implementation="eager", use_cache=False)
    with torch.no_grad():
        for layer in (model.model.layers[5].self_attn.q_proj, model.model.layers[5].self_attn.k_proj):
            layer.weight.mul_(gain)
    return model


def seconds_of(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, model: nn.Module, rate: float | None = None) -> None:
    optimizer = None if rate is None else torch.optim.SGD(model.parameters(), rate)

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss

    step()
    one = min(seconds_of(step) for _ in range(5))
    found: list[fpsim.Why] = []
    took = seconds_of(lambda: found.append(fpsim.why(model, step, optimizer)))
    cause, words = found[0].cause, "nothing"
    if cause is not None:
        words = f"{cause['kind']} at {cause['place']}; tried: {', '.join(r['remedy'] for r in found[0].tried) or '-'}"
    print(f"{name}: {took / one:.0f} steps' time, {found[0].runs} runs, step {1e3 * one:.0f} ms; {words}", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    broken = llama()
    broken.get_parameter("model.layers.4.mlp.up_proj.weight").data[0, 0] = torch.nan
    measure("float32, NaN in a parameter", broken)
    measure("half, logits overflow", llama(400).half())
    measure("half, logits overflow, float32 is not enough", llama(2000).half())
    measure("fp16, logits overflow", fpsim.quantize(llama(400), "fp16"))
    measure("fp16, logits overflow, float32 is not enough", fpsim.quantize(llama(2000), "fp16"))
    measure("bfloat16, updates are lost", llama().bfloat16(), 1e-7)
    measure("float32, nothing wrong", llama(), 1e-2)
    measure("bf16, nothing wrong", fpsim.quantize(llama(), "bf16"))


if __name__ == "__main__":
    main()
