"""Device, Link, Cluster: the machines a plan is for, and how a user names them.

Plain data; imports nothing of ours but the error family and the table of machines (and torch only to look at local
GPUs). ``types``: the data. ``hardware``: device files in ``cost_models/hardware``. ``spec``: SPEC texts and this
machine's GPUs. ``files``: cluster files. ``mixed``: node groups of several kinds as one cluster.

SPEC: ``8`` (the local kind), ``8xH100``, ``16x8xA100-80GB`` (nodes x GPUs a node x kind), ``4xp5.48xlarge`` (machines
by their maker's name, :mod:`autoplan.instances`), ``4xcpu``, ``2x8xH100+2x8xA100-80GB`` (kinds side by side), or the
path of a cluster file (:mod:`.files`).
"""

from autoplan.cluster.hardware import DEFAULT_KIND, HARDWARE, device_kinds
from autoplan.cluster.spec import local_device_count, under_its_own_spec
from autoplan.cluster.types import Cluster, Device, Link

__all__ = [
    "Cluster",
    "DEFAULT_KIND",
    "Device",
    "HARDWARE",
    "Link",
    "device_kinds",
    "local_device_count",
    "under_its_own_spec",
]
