"""The MoE layer: router and balance, dispatch over EP and ETP, grouped experts, shared experts.

Read ``moe.py`` first: route → dispatch → compute → combine stand there on one screen.
"""
