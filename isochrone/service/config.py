"""Configuration: a TOML file, overridden by the environment, checked once into a frozen struct.

A secret stands in a file of its own, which the configuration names.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+/?$")]


class ConfigError(Exception):
    """The configuration is missing or wrong; the message says where and what to write."""


def load_config(kind: type[T], path: Path | None, env: Mapping[str, str], prefix: str) -> T:
    """Read `path` and the variables named `{prefix}FIELD` into `kind`, or raise ConfigError.

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
        values[field.encode_name] = env[name] if field.type is str else _json(env[name])
    try:
        return msgspec.convert(values, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        where = path or f"without --config, from {prefix}* alone"
        raise ConfigError(f"cannot use config {where}: {error}") from error


def read_secret(path: Path, what: str, letters_min: int = 1) -> str:
    """Return the word in a file that only its owner may read, or raise ConfigError."""
    try:
        mode = path.stat().st_mode & 0o077
        word = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from error
    if mode or len(word) < letters_min or not (word.isascii() and word.isprintable()):
        raise ConfigError(
            f"cannot use {what} {path}: it needs mode 0600 and one line of at least "
            f"{letters_min} ASCII letters"
        )
    return word


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
