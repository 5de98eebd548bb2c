"""The DSpark draft architecture alone: flat files that import nothing of the rest of the library."""

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkDraftModel

__all__ = ["DSparkConfig", "DSparkDraftModel"]
