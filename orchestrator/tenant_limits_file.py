"""Where the limits of tenants come from: the defaults of the settings, and a file for those tenants that differ.

The file is TOML or JSON, by its name's ending, and is read again when it changes; one that does not make sense is
refused at the start and told in the log later, when the last good one stays. Knows no usage.

    [tenants.team-a]
    requests_per_s = 5
    max_streams = 32

    [tenants.batch]
    tokens_per_s = "unlimited"
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.tenant_limits import TenantLimits
from specdec.errors import InvalidParameterError, UnusableFileError
from specdec.last_good import LastGood
from specdec.params import validate_tenant

_DEPTH = 3
"""Of a place in the file: tenants, one of them, one of its limits."""
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["unlimited"] | None
_Count = Annotated[int, Field(ge=1, strict=True)] | Literal["unlimited"] | None


class _Overrides(BaseModel):
    """Of one tenant; what is left out is as the settings have it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_s: _Rate = None
    request_burst: Annotated[int, Field(ge=1, strict=True)] | None = None
    tokens_per_s: _Rate = None
    token_burst: Annotated[int, Field(ge=1, strict=True)] | None = None
    max_streams: _Count = None

    def over(self, defaults: TenantLimits) -> TenantLimits:
        given = {name: value for name, value in self if value is not None}
        return dataclasses.replace(
            defaults, **{name: None if value == "unlimited" else value for name, value in given.items()}
        )


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, _Overrides]


class TenantLimitsSource:
    """`limits_of` may be asked as often as one likes: it costs a look at the file's date.

    Raises:
        OSError, UnusableFileError: the file cannot be read or does not make sense.
    """

    def __init__(self, defaults: TenantLimits, path: Path | None) -> None:
        self._defaults = defaults
        self._file = (
            None
            if path is None
            else LastGood([path], lambda: read_tenant_limits(path, defaults), what=f"limits of tenants in {path}")
        )

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._defaults if self._file is None else self._file.current().get(tenant, self._defaults)


def read_tenant_limits(path: Path, defaults: TenantLimits) -> Mapping[str, TenantLimits]:
    """By tenant, "" for whoever names none. Raises OSError, and UnusableFileError: what is wrong and where."""
    try:
        overrides = _File.model_validate(_parsed(path)).tenants
    except ValidationError as error:
        raise UnusableFileError(f"{path}: {_told(error)}") from None
    for tenant in overrides:
        try:
            validate_tenant(tenant)
        except InvalidParameterError:
            raise UnusableFileError(f"{path}: {tenant!r} is no tenant: 1 to 64 of [A-Za-z0-9_-]") from None
    return {tenant: overrides_of.over(defaults) for tenant, overrides_of in overrides.items()}


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".toml":
                return tomllib.loads(text)
            case ".json":
                return json.loads(text)
            case suffix:
                raise ValueError(f"must end with .toml or .json, not {suffix or 'nothing'}")
    except RecursionError:
        raise UnusableFileError(f"{path}: nested too deeply") from None
    except ValueError as error:  # of the decoder and the parsers too
        raise UnusableFileError(f"{path}: {error}") from None


def _told(error: ValidationError) -> str:
    """One clause for each place, which may be wrong in two ways where it is a number or a word."""
    wrong: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        wrong.setdefault(".".join(map(str, fault["loc"][:_DEPTH])), []).append(fault["msg"])
    return "; ".join(f"{place}: {', or '.join(messages)}" for place, messages in wrong.items())
