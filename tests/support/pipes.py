"""Commands whose output nobody reads."""

import os
import subprocess
import sys
from types import ModuleType
from typing import Any


def without_reader(command: ModuleType, *arguments: str, **options: Any) -> tuple[int, str]:
    """Exit status and errors of the command in a module, whose output's reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from {command.__name__} import main; sys.exit(main())"
    stderr = subprocess.PIPE
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=writer, stderr=stderr, text=True, check=False, **options
    )
    os.close(writer)
    return done.returncode, done.stderr
