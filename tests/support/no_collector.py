"""Imported first by the rank server: imports leave no garbage, and looking for some is a fifth of their time.
What is forked from the server collects again."""

import gc

gc.disable()
