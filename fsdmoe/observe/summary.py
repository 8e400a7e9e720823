"""The summary of a run: what it was, how it ended, how fast it went, how even its experts' loads were."""

from collections.abc import Mapping

from fsdmoe.core.rules import counted
from fsdmoe.observe.devices import device_name
from fsdmoe.observe.history import History, Point, best, median
from fsdmoe.observe.record import RunFacts
from fsdmoe.observe.text import duration, number, percent, short

LAST_ROWS = 10
MOST_LAYERS = 8  # the page stays one page; the mean stands for the rest
_FIGURES = ("max_over_mean", "cv", "dead_fraction", "entropy")


def summary_text(history: History, facts: RunFacts, *, status: str, elapsed_seconds: float) -> str:
    """The whole page."""
    sections = {
        "Run": _run_lines(facts, status),
        "Training": _training_lines(history, facts),
        "Speed": _speed_lines(history, facts, elapsed_seconds),
    }
    parts = ["Summary of the run", "=================="]
    for title, lines in sections.items():
        width = max(len(name) for name in lines)
        parts += ["", title, *(f"  {name:<{width}}  {text}" for name, text in lines.items())]
    if history.experts:
        parts += ["", f"Expert balance at step {history.experts_step} (even: 1, 0, 0, 1)"]
        parts += [f"  {line}" for line in balance_table(history.experts)]
    return "\n".join(parts) + "\n"


def _run_lines(facts: RunFacts, status: str) -> dict[str, str]:
    lines = {
        "status": status,
        "devices": f"{facts.num_ranks} x {device_name(facts.device)}",
        "batch": f"{facts.tokens_per_step} tokens a step",
    }
    return lines | {str(name): str(value) for name, value in facts.described.items()}


def _training_lines(history: History, facts: RunFacts) -> dict[str, str]:
    steps = f"{history.last_step} of {facts.total_steps}"
    if facts.start_step:
        steps += f" (resumed at {facts.start_step})"
    lines = {
        "steps": steps,
        "tokens": f"{history.tokens} ({short(history.tokens)})",
        "final loss": _final_loss(history.losses),
        "best loss": _at_step(best(history.losses)),
        "eval loss": _at_step(history.evals[-1] if history.evals else None),
        "best eval loss": _at_step(best(history.evals)),
        "skipped steps": str(history.skipped),
    }
    return lines if history.loss_scale is None else lines | {"loss scale": f"{history.loss_scale:g}"}


def _speed_lines(history: History, facts: RunFacts, elapsed_seconds: float) -> dict[str, str]:
    gflop = short(facts.flops_per_token / 1e9)
    return {
        "tokens/s": f"{short(median(history.speeds))} (median, all ranks)",
        "TFLOP/s": f"{short(median(history.tflops))} a device (median; {gflop} GFLOP a token)",
        "MFU": percent(median(history.mfus)),
        "time": f"{duration(history.seconds)} in steps, {duration(elapsed_seconds)} since this start",
        "peak memory": f"{history.peak_memory_gib:.2f} GiB (first rank)",
    }


def balance_table(experts: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The layers with the highest max/mean load, and the mean over all layers."""
    worst_first = sorted(experts, key=lambda layer: experts[layer]["max_over_mean"] or 0.0, reverse=True)
    shown = [layer for layer in experts if layer in worst_first[:MOST_LAYERS]]  # in the model's order
    means = {name: _mean([figures[name] for figures in experts.values()]) for name in _FIGURES}
    rows = [(layer, experts[layer]) for layer in shown]
    rows.append((f"mean of {counted(len(experts), 'layer')}", means))
    width = max(len("layer"), *(len(name) for name, _ in rows))
    lines = [f"{'layer':<{width}}  max/mean      cv    dead  entropy"]
    for name, figures in rows:
        cells = [number(figures[key], ".3f") for key in ("max_over_mean", "cv")]
        cells += [percent(figures["dead_fraction"]), number(figures["entropy"], ".3f")]
        lines.append(f"{name:<{width}}  {cells[0]:>8}  {cells[1]:>6}  {cells[2]:>6}  {cells[3]:>7}")
    if len(shown) < len(experts):
        lines.append(f"(the {len(shown)} least even layers are shown)")
    return lines


def _final_loss(losses: list[Point]) -> str:
    if not losses:
        return "none"
    # Step 1 is the loss of the initial weights: in a short run it would lift the mean by itself.
    last = [point for point in losses if point.step > 1][-LAST_ROWS:]
    if not last:
        return _at_step(losses[-1])
    mean = sum(point.value for point in last) / len(last)
    return f"{_at_step(losses[-1])}; mean of the last {len(last)} rows {mean:.4f}"


def _at_step(point: Point | None) -> str:
    return "none" if point is None else f"{point.value:.4f} at step {point.step}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
