"""Every error a user can meet, with its exit code. Knows no numbers and no files."""

from __future__ import annotations


class QsimError(Exception):
    """Base of all errors caused by input; the message states the value, the place and the next step."""

    exit_code = 2


class UsageError(QsimError):
    """A command, option or argument is wrong. Exit code 2."""


class StudyError(QsimError):
    """A study file asks for something that does not exist or does not fit together. Exit code 2."""


class FormatError(QsimError):
    """A code or value is outside its format, or a policy does not exist for it. Exit code 2."""


class InputError(QsimError):
    """A file cannot be read, or holds tensors that cannot be used. Exit code 3."""

    exit_code = 3


class OutputError(QsimError):
    """A result cannot be written where it was asked for. Exit code 3."""

    exit_code = 3


class ProtocolViolation(QsimError):  # noqa: N818 - the field's word
    """A quantizer operation was asked to break its lifecycle; it refused (fails closed). Exit code 1."""

    exit_code = 1


class BackendError(QsimError):
    """A backend cannot be used on this machine: the message says why. Exit code 2."""


class CaseError(QsimError):
    """A defect or fix cannot be applied to this schedule: the message names the missing feature."""
