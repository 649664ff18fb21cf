"""Configuration: a TOML file, overridden by environment variables, checked once into a struct.

A secret is kept in a file of its own, which the configuration names.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+/?$")]
TracesEndpoint = Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/?#\s]+(/[^?#\s]*)?)?$")]
"""The base URL of a collector, to which `/v1/traces` is added; empty: no traces."""


class ConfigError(Exception):
    """The configuration is missing or wrong; the message says where and what to write."""


def load_config(kind: type[T], path: Path | None, env: Mapping[str, str], prefix: str) -> T:
    """Read `path`, overridden by the variables `{prefix}FIELD`, into `kind`; raises ConfigError.

    A variable holds a plain string, or JSON where the field is not a string.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read config {path}: {error}") from error
    fields = {
        f"{prefix}{field.encode_name.upper()}": field for field in msgspec.structs.fields(kind)
    }
    for name in (name for name in env if name.startswith(prefix)):
        if name not in fields:
            raise ConfigError(f"cannot use the variable {name}: there is no such setting")
        field = fields[name]
        values[field.encode_name] = env[name] if field.type is str else _json_or_text(env[name])
    try:
        return msgspec.convert(values, kind, dec_hook=_convert_path)
    except msgspec.ValidationError as error:
        source = path or f"without --config, from {prefix}* alone"
        raise ConfigError(f"cannot use config {source}: {error}") from error


def read_secret(path: Path, what: str, length_min: int = 1) -> str:
    """Return the one line of a file that only its owner may read; raises ConfigError.

    `what` names the secret in error messages.
    """
    try:
        mode = path.stat().st_mode & 0o077
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from error
    if mode or len(secret) < length_min or not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"cannot use {what} {path}: it needs mode 0600 and one line of at least "
            f"{length_min} ASCII characters"
        )
    return secret


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _convert_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
