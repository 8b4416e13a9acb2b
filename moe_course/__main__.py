"""`python -m moe_course` is `moe-course`."""

import sys

from moe_course.cli import main

sys.exit(main())
