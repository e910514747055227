"""Messages between real processes, and their end when a generation is over.

Payloads and sums by Gloo; by NCCL as imitated by tests/support/fake_nccl.py, a sample in the ordinary run; and by NCCL
itself where there is a device.
"""

import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import communicator_team as tasks
import pytest
import torch
from communicator_team import Failure, Team
from support.sampling import sampled
from torch import Tensor

from lightning_recycle.control.client import Interrupted
from lightning_recycle.runtime.communicator import SMALL_BYTES, CommunicationError, Communicator
from lightning_recycle.runtime.groups_and_transports import PACKED_BYTES, Transport, UnreachableError
from lightning_recycle.runtime.wire import HEADER_BYTES

ABORT_SECONDS = 1.0  # within which an abort must have unblocked everything
BLOCKED = 0.1  # seconds after which an operation that cannot complete is blocked; an abort before that works too

ENDED = (CommunicationError.__name__, Interrupted.__name__)  # how an operation of a past generation ends

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


SHARE = 0.2  # of the tests that also run over NCCL in the ordinary run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        is_sampled = random.Random(metafunc.function.__name__).random() < SHARE
        nccl = pytest.param("nccl", marks=[] if is_sampled else pytest.mark.exhaustive)
        cuda = pytest.param("cuda", marks=pytest.mark.gpu)
        metafunc.parametrize("transport", ["gloo", nccl, cuda], scope="module")


@pytest.fixture(scope="module")
def four(transport) -> Iterator[Team]:
    """Four processes for the tests that harm none of them."""
    team = Team(4, transport)
    yield team
    team.close()


@pytest.fixture
def team(transport) -> Iterator[Team]:
    """Three processes of the test's own."""
    team = Team(3, transport)
    yield team
    team.close()


def transfer(
    team: Team, values: list[Any], order: list[int] | None = None, wanted: list[int] | None = None
) -> list[Any]:
    """Sends ``values`` from rank 0 to rank 1, value i under tag i; returns them in the order ``wanted``."""
    tags = list(range(len(values)))
    order, wanted = order or tags, wanted or tags
    team.members[1].start(tasks.receive, 0, tags, wanted)
    team.members[0].start(tasks.send, [values[i] for i in order], 1, order)
    received: list[Any] = team.collect([team.members[1], team.members[0]])[0]
    return received


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(actual, expected)


def sample(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return (torch.randn(shape) * 50).to(dtype)


# ---------------------------------------------------------------------- values between stages


@pytest.mark.parametrize("size", [5, 1_000_000], ids=["inline", "large"])
def test_a_damaged_message_is_an_error_and_the_next_one_in_a_step_a_broken_link(size):
    team = Team(2, "gloo")
    try:
        for kind in (CommunicationError, UnreachableError):
            team.regroup(0, 1)
            team.members[1].start(tasks.receive, 0, [0], [0])
            team.members[0].start(tasks.send_damaged, torch.ones(size), 1, 0)
            with pytest.raises(Failure) as caught:
                team.collect([team.members[1], team.members[0]])
            assert caught.value.kind == kind.__name__
    finally:
        team.close()


@pytest.mark.parametrize("size", [5, 20_000], ids=["inline", "large"])
def test_values_of_every_dtype_arrive_as_they_were_sent(four, size):
    four.regroup(0, 1)
    values = [sample(dtype, 3, size) for dtype in DTYPES]
    for received, value in zip(transfer(four, values), values, strict=True):
        assert_same(received, value)


def test_tuples_with_gaps_empty_tensors_scalars_and_strides_arrive(four):
    four.regroup(0, 1)
    large = sample(torch.float32, 200, 300)
    values: list[Any] = [
        (sample(torch.float32, 4), None, sample(torch.int64, 2, 2)),
        (None, None),
        (),
        (sample(torch.float32, 3),),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.float64),
        torch.tensor(3.5),
        torch.tensor(True),
        large.t(),
        sample(torch.float32, 6, 8)[:, ::2],
        (large, None, torch.empty(0, 5), torch.tensor(7), large[:1].bool()),
        tuple(torch.tensor(i) for i in range(31)),
        tuple(large + i for i in range(5)),
        sample(torch.bool, 1, 2, 1, 2, 1, 2, 1, 2),
    ]
    for received, value in zip(transfer(four, values), values, strict=True):
        assert_same(received, value)


def test_values_around_the_sizes_where_a_message_changes_its_form_arrive(four):
    four.regroup(0, 1)
    for limit in (SMALL_BYTES, PACKED_BYTES):
        sizes = [limit - HEADER_BYTES + extra for extra in (-65, -64, -1, 0, 1, 64, HEADER_BYTES)]
        values = [torch.arange(size) % 251 for size in sizes]
        for received, value in zip(transfer(four, [v.byte() for v in values]), values, strict=True):
            assert_same(received, value.byte())


def test_sizes_may_change_from_step_to_step_under_the_same_tag(four):
    four.regroup(0, 1)
    sizes = [1, 30_000, 0, 7, 200_000, 200_000, 200_001, 1_100_000, 1_100_000, 1_000_000, 3, 16_000, 17_000, 0] * 2
    found = four.run(tasks.ping_pong, sizes, ranks=[0, 1])
    for me in (0, 1):
        assert found[me] == [(n, {10.0 * i + 1 - me} if n else set()) for i, n in enumerate(sizes)]


def test_posted_receives_are_matched_by_tag_in_whatever_order_they_are_sent_and_waited_for(four):
    four.regroup(0, 1)
    values = [torch.full((30_000 if i % 3 == 0 else i,), float(i)) for i in range(24)]
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    wanted = list(reversed(range(24)))
    received = transfer(four, values, order=shuffled, wanted=wanted)
    for value, i in zip(received, wanted, strict=True):
        assert_same(value, values[i])


@pytest.mark.parametrize(
    ("kind", "names"),
    [("too many tensors", "32 tensors"), ("unknown dtype", "uint16"), ("too many dimensions", "20 tensors")],
)
def test_a_value_that_cannot_be_sent_is_an_error_that_names_it(four, kind, names):
    four.regroup(0, 1)
    four.members[0].start(tasks.send_unusual, kind)
    with pytest.raises(Failure, match=names) as caught:
        four.members[0].result()
    assert caught.value.kind in ("ReCycleError", "ConfigurationError", "UnsupportedFeatureError")


# ---------------------------------------------------------------------- within a stage


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (0, 1, 2, 3)], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_reduce_gives_everybody_the_same_bits(four, ranks, dtype):
    four.regroup(*ranks)
    for size in (1, 3, 1000, 100_003):
        results = four.run(tasks.all_reduce, size, dtype, ranks=ranks)
        assert all(torch.equal(result, results[0]) for result in results)
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(r)).mul(1e3 ** (r - 1)).to(dtype) for r in ranks]
    # Each addition, in whatever order, may round the sum so far, which is no larger than that of the magnitudes.
    bound = len(ranks) * torch.finfo(dtype).eps * sum(part.double().abs() for part in parts)
    assert ((results[0].double() - sum(part.double() for part in parts)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_sum_of_negative_zeros_is_a_negative_zero(four, dtype):
    four.regroup(0, 1, 2)
    for size in (10, 400_000):
        assert all(four.run(tasks.sum_of_negative_zeros, size, dtype, ranks=[0, 1, 2]))


def test_broadcast_overwrites_with_the_tensor_of_a_rank_of_the_stage(four):
    four.regroup(0, 1, 2, 3, stages=2)
    four.members[1].start(tasks.broadcast, 3)
    four.members[3].start(tasks.broadcast, 3)
    for rank in (1, 3):
        assert set(four.members[rank].result().tolist()) == {3.0}


@pytest.mark.parametrize("size", [10, 100_000])
def test_members_of_a_tie_are_told_what_a_member_of_whatever_stage_has(four, size):
    four.generation += 1
    four.run(tasks.configure_tied, four.generation, (0, 1, 2, 3), 4, [(0, 3), (0, 1, 3), (1, 2)])
    outer, three, inner = (0, 3), (0, 1, 3), (1, 2)
    members = {0: ([three, outer], [1, 3]), 1: ([three, inner], [1, 2]), 2: ([inner], [2]), 3: ([three, outer], [1, 3])}
    for rank, (ties, sources) in members.items():
        four.members[rank].start(tasks.broadcast_tied, ties, sources, size)
    assert four.collect(four.members) == [[31.0, 23.0], [31.0, 22.0], [22.0], [31.0, 23.0]]


@pytest.mark.parametrize("size", [10, 100_000])
def test_sums_over_the_workers_of_a_tie_have_the_same_bits_on_all_of_them(four, size):
    four.generation += 1
    four.run(tasks.configure_tied, four.generation, (0, 1, 2, 3), 3, [(0, 1), (1, 2)])  # stages of 2, 1 and 1 workers
    ties = {0: [(0, 1)], 1: [(0, 1), (1, 2)], 2: [(1, 2)], 3: [(0, 1)]}
    for rank, mine in ties.items():
        four.members[rank].start(tasks.sum_within_and_over_stages, mine, size, 2)
    found = dict(zip(ties, four.collect([four.members[rank] for rank in ties]), strict=True))

    def own(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(size, generator=generator) for _ in range(2 * (1 + len(ties[rank])))]

    def check(first: dict[int, int]) -> None:
        """By rank, the number of the first of two tensors that are summed."""
        for number in range(2):
            total = sum(own(rank)[begin + number] for rank, begin in first.items())
            sums = [found[rank][begin + number] for rank, begin in first.items()]
            assert all(torch.equal(sums[0], other) for other in sums)
            torch.testing.assert_close(sums[0], total)

    check({0: 0, 3: 0})
    check({1: 0})
    check({2: 0})
    check({0: 2, 1: 2, 3: 2})
    check({1: 4, 2: 2})


# ---------------------------------------------------------------------- transfers of state, and memory


@pytest.mark.parametrize("part_bytes", [1000, 300_000, 4 << 20])
def test_a_state_arrives_whole_in_parts_of_so_many_bytes(four, part_bytes):
    four.regroup(0, 1)
    sizes = [0, 1, 100, 124, 125, 126, 1000, 1251, 9000, 20_000, 5_000_000][: 9 if part_bytes < 10_000 else None]
    (sent, _), (_, is_whole) = four.run(tasks.exchange_state, sizes, part_bytes, ranks=[0, 1])
    assert is_whole
    size = 8 * (sum(sizes) + sizes[-1] // 2)
    assert size / part_bytes <= sent <= size / part_bytes + len(sizes) + 4, "small tensors travel together"


def test_steady_values_take_no_more_memory_of_the_host(four):
    four.regroup(0, 1)
    for taken in four.run(tasks.count_allocations, [10_000] * 3, 4, ranks=[0, 1]):
        assert taken[0] > 0
        assert taken[1:] == [0, 0, 0]


# ---------------------------------------------------------------------- abort

BLOCKING: dict[str, tuple[Any, ...]] = {
    "receive": (tasks.receive, 1, [0], [0]),
    "all_reduce": (tasks.all_reduce, 100_000, torch.float32),
    "broadcast": (tasks.broadcast, 1),
    "transfer": (tasks.give, 100_000, 1),
}


def assert_ended(member: tasks.Member, timeout: float = tasks.PATIENCE) -> None:
    with pytest.raises(Failure) as caught:
        member.result(timeout)
    assert caught.value.kind in ENDED


def assert_abort_unblocks(team: Team, rank: int, generation: int) -> None:
    member = team.members[rank]
    time.sleep(BLOCKED)
    started = time.monotonic()
    member.abort(generation)
    assert_ended(member, ABORT_SECONDS + 5)
    assert time.monotonic() - started < ABORT_SECONDS


LARGE = 100_000_000  # bytes; more than the buffers of a connection hold
MANY = (30, 4_000_000)
CUT: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # what the receiver does, and the sender
    "values": ((tasks.receive_many, MANY[0]), (tasks.send_many, *MANY)),
    "transfer": ((tasks.take, LARGE), (tasks.give, LARGE)),
    "broadcast": ((tasks.broadcast, 1, LARGE // 16), (tasks.broadcast, 1, LARGE // 16)),
    "all_reduce": ((tasks.all_reduce_zeros, LARGE // 16), (tasks.all_reduce_zeros, LARGE // 16)),
}


def call(task: tuple[Any, ...], peer: int) -> tuple[Any, ...]:
    return task if task[0] in (tasks.broadcast, tasks.all_reduce_zeros) else (*task, peer)


@pytest.mark.parametrize(
    ("who", "operation", "end"),
    sampled(itertools.product(["sender", "receiver"], CUT, ["kill", "stop"]), 6, seed=2, rest=pytest.mark.long),
)
def test_a_message_of_which_one_side_ends_in_the_middle_holds_nobody_up(team, who, operation, end):
    """Gloo forgets a message that is under way when its connection ends: whoever waits for it waits for the timeout."""
    receiver, sender = team.members[:2]
    team.regroup(0, 1)
    receives, sends = CUT[operation]
    if operation == "values" and who == "sender":  # from now on their size is known, and each is one message
        receiver.start(*call(receives, 1))
        sender.start(*call(sends, 0))
        receiver.result(), sender.result()
    receiver.start(*call(receives, 1))
    time.sleep(0.1)
    receiver.stop()
    sender.start(*call(sends, 0))
    time.sleep(0.3)  # the buffers are full, with the end of some message still to be written
    if who == "sender":
        getattr(sender, end)()
        receiver.go_on()
    elif end == "kill":
        receiver.kill()
    survivor = 0 if who == "sender" else 1
    assert_abort_unblocks(team, survivor, team.generation)
    assert_goes_on(team, survivor)


def assert_goes_on(team: Team, rank: int) -> None:
    """Worker ``rank`` is not held up by what it was in the middle of."""
    started = time.monotonic()
    team.regroup(rank, 2)
    assert torch.equal(*team.run(tasks.all_reduce, 10, torch.float32, ranks=[rank, 2]))
    assert time.monotonic() - started < ABORT_SECONDS


def test_a_message_may_be_waited_for_longer_than_connecting_may_take(four):
    four.run(tasks.bound_connecting, 0.5)
    four.regroup(0, 1)
    four.members[0].start(tasks.receive, 1, [0], [0])
    time.sleep(1.0)
    four.members[1].start(tasks.send, [torch.ones(3)], 0, [0])
    assert_same(four.collect(four.members[:2])[0], [torch.ones(3)])
    four.run(tasks.bound_connecting, 5.0)


def test_abort_unblocks_connecting_to_a_peer_that_is_missing(four):
    four.generation += 1
    four.members[0].start(tasks.configure, four.generation, (0, 1), 1)
    assert_abort_unblocks(four, 0, four.generation)
    four.regroup(0, 1)
    assert_same(transfer(four, [torch.ones(3)]), [torch.ones(3)])


def test_an_abort_before_connecting_prevents_it(four):
    four.generation += 1
    four.members[0].abort(four.generation)
    four.run(tasks.count_descriptors, ranks=[0])  # sent after the abort, so it is over when this is done
    four.members[0].start(tasks.configure, four.generation, (0, 1), 1)
    assert_ended(four.members[0])


def test_every_operation_after_an_abort_fails_at_once(four):
    four.regroup(0, 1)
    four.members[0].abort(four.generation)
    four.run(tasks.count_descriptors, ranks=[0])
    for task, *args in BLOCKING.values():
        four.members[0].start(task, *args)
        assert_ended(four.members[0], ABORT_SECONDS)


class Ends:
    """A collective that ends between a look at it and the question whether it has ended."""

    def __init__(self, error: str = "") -> None:
        self.error, self.looks = error, 0

    def wait(self, timeout: timedelta) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def communicator(tmp_path) -> Communicator:
    communicator = Communicator(0, tasks.HOST, torch.device("cpu"), tasks.Meeting(str(tmp_path)), tasks.KEY)
    communicator.generation = 0
    return communicator


def test_a_collective_that_ends_right_after_a_look_at_it_has_not_failed(communicator):
    communicator._await_collective(None, Ends())
    with pytest.raises(CommunicationError, match="Connection closed"):
        communicator._await_collective(None, Ends("Connection closed"))


class GoesOn:
    """A collective that does not notice that its sockets are cut; ``abort`` is called in the first look at it."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort

    def wait(self, timeout: timedelta) -> None:
        self._abort()
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("begun", [False, True], ids=["before the wait", "in the wait"])
@pytest.mark.parametrize("in_hook", [False, True])
def test_the_group_of_a_collective_that_goes_on_is_never_destroyed(communicator, begun, in_hook):
    """Its destructor would wait for the thread that is inside, for ever."""

    class Gloos:
        pass

    group = Gloos()
    alive = weakref.ref(group)
    if not begun:
        communicator.abort(0)
    with pytest.raises(CommunicationError, match="aborted"):
        communicator._await_members(group, GoesOn(lambda: communicator.abort(0)), in_hook)
    del group
    gc.collect()
    assert alive() is not None


class Slow(Transport):
    """Takes some looks to connect."""

    def __init__(self, connect_seconds: float) -> None:
        self.connect_seconds = connect_seconds
        self.may_connect = threading.Event()

    def connect(self, *given: Any) -> None:
        self.may_connect.wait(tasks.PATIENCE)
        super().connect(*given)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_a_transport_that_takes_long_to_connect_is_progress_for_as_long_as_it_may(tmp_path, seconds):
    transport, told = Slow(seconds), []
    communicator = Communicator(
        0, tasks.HOST, torch.device("cpu"), tasks.Meeting(str(tmp_path)), tasks.KEY, transport=transport
    )

    def progressed() -> None:
        told.append(True)
        if len(told) == 3:
            transport.may_connect.set()

    communicator.on_progress = progressed
    if not seconds:
        threading.Timer(0.3, transport.may_connect.set).start()
    communicator.configure(0, [0], [0])
    assert len(told) >= 3 if seconds else not told
    communicator.close()


def test_a_late_abort_of_an_older_generation_does_not_touch_the_current_one(four):
    four.regroup(0, 1)
    four.regroup(0, 1)
    four.members[0].abort(four.generation - 1)
    four.members[1].abort(four.generation - 1)
    assert_same(transfer(four, [torch.ones(30_000)]), [torch.ones(30_000)])


def test_abort_leaves_sockets_alone_that_are_not_the_communicators(four):
    four.generation += 1
    assert four.run(tasks.foreign_socket_survives_abort, four.generation, ranks=[0]) == [b"xx"]


def test_a_killed_peer_is_noticed_without_an_abort(team):
    team.regroup(0, 1)
    team.members[0].start(tasks.receive, 1, [0], [0])
    team.members[1].kill()
    assert_ended(team.members[0], 5)


def test_connecting_takes_milliseconds_in_every_generation(four, transport):
    limit = 1.0 if transport == "gloo" else 10.0  # for the imitation, which polls
    seconds = []
    for _ in range(30):
        started = time.monotonic()
        four.regroup(0, 1, 2)
        seconds.append(time.monotonic() - started)
    assert max(seconds) < limit, [round(s, 2) for s in seconds]


def test_generations_leave_no_descriptors_behind(four):
    def use() -> None:
        four.regroup(0, 1, stages=1)
        four.run(tasks.all_reduce, 10, torch.float32, ranks=[0, 1])
        transfer(four, [torch.ones(5), torch.ones(30_000)])

    for _ in range(3):
        use()
    before = four.run(tasks.count_descriptors, ranks=[0, 1])
    for number in range(20):
        use()
        if number % 2:
            four.members[0].start(*BLOCKING["receive"])
            assert_abort_unblocks(four, 0, four.generation)
        four.regroup(0, 1, check_links=number % 3 == 0)
    use()
    assert four.run(tasks.count_descriptors, ranks=[0, 1]) == before


# ---------------------------------------------------------------------- workers that do not answer


@pytest.fixture
def with_2_hidden(four) -> Iterator[Team]:
    four.run(tasks.hide, True, ranks=[2])
    yield four
    four.run(tasks.hide, False, ranks=[2])


def test_who_dials_says_whom_it_cannot_reach(with_2_hidden):
    with_2_hidden.generation += 1
    for rank in (1, 2):
        with_2_hidden.members[rank].start(tasks.configure, with_2_hidden.generation, (1, 2), 1, True)
    for rank, kind in ((1, UnreachableError), (2, CommunicationError)):
        with pytest.raises(Failure) as caught:
            with_2_hidden.members[rank].result(timeout=10)
        assert caught.value.kind == kind.__name__
        assert f"rank {3 - rank}" in str(caught.value)
    with_2_hidden.regroup(0, 1, 3)
    assert_same(transfer(with_2_hidden, [torch.ones(3)]), [torch.ones(3)])
