"""What the command line says when it cannot do what was asked: one line, one exit status.

Raised anywhere in `trainmount_cli`; `app.main` prints it, as text or as a JSON envelope.
"""

from __future__ import annotations

from typing import Final

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_USAGE", "CliError"]

EXIT_FAILED: Final = 1
"""The job failed, or something could not be done."""
EXIT_USAGE: Final = 2
"""What was given is wrong: an option, a file, a name."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C, as every shell has it."""

_KINDS: Final = {"NOT_FOUND": "NOT_FOUND", "INTERNAL_ERROR": "TRANSIENT"}


class CliError(Exception):
    """One line for a person. `code` is for programs: INVALID_ARGS, UNAUTHENTICATED, NOT_FOUND,
    CONFLICT, INTERNAL_ERROR.
    """

    def __init__(
        self, message: str, *, code: str = "INVALID_ARGS", exit_status: int = EXIT_USAGE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.exit_status = exit_status

    @property
    def kind(self) -> str:
        return _KINDS.get(self.code, "PERMANENT")

    @property
    def is_retryable(self) -> bool:
        return self.code == "INTERNAL_ERROR"
