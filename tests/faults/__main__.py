"""`python tests/faults`: campaign.py says what it does."""

import sys

from campaign import main

sys.exit(main())
