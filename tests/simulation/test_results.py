"""Every second of every GPU, exactly once, whatever fails under whatever policy."""

import pytest
from hypothesis import strategies as st
from random_outages import DURATION, GRIDS, outages
from random_outages import small_model as model
from support.drawn_examples import check_examples, examples

from lightning_recycle import simulation

POLICIES = [
    simulation.Recycle(effort=0),
    simulation.Recycle(effort=0, schedule="1f1b", checkpoint="memory"),
    simulation.Recycle(effort=0, normalization=False, fault_free="1f1b", checkpoint="memory", checkpoint_every="young"),
    simulation.Recycle(adaptive=False, split_backward=False, staggered=False),
    simulation.Elastic(effort=0),
    simulation.Auto(effort=0),
    simulation.Auto(effort=0, schedule="1f1b", checkpoint="memory"),
    simulation.Merge(),
    simulation.Merge(schedule="planned", effort=0, checkpoint="sharded", checkpoint_every=200.0),
    simulation.Spares(0),
    simulation.Spares(2, schedule="planned", effort=0),
    simulation.DropReplica(checkpoint="memory"),
    simulation.DropReplica(schedule="planned", effort=0),
    simulation.Restart(checkpoint="synchronous", checkpoint_every=200.0, restart=50.0),
    simulation.Restart(checkpoint_every="daly", restart=50.0, storage=1e6),
    simulation.Restart(checkpoint_every=20.0, restart=50.0, schedule="planned", effort=0, storage=1e6),
    simulation.Bamboo(checkpoint_every=300.0),
    simulation.Bamboo(checkpoint_every=300.0, schedule="planned", effort=0),
    simulation.Oobleck(),
    simulation.Oobleck(schedule="planned", effort=0),
    simulation.Varuna(checkpoint="synchronous", checkpoint_every=200.0),
    simulation.Varuna(schedule="planned", effort=0),
    simulation.FaultFree(),
    simulation.FaultFree("planned"),
]


@examples(40, 2000)
def test_the_parts_add_up_and_agree_with_the_failures(examples):
    check_examples(check_failures, examples)


def check_failures(data) -> None:
    policy = data.draw(st.sampled_from(POLICIES))
    pipelines, stages = data.draw(st.sampled_from(GRIDS))
    chosen = model(pipelines, stages)
    extra = 2 if isinstance(policy, simulation.Spares) else data.draw(st.sampled_from([0, 3]))
    gpus_per_node = data.draw(st.sampled_from([size for size in (1, 2) if chosen.gpus % size == 0]))
    cluster = simulation.Cluster.of(chosen, gpus_per_node=gpus_per_node, extra_nodes=extra, price=3.6)
    broken = data.draw(outages(cluster.nodes))
    result = simulation.simulate(chosen, cluster, policy, simulation.Scripted(broken), DURATION)
    account = result.accounting
    check_the_sums(result, chosen, cluster)

    # Failed time is known from the outages alone.
    down = 0 if policy.ignores_failures else sum(failed_ticks(node, broken) for node in range(cluster.nodes))
    assert account.failed == down * gpus_per_node
    assert result.cost == pytest.approx(1e-3 * (cluster.gpus * DURATION - account.failed / 1e9))


def check_the_sums(
    result: simulation.SimulationResult, chosen: simulation.TrainingModel, cluster: simulation.Cluster
) -> None:
    account = result.accounting
    assert account.total == cluster.gpus * round(DURATION * 1e9)
    assert all(getattr(account, cause.value) >= 0 for cause in simulation.Cause)
    assert sum(account.fractions().values()) == pytest.approx(1.0)

    # The timeline has no gap and no overlap.
    ends = [interval.end for interval in result.intervals]
    assert [interval.begin for interval in result.intervals] == [0.0, *ends[:-1]]
    assert ends[-1] == DURATION

    # Useful time is what the samples need, and samples are what the timeline says.
    per_sample = chosen.useful_gpu_seconds / chosen.global_batch
    assert account.seconds(simulation.Cause.USEFUL) == pytest.approx(result.samples * per_sample, rel=1e-6, abs=1e-5)
    trained = sum((i.end - i.begin) * i.throughput for i in result.intervals if i.state is simulation.State.TRAINING)
    assert result.samples == pytest.approx(trained, rel=1e-6, abs=1e-6)
    assert sum(result.losses().values()) == pytest.approx(
        result.fault_free_throughput * cluster.gpus / chosen.gpus - result.throughput
    )


def failed_ticks(node: int, broken: list[simulation.Outage]) -> int:
    """Nanoseconds for which a node is down: the union of its outages."""
    end = round(DURATION * 1e9)
    spans = sorted(
        (round(outage.begin * 1e9), end if outage.end is None else min(end, round(outage.end * 1e9)))
        for outage in broken
        if node in outage.nodes and outage.begin < DURATION
    )
    total, reached = 0, 0
    for begin, finish in spans:
        total += max(0, finish - max(begin, reached))
        reached = max(reached, finish)
    return total


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy):
    chosen = model(3, 4)
    cluster = simulation.Cluster.of(chosen, extra_nodes=getattr(policy, "spares", 0))
    runs = [
        simulation.simulate(chosen, cluster, policy, simulation.Poisson(300.0, repair=200.0), DURATION, seed)
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) is policy.ignores_failures


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_without_failures_nothing_is_lost_or_failed(policy):
    chosen = model(3, 4)
    cluster = simulation.Cluster.of(chosen, extra_nodes=getattr(policy, "spares", 0))
    result = simulation.simulate(chosen, cluster, policy, simulation.Scripted(), DURATION)
    account = result.accounting
    assert account.failed == 0
    assert all(interval.state in (simulation.State.TRAINING, simulation.State.PAUSED) for interval in result.intervals)
    if not isinstance(policy, (simulation.Bamboo, simulation.Varuna)):  # these compute twice, by design
        assert account.redone == 0
    stalls = {interval.label for interval in result.intervals if interval.state is simulation.State.PAUSED}
    assert stalls <= {"checkpoint"}
    if getattr(policy, "checkpoint", "memory") == "memory":
        assert not stalls
