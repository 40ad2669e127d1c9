"""`--source` for several workers, and messages about settings for several workers."""

from __future__ import annotations

import pytest

from orchestrator.sweep import main

LAYERS = ("--workload", "layers", "--size", "tiny", "--device", "cpu")


def test_the_source_of_a_setting_is_that_of_so_many_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", "scope=full,ddp.bucket_cap_mb=50", "--workers-per-trial", "2", *LAYERS]) == 0
    source = capsys.readouterr().out
    compile(source, "best", "exec")
    assert "DistributedDataParallel(model, bucket_cap_mb=50)" in source
    assert main(["--source", "scope=full", *LAYERS]) == 0
    assert "DistributedDataParallel" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--source", "ddp.static_graph=on"], "there is one; add --workers-per-trial 2 or more"),
        (["--source", "ddp.compression=bf16", "--workers-per-trial", "2"], "needs NCCL"),
        (["--source", "scope=full", "--workers-per-trial", "0"], "--workers-per-trial 0 is too few"),
        (["--explain", "scope=full", "--workers-per-trial", "2"], "leave out --workers-per-trial"),
        (["--settings", "ddp.bucket_cap_mb=1", "--dry-run"], "there is one; add --workers-per-trial 2"),
        (["--settings", "ddp.bucket_cap=1", "--workers-per-trial", "2", "--dry-run"], "did you mean bucket_cap_mb?"),
    ],
)
def test_what_is_not_for_these_workers_is_one_sentence(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *LAYERS]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.err.count("\n") == 1
