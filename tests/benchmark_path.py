"""Makes the modules of `benchmarks/` importable."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
