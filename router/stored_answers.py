"""Composes the parts that answer stored responses: their routes, and their periodic job."""

import time
from collections.abc import Callable
from typing import NamedTuple

from isochrone.wire.client_keys.key_table import KeyTable
from router.apis.openai.surface import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.apis.responses.background import BackgroundAnswerer
from router.apis.responses.stored import Charge, Serve, StoredResponses
from router.apis.responses.stored_routes import StoredRoutes
from router.config import RouterConfig
from router.loops.answer_responses import AnswerResponses
from router.recording.metrics import Metrics
from router.response_client import ResponseClient
from router.scheduler_client import SchedulerClient


class StoredAnswers(NamedTuple):
    """The routes for the dispatcher, and the job for the loops of a router."""

    routes: StoredRoutes
    job: AnswerResponses


def compose_stored_answers(
    config: RouterConfig,
    client: SchedulerClient,
    openai: OpenAiSurface,
    serve: Serve,
    metrics: Metrics,
    *,
    charge: Charge,
    keys: Callable[[], KeyTable],
    may_lease: Callable[[], bool],
    request_ids: RequestIds,
    is_main_process: bool,
) -> StoredAnswers:
    """Return the parts; only a router's main process answers background responses."""
    responses = ResponseClient(client)
    stored = StoredResponses(
        client=responses,
        openai=openai,
        serve=serve,
        metrics=metrics,
        is_default=config.store_responses,
        charge=charge,
    )
    answerer = BackgroundAnswerer(openai, serve, keys, request_ids, time.monotonic)
    job = AnswerResponses(
        client=responses,
        answer=answerer.answer,
        open_refs=stored.open,
        running_max=config.background_responses_max if is_main_process else 0,
        may_lease=may_lease,
        clock=time.monotonic,
    )
    return StoredAnswers(StoredRoutes(client, stored), job)
