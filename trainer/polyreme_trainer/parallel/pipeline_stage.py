"""Torch's pipeline stage, which records on this rank's page what it computes, sends and waits for.

Torch's flight recorder does not record exchanges between two ranks on gloo, so the page is what shows which stage a
rank waits for. Imported when the first schedule is built, since torch's pipelining takes 0.3 to 2 s.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import pipelining

from polyreme_api.rank_state import RankWait
from polyreme_trainer.rank_page import enter_stage, sent, wait_for_stage


class RecordedStage(pipelining.PipelineStage):
    """A stage whose work is recorded where torch's schedules ask for it."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Record the wait for the previous stage's output; the first stage waits for none."""
        ops: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        if ops:
            wait_for_stage(RankWait.FORWARD, self.stage_index, fwd_chunk_id)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Record the wait for the next stage's gradient; the last stage waits for none."""
        ops: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        if ops:
            wait_for_stage(RankWait.BACKWARD, self.stage_index, bwd_chunk_id)
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Record that the output is sent."""
        ops: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        if ops:
            sent(RankWait.FORWARD)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Record that the gradient is sent."""
        ops: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        if ops:
            sent(RankWait.BACKWARD)
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Record that the stage runs forward."""
        enter_stage(self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Record that the stage runs backward."""
        enter_stage(self.stage_index, bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
