"""Rewrites of the captured graph, one pass a file, in the order they run.

A pass is a pure function: graph in, new graph out. It never talks to a process group; what a rewritten graph
calls at run time stands in :mod:`autoplan.passes.operators`.
"""

if __name__ != "autoplan.passes":
    raise ImportError("import autoplan.passes, not passes")
