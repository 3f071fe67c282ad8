"""Optional capabilities of a run, one folder or file each; deleting one takes it out. ``algorist.declared`` finds them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

PUBLIC: dict[str, str] = {}
"""Names that ``algorist`` offers of extensions → their modules."""

if TYPE_CHECKING:
    from algorist.extensions.toolkit import *  # noqa: F403
else:
    with suppress(ModuleNotFoundError):
        from algorist.extensions.toolkit import MODULE_OF

        PUBLIC |= MODULE_OF
