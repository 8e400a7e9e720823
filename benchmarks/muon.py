"""A training step with Muon against one with AdamW, as one rank of a world that is not there.

8 layers of Qwen3-30B-A3B's shapes, sharded over 8 ranks. Also: how fast Newton–Schulz of the experts runs, by
the FLOPs that it executes, against an 8192 x 8192 x 8192 product in the same process; and what the states
take. On a single rank (``--world 1``) all matrices fall due, eight times as many. Lines are printed as
they are known.

    python benchmarks/muon.py                         about 90 s on one H200
    python benchmarks/muon.py --world 1 --layers 4
    python benchmarks/muon.py --tiny                  on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from fsdp_world import emulated_meshes, emulated_world
from timing import changing_orders, milliseconds, require_gpu, wait

from fsdmoe.fsdp import engine_of
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.newton_schulz import newton_schulz, symmetric_product, symmetric_product_of
from fsdmoe.models.config import ModelConfig, preset_config
from fsdmoe.models.decoder import Decoder, build_model
from fsdmoe.optim import AdamW, Muon, MuonConfig
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

MICRO_BATCHES = (1, 4)
SETTLING_STEPS = 3
STEPS_IN_A_ROW = 6
"""Timed ones, behind some that are not. The card runs at its power limit, and lets one optimizer's steps have
what the other's saved: after a second of its own steps each has the clock that it would have in a run."""
TILE = 128
"""Of symmetric products (``fsdmoe/kernels/triton/symmetric_product.py``)."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Times(NamedTuple):
    """Milliseconds of a step, and of the update in it."""

    step: float
    update: float


def show(line: str = "") -> None:
    print(line, flush=True)


def now() -> float | torch.cuda.Event:
    """A moment on the device's clock, without waiting for it."""
    if DEVICE.type == "cpu":
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        return start.elapsed_time(end)  # type: ignore[arg-type]
    return end - start  # type: ignore[operator]


def train(
    model: Decoder, optimizer: AdamW, tokens_BS: torch.Tensor, micro_batches: int
) -> list[float | torch.cuda.Event]:
    """One step; when it began, when its gradients were there, when it ended."""
    moments = [now()]
    for number in range(micro_batches):
        with engine_of(model).micro_batch(last=number == micro_batches - 1):
            model(tokens_BS, labels_BS=tokens_BS).loss.backward()
    moments.append(now())
    optimizer.step()
    optimizer.zero_grad()
    return [*moments, now()]


def measure(
    model: Decoder, optimizers: dict[str, AdamW], tokens_BS: torch.Tensor, count: int, rounds: int
) -> dict[str, Times]:
    """Medians; the optimizers take turns, so that a card that slows down does so for both."""
    found: dict[str, list[list[float | torch.cuda.Event]]] = {name: [] for name in optimizers}
    for order in changing_orders(list(optimizers), rounds):
        for name in order:
            for _ in range(SETTLING_STEPS):
                train(model, optimizers[name], tokens_BS, count)
            for _ in range(STEPS_IN_A_ROW):
                found[name].append(train(model, optimizers[name], tokens_BS, count))
    wait(DEVICE)
    return {
        name: Times(
            statistics.median(between(began, ended) for began, _, ended in steps),
            statistics.median(between(ready, ended) for _, ready, ended in steps),
        )
        for name, steps in found.items()
    }


def product_rate(size: int, repeats: int) -> float:
    """TFLOP/s of a square product in bfloat16."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    torch.mm(a, b)
    return 2 * size**3 / milliseconds(lambda: torch.mm(a, b), repeats, DEVICE) / 1e9


def show_rates(config: ModelConfig, args: argparse.Namespace) -> None:
    """Newton–Schulz of a batch of experts' matrices by the FLOPs it executes, with the kernel and without."""
    size, count, repeats = (64, 2, 1) if args.tiny else (8192, 42, 20)
    product = product_rate(size, repeats)
    show(f"a {size}³ product in bfloat16: {product:.0f} TFLOP/s\n")
    short, long = sorted((config.moe_intermediate_size, config.hidden_size))
    wide_NRC = torch.randn(count, short, long, dtype=torch.bfloat16, device=DEVICE)
    muon = MuonConfig()
    has_kernel = DEVICE.type == "cuda"
    show(f"| of {count} matrices {short} x {long} | by | ms | TFLOP executed | TFLOP/s | of that product |")
    show("| --- | --- | --- | --- | --- | --- |")
    for is_tall in (False, True):
        x = wide_NRC.mT.contiguous() if is_tall else wide_NRC
        gram = symmetric_product(x, is_tall=is_tall) / short
        shape = "tall" if is_tall else "wide"
        for name in ("torch", "auto") if has_kernel else ("torch",):
            share = 1.0 if name == "torch" else triangle_share(short)
            rows = {
                f"{shape}, x xᵀ": (2 * share * short * short * long, partial(_product, x, is_tall=is_tall)),
                f"{shape}, its square": (2 * share * short**3, partial(_product, gram, added=gram, beta=0.5)),
                f"{shape}, Newton–Schulz": (
                    muon.ns_steps * (2 * (1 + share) * short * short * long + 2 * share * short**3),
                    partial(newton_schulz, x, muon.ns_coefficients, muon.ns_steps),
                ),
            }
            for title, (work, run) in rows.items():
                with kernels(name):
                    run()
                    took = milliseconds(run, repeats, DEVICE)
                rate = count * work / took / 1e9
                by = "torch" if name == "torch" else "kernel"
                numbers = f"{took:.2f} | {count * work / 1e12:.2f} | {rate:.0f} | {rate / product:.0%}"
                show(f"| {title} | {by} | {numbers} |")
    show()


def _product(x_NRC: torch.Tensor, **settings: Any) -> torch.Tensor:
    return symmetric_product_of(x_NRC)(x_NRC, **settings)


def triangle_share(size: int) -> float:
    """Of a square product, what is computed where it is symmetric."""
    tiles = -(-size // TILE)
    return tiles * (tiles + 1) / 2 * TILE**2 / size**2


def show_steps(config: ModelConfig, args: argparse.Namespace) -> None:
    began = time.perf_counter()
    meshes = emulated_meshes(args.world, 1, DEVICE.type)
    policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="bfloat16"), grad_divisor=1.0)
    model = parallelize(build_model(config), meshes, policy)
    tokens_BS = torch.randint(config.vocab_size, (args.batch, args.length), device=DEVICE)
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    adamw = AdamW(model, **settings)  # type: ignore[arg-type]
    muon = Muon(model, **settings)  # type: ignore[arg-type]
    wait(DEVICE)
    show(f"built in {time.perf_counter() - began:.0f} s")
    state = muon.moment_bytes.device
    other = adamw.moment_bytes.device
    plan = muon.exchange()
    sent = 2 * (sum(plan.parts_to) + sum(plan.results_to))
    show(f"state: {state / 2**20:,.1f} MiB, {state / other:.3f} of AdamW's")
    show(f"this rank sends {sent / 2**20:,.1f} MiB a step")
    began = time.perf_counter()
    optimizers: dict[str, AdamW] = {"adamw": adamw, "muon": muon}
    for optimizer in optimizers.values():
        train(model, optimizer, tokens_BS, 1)
    wait(DEVICE)
    show(f"first steps, kernels compiled: {time.perf_counter() - began:.0f} s\n")
    show("| micro-batches | step with AdamW, ms | with Muon, ms | ratio | AdamW's update, ms | Muon's, ms |")
    show("| --- | --- | --- | --- | --- | --- |")
    for count in MICRO_BATCHES:
        times = measure(model, optimizers, tokens_BS, count, args.rounds)
        steps = times["adamw"].step, times["muon"].step
        updates = f"{times['adamw'].update:.1f} | {times['muon'].update:.1f}"
        show(f"| {count} | {steps[0]:.1f} | {steps[1]:.1f} | {steps[1] / steps[0]:.3f} | {updates} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=8, help="ranks that the model is sharded over")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it works")
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    config = preset_config("qwen3-30b-a3b", num_hidden_layers=args.layers)
    if args.tiny:
        config = preset_config("tiny-qwen3")
        args.batch, args.length, args.rounds = 1, 16, 1
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    show(
        f"{where}, torch {torch.__version__}: rank 0 of {args.world}, {config.num_hidden_layers} layers, "
        f"{args.batch} x {args.length} tokens a micro-batch\n"
    )
    show_rates(config, args)
    with emulated_world(args.world):
        show_steps(config, args)


if __name__ == "__main__":
    main()
