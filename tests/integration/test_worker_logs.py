"""What workers log reaches the handlers of the launching process, that of a killed worker too."""

import re
from pathlib import Path

import pytest
from support.sampling import sampled
from support.scripts import output_of
from support.waiting import PATIENCE

SCRIPT = Path(__file__).parent / "logging_script.py"


@pytest.mark.long
@pytest.mark.parametrize("kind", sampled(["basic", "hydra"], 1, rest=pytest.mark.long))
def test_records_of_workers_reach_handlers_configured_under_the_main_guard(kind, tmp_path):
    file = tmp_path / "job.log"
    printed = output_of(SCRIPT, kind, file, timeout=PATIENCE)
    written = file.read_text()
    for step in range(4):  # a step that is interrupted is computed, and logged, again
        assert f"step {step} of worker 0\n" in written
    assert "[__main__][INFO]" in written
    assert written.count("step 0 of worker 1\n") == written.count("step 0 of worker 0\n")
    assert written.count("from rank zero") == 1
    assert sorted(re.findall(r"\[library.part\]\[DEBUG\]\[\d+\] detail of (\d)\n", written)) == ["0", "1"]
    assert re.search(r"\[__main__\]\[ERROR\]\[\d+\] last words\n(?:Traceback.*\n)?ValueError: why\n", written)
    assert "never written" not in written + printed
    console = [line for line in printed.splitlines() if " of worker " in line]
    assert console == ([line for line in written.splitlines() if " of worker " in line] if kind == "hydra" else [])
