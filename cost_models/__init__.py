"""What a partition costs: compute, communication, memory and schedule, as numbers only.

Knows no torch.distributed, no solver and no command line. Units are in the names: seconds ``_s``, ``_bytes``,
``_flops``, ``_bytes_per_s``; SI inside, formatted only at the edge.
"""

if __name__ != "autoplan.cost_models":
    raise ImportError("import autoplan.cost_models, not cost_models")
