"""Every key of a volume's attributes, and what they mean together. Called by node and controller.

`volumeAttributes` of a PersistentVolume or of an inline volume, `parameters` of a StorageClass and
`mountOptions` arrive as strings; this module turns them into values once. A key that nobody knows
is refused by name, because a mistyped one would otherwise be silently without effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from trainmount_csi.errors import InvalidArgument

__all__ = [
    "EPHEMERAL",
    "KEY_OF_SETTING",
    "POD_NAME",
    "POD_NAMESPACE",
    "POD_UID",
    "SERVICE_ACCOUNT_TOKENS",
    "SOURCE",
    "MountFlags",
    "VolumeContext",
    "parse_quantity",
]

SOURCE: Final = "source"
READ_ONLY: Final = "readOnly"
CACHE_SIZE: Final = "cacheSize"
BLOCK_SIZE: Final = "blockSize"
MEMORY: Final = "memory"
METADATA_TIMEOUT: Final = "metadataTimeout"
NEGATIVE_TIMEOUT: Final = "negativeTimeout"
OPEN_TIMEOUT: Final = "openTimeout"
UID: Final = "uid"
GID: Final = "gid"
FILE_MODE: Final = "fileMode"
DIRECTORY_MODE: Final = "directoryMode"

_OURS: Final = (
    SOURCE,
    READ_ONLY,
    CACHE_SIZE,
    BLOCK_SIZE,
    MEMORY,
    METADATA_TIMEOUT,
    NEGATIVE_TIMEOUT,
    OPEN_TIMEOUT,
    UID,
    GID,
    FILE_MODE,
    DIRECTORY_MODE,
)

KEY_OF_SETTING: Final = {
    "cache_size_bytes": CACHE_SIZE,
    "block_size_bytes": BLOCK_SIZE,
    "memory_bytes": MEMORY,
    "entry_timeout_seconds": METADATA_TIMEOUT,
    "attr_timeout_seconds": METADATA_TIMEOUT,
    "directory_timeout_seconds": METADATA_TIMEOUT,
    "negative_timeout_seconds": NEGATIVE_TIMEOUT,
    "open_timeout_seconds": OPEN_TIMEOUT,
    "uid": UID,
    "gid": GID,
    "file_mode": FILE_MODE,
    "directory_mode": DIRECTORY_MODE,
}
"""What a person wrote, by the setting of the mount that it becomes."""

# Added by the kubelet, where the CSIDriver object has podInfoOnMount or tokenRequests.
POD_NAME: Final = "csi.storage.k8s.io/pod.name"
POD_NAMESPACE: Final = "csi.storage.k8s.io/pod.namespace"
POD_UID: Final = "csi.storage.k8s.io/pod.uid"
EPHEMERAL: Final = "csi.storage.k8s.io/ephemeral"
SERVICE_ACCOUNT_TOKENS: Final = "csi.storage.k8s.io/serviceAccount.tokens"

# Kubernetes' own components may add keys under these at any time.
_FOREIGN_PREFIXES: Final = ("csi.storage.k8s.io/", "storage.kubernetes.io/")

_QUANTITY: Final = re.compile(r"(?P<number>\d+)(?P<unit>|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)")
_UNITS: Final = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kMGTP", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTP", start=1)},
}
_MAX_ID: Final = (1 << 32) - 2  # 2**32 - 1 means "no change" to chown


@dataclass(frozen=True, kw_only=True, slots=True)
class MountFlags:
    """`mountOptions` of a PersistentVolume or StorageClass, as other drivers know them."""

    read_only: bool = False

    uid: int | None = None

    gid: int | None = None

    umask: int | None = None
    """Bits taken away from the modes of files and directories."""

    @classmethod
    def parse(cls, flags: Iterable[str]) -> MountFlags:
        """Each flag may itself be a comma-separated list, as in fstab.

        Raises:
            InvalidArgument: an option that is not known.
        """
        read_only = False
        numbers: dict[str, int] = {}
        for option in (option.strip() for flag in flags for option in flag.split(",")):
            key, _, value = option.partition("=")
            if option in ("ro", "rw"):
                read_only = option == "ro"
            elif key in ("uid", "gid"):
                numbers[key] = _number(f"mountOptions {key}", value, _MAX_ID)
            elif key == "umask":
                numbers[key] = _octal("mountOptions umask", value)
            elif option not in ("", "allow_other"):
                raise InvalidArgument(
                    f"mountOptions has {key!r}; known are ro, rw, uid=, gid=, umask="
                )
        return cls(read_only=read_only, **numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeContext:
    """A volume's attributes. None stands for "not given"."""

    source: str
    """`/Volumes/<catalog>/<schema>/<volume>[/...]` or `file:///directory`, without a slash at its
    end."""

    read_only: bool = False

    cache_size_bytes: int | None = None

    block_size_bytes: int | None = None

    memory_bytes: int | None = None

    metadata_timeout_seconds: float | None = None
    """How long names, sizes and listings are believed."""

    negative_timeout_seconds: float | None = None

    open_timeout_seconds: float | None = None

    uid: int | None = None

    gid: int | None = None

    file_mode: int | None = None

    directory_mode: int | None = None

    @classmethod
    def parse(
        cls, attributes: Mapping[str, str], *, field: str = "volumeAttributes"
    ) -> VolumeContext:
        """Check and convert; `field` is what a person wrote the keys under.

        Raises:
            InvalidArgument: `source` is missing, a key is not known, a value is not what the key
            wants.
        """
        refuse_unknown(attributes, _OURS, field)
        return cls(
            source=_source(attributes.get(SOURCE, ""), field),
            read_only=_boolean(f"{field}.{READ_ONLY}", attributes.get(READ_ONLY, "false")),
            cache_size_bytes=_optional_size(attributes, CACHE_SIZE, field),
            block_size_bytes=_optional_size(attributes, BLOCK_SIZE, field),
            memory_bytes=_optional_size(attributes, MEMORY, field),
            metadata_timeout_seconds=_optional_seconds(attributes, METADATA_TIMEOUT, field),
            negative_timeout_seconds=_optional_seconds(attributes, NEGATIVE_TIMEOUT, field),
            open_timeout_seconds=_optional_seconds(attributes, OPEN_TIMEOUT, field),
            uid=_optional_id(attributes, UID, field),
            gid=_optional_id(attributes, GID, field),
            file_mode=_optional_mode(attributes, FILE_MODE, field),
            directory_mode=_optional_mode(attributes, DIRECTORY_MODE, field),
        )

    @property
    def needs_credentials(self) -> bool:
        """A directory of the node is opened as it is; everything else is asked for with a token."""
        return not self.source.startswith("file:")

    def to_attributes(self) -> dict[str, str]:
        """The attributes of a volume that was provisioned; `parse` gives the same value back."""
        values: dict[str, str | None] = {
            SOURCE: self.source,
            READ_ONLY: "true" if self.read_only else None,
            CACHE_SIZE: None if self.cache_size_bytes is None else str(self.cache_size_bytes),
            BLOCK_SIZE: None if self.block_size_bytes is None else str(self.block_size_bytes),
            MEMORY: None if self.memory_bytes is None else str(self.memory_bytes),
            METADATA_TIMEOUT: _seconds_text(self.metadata_timeout_seconds),
            NEGATIVE_TIMEOUT: _seconds_text(self.negative_timeout_seconds),
            OPEN_TIMEOUT: _seconds_text(self.open_timeout_seconds),
            UID: None if self.uid is None else str(self.uid),
            GID: None if self.gid is None else str(self.gid),
            FILE_MODE: None if self.file_mode is None else f"{self.file_mode:04o}",
            DIRECTORY_MODE: None if self.directory_mode is None else f"{self.directory_mode:04o}",
        }
        return {key: value for key, value in values.items() if value is not None}


def refuse_unknown(attributes: Mapping[str, str], known: Iterable[str], field: str) -> None:
    """Raises InvalidArgument for the first key that is neither ours nor of Kubernetes itself."""
    names = list(known)
    for key in sorted(attributes):
        if key not in names and not key.startswith(_FOREIGN_PREFIXES):
            raise InvalidArgument(
                f"{field} has an unknown key {key!r}; known are {', '.join(names)}"
            )


def parse_quantity(field: str, text: str) -> int:
    """Bytes of a Kubernetes quantity such as `10Gi`; fractions and exponents are not taken.

    Raises:
        InvalidArgument: not a quantity, or zero.
    """
    match = _QUANTITY.fullmatch(text.strip())
    size = 0 if match is None else int(match["number"]) * _UNITS[match["unit"]]
    if size == 0:
        raise InvalidArgument(f"{field} must be a size above 0 such as 10Gi, got {text!r}")
    return size


def _source(text: str, field: str) -> str:
    source = text.strip().removeprefix("dbfs:")
    if not source:
        raise InvalidArgument(
            f"{field} must have the key {SOURCE}, such as /Volumes/main/default/data"
        )
    if any(name in (".", "..") for name in source.split("/")):
        raise InvalidArgument(f"{field}.{SOURCE} must not contain '.' or '..' names: {source}")
    return source.rstrip("/") or source


def _boolean(field: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise InvalidArgument(f'{field} must be "true" or "false", got {text!r}')
    return value == "true"


def _number(field: str, text: str, maximum: int) -> int:
    if not text.strip().isascii() or not text.strip().isdigit() or int(text) > maximum:
        raise InvalidArgument(f"{field} must be a number from 0 to {maximum}, got {text!r}")
    return int(text)


def _octal(field: str, text: str) -> int:
    if re.fullmatch(r"0?o?[0-7]{1,4}", text.strip()) is None:
        raise InvalidArgument(f"{field} must be octal such as 0644, got {text!r}")
    return int(text.strip().removeprefix("0o"), 8) & 0o777


def _optional_id(attributes: Mapping[str, str], key: str, field: str) -> int | None:
    text = attributes.get(key)
    return None if text is None else _number(f"{field}.{key}", text, _MAX_ID)


def _optional_mode(attributes: Mapping[str, str], key: str, field: str) -> int | None:
    text = attributes.get(key)
    return None if text is None else _octal(f"{field}.{key}", text)


def _optional_size(attributes: Mapping[str, str], key: str, field: str) -> int | None:
    text = attributes.get(key)
    return None if text is None else parse_quantity(f"{field}.{key}", text)


def _optional_seconds(attributes: Mapping[str, str], key: str, field: str) -> float | None:
    text = attributes.get(key)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) is None:
        raise InvalidArgument(f"{field}.{key} must be a number of seconds, got {text!r}")
    return float(text)


def _seconds_text(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.10g}"
