"""A plan to look at: a timeline for a trace viewer or a terminal, an HTML page, and what differs between two plans.

All of it reads a plan file and nothing else: no model, no cluster, no torch.
"""
