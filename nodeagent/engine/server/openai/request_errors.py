"""Errors for requests that the engine refuses, with the field they concern."""

from isochrone.wire.errors import ApiError, ErrorCode


def invalid_request(param: str, message: str) -> ApiError:
    """Return the error for a field or header with a value that cannot be used."""
    return ApiError(ErrorCode.INVALID_REQUEST, message, param=param)


def unsupported_field(param: str, reason: str = "this engine does not support it") -> ApiError:
    """Return the error for a field, or a value of it, that the engine does not support."""
    return invalid_request(param, f"cannot use field '{param}': {reason}")


def context_length_exceeded(param: str, message: str) -> ApiError:
    """Return the error for a prompt that does not fit into the context."""
    return ApiError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param)


def model_not_found(name: str, available: str) -> ApiError:
    """Return the error for a name that belongs neither to the model nor to an adapter."""
    return ApiError(
        ErrorCode.MODEL_NOT_FOUND,
        f"cannot serve model {name[:200]!r}: this engine has {available}",
        param="model",
    )
