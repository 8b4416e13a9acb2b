"""pytest within a test: what nbval finds in a notebook, cell by cell.

Read from a JUnit file. What pytest prints is another text where CI is set, in colour, or in a narrow window.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree


def faults_of_cells(notebook: Path, *options: object) -> list[str]:
    """What nbval says of each code cell, "" where all is well."""
    found = notebook.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={found}", *options, notebook.name]
    done = subprocess.run(command, cwd=notebook.parent, capture_output=True, text=True, timeout=120, check=False)
    assert found.is_file(), done.stdout + done.stderr
    return [cell.findtext("failure", "") for cell in ElementTree.parse(found).iter("testcase")]
