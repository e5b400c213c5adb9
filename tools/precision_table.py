"""`megafp8 precision_table`, from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafp8.cli.precision_table import main

if __name__ == "__main__":
    sys.exit(main())
