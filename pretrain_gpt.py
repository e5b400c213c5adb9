"""`megafp8 pretrain` as a script: `python pretrain_gpt.py FLAGS`, or `torchrun ... pretrain_gpt.py FLAGS`."""

import sys

from megafp8.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
