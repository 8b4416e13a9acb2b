"""What can be wrong with a deck or with the tools that build it."""

from moe_course.errors import MoECourseError


class SlidesError(MoECourseError):
    """A deck that does not agree with its notebook, or a tool that is missing. Says where, and the cure."""

    exit_code = 2
