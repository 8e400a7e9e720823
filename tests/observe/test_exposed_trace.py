"""Chrome traces in, what computed and what travelled out."""

import gzip
import json

from fsdmoe.observe.__main__ import main
from fsdmoe.observe.exposed_trace import read_trace, timeline_of


def event(name, ts, dur, cat="kernel", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


GPU = [
    event("gemm", 0, 5e6),
    event("Memcpy DtoD", 5e6, 1e6, cat="gpu_memcpy"),
    event("ncclDevKernel_SendRecv", 4e6, 4e6, **{"Collective name": "all_to_allv",
          "Process Group Description": "mesh_ep"}),
    event("ncclDevKernel_AllGather_RING_LL", 6e6, 1e6, **{"Process Group Description": "mesh_fsdp"}),
    event("fabric_tp", 9e6, 1e6),
    event("aten::mm", 0, 9e6, cat="cpu_op"),
    event("cudaLaunchKernel", 0, 9e6, cat="cuda_runtime"),
    {"ph": "i", "name": "marker", "ts": 1},
]  # fmt: skip


def test_kernels_are_told_apart_by_name_and_by_the_group_of_their_collective():
    found = timeline_of(GPU)
    assert found.compute == [(0, 5), (5, 6)]
    assert found.transfers == {"all_to_all": [(4, 8)], "gather": [(6, 7)], "tp": [(9, 10)]}


def test_without_a_gpu_operators_compute_and_gloo_travels():
    found = timeline_of(
        [
            event("aten::mm", 0, 2e6, cat="cpu_op"),
            event("c10d::allreduce_", 2e6, 5e6, cat="cpu_op"),
            event("gloo:all_reduce", 1e6, 3e6, cat="cpu_op"),
            event("layer 0 forward", 0, 9e6, cat="user_annotation"),
        ]
    )
    assert found.compute == [(0, 2)]
    assert found.transfers == {"reduce": [(1, 4)]}


def test_traces_are_read_packed_or_not(tmp_path):
    text = json.dumps({"traceEvents": GPU})
    (tmp_path / "trace.json").write_text(text)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "trace.json") == read_trace(tmp_path / "trace.json.gz") == timeline_of(GPU)


def test_the_command_prints_a_table_of_each_trace_and_draws_them(tmp_path, capsys):
    (tmp_path / "trace.json").write_text(json.dumps(GPU))
    picture = tmp_path / "out.svg"
    traces = [f"mine={tmp_path}/trace.json", f"{tmp_path}/trace.json"]
    assert main(["exposed", *traces, "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("mine\n")
    assert "trace.json\n" in printed
    assert printed.count("all-to-all") == 2
    assert "<svg " in picture.read_text()


def test_a_trace_that_is_not_there_or_not_whole_is_named(tmp_path, capsys):
    assert main(["exposed", f"mine={tmp_path}/nowhere.json"]) == 2
    assert "nowhere.json: expected a trace" in capsys.readouterr().err
    whole = gzip.compress(json.dumps({"traceEvents": [{"name": str(n)} for n in range(100)]}).encode())
    files = {
        "cut.json.gz": whole[:-20],
        "damaged.json.gz": whole[:20] + bytes([255] * 40) + whole[60:],
        "text.json.gz": b"text",
        "rows.jsonl": b"{}\n{}\n",
        "a.json": b"{}",
        "numbers.json": b"[1, 2]",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert main(["exposed", str(tmp_path / name)]) == 2
        assert f"{name}: expected a whole Chrome trace, found another file" in capsys.readouterr().err
