# SPDX-License-Identifier: Apache-2.0
"""`python -m ds_muon`."""

import sys

from ds_muon.cli import main

sys.exit(main())
