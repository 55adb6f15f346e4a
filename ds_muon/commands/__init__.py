# SPDX-License-Identifier: Apache-2.0
"""Commands: one module for each `ds_muon` command, with add_arguments(parser) and run(args).

Owns: arguments and exit statuses.
Never does: compute what it shows.
"""
