"""Configuration: a TOML file, overridden by environment variables, checked once into a struct.

A secret is kept in a file of its own, which the configuration names.
"""

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+/?$")]
TracesEndpoint = Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/?#\s]+(/[^?#\s]*)?)?$")]
"""The base URL of a collector, to which `/v1/traces` is added; empty: no traces."""


class ConfigError(Exception):
    """The configuration is missing or wrong; the message says where and what to write."""


def load_config(
    kind: type[T],
    path: Path | None,
    env: Mapping[str, str],
    prefix: str,
    old_names: Mapping[str, str] = {},
) -> T:
    """Read `path`, overridden by the variables `{prefix}FIELD`, into `kind`; raises ConfigError.

    A variable holds a plain string, or JSON where the field is not a string. `old_names` has the
    current name of each renamed setting; an old name is read, in the file and in variables, and a
    warning is logged.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read config {path}: it is not UTF-8 text") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"cannot read config {path}: {error}") from error
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    types |= {old: types[new] for old, new in old_names.items()}
    settings = {f"{prefix}{setting.upper()}": setting for setting in types}
    for name in (name for name in env if name.startswith(prefix)):
        if name not in settings:
            raise ConfigError(f"cannot use the variable {name}: there is no such setting")
        setting = settings[name]
        values[setting] = env[name] if types[setting] is str else _json_or_text(env[name])
    _replace_old_names(values, old_names)
    try:
        return msgspec.convert(values, kind, dec_hook=_convert_path)
    except msgspec.ValidationError as error:
        source = path or f"without --config, from {prefix}* alone"
        # Most often a typing mistake, or the file of another service.
        where = f"{kind.__module__.replace('.', '/')}.py"
        hint = f"; the settings of this service are in {where}" * ("unknown field" in str(error))
        raise ConfigError(f"cannot use config {source}: {error}{hint}") from error


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


def _replace_old_names(values: dict[str, Any], old_names: Mapping[str, str]) -> None:
    for old, new in old_names.items():
        if old not in values:
            continue
        if new in values:
            raise ConfigError(
                f"cannot use both {old} and {new}: {old} is the old name of {new}, so remove it"
            )
        values[new] = values.pop(old)
        fields = {"old_name": old, "name": new}
        log.warning(
            "a setting has a new name; the next release refuses the old one",
            extra={"fields": fields},
        )


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _convert_path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
