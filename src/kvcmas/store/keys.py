"""Keys: which model KV and states belong to, and names that are safe in paths.

A model is identified by its fields: the configuration flattened to dotted names, the dtype, and
whatever else the owner adds (a digest of the weights, the tokenizer, an adapter). The fields are
kept next to saved data, so that a mismatch names what differs; their hash is the short key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kvcmas.errors import ConfigError, StateMismatchError

Fields = dict[str, str]
"""Dotted field name -> canonical JSON of its value."""

_DIGEST_BYTES: Final = 16
_NAMED_DIFFERENCES: Final = 5
_ABSENT: Final = "absent"

# Fields that change neither weights nor KV: bookkeeping, labels, how the outputs are returned.
_IGNORED: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attn_implementation",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_fields(
    config: Mapping[str, object],
    dtype: torch.dtype | str,
    extra: Mapping[str, object] | None = None,
) -> Fields:
    """The fields that identify a model.

    Args:
        config: the model's configuration as a dictionary (`PretrainedConfig.to_dict()`).
        dtype: of the KV. The configuration's own dtype entries are ignored.
        extra: what the configuration does not tell, such as `{"weights": digest}`.

    Raises:
        ConfigError: a value is neither plain data nor a torch dtype.
    """
    fields = dict(_flatten("config", config))
    fields["dtype"] = _canonical("dtype", dtype)
    fields.update(_flatten("extra", extra or {}))
    return fields


def model_fingerprint(
    config: Mapping[str, object],
    dtype: torch.dtype | str,
    extra: Mapping[str, object] | None = None,
) -> str:
    """32 hexadecimal digits that differ when any of `model_fields` differs.

    Raises:
        ConfigError: a value is neither plain data nor a torch dtype.
    """
    return fields_digest(model_fields(config, dtype, extra))


def fields_digest(fields: Mapping[str, str]) -> str:
    """Hash of fields, independent of their order: 32 hexadecimal digits."""
    return _digest(json.dumps(sorted(fields.items())).encode(), b"kvcmas-model")


def check_same_model(saved: Mapping[str, str], current: Mapping[str, str], what: str) -> None:
    """Compare the fields of saved data with those of the model in use.

    Args:
        what: names the saved data in the message, for example a file name.

    Raises:
        StateMismatchError: names the differing fields with both values.
    """
    names = sorted(
        name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name)
    )
    if not names:
        return
    shown = [
        f"{name} is {current.get(name, _ABSENT)} here, {saved.get(name, _ABSENT)} there"
        for name in names[:_NAMED_DIFFERENCES]
    ]
    more = len(names) - len(shown)
    rest = f"; and {more} more" if more else ""
    raise StateMismatchError(
        f"{what} belongs to another model: {'; '.join(shown)}{rest}. Use it with the model that "
        "it was made with, or remove it so that it is computed anew"
    )


def tenant_key(tenant: str) -> str:
    """The form of a tenant's name that may become part of a path: 32 hexadecimal digits.

    Every string is a valid tenant, the empty one too, and none can leave its folder.
    """
    return _digest(tenant.encode("utf-8", "surrogatepass"), b"kvcmas-tenant")


def _digest(data: bytes, purpose: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=purpose).hexdigest()


def _flatten(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            if key not in _IGNORED:
                yield from _flatten(f"{name}.{key}", value[key])
    elif not isinstance(value, Mapping) or name.count("."):
        yield name, _canonical(name, value)


def _canonical(name: str, value: object) -> str:
    return json.dumps(_plain(name, value), sort_keys=True)


def _plain(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # A configuration saved as 10000.0 may come back as 10000.
        return int(value) if value.is_integer() else value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _plain(name, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(name, entry) for entry in value), key=str)
    raise ConfigError(
        f"{name} is a {type(value).__name__}; a model's key is made of plain data (text, numbers, "
        "lists, dictionaries) and torch dtypes"
    )
