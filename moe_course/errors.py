"""The errors this package raises. Each names the rank, the field, both values and the cure.

A rank program ends with the `exit_code` of the error it met: 2 usage, 4 mismatch, 5 lost rank or time-out.
"""

from __future__ import annotations


class MoECourseError(Exception):
    """Base of all errors of the package."""

    exit_code = 1


class ConfigError(MoECourseError):
    """A configuration that does not make sense, or that this package cannot run."""

    exit_code = 2


class CheckpointError(MoECourseError):
    """A checkpoint with missing, surplus, duplicated, damaged or wrongly shaped tensors."""

    exit_code = 2


class BackendUnavailable(MoECourseError):
    """A backend or transport that was asked for and cannot run here."""

    exit_code = 2


class TraceError(MoECourseError):
    """A trace that cannot be read or does not add up."""

    exit_code = 2


class VerificationFailed(MoECourseError):
    """A result is not what it should be: the reference model says so, or the canary."""

    exit_code = 3


class StageFailed(MoECourseError):
    """A stage of your own raised an error."""


class PlanMismatch(MoECourseError):
    """Ranks were started with different plans."""

    exit_code = 4


class ExchangeMismatch(MoECourseError):
    """Ranks met in one exchange and disagree about what it carries."""

    exit_code = 4


class CapacityExceeded(MoECourseError):
    """More rows than a fixed-size buffer holds."""

    exit_code = 4


class ExchangeTimeout(MoECourseError):
    """A rank waited too long for its peers."""

    exit_code = 5


class RankLost(MoECourseError):
    """A peer went away: killed, crashed, or returned early."""

    exit_code = 5
