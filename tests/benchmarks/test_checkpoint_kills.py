from pathlib import Path

import pytest
from checkpoint_kills import TOLERANCE, Side, measure
from support.sampling import sampled


@pytest.mark.long
@pytest.mark.parametrize("sharded", sampled([False, True], 1))
def test_a_run_whose_processes_are_all_killed_while_it_writes_resumes_from_a_whole_checkpoint(
    sharded: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    result = measure(Side(sharded, two_file_systems=False), kills=2, seed=7, directory=tmp_path, scratch=scratch)
    assert not result.errors, "\n".join(result.errors)
    assert result.found["newest"] + result.found["second newest"] == 2
    assert result.difference < TOLERANCE
