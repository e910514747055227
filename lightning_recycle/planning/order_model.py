"""A mixed-integer model of orders: who runs before whom, with times as continuous variables and no slots.

The mathematics. A plan is known, and the model asks for one with a period of at most T, below that plan's. Only the
operations of a *free* set may change their place; the others keep their order among themselves, so that T gives most
of them narrow windows, and most pairs their order. With everything free it is the whole problem.

Sets
    operations i with duration p_i (on worker w: p_iw), stage s(i) and micro-batch; workers; *movers*: micro-batches at
    a stage whose worker is to be chosen among the live peers H; for each worker w the pairs {i, j} of operations that
    may both run there and of which one is free.
Parameters
    first_i, last_i: the window of i's start, by propagating T along dependencies and kept orders from both ends, and
    along the pairs that this decides.
Variables
    x_i in first_i .. last_i: start
    y_ij (binary, for pairs that the windows leave open): i before j
    z_mw (binary, for movers m and w in H): m runs on w
    begin_s (staggered): when stage s begins
    b_ji: in 0..1, whether j comes before the forward i on i's worker, for the memory, where that depends on z
Constraints
    routing       sum over w of z_mw = 1
    dependencies  x_j >= x_i + p_i + communication, along the way of a micro-batch, and along kept orders
    no overlap    x_j >= x_i + p_iw - (last_i + p_iw - first_j) (3 - y_ij - z_iw - z_jw)     and the same with i, j
                  exchanged and 1 - y_ij; z = 1 for what is not moved
    memory        before a forward i on w: forwards before it - releases before it <= limit - 1, where
                  "before" is a constant, y, or b with b >= y + z - 1 (forwards), b <= y, b <= z (releases)
    period        x_i + p_i + REDUCE + STEP <= T, or with the staggered optimizer <= begin_s + T and begin_s <= x_F
Objective
    none: the search asks again with a smaller T.

Memory is a sum of what operations take and give, so sizes in bytes would only change the coefficients.

Contract: as :mod:`milp`; an infeasible model with everything free proves that no plan has the period T.

Must not know: which operations are worth setting free (:mod:`order_search`).

Source: disjunctive model of job-shop scheduling (Manne, Operations Research 8, 1960), windows as in constraint
propagation (Carlier and Pinson, 1989).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import mip

from lightning_recycle.planning.ops import OpKind
from lightning_recycle.planning.schedule import Schedule
from lightning_recycle.planning.slots import Placement, families, placements
from lightning_recycle.planning.timing import BACKWARD, FORWARD, WEIGHT

__all__ = ["ContradictionError", "OrderModel", "Orders"]


class ContradictionError(Exception):
    """The windows already exclude the period."""


class Orders:
    """A plan as operations by index, in the order of their starts, and what the model needs of them.

    Micro-batches that take the same route are renamed so that all go first in, first out: that keeps fewer orders
    open and loses nothing (:mod:`slots`).
    """

    def __init__(self, schedule: Schedule) -> None:
        problem, grid = schedule.problem, schedule.grid
        self.schedule = schedule
        self.problem = problem
        self.fused = not problem.technique.decoupled
        self.stages = grid.stages
        self.release = BACKWARD if self.fused else WEIGHT
        self.communication = problem.costs.communication
        hosts_of = {number: hosts for hosts, members in families(schedule).items() for number in members}
        family_of = {n: f for f, members in enumerate(families(schedule).values()) for n in members}
        rows = _first_in_first_out(placements(schedule), family_of)
        rows.sort(key=lambda row: (row[4], row[0] * grid.stages + (row[1] if row[0] == FORWARD else -row[1])))
        self.keys = [row[:3] for row in rows]
        self.index = {key: i for i, key in enumerate(self.keys)}
        self.ranks = [row[3] for row in rows]
        self.starts = [row[4] for row in rows]
        self.hosts = [hosts_of[number][stage] for _, stage, number in self.keys]
        self.family = [family_of[number] for _, _, number in self.keys]
        self.route = {
            number: tuple(self.ranks[self.index[FORWARD, s, number]] for s in range(grid.stages)) for number in hosts_of
        }
        kinds = {
            FORWARD: OpKind.FORWARD,
            BACKWARD: OpKind.BACKWARD if self.fused else OpKind.BACKWARD_INPUT,
            WEIGHT: OpKind.BACKWARD_WEIGHT,
        }
        self.durations = {
            (kind, grid.rank(worker)): problem.duration(kinds[kind], worker)
            for kind in kinds
            for worker in problem.live_workers()
        }
        self.closing = [
            problem.costs.of(OpKind.REDUCE, s)
            + max(problem.duration(OpKind.STEP, worker) for worker in problem.live_workers(s))
            for s in range(grid.stages)
        ]
        self.sources = [self._source(key) for key in self.keys]

    def __len__(self) -> int:
        return len(self.keys)

    def duration(self, op: int, rank: int) -> float:
        """Of an operation on a worker."""
        return self.durations[self.keys[op][0], rank]

    def _source(self, key: tuple[int, int, int]) -> int | None:
        """Index of the operation whose result this one needs."""
        kind, stage, number = key
        if kind == FORWARD:
            return self.index[FORWARD, stage - 1, number] if stage else None
        if kind == WEIGHT:
            return self.index[BACKWARD, stage, number]
        last = stage == self.stages - 1
        return self.index[FORWARD, stage, number] if last else self.index[BACKWARD, stage + 1, number]


def _first_in_first_out(rows: Sequence[Placement], family: dict[int, int]) -> list[Placement]:
    """The same times on the same workers, with interchangeable micro-batches of one route in order."""
    routes: dict[int, list[tuple[int, int]]] = {}
    for kind, stage, number, rank, _ in rows:
        if kind == FORWARD:
            routes.setdefault(number, []).append((stage, rank))
    groups: dict[tuple[object, ...], list[int]] = {}
    group_of = {}
    for number in sorted(routes):
        key = (family[number], *sorted(routes[number]))
        groups.setdefault(key, []).append(number)
        group_of[number] = key
    times: dict[tuple[object, ...], list[tuple[float, int]]] = {}
    for kind, stage, number, rank, start in rows:
        times.setdefault((kind, stage, group_of[number]), []).append((start, rank))
    return [
        (kind, stage, number, rank, start)  # type: ignore[misc]
        for (kind, stage, key), placed in times.items()
        for number, (start, rank) in zip(groups[key], sorted(placed), strict=True)  # type: ignore[index]
    ]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two operations that may both run on worker ``rank`` and whose order is open."""

    i: int
    j: int
    rank: int


class OrderModel:
    """The model for one free set and one period.

    Args:
        orders: the plan.
        free: indices of the operations that may change their place.
        movers: (micro-batch, stage) whose worker may change; all their operations are free.
        period: T.

    Raises:
        ContradictionError: when the windows show that there is no such plan.
    """

    def __init__(
        self, orders: Orders, free: Collection[int], movers: Collection[tuple[int, int]], period: float
    ) -> None:
        self.orders, self.period = orders, period
        self.free = set(free)
        self.movers = set(movers)
        self.options = [
            orders.hosts[op] if (key[2], key[1]) in self.movers else (orders.ranks[op],)
            for op, key in enumerate(orders.keys)
        ]
        self.shortest = [min(orders.duration(op, rank) for rank in ranks) for op, ranks in enumerate(self.options)]
        self.before: list[list[tuple[int, float]]] = [[] for _ in orders.keys]
        """By operation: what must have started how long before it."""
        self.decided: set[tuple[int, int]] = set()
        self._dependencies()
        self.first = [0.0] * len(orders)
        self.last = [0.0] * len(orders)
        self.pairs = list(self._pairs())
        while True:
            self._windows()
            if not self._decide():
                break

    def _arc(self, i: int, j: int, rank: int | None = None) -> None:
        distance = self.shortest[i] if rank is None else self.orders.duration(i, rank)
        if rank is None and self.orders.keys[i][1] != self.orders.keys[j][1]:
            distance += self.orders.communication
        self.before[j].append((i, distance))

    def _dependencies(self) -> None:
        orders = self.orders
        for op, source in enumerate(orders.sources):
            if source is not None:
                self._arc(source, op)
        for op, (kind, stage, number) in enumerate(orders.keys):
            if kind != FORWARD:  # also where B waits for the next stage: windows of movers need it
                before = FORWARD if kind == BACKWARD else BACKWARD
                self.decided.add((orders.index[before, stage, number], op))
                if kind == WEIGHT:
                    self.decided.add((orders.index[FORWARD, stage, number], op))

    def _pairs(self) -> Iterator[_Pair]:
        """Pairs without a known order; the known ones become arcs."""
        by_rank: dict[int, list[int]] = {}
        for op, ranks in enumerate(self.options):
            for rank in ranks:
                by_rank.setdefault(rank, []).append(op)
        for rank, ops in by_rank.items():
            kept = [op for op in ops if op not in self.free]
            for i, j in pairwise(kept):
                self._arc(i, j, rank)
            self.decided.update(combinations(kept, 2))
            for i, j in combinations(ops, 2):
                if (i, j) in self.decided or (j, i) in self.decided:
                    continue
                if i in self.free or j in self.free:
                    if self._alike(i, j):
                        # Of micro-batches on the same route, the smaller number goes first.
                        self.decided.add((i, j))
                        self._arc(i, j, rank)
                    else:
                        yield _Pair(i, j, rank)

    def _alike(self, i: int, j: int) -> bool:
        orders = self.orders
        (kind, _, one), (other_kind, _, other) = orders.keys[i], orders.keys[j]
        fixed = not any((number, s) in self.movers for number in (one, other) for s in range(orders.stages))
        return (
            fixed
            and kind == other_kind
            and orders.family[i] == orders.family[j]
            and orders.route[one] == orders.route[other]
        )

    def _windows(self) -> None:
        """Propagate from both ends. Operations are in the order of the known plan, which all arcs but the new ones
        follow; those are caught up in further rounds."""
        orders, period = self.orders, self.period
        staggered = orders.problem.technique.staggered
        keys, closing, shortest = orders.keys, orders.closing, self.shortest
        infinity = float("inf")
        after: list[list[tuple[int, float]]] = [[] for _ in keys]
        for j, arcs in enumerate(self.before):
            for i, distance in arcs:
                after[i].append((j, distance))
        begin_first = [0.0] * orders.stages
        begin_last = [infinity if staggered else 0.0] * orders.stages
        begin_last[0] = 0.0
        first = self.first
        last = [infinity] * len(keys)
        for _ in range(4):
            for op, (kind, stage, _number) in enumerate(keys):
                early = max(first[op], begin_first[stage]) if kind == FORWARD else first[op]
                for i, distance in self.before[op]:
                    early = max(early, first[i] + distance)
                first[op] = early
            for op in reversed(range(len(keys))):
                kind, stage, _number = keys[op]
                late = min(last[op], begin_last[stage] + period - closing[stage] - shortest[op])
                for j, distance in after[op]:
                    late = min(late, last[j] - distance)
                last[op] = late
            if not staggered:
                break
            for op, (kind, stage, _number) in enumerate(keys):
                if kind == FORWARD:
                    begin_last[stage] = min(begin_last[stage], last[op])
                elif kind == orders.release:
                    begin_first[stage] = max(begin_first[stage], first[op] + shortest[op] + closing[stage] - period)
        self.last = last
        self.begin_first = begin_first
        tolerance = 1e-7 * max(1.0, period)
        if any(late < early - tolerance for early, late in zip(first, last, strict=True)):
            raise ContradictionError

    def _decide(self) -> bool:
        """Settle the pairs whose windows leave one order only; whether there were any."""
        orders, open_pairs = self.orders, []
        for pair in self.pairs:
            i, j = pair.i, pair.j
            settled = len(self.options[i]) == len(self.options[j]) == 1
            i_first = self.first[i] + orders.duration(i, pair.rank) <= self.last[j] + 1e-7
            j_first = self.first[j] + orders.duration(j, pair.rank) <= self.last[i] + 1e-7
            if i_first and j_first:
                open_pairs.append(pair)
            elif not i_first and not j_first:
                if settled:
                    raise ContradictionError
                open_pairs.append(pair)  # they cannot both run there
            else:
                one, other = (i, j) if i_first else (j, i)
                if settled:
                    self.decided.add((one, other))
                    self._arc(one, other, pair.rank)
                else:
                    open_pairs.append(pair)
        changed = len(open_pairs) < len(self.pairs)
        self.pairs = open_pairs
        return changed

    def write(self, model: Any) -> None:
        """Add variables and constraints to an empty model of python-mip."""
        orders, period = self.orders, self.period
        staggered = orders.problem.technique.staggered
        late = [max(a, b) for a, b in zip(self.first, self.last, strict=True)]
        self.x = [model.add_var(lb=a, ub=b) for a, b in zip(self.first, late, strict=True)]
        self.z: dict[tuple[int, int, int], Any] = {}
        for number, stage in sorted(self.movers):
            hosts = orders.hosts[orders.index[FORWARD, stage, number]]
            for rank in hosts:
                self.z[number, stage, rank] = model.add_var(var_type=mip.BINARY)
            model.add_constr(mip.xsum(self.z[number, stage, rank] for rank in hosts) == 1)
        begin: list[Any] = [0.0] * orders.stages
        if staggered:
            begin[1:] = [model.add_var(lb=self.begin_first[s]) for s in range(1, orders.stages)]
        for j, arcs in enumerate(self.before):
            for i, distance in arcs:
                longer = self._longer(i)
                if longer or self.first[j] < late[i] + distance:  # else implied by the windows
                    model.add_constr(self.x[j] >= self.x[i] + distance + longer)
        y: dict[tuple[int, int], Any] = {}
        for pair in self.pairs:
            i, j = pair.i, pair.j
            if (i, j) not in y:
                y[i, j] = model.add_var(var_type=mip.BINARY)
            absent = self._absent(i, pair.rank) + self._absent(j, pair.rank)
            for one, other, after in ((i, j, 1 - y[i, j]), (j, i, y[i, j] * 1)):
                lasts = orders.duration(one, pair.rank)
                most = max(0.0, late[one] + lasts - self.first[other])
                model.add_constr(self.x[other] >= self.x[one] + lasts - most * (after + absent))
        self.y = y
        for op, (kind, stage, _number) in enumerate(orders.keys):
            if kind == FORWARD and stage and staggered:
                model.add_constr(begin[stage] <= self.x[op])
            if kind == orders.release and (stage and staggered):
                end = self.x[op] + self.shortest[op] + self._longer(op) + orders.closing[stage]
                model.add_constr(end <= begin[stage] + period)
            elif kind == orders.release and len(self.options[op]) > 1:
                model.add_constr(self.x[op] + self.shortest[op] + self._longer(op) + orders.closing[stage] <= period)
        self._memory(model)

    def _longer(self, op: int) -> Any:
        """By how much a moved operation takes longer on its worker than on the fastest one."""
        _, stage, number = self.orders.keys[op]
        ranks = self.options[op]
        extra = {rank: self.orders.duration(op, rank) - self.shortest[op] for rank in ranks}
        if len(ranks) == 1 or not any(extra.values()):
            return 0.0
        return mip.xsum(time * self.z[number, stage, rank] for rank, time in extra.items() if time)

    def _absent(self, op: int, rank: int) -> Any:
        """1 - z, or 0 for what is not moved."""
        if len(self.options[op]) == 1:
            return 0
        _, stage, number = self.orders.keys[op]
        return 1 - self.z[number, stage, rank]

    def _memory(self, model: Any) -> None:
        orders = self.orders
        limits = orders.problem.counted().in_flight_limit
        if limits is None:
            return
        by_rank: dict[int, tuple[list[int], list[int]]] = {}
        for op, ranks in enumerate(self.options):
            kind = orders.keys[op][0]
            for rank in ranks:
                forwards, releases = by_rank.setdefault(rank, ([], []))
                if kind == FORWARD:
                    forwards.append(op)
                elif kind == orders.release:
                    releases.append(op)
        for rank, (forwards, releases) in by_rank.items():
            limit = limits[rank % orders.stages]
            if len(forwards) <= limit:
                continue
            for i in forwards:
                held: list[Any] = [self._counted(model, j, i, rank, least=True) for j in forwards if j != i]
                held += [-1 * self._counted(model, j, i, rank, least=False) for j in releases]
                total = mip.xsum(held)
                spare = len(forwards) * self._absent(i, rank)
                if isinstance(spare, int) and not total.expr:
                    if total.const > limit - 1 + 1e-9:
                        raise ContradictionError
                else:
                    model.add_constr(total <= limit - 1 + spare)

    def _counted(self, model: Any, j: int, i: int, rank: int, *, least: bool) -> Any:
        """Whether j runs before i on ``rank``: at least that (a forward) or at most that (a release)."""
        orders = self.orders
        if self.orders.keys[j][2] == orders.keys[i][2]:
            return 0  # its own release
        precedes: Any
        if (i, j) in self.y:
            precedes = 1 - self.y[i, j]
        elif (j, i) in self.y:
            precedes = self.y[j, i] * 1
        elif (j, i) in self.decided:
            precedes = 1
        elif (i, j) in self.decided:
            precedes = 0
        else:  # kept orders are transitive
            precedes = int(j < i)
        if len(self.options[j]) == 1:
            return precedes
        if isinstance(precedes, int) and precedes == 0:
            return 0
        present = 1 - self._absent(j, rank)
        counted = model.add_var(lb=0.0, ub=1.0)
        if least:
            model.add_constr(counted >= precedes + present - 1)
        else:
            model.add_constr(counted <= precedes)
            model.add_constr(counted <= present)
        return counted

    def placements(self) -> list[Placement]:
        """The solution."""
        orders, found = self.orders, []
        for op, (kind, stage, number) in enumerate(orders.keys):
            ranks = self.options[op]
            rank = ranks[0] if len(ranks) == 1 else max(ranks, key=lambda r: self.z[number, stage, r].x)
            found.append((kind, stage, number, rank, float(self.x[op].x)))
        return found
