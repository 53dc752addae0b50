"""python -m runlog runs/NAME: write the report of a run again, at any time."""

import sys

from runlog.report import main

main(sys.argv[1:])
