"""Opens the place where the files of batches are stored."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from isochrone.service.config import ConfigError
from isochrone.service.threads import start_daemon_thread
from scheduler.api.client_objects.batch_service import BatchStorage
from scheduler.config import SchedulerConfig
from scheduler.state.files.batch_bucket import BatchBucket
from scheduler.state.files.batch_folder import BatchFolder

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S: Final = 10.0
"""How long a start waits for the place of files."""


async def open_batch_storage(
    config: SchedulerConfig, nudge: Callable[[], None]
) -> BatchStorage | None:
    """Return where batches are stored, if the settings say so; raises ConfigError.

    A disk or a bucket that hangs is logged only: everything else is served without it.
    """
    if config.batch_bucket and config.batch_folder is not None:
        raise ConfigError("cannot use both batch_folder and batch_bucket: set one of them")
    if not config.batch_bucket and config.batch_folder is None:
        return None
    place = f"batch_folder {config.batch_folder}"
    try:
        if config.batch_folder is None:
            place = f"batch_bucket {config.batch_bucket}"
            folder: BatchFolder = BatchBucket(
                config.batch_bucket,
                config.batch_spool_folder,
                endpoint=config.batch_bucket_endpoint,
                region=config.batch_bucket_region,
            )
        else:
            folder = BatchFolder(config.batch_folder)
        async with asyncio.timeout(PREPARE_TIMEOUT_S):
            await start_daemon_thread("files", folder.prepare)
    except TimeoutError:
        fields = {"place": place, "waited_s": PREPARE_TIMEOUT_S}
        log.error(
            "cannot reach the place of files: requests for files fail until it answers",
            extra={"fields": fields},
        )
    except OSError as error:
        raise ConfigError(f"cannot use {place}: {error.strerror or error}") from error
    return BatchStorage(folder, config.batches, nudge)
