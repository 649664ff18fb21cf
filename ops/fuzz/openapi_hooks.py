"""Names a model that exists in the valid requests that schemathesis draws, which loads this file.

Otherwise nearly all of them would end at "there is no such model". Requests that are meant to be
invalid stay as they are.
"""

import os
from typing import Any

import schemathesis

MODEL = os.environ.get("OPENAPI_MODEL", "")


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Replace the model in the body and the path of a valid request."""
    mode = getattr(getattr(case.meta, "generation", None), "mode", None)
    if not MODEL or mode is None or mode.name != "POSITIVE":
        return
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = MODEL
