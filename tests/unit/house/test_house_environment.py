"""The page of environment variables names every variable of the contract, and no other."""

import re
from pathlib import Path

from polyreme_api import environment
from polyreme_datahub.topics.open import AUTHORITIES_FILE, TOKEN, TOKEN_FILE
from polyreme_datahub_service.home import HOME_VARIABLE

PAGE = Path(__file__).parents[3] / "docs/reference/environment.md"
ELSEWHERE = {HOME_VARIABLE, TOKEN, TOKEN_FILE, AUTHORITIES_FILE}
OPTIONS = re.compile(r"POLYREME_(OPERATOR|DATAHUB|DATA_WORKER)_")


def test_the_page_of_variables_is_complete() -> None:
    values = (value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str))
    known = {value for value in values if value.startswith("POLYREME_")} | ELSEWHERE
    named = {name for name in re.findall(r"POLYREME_[A-Z_]+", PAGE.read_text()) if not OPTIONS.match(name)}
    assert len(known) > 30
    assert named == known
