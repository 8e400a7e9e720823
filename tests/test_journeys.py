"""Six readers, each in a fresh clone: what the documentation has them type, to the end, and a check of what
they came for. They paste the pages' own commands; nothing is shortened."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fsdmoe.config import load_config
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.pasted import clone, run_pasted
from tests.support.snippets import pasted
from tests.test_examples import example

pytestmark = [pytest.mark.full, requires_transformers]


def rows(run: Path, key: str = "loss") -> list[float]:
    """That figure in every logged step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in lines if key in row and ("loss" in row or key == "eval_loss")]


def test_a_researcher_trains_the_quick_start_and_a_model_of_their_own(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    script = pasted("docs/index.md", "Start") + pasted("docs/training.md")
    printed = run_pasted(folder, script)
    losses = rows(folder / "runs/quickstart")
    assert losses[-1] < losses[0] / 2, losses
    assert "finished" in (folder / "runs/quickstart/summary.txt").read_text()
    own = folder / "runs/my"
    assert rows(own, "step")[-1] == 50, "evaluated, then continued by --run"
    assert rows(own)[-1] < rows(own)[0] - 1
    (evaluated,) = re.findall(r"held-out loss ([0-9.]+), .* \(after step 40\)", printed)
    assert float(evaluated) == pytest.approx(rows(own, "eval_loss")[1], rel=1e-3), printed


@requires_peft
def test_a_fine_tuner_gets_the_right_answer_and_an_adapter_that_merges_exactly(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder = clone(tmp_path)
    printed = run_pasted(folder, pasted("docs/finetune.md"))
    assert printed.splitlines()[-1] == "The capital of France is Paris."
    run_pasted(folder, pasted("docs/adapters.md"))
    models = folder / "tutorial"
    base = AutoModelForCausalLM.from_pretrained(models / "model")
    merged = AutoModelForCausalLM.from_pretrained(models / "merged")
    with torch.no_grad():
        tokens = torch.arange(64)[None]
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, models / "adapter")(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, adapted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(adapted, before, atol=1e-3), "it learned nothing"


def test_a_platform_engineer_plans_joins_two_nodes_and_moves_the_run_to_one(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    script = pasted("docs/choosing.md") + pasted("docs/planning.md", "What to set first", "The dry run")
    script += pasted("docs/many_machines.md") + pasted("docs/checkpoint.md", "What to set first")
    printed = run_pasted(folder, script)
    plan = load_config(
        ["--config", str(folder / "best.toml"), "--files-elsewhere", "--dry-run", "--world", "256"]
    )
    assert not plan.problems, "the planner's winner is a configuration"
    assert rows(folder / "runs/two_nodes", "step") == [1, 4, 5, 6]
    assert rows(folder / "runs/moved", "step")[-1] == 30
    assert "step 30" in printed or "step_00000030" in printed, "inspect"


def run_script(folder: str) -> list[float]:
    """As many steps of the script, in one go."""
    return example("fsdp2_script").main(folder, 18)


def test_a_user_of_fsdp2_changes_one_import_and_goes_back_and_forth(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    printed = run_pasted(folder, pasted("docs/fsdp2.md"))
    found = re.findall(r"steps (\d+) to (\d+): loss ([0-9.]+) to ([0-9.]+)", printed)
    assert [tuple(map(int, steps[:2])) for steps in found] == [(0, 6), (6, 12), (12, 18)], printed
    losses = run_ranks(run_script, 2, str(tmp_path / "whole"))[0]
    for first, last, *logged in found:
        want = [losses[int(first)], losses[int(last) - 1]]
        assert list(map(float, logged)) == pytest.approx(want, rel=5e-3), printed


def test_a_kernel_engineer_compares_fp8_with_the_plain_run_and_sees_what_waits(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    pages = {
        "observe": ["What to set first", "Hidden and exposed time"],
        "low_precision": ["What to set first"],
    }
    pages |= {"performance": ["Measure it"], "fabric": ["What to set first"]}
    run_pasted(folder, "".join(pasted(f"docs/{page}.md", *parts) for page, parts in pages.items()))
    plain, rounded = (rows(folder / f"runs/{name}")[-1] for name in ("seen", "fp8"))
    assert rounded == pytest.approx(plain, rel=0.02)
    assert rounded != plain
    for rank in range(2):
        table = (folder / f"runs/exposed/profile/exposed_rank{rank}_steps10-12.txt").read_text()
        assert "gather" in table
        assert "reduce" in table


def test_a_reader_builds_the_site_and_finds_every_page(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    pages = ("concepts", "compatibility", "how_it_works", "faq")
    script = pasted("docs/index.md", "Which page") + "".join(pasted(f"docs/{page}.md") for page in pages)
    run_pasted(folder, script)
    for page in (folder / "docs").rglob("*.md"):
        built = folder / "site" / page.relative_to(folder / "docs").with_suffix(".html")
        assert built.is_file(), built
    assert "Fine-tune in ten minutes" in (folder / "site/index.html").read_text()
