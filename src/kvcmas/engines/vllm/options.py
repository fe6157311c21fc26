"""Options of kvcmas in vLLM: `kv_connector_extra_config` of `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvcmas.errors import ConfigError
from kvcmas.methods.kvcmas.config import KvcmasConfig, check_dial

GIB = 1 << 30

_NOT_YET = {"base": "donor", "exact_readers": 1}
_ELSEWHERE = {"dial": "dial", "budget_bytes": "device_bytes and host_bytes"}


class VllmOptions(BaseModel):
    """Options of a server. Bytes are those of one rank; other ranks hold their own heads' KV.

    dial: for requests that name none: `exact`, `strict`, `balanced` or `fast`.
    method: single numbers of `KvcmasConfig` in place of the dial's, such as `{"head": 64}`.
    device_bytes: most bytes of donors in the memory that the KV cache is in (the GPU's).
    host_bytes: most bytes of donors in the host's memory, for those that have no room there.
    tenant_bytes: most bytes of one tenant's donors; `None` lets one tenant take all.
    wait_s: longest time in seconds that a reader waits for a donor that is just being computed.
    exact_tenants: values of `cache_salt` whose requests are always served exactly.
    records: whether responses carry a record in `kv_transfer_params`.
    log_level: of kvcmas's own log lines; `None` takes vLLM's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dial: str = "balanced"
    method: dict[str, Any] = Field(default_factory=dict)
    device_bytes: int = Field(default=2 * GIB, ge=0)
    host_bytes: int = Field(default=2 * GIB, ge=0)
    tenant_bytes: int | None = Field(default=None, ge=0)
    wait_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    exact_tenants: tuple[str, ...] = ()
    records: bool = True
    log_level: Literal["debug", "info", "warning", "error"] | None = None

    @field_validator("exact_tenants", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        """JSON has lists only."""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("dial")
    @classmethod
    def _known_dial(cls, value: str) -> str:
        check_dial(value)
        return value

    @field_validator("method")
    @classmethod
    def _known_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = {field.name for field in fields(KvcmasConfig)} - _ELSEWHERE.keys()
        for name, given in value.items():
            if name in _ELSEWHERE:
                raise ConfigError(f"{name} does not belong here; set {_ELSEWHERE[name]}")
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {sorted(known)}"
                raise ConfigError(f"there is no {name!r}; {hint}")
            if name in _NOT_YET and given != _NOT_YET[name]:
                raise ConfigError(
                    f"{name}={given!r} is not in vLLM yet; leave it at {_NOT_YET[name]!r}, or use "
                    "the transformers engine"
                )
        return value

    @model_validator(mode="after")
    def _values(self) -> VllmOptions:
        self.to_config()
        return self

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> VllmOptions:
        """Options from a `kv_connector_extra_config`.

        Raises:
            ConfigError: an unknown name or a bad value; names all of them.
        """
        try:
            return cls.model_validate(dict(given or {}))
        except ValidationError as error:
            raise ConfigError(
                "kv_connector_extra_config: " + "; ".join(map(_told, error.errors()))
            ) from error

    def to_config(self) -> KvcmasConfig:
        """The same for the method.

        Raises:
            ConfigError: a value of `method` is out of range.
        """
        budget = self.device_bytes + self.host_bytes
        return KvcmasConfig(dial=self.dial, budget_bytes=budget, **self.method)

    def to_extra_config(self) -> dict[str, Any]:
        """What differs from the defaults, as `kv_connector_extra_config` takes it."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _told(problem: Any) -> str:
    """One problem, for a user."""
    place = ".".join(map(str, problem["loc"])) or "method"
    if problem["type"] == "extra_forbidden":
        known = list(VllmOptions.model_fields)
        near = get_close_matches(place, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        return f"there is no option {place!r}; {hint}"
    if problem["type"] == "value_error":
        return f"{place}: {problem['ctx']['error']}"
    return f"{place}: {problem['msg']}, got {problem['input']!r}"
