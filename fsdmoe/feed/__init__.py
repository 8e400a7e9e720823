"""The stage between data and models: whole rows in, a model's arguments out, the same for every model.

``data`` knows documents and ranks, a model knows tokens; what stands between the two is here: which rows the
ranks share and how (``feed``), which documents are planned again for a step (``dynamic``), what ranks do that
run out of batches (``join``), and that all of them read the same documents (``open_data``).
"""

from fsdmoe.feed.feed import Feed, Prepared
from fsdmoe.feed.join import join_batches
from fsdmoe.feed.open_data import open_data

__all__ = ["Feed", "Prepared", "join_batches", "open_data"]
