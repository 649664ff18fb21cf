"""A real vLLM that is stepped in this process, without a server, behind the seats of a node.

`small_tenant_vllm` and `batch_vllm_steps` compare rules of the seats with it. Time is the
processor time of this process, so that other load on the machine matters little.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from nodeagent.decide.requests.seats import STARTED_AFTER_S, SeatRequest, Seats, spare_seats
from ops.bench.processor_time import ProcessorTime
from ops.sim.measure import percentile

MODEL: Final = Path(__file__).parents[2] / ".engines" / "smollm2"
SEATS: Final = 16
"""The seats of a deployment with `max_num_seqs = 16`."""

TOKEN_IDS: Final = (100, 20_000)
YIELDING_PRIORITY: Final = 50


@dataclass
class SteppedRequest:
    """A request that waits for a seat or has one, with its prompt."""

    seat: SeatRequest
    prompt: list[int]
    tokens: int
    sent_at_s: float
    seated_at_s: float = 0.0
    has_token: bool = False


class SteppedVllm:
    """A vLLM and the requests that have a seat there or wait for one."""

    def __init__(self, engine: Any, seats: Seats, clock: ProcessorTime) -> None:
        self._engine = engine
        self._seats = seats
        self._clock = clock
        self._number = 0
        self._open: dict[str, SteppedRequest] = {}
        self._ids: dict[SeatRequest, str] = {}

    def drain(self) -> None:
        """Drop all requests."""
        self._engine.abort_request(list(self._open))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _open_request(self, request: SteppedRequest) -> str:
        """Return the id of a request that has just begun to wait for a seat."""
        self._number += 1
        request_id = self._ids[request.seat] = f"{id(self):x}-{self._number}"
        self._open[request_id] = request
        return request_id

    def _send(self, seated: Sequence[SeatRequest]) -> None:
        """Give the engine the requests that have got a seat."""
        for seat in seated:
            request_id = self._ids[seat]
            request = self._open[request_id]
            request.seated_at_s = self._clock.now_s()
            params = import_module("vllm").SamplingParams(
                max_tokens=request.tokens, temperature=0, ignore_eos=True
            )
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": request.prompt},
                params,
                priority=YIELDING_PRIORITY if seat.yields else 0,
            )

    def _step(self, steps_s: list[float]) -> Sequence[Any]:
        """Return what a step generated. Its time is added to `steps_s` if it generated anything."""
        before_s = self._clock.now_s()
        outputs: Sequence[Any] = self._engine.step()
        if outputs:
            steps_s.append(self._clock.now_s() - before_s)
        return outputs

    def _close(self, request_id: str, now_s: float) -> None:
        """Give back the seat of a request that has ended."""
        request = self._open.pop(request_id)
        del self._ids[request.seat]
        self._send(self._seats.release(request.seat, now_s))

    def _start_overdue(self, now_s: float) -> None:
        """Do what the node's timers do."""
        for request in list(self._open.values()):
            is_due = now_s - request.seated_at_s >= STARTED_AFTER_S
            if request.seat.is_seated and not request.seat.has_started and is_due:
                self._send(self._seats.record_start(request.seat, now_s))


def load(step_tokens_max: int) -> Any:
    """Load vLLM with one thread, in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL),
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=SEATS + spare_seats(SEATS),
            max_num_batched_tokens=step_tokens_max,
            kv_cache_memory_bytes=1 << 29,
            gpu_memory_utilization=0.05,
            enforce_eager=True,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            async_scheduling=False,
        )
    )


def quantile_ms(values: list[float], share: float) -> float:
    """Return the value at `share` of the sorted values, in milliseconds."""
    return 1000 * percentile(values, share)
