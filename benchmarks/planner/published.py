"""Training runs that others have published: calibrate the planner on one of them, predict the rest.

Sources:

- arXiv:2504.14960 (MoE Parallel Folding, Megatron-Core): H100, bfloat16, sequences of 4,096 tokens, 256 a step, rows
  "MCore w/ Folding" of table 3. Each pipeline rank holds seven layers, and four times the batch gains 6 % (table 4),
  where a plain 1F1B would gain 15 %: so it is interleaved, and since seven is a prime, with one layer a stage.
- arXiv:2412.19437 (DeepSeek-V3): 2,048 H800, 180,000 device hours for 1e12 tokens (section 1), 15,360 sequences of
  4,096 tokens a step (4.2), PP16, EP64 on 8 nodes, ZeRO-1 and DualPipe, which hides the exchanges of experts and stages
  and takes 20 of 132 multiprocessors for them (3.2 to 3.2.2), NVLink of 160 GB/s (3.2.2), a token on at most four
  nodes (2.1.2), norms and latent products recomputed (3.2.3), attention's own products, embedding, head and router not
  in FP8 (3.3.1), a module that predicts a second token (2.2).

Models with grouped queries are stood in for by latent attention of as many parameters and operations.
"""

from __future__ import annotations

import dataclasses

from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.flops import Mix, core_flops, forward_flops
from polyreme_planner.hardware import HARDWARE, MIXED, Hardware
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.schedules import Schedule
from polyreme_planner.search import Candidate, Pricer
from polyreme_planner.shapes import MOONLIGHT_16B_A3B, NO_VISION, ModelShape
from polyreme_planner.traffic import TRAINER, Framework

SEQUENCE = 4096
PEAK_FLOPS_PER_S = 989.5e12
"""Of H100 and H800 in bfloat16, by which all of them report."""
H100 = HARDWARE["h100-80g"]
H800 = dataclasses.replace(H100, name="h800", near_bytes_per_s=160e9)
FP8_RATIO = 631.7 / (0.493 * PEAK_FLOPS_PER_S / 1e12)
"""Speed of Mixtral in FP8 over that in bfloat16 (arXiv:2504.14960, section 4): of whole steps, so of products a little
more."""
SIMULATIONS = 1
SHARES = (0.1, 1.2)
"""Shares of the peak between which a calibration is looked for."""
ROUNDS = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A run, and how fast it was."""

    name: str
    shape: ModelShape
    reported_flops: float
    """Of a token, as its authors count them for their MFU."""
    mfu: float
    layout: Layout
    sequences: int
    """Of a step."""
    schedule: Schedule
    chunks: int | None = None
    recompute: Recompute = Recompute.NONE
    hardware: Hardware = H100
    framework: Framework = TRAINER
    product_speed: float = 1.0
    """Of its products over those of bfloat16 on the whole device."""

    def predicted_mfu(self, share: float) -> float:
        """Predict the MFU, where products reach a share of the peak."""
        tokens = self.sequences * SEQUENCE
        return self.reported_flops * tokens / (self.layout.world * PEAK_FLOPS_PER_S * self.step_s(share))

    def step_s(self, share: float) -> float:
        """Predict the time of a step [seconds]."""
        rate = share * self.product_speed * self.hardware.peak_flops_per_s
        # What fits the memory is theirs to say.
        hardware = dataclasses.replace(self.hardware, flops_per_s=rate, memory_bytes=1 << 45)
        mix = Mix(sequence_tokens=SEQUENCE, image_patches=1, visual_share=0.0)
        setting = Setting(shape=self.shape, mix=mix, hardware=hardware, numerics=MIXED, framework=self.framework)
        of = Candidate(
            layout=self.layout,
            schedule=self.schedule,
            recompute=self.recompute,
            microbatch_packs=1,
            microbatches=self.sequences // self.layout.dp,
            chunks=self.chunks,
        )
        return Pricer(setting).simulated(of, SIMULATIONS).step_s

    def calibrated_share(self) -> float:
        """Return the share of the peak with which the prediction is what was published."""
        low, high = SHARES
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.predicted_mfu(middle) < self.mfu else (low, middle)
        return low


def grouped(name: str, *, kv_heads: int, head_dim: int = 128, **sizes: int) -> ModelShape:
    """Stand in for grouped queries: the rank of the latents is what gives as many parameters."""
    width, heads, rope = sizes["width"], sizes["heads"], head_dim // 2
    wanted = 2 * width * kv_heads * head_dim - rope * width
    rank = round(wanted / (width + 1 + heads * (2 * head_dim - rope)))
    decoder = dataclasses.replace(
        MOONLIGHT_16B_A3B.decoder,
        **sizes,
        dense_layers=0,
        dense_ffn_width=0,
        kv_rank=rank,
        nope_dim=head_dim - rope,
        rope_dim=rope,
        value_dim=head_dim,
    )
    return ModelShape(name=name, vision=NO_VISION, decoder=decoder)


def megatron_flops(shape: ModelShape, *, kv_heads: int, head_dim: int = 128) -> float:
    """Count a training token as Megatron does: attention over the whole square."""
    d = shape.decoder
    attention = 4 * d.width * (d.heads + kv_heads) * head_dim + 4 * SEQUENCE * d.heads * head_dim
    experts = 6 * d.width * d.expert_ffn_width * (d.experts_per_token + d.shared_experts) + 2 * d.width * d.experts
    return 3.0 * (d.layers * (attention + experts) + 2 * d.width * d.vocabulary)


MIXTRAL = grouped(
    "mixtral-8x22b",
    kv_heads=8,
    width=6144,
    heads=48,
    layers=56,
    expert_ffn_width=16_384,
    experts=8,
    experts_per_token=2,
    shared_experts=0,
    vocabulary=32_768,
)
QWEN = grouped(
    "qwen2-57b-a14b",
    kv_heads=4,
    width=3584,
    heads=28,
    layers=28,
    expert_ffn_width=2560,
    experts=64,
    experts_per_token=8,
    shared_experts=8,
    vocabulary=151_936,
)
DEEPSEEK = ModelShape(
    name="deepseek-v3",
    vision=NO_VISION,
    decoder=dataclasses.replace(
        MOONLIGHT_16B_A3B.decoder,
        vocabulary=129_280,
        width=7168,
        layers=61,
        dense_layers=3,
        dense_ffn_width=18_432,
        expert_ffn_width=2048,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        heads=128,
        q_rank=1536,
        kv_rank=512,
    ),
)


def with_second_prediction(shape: ModelShape) -> ModelShape:
    """Add the module that predicts a second token: a layer, and the head once more."""
    d = shape.decoder
    return dataclasses.replace(shape, decoder=dataclasses.replace(d, layers=d.layers + 1, vocabulary=2 * d.vocabulary))


def deepseek_product_speed() -> float:
    """Return how fast DeepSeek-V3's products are over bfloat16's: some in FP8, on the multiprocessors that are left."""
    mix = Mix(sequence_tokens=SEQUENCE, image_patches=1, visual_share=0.0)
    flops = forward_flops(DEEPSEEK, mix)
    whole = sum(flops[part] for part in all_parts(DEEPSEEK))
    wide = flops[Part.HEAD] + DEEPSEEK.decoder.layers * core_flops(DEEPSEEK, mix)
    return (132 - 20) / 132 / (wide / whole + (1 - wide / whole) / FP8_RATIO)


def deepseek_run() -> Published:
    """DeepSeek-V3's own, its MFU from device hours."""
    mix = Mix(sequence_tokens=SEQUENCE, image_patches=1, visual_share=0.0)
    flops = forward_flops(DEEPSEEK, mix)
    token = 3 * sum(flops[part] for part in all_parts(DEEPSEEK))
    return Published(
        name="DeepSeek-V3",
        shape=with_second_prediction(DEEPSEEK),
        reported_flops=token,
        mfu=token * 1e12 / (180e3 * 3600 * PEAK_FLOPS_PER_S),
        layout=Layout(dp=128, ep=64, pp=16),
        sequences=15_360,
        schedule=Schedule.DUAL_PIPE_V,
        recompute=Recompute.SELECTIVE,
        hardware=H800,
        framework=Framework(overlapped=frozenset({"ep", "pp"}), token_nodes=4),
        product_speed=deepseek_product_speed(),
    )


RUNS = (
    Published(
        name="Mixtral 8x22B",
        shape=MIXTRAL,
        reported_flops=megatron_flops(MIXTRAL, kv_heads=8),
        mfu=0.493,
        layout=Layout(dp=8, ep=8, pp=8, tp=2),
        sequences=256,
        schedule=Schedule.INTERLEAVED,
        chunks=7,
    ),
    Published(
        name="Qwen2-57B-A14B",
        shape=QWEN,
        reported_flops=megatron_flops(QWEN, kv_heads=4),
        mfu=0.390,
        layout=Layout(dp=8, ep=4, pp=4, tp=2),
        sequences=256,
        schedule=Schedule.INTERLEAVED,
        chunks=7,
    ),
    deepseek_run(),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Predictions of all runs, calibrated on one."""

    on: str
    share: float
    mfu: dict[str, float]

    @property
    def ordered(self) -> bool:
        """Whether runs come in the order that was published."""
        published = sorted(RUNS, key=lambda run: run.mfu)
        return sorted(self.mfu, key=self.mfu.__getitem__) == [run.name for run in published]

    @property
    def largest_error(self) -> float:
        """Largest error of the runs that were predicted."""
        return max(abs(self.mfu[run.name] / run.mfu - 1) for run in RUNS if run.name != self.on)


def compared() -> list[Compared]:
    """Calibrate on each run in turn."""
    found = []
    for on in RUNS:
        share = on.calibrated_share()
        found.append(Compared(on=on.name, share=share, mfu={run.name: run.predicted_mfu(share) for run in RUNS}))
    return found
