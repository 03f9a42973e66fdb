"""Whatever is stored, the operator continues: ``make soak-objects`` stores 10,000 malformed objects of every kind."""

import logging

import pytest

from tests.property.operator.stored_objects import Flood, generate

EACH = 60
BATCH = 20


@pytest.mark.slow
def test_malformed_objects_of_every_kind_block_no_job() -> None:
    flood = Flood(generate(EACH, seed=None), batch=BATCH)
    logging.disable(logging.CRITICAL)
    try:
        flood.run()
    finally:
        logging.disable(logging.NOTSET)
    assert flood.healthy == EACH // BATCH
    assert min(flood.stored.values()) >= EACH
