"""Refuses requests for models that the operator has retired."""

from datetime import UTC, datetime

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.models.model import Deprecation
from isochrone.wire.peers.routes import DeploymentEntry
from router.proxy_headers import deprecation_headers


def refuse_retired(
    deployment: DeploymentEntry, deprecation: Deprecation, now_unix_s: float
) -> None:
    """Raise ApiError 410 from the day on that the operator announced."""
    if not 0 < deprecation.sunset_at <= now_unix_s:
        return
    day = datetime.fromtimestamp(deprecation.sunset_at, UTC).date()
    instead = f"use {deprecation.replacement!r}" if deprecation.replacement else "use another model"
    raise ApiError(
        ErrorCode.MODEL_RETIRED,
        f"Model has been deprecated: {deployment.name!r} was retired on {day}; {instead}",
        param="model",
        headers=deprecation_headers(deprecation),
    )
