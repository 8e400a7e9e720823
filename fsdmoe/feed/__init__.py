"""The stage between data and models: whole rows in, a model's arguments out, the same for every model.

``data`` knows documents and ranks, a model knows tokens; what stands between the two is here: which rows the
ranks share and how (``feed``), and which documents are planned anew for a step (``dynamic``).
"""

from fsdmoe.feed.feed import Feed, Prepared

__all__ = ["Feed", "Prepared"]
