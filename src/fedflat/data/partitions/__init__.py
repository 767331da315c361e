"""Ways to partition one training set over clients. Each is deterministic in its seed and returns index lists."""

from .base import Partition
from .dirichlet import Dirichlet
from .even import IID, Quantity
from .long_tail import LongTail
from .natural import ByDomain, ByUser
from .pathological import Pathological
from .text import parse_partition

__all__ = [
    "IID",
    "ByDomain",
    "ByUser",
    "Dirichlet",
    "LongTail",
    "Partition",
    "Pathological",
    "Quantity",
    "parse_partition",
]
