"""Distribution of a stream's images over the ranks that share it, and routes of their features to the media tokens.

Images do not see each other, so under context parallelism each rank encodes some whole images instead of all ranks
encoding all of them. Features then go straight to the rank that holds their media token, by one uneven exchange whose
sizes every rank knows from the batch; gradients take the same route back. A rank without an image takes part too.

Legend: M rows of features, R ranks that share a stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.model.transfer import on_device
from polyreme_trainer.parallel import collectives

Places = npt.NDArray[np.int64]
Deliver = Callable[[Tensor], Tensor]
"""Maps features that were made here to the features of the media tokens that are held here, in the tokens' order."""


def share_images(costs: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Give whole images to ranks: the next largest always to the rank with the least work so far.

    Args:
        costs: Operations of each image (``polyreme_planner.flops.image_flops``).
        ranks: Ranks to share among; some may get none.

    Returns:
        Images of each rank by their number in the stream, rising.
    """
    if ranks == 1:
        return (tuple(range(len(costs))),)
    load, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for image in sorted(range(len(costs)), key=lambda image: (-costs[image], image)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[rank] += costs[image]
        shares[rank].append(image)
    return tuple(tuple(sorted(share)) for share in shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRoutes:
    """Rows that each of R ranks makes and needs; rows are numbered by their media tokens in the stream."""

    made: Sequence[Places]
    """Rows of each rank in the order in which it makes them, without the rows of padding at the end."""
    wanted: Sequence[Places]
    """Rows of each rank in the order of its tokens."""

    def __post_init__(self) -> None:
        """Refuse routes that lose a row or send one twice.

        Raises:
            InvalidConfigError: If media tokens and features differ.
        """
        made, wanted = (np.sort(np.concatenate(list(rows))) for rows in (self.made, self.wanted))
        if not np.array_equal(made, wanted):
            raise InvalidConfigError(
                f"media tokens do not fit the images: {wanted.size} tokens, {made.size} features", field="spec.data"
            )

    def deliver(self, rank: int, group: dist.ProcessGroup) -> Deliver:
        """Lay out the exchange for one rank of the group."""
        rows = sum(made.size for made in self.made)
        maker_M, index_M = np.empty(rows, np.int64), np.empty(rows, np.int64)
        for other, made in enumerate(self.made):
            maker_M[made], index_M[made] = other, np.arange(made.size)
        # Rows leave for each rank, and arrive from each, in the order of the tokens of the rank that wants them.
        leaving = [index_M[wanted[maker_M[wanted] == rank]] for wanted in self.wanted]
        arriving = [np.flatnonzero(maker_M[self.wanted[rank]] == other) for other in range(len(self.made))]
        sent, received = ([part.size for part in parts] for parts in (leaving, arriving))
        order, back = torch.tensor(np.concatenate(leaving)), torch.tensor(np.concatenate(arriving).argsort())

        def deliver(features_MD: Tensor) -> Tensor:
            order_M, back_M = on_device([order, back], features_MD.device)
            rows_MD = features_MD.index_select(0, order_M)
            arrived_MD = collectives.exchange_rows(rows_MD, sent=sent, received=received, group=group)
            return arrived_MD.index_select(0, back_M)

        return deliver
