"""Tensor parallelism from factor rules: which dimensions of which operators are split over the tensor axis."""

from autoplan.sharding.placements import Copied, Partial, Placement, Replicate, Shard, assemble, take_shard
from autoplan.sharding.pricing import Pricing, price_on
from autoplan.sharding.registry import register_rule
from autoplan.sharding.solve import KindSharding, Sharding, Shardings, Whole, shard_kind, shard_model

__all__ = [
    "Copied",
    "KindSharding",
    "Partial",
    "Placement",
    "Pricing",
    "Replicate",
    "Shard",
    "Sharding",
    "Shardings",
    "Whole",
    "assemble",
    "price_on",
    "register_rule",
    "shard_kind",
    "shard_model",
    "take_shard",
]
