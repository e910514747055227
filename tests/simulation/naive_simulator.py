"""A second simulator, for the tests: small, naive, one step after the other, in seconds as floats.

Written from docs/simulation.md and the policies' docstrings. It shares with the simulator what is planned elsewhere
(the duration of a step, where failures are normalized to, Varuna's shapes, Oobleck's cuts) and none
of its engine, ledger, placements, checkpoints and pauses.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from lightning_recycle.planning import Problem, normalized_failures, roles
from lightning_recycle.planning.layouts import Judgement
from lightning_recycle.simulation.policy import Context, checkpoint_costs, distribution, pipeline_step, planned_step
from lightning_recycle.simulation.published_policies import cut, morph, pipelines_step
from lightning_recycle.simulation.training_model import Cluster, one_f_one_b_seconds

AGREEMENT = 0.01
NEVER = float("inf")


@dataclass
class Outcome:
    """Samples kept, seconds paused and seconds without training, of the whole run."""

    samples: float
    paused: float
    stopped: float


@dataclass
class Way:
    """How training runs: who, and the seconds, extra seconds of the first step, overlap and samples of a step."""

    layout: object
    seconds: float
    samples: float
    fill: float = 0.0
    lead: float = 0.0


@dataclass
class Answer:
    """What follows from a change; ``way`` None: nothing runs."""

    way: Way | None
    pauses: list[float]
    back: str  # to which state: "now", "step", "checkpoint"
    saved: bool = False
    alarm: float | None = None
    layout: object = None


@dataclass
class Naive:
    """One run of a policy on nodes of one worker; subclasses decide. The policy's ``agreement`` must be AGREEMENT."""

    model: object
    policy: object
    outages: list
    duration: float
    nodes: int
    live: set = field(default_factory=set)

    def down_at(self, time: float) -> set:
        found: set = set()
        for outage in self.outages:
            end = NEVER if outage.end is None else outage.end
            if outage.begin <= time < end:
                found.update(outage.nodes)
        return found

    def play(self) -> Outcome:
        moments = {outage.begin for outage in self.outages} | {o.end for o in self.outages if o.end is not None}
        changes, down = [], self.down_at(0.0)
        for time in sorted(moment for moment in moments if 0 < moment < self.duration):
            if self.down_at(time) != down:
                down = self.down_at(time)
                changes.append((time, down))
        everybody, down = set(range(self.nodes)), self.down_at(0.0)
        self.live = everybody - down
        policy = self.policy
        self.costs = checkpoint_costs(policy.checkpoint, self.model, policy.storage)
        (stall, writing, _), every = self.costs, policy.checkpoint_every

        way = self.way = self.start()
        now, begun, kept = 0.0, 0.0, 0.0
        pauses: list[float] = []  # ends
        paused = stopped = 0.0
        checkpoints = [(0.0, 0.0, 0.0)]  # taken, readable, samples then
        saving = None  # at the end of the pauses: the delay until the state of that moment can be read
        waiting, alarm = None, NEVER  # (time, answer, whether it answers an alarm)
        filling = False  # whether the last pause is a fill

        def newest() -> int:
            return max(n for n, (_, readable, _) in enumerate(checkpoints) if readable <= now + 1e-9)

        def switch(answer: Answer) -> None:
            nonlocal way, kept, pauses, saving, begun, filling
            fresh = answer.back != "now"
            if answer.back == "checkpoint":
                del checkpoints[newest() + 1 :]
                kept = checkpoints[-1][2]
            if fresh:
                pauses, saving, filling = [], (0.0 if answer.back == "checkpoint" else None), False
            elif answer.pauses and filling:
                pauses, filling = pauses[:-1], False
            was_running, old = way is not None and not pauses, way
            way, self.layout = answer.way, answer.way.layout if answer.way else answer.layout
            end = pauses[-1] if pauses else now
            for seconds in answer.pauses:
                if seconds > 0:
                    end += seconds
                    pauses.append(end)
            if answer.saved:
                saving = 0.0
            if way and way.fill and (fresh or answer.pauses) and now > 0:
                pauses.append(end + way.fill)
                filling = True
            if not pauses and (fresh or not was_running):
                go_on()
            elif not pauses and way and old:  # the step in progress goes on at another speed
                begun = now - (now - begun) * way.seconds / old.seconds

        def go_on() -> None:
            nonlocal begun, saving, filling
            begun, filling = now, False
            if saving is not None:
                checkpoints.append((now, now + saving, kept))
                saving = None

        self.layout = way.layout if way else ()
        while now < self.duration:
            change = changes[0][0] if changes else NEVER
            until = min(change, alarm, self.duration)
            if pauses:
                if pauses[0] <= until:
                    paused += pauses[0] - now
                    now = pauses.pop(0)
                    if not pauses:
                        go_on()
                    continue
                paused += until - now
            elif way is None:
                stopped += until - now
            else:
                end = begun + way.seconds
                if end <= until:
                    now = begun = end
                    kept += way.samples
                    taken, readable, _ = checkpoints[-1]
                    if now >= max(taken + every, readable) - 1e-9:
                        if stall:
                            pauses, saving, filling = [now + stall], writing, False
                        else:
                            checkpoints.append((now, now + writing, kept))
                    if waiting and now >= waiting[0] - 1e-9:
                        answer, waiting = waiting[1], None
                        switch(answer)
                    continue
                if until == self.duration:
                    kept += way.samples * (self.duration - begun) / way.seconds
            now, before = until, self.live
            if now == self.duration:
                break
            woken = now != change
            if woken:
                alarm = NEVER
            else:
                self.live = everybody - changes.pop(0)[1]
            self.gone = before - self.live
            if waiting:  # both are answered at once
                woken = woken or waiting[2]
                waiting = None
            else:
                self.known = before
            answer = self.answer(way, woken)
            if answer is None:
                continue
            alarm = NEVER if answer.alarm is None else now + answer.alarm
            if answer.back == "now" and answer.pauses and way is not None and not pauses:
                end = begun + way.seconds
                while end < now + way.lead - 1e-12:
                    end += way.seconds
                waiting = (end, answer, woken)
                continue
            switch(answer)
        return Outcome(kept, paused, stopped)

    # -- for all policies ----------------------------------------------------------------------------------------------

    def regrouping(self, workers: int, failed: bool, transfer: float = 0.0) -> list[float]:
        policy = self.policy
        detection = policy.detection if failed else 0.0
        return [detection, AGREEMENT + policy.lookup, policy.regroup + policy.connect * workers, transfer]

    def reloading(self, failed: bool) -> list[float]:
        return [self.policy.detection if failed else 0.0, self.policy.restart, self.costs[2]]

    def pipelines(self, layout: tuple, share: bool = True) -> Way | None:
        """Whole pipelines, each with its part of the batch."""
        model, count = self.model, len(layout)
        if not count:
            return None
        total = model.global_batch // model.microbatch
        micro = -(-total // count) if share else total // model.pipelines
        step = pipeline_step(self.policy.schedule, model.costs(), micro, model.in_flight_limit(), self.policy.effort)
        samples = model.global_batch if share else micro * model.microbatch * count
        return Way(layout, step.period, samples, step.fill, step.lead)

    def one_copy(self) -> float:
        return self.model.transfer_seconds(1 / self.model.stages)

    # -- what a policy says --------------------------------------------------------------------------------------------

    def start(self) -> Way | None:
        raise NotImplementedError

    def answer(self, way: Way | None, woken: bool) -> Answer | None:
        raise NotImplementedError


class NaiveMerge(Naive):
    """Merge and spares."""

    def start(self):
        return self.pipelines(self.whole(())[0])

    def whole(self, before):
        """As many whole pipelines as the live workers make, and whether a state must be copied."""
        stages, most = self.model.stages, self.model.pipelines
        good = [list(team) for team in before if set(team) <= self.live]
        bad = sorted((list(team) for team in before if not set(team) <= self.live), key=self.gaps)
        spare = sorted(self.live - {worker for team in before for worker in team})
        copied = False
        donors: list = []  # of pipelines that are dissolved now, with the stage whose state they have
        while bad:
            team = bad.pop(0)
            while bad and len(spare) + len(donors) < self.gaps(team):
                donors += [(worker, stage) for stage, worker in enumerate(bad.pop()) if worker in self.live]
            if len(spare) + len(donors) < self.gaps(team):
                spare += [worker for worker in team if worker in self.live]
                bad = []
                break
            holes = [stage for stage in range(stages) if team[stage] not in self.live]
            for stage in list(holes):
                own = [worker for worker, had in donors if had == stage]
                if own:
                    team[stage] = min(own)
                    donors = [donor for donor in donors if donor[0] != min(own)]
                    holes.remove(stage)
            for stage in holes:
                copied = True
                if spare:
                    team[stage] = spare.pop(0)
                else:
                    team[stage] = min(donors)[0]
                    donors.remove(min(donors))
            good.append(team)
        spare = sorted([*spare, *(worker for worker, _ in donors)])
        while len(good) < most and len(spare) >= stages:
            good.append(spare[:stages])
            spare, copied = spare[stages:], True
        return tuple(sorted(map(tuple, good[:most]))), copied

    def gaps(self, team):
        return sum(worker not in self.live for worker in team)

    def answer(self, way, woken):
        before = self.layout
        after, copied = self.whole(before)
        if after == before:
            return None
        found = self.pipelines(after)
        failed = any(not set(team) <= self.live for team in before)
        if not all(any(team[stage] in self.live for team in before) for stage in range(self.model.stages)):
            return Answer(found, self.reloading(failed) if found else [], "checkpoint" if before else "now", layout=())
        pauses = self.regrouping(len(self.live), failed, self.one_copy() if copied else 0.0)
        return Answer(found, pauses, "step" if failed else "now")


class NaiveRestart(NaiveMerge):
    """Restart."""

    def start(self):
        return self.pipelines(self.whole(())[0])

    def answer(self, way, woken):
        before = self.layout
        after = self.whole(before)[0]
        found = self.pipelines(after)
        if any(not set(team) <= self.live for team in before):
            return Answer(found, self.reloading(True) if found else [], "checkpoint", layout=())
        if len(after) <= len(before):
            return None
        if not before:
            return Answer(found, self.reloading(False), "now")
        return Answer(found, [self.costs[0] + self.costs[1], *self.reloading(False)], "now", saved=True)


class NaiveDropReplica(Naive):
    """Drop the replica."""

    def start(self):
        return self.pipelines(self.more(()), share=False)

    def more(self, teams):
        stages, most = self.model.stages, self.model.pipelines
        free = sorted(self.live - {worker for team in teams for worker in team})
        found = list(teams)
        while len(found) < most and len(free) >= stages:
            found.append(tuple(free[:stages]))
            free = free[stages:]
        return tuple(sorted(found))

    def answer(self, way, woken):
        before = self.layout
        whole = tuple(team for team in before if set(team) <= self.live)
        more = self.more(whole)
        grows = len(more) > len(whole)
        wait = None
        if grows:
            wait = 60.0 if whole else 1e-3
        if len(whole) < len(before):
            pauses = self.regrouping(len(whole) * self.model.stages, True) if whole else []
            found = self.pipelines(whole, share=False)
            return Answer(found, pauses, "step" if whole else "checkpoint", alarm=wait, layout=())
        if not grows:
            return None
        if not woken:
            return Answer(way, [], "now", alarm=wait, layout=before)
        found = self.pipelines(more, share=False)
        if not whole:
            return Answer(found, self.reloading(False), "now")
        return Answer(found, self.regrouping(len(more) * self.model.stages, False, self.one_copy()), "now")


class NaiveRecycle(Naive):
    """ReCycle with 1F1B or planned schedules, with and without failure normalization."""

    def start(self):
        return self.afresh()

    @property
    def grid(self):
        return self.model.grid

    def problem(self, vacancies):
        policy, model = self.policy, self.model
        gone = normalized_failures(self.grid, vacancies)
        return Problem(self.grid, model.costs(), gone, policy.technique, model.in_flight_limit())

    def spread(self, count):
        return distribution(self.problem((0,) * self.model.stages), count, self.policy.effort)

    def afresh(self):
        grid = self.grid
        workers = sorted(self.live)[: grid.num_workers]
        if len(workers) < grid.stages:
            return None
        gone = normalized_failures(grid, self.spread(grid.num_workers - len(workers)))
        places = [place for place in grid.workers() if place not in gone]
        return self.running(dict(zip(workers, places, strict=True)))

    def running(self, places):
        if not self.policy.adaptive:
            way = self.pipelines((0,) * (len(places) // self.model.stages))
            return way and replace(way, layout=places)
        counts = Counter(place.stage for place in places.values())
        step = self.step(tuple(self.grid.lanes - counts[stage] for stage in range(self.model.stages)))
        return Way(places, step.period, self.model.global_batch, step.fill, step.lead)

    def step(self, vacancies):
        model, policy = self.model, self.policy
        step = usual = Judgement(one_f_one_b_seconds(model.costs(), model.grid.microbatches))
        if any(vacancies) or not (policy.schedule == "1f1b" or policy.fault_free == "1f1b"):
            step = planned_step(self.problem(vacancies), policy.effort)
            step = step if any(vacancies) else min(usual, step)
        return step

    def answer(self, way, woken):
        grid, before = self.grid, self.layout or {}
        held = {worker: place for worker, place in before.items() if worker in self.live}
        lost_stage = {place.stage for place in held.values()} != set(range(grid.stages))
        failed = len(held) < len(before)
        if lost_stage:
            found = self.afresh()
            if not before and not found:
                return None
            return Answer(found, self.reloading(failed) if found else [], "checkpoint" if before else "now", layout={})
        old = dict(held)
        sent: Counter = Counter()
        for worker in sorted(self.live - set(held)):
            empty = [place for place in grid.workers() if place not in held.values()]
            if not empty:
                break
            bare = Counter(place.stage for place in empty)
            held[worker] = max(empty, key=lambda place: (bare[place.stage], -place.pipeline, -place.stage))
        if held == before:
            return None
        has = {worker: place.stage for worker, place in old.items()}
        if self.policy.normalization:
            vacant = sorted(set(grid.workers()) - set(held.values()))
            taken = roles(grid, vacant, self.spread(len(vacant)))
            held = {worker: taken[place] for worker, place in held.items()}
        for worker, place in held.items():
            if has.get(worker) != place.stage:
                sent[min((p for p in old.values() if p.stage == place.stage), key=lambda p: (sent[p], p))] += 1
        transfer = max(sent.values(), default=0) * self.one_copy()
        pauses = self.regrouping(len(self.live), failed, transfer)
        return Answer(self.running(held), pauses, "step" if failed else "now", layout=held)


class NaiveElastic(NaiveRecycle):
    """Elastic: places for more workers of each stage than the batch has pipelines."""

    @property
    def grid(self):
        grid = self.model.grid
        most = min(self.policy.max_pipelines or 2 * grid.pipelines, grid.pipelines * grid.microbatches)
        return replace(grid, lanes=max(most, grid.pipelines))

    def spread(self, count):
        grid = self.grid
        workers = grid.num_workers - count
        used = max(grid.pipelines, -(-workers // grid.stages))
        fewer = replace(self.problem((0,) * grid.stages), grid=replace(grid, lanes=used))
        found = distribution(fewer, used * grid.stages - workers, self.policy.effort)
        return tuple(grid.lanes - used + gone for gone in found)

    def step(self, vacancies):
        model = self.model
        held = [self.grid.lanes - gone for gone in vacancies]
        lanes = max(*held, model.pipelines)  # the others are nowhere in the plan
        grid = replace(model.grid, lanes=lanes)
        gone = normalized_failures(grid, tuple(lanes - count for count in held))
        problem = Problem(grid, model.costs(), gone, self.policy.technique, model.in_flight_limit())
        step = planned_step(problem, self.policy.effort)
        usual = Judgement(one_f_one_b_seconds(model.costs(), model.grid.microbatches))
        return min(usual, step) if held == [model.pipelines] * model.stages else step


class NaiveBamboo(NaiveMerge):
    """Bamboo; what fits into memory is the policy's."""

    def start(self):
        return self.again(())

    def again(self, before):
        return self.running(self.whole(before)[0], frozenset())

    def running(self, teams, lost):
        model, policy = self.model, self.policy
        if not teams:
            return None
        costs = model.costs()
        both = tuple(sum(pair) for pair in zip(costs.forward, (*costs.forward[1:], costs.forward[0]), strict=True))
        micro = -(-model.global_batch // model.microbatch // len(teams))
        limit = policy._in_flight_limit(model)
        step = pipeline_step(policy.schedule, replace(costs, forward=both), micro, limit, policy.effort)
        work = model.useful_gpu_seconds + model.global_batch * model.sample_seconds[0]
        seconds = max(step.period * (1.5 if lost else 1), work / (len(teams) * model.stages - len(lost)))
        return Way((teams, lost), seconds, model.global_batch, step.fill, step.lead)

    def answer(self, way, woken):
        model, policy = self.model, self.policy
        teams, lost = self.layout or ((), frozenset())
        fatal = [30.0, self.costs[2]]
        if not teams:
            found = self.again(())
            return found and Answer(found, fatal, "now")
        places = {(p, s): worker for p, team in enumerate(teams) for s, worker in enumerate(team)}
        dead = {place for place, worker in places.items() if worker not in self.live}
        if new := dead - lost:
            dead |= lost
            around = {(p, (s + by) % model.stages) for p, s in new for by in (1, -1)}
            if around & dead:
                found = self.again(teams)
                return Answer(found, fatal if found else [], "checkpoint", layout=())
            return Answer(self.running(teams, frozenset(dead)), [], "now", alarm=1e-3)
        if self.live - self.known:
            return Answer(way, [], "now", alarm=max(1e-3, policy.node_start), layout=self.layout)
        working = {worker for place, worker in places.items() if place not in lost}
        idle = len(self.live - working)
        short = lost and (idle >= len(lost) or 2 * len(lost) / len(working) > policy.threshold)
        more = min((len(working) + idle) // model.stages, model.pipelines) > len(teams)
        if not woken or not (short or more):
            return None
        pauses = [AGREEMENT + policy.lookup, 20.0]
        return Answer(self.again(teams), pauses, "now")


class NaiveVaruna(Naive):
    """Varuna."""

    def start(self):
        self.again = replace(self.model, recompute=True, throughput=None)
        return self.shape()

    def shape(self):
        policy, model = self.policy, self.model
        found = morph(self.again, len(self.live), policy.schedule, policy.effort)
        if found is None:
            return None
        pipelines, depth, _, step = found
        used = frozenset(sorted(self.live)[: pipelines * depth])
        return Way(used, step.period, model.global_batch, step.fill, step.lead)

    def answer(self, way, woken):
        used, found = self.layout or frozenset(), self.shape()
        if not used <= self.live:
            return Answer(found, self.reloading(True) if found else [], "checkpoint", layout=frozenset())
        came = self.live - self.known
        slower = way and found and found.samples / found.seconds <= way.samples / way.seconds
        if not came or found is None or slower:
            return None
        if way is None:
            return Answer(found, self.reloading(False), "now")
        return Answer(found, [self.costs[0] + self.costs[1], *self.reloading(False)], "now", saved=True)


class NaiveOobleck(Naive):
    """Oobleck; the instantiation after a restart is the policy's."""

    def start(self):
        self.context = Context(self.model, Cluster(self.nodes))
        self.least = self.policy.least_nodes(self.context)
        return self.running(self.policy._anew(self.context, tuple(sorted(self.live))))

    def running(self, teams):
        if not teams or min(map(len, teams)) < self.least:
            return None
        sizes = tuple(sorted(map(len, teams), reverse=True))
        step = pipelines_step(self.model, sizes, self.policy.schedule, self.policy.effort)
        return Way(teams, step.period, self.model.global_batch, step.fill, step.lead)

    def units(self, teams):
        """The units of the model that each worker holds."""
        found = {}
        for team in teams:
            parts = cut(self.model.units, len(team))
            for place, worker in enumerate(team):
                found[worker] = set(range(sum(parts[:place]), sum(parts[: place + 1])))
        return found

    def shrunk(self, teams):
        left = [[worker for worker in team if worker in self.live] for team in teams]
        left = [team for team in left if team]
        while len(left) > 1 and any(len(team) < self.least for team in left):
            small = min(left, key=len)
            rest = [team for team in left if team is not small]
            longest = max(rest, key=len)
            if len(longest) > self.least:
                small.append(longest.pop())
            else:
                min(rest, key=len).extend(small)
                left = rest
        return left

    def grown(self, teams):
        pipelines, stages = self.model.pipelines, self.model.stages
        whole = pipelines * stages
        workers = sorted(self.live)
        if all(len(team) == stages for team in teams) and len(teams) == pipelines:
            return teams
        if len(workers) >= whole and any(len(team) != stages for team in teams):
            return [workers[stages * place : stages * (place + 1)] for place in range(pipelines)]
        for worker in workers:
            used = {one for team in teams for one in team}
            if worker not in used and len(used) < whole:
                shortest = min(teams, key=len)
                if len(shortest) < self.model.units:
                    shortest.append(worker)
        return teams

    def answer(self, way, woken):
        before = self.layout or ()
        had = self.units(before)
        there = set().union(*(units for worker, units in had.items() if worker in self.live))
        if not before or len(there) < self.model.units:
            found = self.running(self.policy._anew(self.context, tuple(sorted(self.live))))
            if found is None:
                return Answer(None, [], "checkpoint", layout=()) if before else None
            return Answer(found, self.reloading(bool(self.gone)), "checkpoint")
        failed = any(worker not in self.live for worker in had)
        if not failed and not self.live - self.known:
            return None
        after = self.shrunk(before) if failed else [list(team) for team in before]
        after = tuple(map(tuple, self.grown(after)))
        if after == before:
            return None
        missing = max(len(units - had.get(worker, set())) for worker, units in self.units(after).items())
        transfer = self.model.transfer_seconds(missing / self.model.units)
        pauses = self.regrouping(len(self.live), failed, transfer)
        return Answer(self.running(after), pauses, "step" if failed else "now", layout=())


NAIVE = {
    "Bamboo": NaiveBamboo,
    "Elastic": NaiveElastic,
    "Merge": NaiveMerge,
    "Spares": NaiveMerge,
    "Restart": NaiveRestart,
    "DropReplica": NaiveDropReplica,
    "Oobleck": NaiveOobleck,
    "Recycle": NaiveRecycle,
    "Varuna": NaiveVaruna,
}
