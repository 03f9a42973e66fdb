"""Packs of a step as people may read them: with the images as the model sees them, their masks and shapes."""

from __future__ import annotations

from functools import partial

from polyreme.run_files.paths import Home
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.hub import read_masks
from polyreme_datahub.loader.inspect.preview import PreviewPack, preview
from polyreme_datahub.loader.open import open_tokenizer
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.tokenizer_file import TokenText


def read_packs(
    home: Home, spec: TrainingJobSpec, uid: str, source: PackedSource, step: int, *, first: int = 0, count: int
) -> list[PreviewPack]:
    """Read packs of a step, as many as there are from the first one on.

    Args:
        home: Where the run's data are.
        spec: The run's.
        uid: UID under which its data were processed.
        source: Its training data; errors are passed on.
        step: Counts from 1.
        first: First pack, from 0.
        count: Most packs.
    """
    text = TokenText(open_tokenizer(home.objects_url, spec, job=uid).content)
    masks = partial(read_masks, home.registry_url, home.objects_url)
    count = min(count, source.packs_in(step) - first)
    return list(preview(source, text, step, first=first, count=count, masks=masks))
