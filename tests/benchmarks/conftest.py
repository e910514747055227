"""The benchmarks are scripts: their directory and that of the examples are on the path as when one of them is run."""

import sys
from pathlib import Path

for name in ("examples", "benchmarks"):
    sys.path.insert(0, str(Path(__file__).parents[2] / name))
