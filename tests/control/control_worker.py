"""A worker without a model: what an executor says to the coordinator."""

from __future__ import annotations

from lightning_recycle.control.client import ControlClient, Interrupted
from lightning_recycle.control.protocol.messages import Applied, Losses, Milestone, Reached, Resume, WorkerStatus


class Member:
    """Worker ``rank``, whose steps are commits."""

    def __init__(self, client: ControlClient, stages: int) -> None:
        self.client = client
        self.stage = client.rank % stages
        self.last_stage = stages - 1
        self.version = 0
        self.reduced = False
        self.resumes: list[Resume] = []
        client.regroup = self.regroup

    def join(self) -> Member:
        self.client.await_announcement(20.0)
        self.regroup()
        return self

    def enter(self) -> Member:
        """Joins a training that has begun."""
        self.version = -1
        self.client.wait_to_enter()
        self.regroup()
        return self

    def regroup(self) -> None:
        while True:
            self.client.enter_generation()
            payload = self.client.rank if self.reduced else None
            status = WorkerStatus(self.stage, self.version, self.reduced)
            try:
                resume = self.client.report_and_wait(status, payload)
            except Interrupted:
                continue
            self.resumes.append(resume)
            self.client.send(Reached(self.client.rank, resume.generation, Milestone.CONNECTED))
            if self.client.rank in resume.donors:  # there is no state to get
                self.version = resume.decision.version
                self.client.send(Reached(self.client.rank, resume.generation, Milestone.ENTERED))
            if self.version < resume.decision.version:
                self.apply()
            return

    def step(self) -> None:
        target = self.version + 1
        while self.version < target:
            try:
                self.client.begin_step(self.version)
                if self.stage == self.last_stage:  # the last one: losses come before gradients
                    self.client.send(Losses(self.client.rank, self.version, {0: 0.5, 1: 0.5}))
                self.reduced = True
                self.client.commit(self.version, self.client.rank)
                self.apply()
            except Interrupted:
                self.regroup()

    def apply(self) -> None:
        self.client.send(Applied(self.client.rank, self.version, {"F": 0.5}))
        self.version, self.reduced = self.version + 1, False
