import pytest
from checkpoint_kills import TOLERANCE, Side, kill_writers, measure
from support.sampling import sampled


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("sharded", sampled([False, True], 1))
def test_a_run_whose_processes_are_all_killed_while_it_writes_resumes_from_a_whole_checkpoint(
    sharded, background, tmp_path, tmp_path_factory
):
    scratch = tmp_path_factory.mktemp("scratch")
    side = Side(sharded, two_file_systems=False, background=background)
    result = measure(side, kills=2, seed=7, directory=tmp_path, scratch=scratch)
    assert not result.errors, "\n".join(result.errors)
    assert result.found["newest"] + result.found["second newest"] == 2
    assert result.difference < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("sharded", sampled([False, True], 1))
def test_training_is_exact_and_checkpoints_are_whole_when_their_writers_are_killed(sharded, tmp_path):
    killed, difference, wrong = kill_writers(4, sharded, seed=3, directory=tmp_path)
    assert killed >= 1
    assert difference < TOLERANCE
    assert not wrong
