"""A simulated replica that works step by step, as engines do.

SimulatedReplica begins a prompt in the middle of a step and reads one after the other, so that a
short prompt beside many answers is answered within a part of a step. Here a prompt begins at a
step's boundary, a step reads as many prompts as fit its chunk, and first tokens come at
the end of a step, with a token of every running sequence.
"""

from collections.abc import Set
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple

from ops.sim.replica import (
    BLOCK_TOKENS,
    TOLERANCE,
    QueueOrder,
    ReplicaKind,
    SimulatedReplica,
    StepEvents,
)
from ops.sim.replica_job import ReplicaJob
from ops.sim.traces import TraceRequest
from ops.sim.world import ReplicaSite


class ReadingStep(NamedTuple):
    """A step that reads prompts: when it ends, how long it takes, and the work on each prompt."""

    ends_s: float
    took_s: float
    parts: list[tuple[ReplicaJob, float]]


class SteppedReplica(SimulatedReplica):
    """See the module. With `is_reading_together` False a step reads a part of one prompt only."""

    def __init__(
        self,
        site: ReplicaSite,
        queue_order: QueueOrder | None = None,
        is_reading_together: bool = True,
    ) -> None:
        super().__init__(site, queue_order)
        self._is_reading_together = is_reading_together
        self._being_read: list[ReplicaJob] = []
        """In the order in which they began; `reading` is the first."""
        self._step: ReadingStep | None = None

    def settle(self, now_s: float) -> StepEvents:
        """Let time pass until now; return the jobs with a first token and those that ended."""
        self._advance(now_s)
        events = StepEvents([], [])
        step = self._step
        if step is not None and now_s >= step.ends_s - TOLERANCE:
            self._step = None
            self._tokens_given = float(round(self._tokens_given))
            for job, work in step.parts:
                job.work_left -= work
                if job.work_left <= TOLERANCE:
                    self._being_read.remove(job)
                    self._end_reading(job, events)
            self.reading = self._being_read[0] if self._being_read else None
        if self._step is None:
            self._end_answers(events)
            self._read_next()
        if events.first_tokens or events.ended:
            self._record_load(now_s)
        return events

    def next_event_s(self) -> float:
        """Return the time of the next event if no request arrives; infinite if there is none."""
        if self._step is not None:
            return self._step.ends_s
        at_s = super().next_event_s()
        if self._decoding and self._beginning() is not None:
            at_s = min(at_s, self._now_s + self._to_boundary() / self._decode_speed())
        return at_s

    def lose(self) -> list[ReplicaJob]:
        """Lose all requests and the cache: the replica dies. Return the requests."""
        lost = [*super().lose(), *self._being_read[1:]]
        self._being_read.clear()
        self._step = None
        return lost

    def cached(self, request: TraceRequest, blocks_to_come: Set[int] = frozenset()) -> int:
        """Return how many tokens of the prompt are cached, counting also `blocks_to_come`.

        What is read before it counts: an earlier prompt is read to its end before a later one of
        the same step begins.
        """
        earlier = {block for job in self._being_read for block in job.request.blocks}
        return super().cached(request, earlier | blocks_to_come)

    def work_left(self, now_s: float) -> float:
        """Return how much of the prompts being read is left now, in tokens."""
        left = sum(job.work_left for job in self._being_read)
        if self._step is not None:
            done = 1 - max(0.0, self._step.ends_s - now_s) / self._step.took_s
            left -= done * sum(work for _, work in self._step.parts)
        return max(0.0, left)

    def _decode_speed(self) -> float:
        if self._step is not None:
            return 1.0 / self._step.took_s
        return 1.0 / (self.site.profile.step_s + self._decodes_s())

    def _advance(self, now_s: float) -> None:
        took_s = now_s - self._now_s
        if took_s > 0:
            if self._step is not None:
                self.busy_s += took_s
            if self._step is not None or self._decoding:
                self._tokens_given += took_s * self._decode_speed()
            self._now_s = self._memory.now_s = now_s

    def _to_boundary(self) -> float:
        """Return what is left of the present step of decoding, as a share of a step."""
        return ceil(self._tokens_given - TOLERANCE) - self._tokens_given

    def _beginning(self) -> ReplicaJob | None:
        job = super()._beginning()
        if job is None or not self._being_read:
            return job
        running = len(self._decoding) + len(self._being_read)
        has_room = self._memory.has_room(job.request, job.generated_tokens, self._grown_tokens())
        return job if has_room and running < self.site.profile.sequences_max else None

    def _read_next(self) -> None:
        """Begin a step that reads, if a step may begin now and there is anything to read."""
        if self._step is not None or (self._decoding and self._to_boundary() > TOLERANCE):
            return
        left, rate = self._chunk_work(), self.site.true_rate
        parts: list[tuple[ReplicaJob, float]] = []
        for job in self._being_read:
            parts.append((job, min(left, job.work_left)))
            left -= parts[-1][1]
        while left > TOLERANCE and (self._is_reading_together or not parts):
            following = self._beginning()
            if following is None:
                break
            cached = self._hold(following)
            following.work_left = self._tokens_work(
                following.request, cached, following.generated_tokens
            )
            self._being_read.append(following)
            parts.append((following, min(left, following.work_left)))
            left -= parts[-1][1]
        self.reading = self._being_read[0] if self._being_read else None
        if parts:
            profile = self.site.profile
            read_s = sum(work for _, work in parts) / rate
            is_short = self._decoding and profile.interval_s < float("inf")
            # Reading the weights takes step_s, which long chunks hide; short ones add to it.
            took_s = read_s + profile.step_s if is_short else max(read_s, profile.step_s)
            took_s += self._decodes_s()
            self._tokens_given = float(round(self._tokens_given))
            self._step = ReadingStep(self._now_s + took_s, took_s, parts)

    def _chunk_work(self) -> float:
        """Return how much prefill work the next step can do."""
        profile, rate = self.site.profile, self.site.true_rate
        decodes_s = self._decodes_s()
        if not self._decoding or profile.chunk_tokens / rate + decodes_s <= profile.interval_s:
            return profile.chunk_tokens
        return rate * max(profile.interval_s - decodes_s - profile.step_s, BLOCK_TOKENS / rate)

    def _preempt_newest(self) -> None:
        if not self._being_read:
            super()._preempt_newest()
            return
        job = self._being_read.pop()
        self._memory.release(job.request, job.generated_tokens, is_read=False)
        self.queue.appendleft(job)
        self.reading = self._being_read[0] if self._being_read else None


REPLICA_KINDS: Final = MappingProxyType[str, ReplicaKind](
    {
        "flowing": SimulatedReplica,
        "boundaries": partial(SteppedReplica, is_reading_together=False),
        "stepped": SteppedReplica,
    }
)
"""The models of a replica by name: that of the tables, one prompt a step, and several."""
