"""How runs are started: the ranks of one host (``fsdmoe train``), and jobs on many (``fsdmoe launch``).

Nothing here loads torch before a rank or a store is started.
"""
