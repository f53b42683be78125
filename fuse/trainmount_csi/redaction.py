"""Requests as text that may be logged. Called by the server for every call."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from trainmount_csi.volume_context import SERVICE_ACCOUNT_TOKENS
from trainmount_csi.wire import csi_pb2

__all__ = ["log_safe"]

_HIDDEN: Final = "***"


def log_safe(request: Message) -> str:
    """One line without any secret: values of fields that the protocol marks, service-account
    tokens, mount options.

    Names of the secrets' keys stay, because a missing one is the usual mistake.
    """
    copy = type(request)()
    copy.CopyFrom(request)
    _hide(copy)
    return MessageToString(copy, as_one_line=True)


def _hide(message: Message) -> None:
    for field, value in message.ListFields():
        if _is_secret(field) or field.name == "volume_context":
            _hide_values(field, value)
        elif field.name == "mount_flags":
            # The specification allows secrets in them.
            value[:] = [flag.partition("=")[0] for flag in value]
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _hide(part)


def _hide_values(field: FieldDescriptor, values: dict[str, str]) -> None:
    is_secret = _is_secret(field)
    for key in list(values):
        if is_secret or key == SERVICE_ACCOUNT_TOKENS:
            values[key] = _HIDDEN


def _is_secret(field: FieldDescriptor) -> bool:
    # The generated stub knows the extension only as a descriptor.
    extension: Any = csi_pb2.csi_secret
    return bool(field.GetOptions().Extensions[extension])
