"""Rules for opening an image that the default refuses."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenRules:
    """How an image is opened where the default would refuse it."""

    first_frame: bool = False
    """Take the first frame of an animation or of several pages."""
    scale_deep: bool = False
    """Take 16-bit pixels that use 12 bits or fewer for a bright image in so many bits."""
