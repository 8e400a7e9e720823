"""The stage between data and models: whole rows in, a model's arguments out, the same for every model.

``data`` knows documents and ranks, a model knows tokens; what stands between the two is here: which rows the
ranks share and how (``feed``), which documents are planned anew for a step (``dynamic``), and what ranks do
that run out of batches (``join``).
"""

from fsdmoe.feed.feed import Feed, Prepared
from fsdmoe.feed.join import join_batches

__all__ = ["Feed", "Prepared", "join_batches"]
