"""A training step with Muon against one with AdamW, as one rank of a world that is not there.

8 layers of Qwen3-30B-A3B's shapes, sharded over 8 ranks. Also: how fast Newton–Schulz of the experts runs, by
the FLOPs that it executes, against an 8192 x 8192 x 8192 product in the same process; and what the states
take. On a single rank (``--world 1``) all matrices fall due, eight times as many.

    python benchmarks/muon.py                         about 60 s on one H200
    python benchmarks/muon.py --world 1 --layers 4
    python benchmarks/muon.py --tiny                  on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import gc
import statistics

import torch
from fsdp_world import emulated_meshes, emulated_world
from timing import milliseconds, wait

from fsdmoe.fsdp import engine_of
from fsdmoe.kernels.newton_schulz import newton_schulz
from fsdmoe.models.config import ModelConfig, preset_config
from fsdmoe.models.decoder import Decoder, build_model
from fsdmoe.optim import AdamW, Muon, MuonConfig
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig

MICRO_BATCHES = (1, 4)
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    model: Decoder, optimizer: AdamW, tokens_BS: torch.Tensor, micro_batches: int, *, steps: bool = True
) -> None:
    """One step; without ``steps`` forward and backward alone."""
    for number in range(micro_batches):
        with engine_of(model).micro_batch(last=number == micro_batches - 1):
            model(tokens_BS, labels_BS=tokens_BS).loss.backward()
    if steps:
        optimizer.step()
    optimizer.zero_grad()


def measure(model: Decoder, kind: str, tokens_BS: torch.Tensor, args: argparse.Namespace) -> dict[str, float]:
    optimizer = AdamW(model, **SETTINGS) if kind == "adamw" else Muon(model, **SETTINGS)  # type: ignore[arg-type]
    found = {"state": float(optimizer.moment_bytes.device)}
    for count in MICRO_BATCHES:
        for with_step in (True, False):
            run = lambda: train(model, optimizer, tokens_BS, count, steps=with_step)  # noqa: E731, B023
            run()
            times = [milliseconds(run, args.repeats, DEVICE) for _ in range(args.rounds)]
            found[f"{count} {'whole' if with_step else 'without'}"] = statistics.median(times)
    if isinstance(optimizer, Muon):
        plan = optimizer.exchange()
        found["sent"] = float(2 * (sum(plan.parts_to) + sum(plan.results_to)))
    return found


def product_rate(size: int, args: argparse.Namespace) -> float:
    """TFLOP/s of a square product in bfloat16."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    torch.mm(a, b)
    return 2 * size**3 / milliseconds(lambda: torch.mm(a, b), 5 * args.repeats, DEVICE) / 1e9


def newton_schulz_rate(config: ModelConfig, count: int, args: argparse.Namespace) -> tuple[float, float]:
    """TFLOP/s of the experts' matrices, by the products that are executed; and TFLOP of one call."""
    short, long = sorted((config.moe_intermediate_size, config.hidden_size))
    muon = MuonConfig()
    x_NRC = torch.randn(count, short, long, dtype=torch.bfloat16, device=DEVICE)
    run = lambda: newton_schulz(x_NRC, muon.ns_coefficients, muon.ns_steps)  # noqa: E731
    run()
    work = muon.ns_steps * count * (4 * short * short * long + 2 * short**3)
    return work / milliseconds(run, args.repeats, DEVICE) / 1e9, work / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=8, help="ranks that the model is sharded over")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it works")
    args = parser.parse_args()
    config = preset_config("qwen3-30b-a3b", num_hidden_layers=args.layers)
    size, count = 8192, 32
    if args.tiny:
        config = preset_config("tiny-qwen3")
        args.batch, args.length, args.repeats, args.rounds, size, count = 1, 16, 1, 1, 64, 2
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}: rank 0 of {args.world}, {config.num_hidden_layers} layers, ")
    print(f"{args.batch} x {args.length} tokens a micro-batch\n")
    with emulated_world(args.world):
        meshes = emulated_meshes(args.world, 1, DEVICE.type)
        policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="bfloat16"), grad_divisor=1.0)
        model = parallelize(build_model(config), meshes, policy)
        tokens_BS = torch.randint(config.vocab_size, (args.batch, args.length), device=DEVICE)
        rows = {}
        for kind in ("adamw", "muon"):
            rows[kind] = measure(model, kind, tokens_BS, args)
            gc.collect()
            wait(DEVICE)
    report(rows["adamw"], rows["muon"])
    product, (rate, work) = product_rate(size, args), newton_schulz_rate(config, count, args)
    print(f"\nNewton–Schulz of {count} experts' matrices: {rate:.0f} TFLOP/s ({work:.2f} TFLOP a call), ")
    print(f"{rate / product:.0%} of a {size}³ product's {product:.0f} TFLOP/s")


def report(adamw: dict[str, float], muon: dict[str, float]) -> None:
    print("| micro-batches | step with AdamW, ms | with Muon, ms | ratio | AdamW's update, ms | Muon's, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in MICRO_BATCHES:
        whole = adamw[f"{count} whole"], muon[f"{count} whole"]
        updates = (each[f"{count} whole"] - each[f"{count} without"] for each in (adamw, muon))
        shown = " | ".join(f"{each:.1f}" for each in updates)
        print(f"| {count} | {whole[0]:.1f} | {whole[1]:.1f} | {whole[1] / whole[0]:.3f} | {shown} |")
    state, other = muon["state"], adamw["state"]
    print(f"\nstate: {state / 2**20:,.1f} MiB, {state / other:.3f} of AdamW's")
    print(f"this rank sends {muon['sent'] / 2**20:,.1f} MiB a step")


if __name__ == "__main__":
    main()
