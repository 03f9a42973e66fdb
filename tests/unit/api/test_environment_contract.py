"""What pods tell launchers and launchers tell ranks."""

from __future__ import annotations

import dataclasses

import pytest

from polyreme_api import environment
from polyreme_api.environment import PodEnvironment, RankEnvironment
from polyreme_api.errors import InvalidConfigError

POD = PodEnvironment(
    pod="quickstart-0a1b2-1-0",
    job="quickstart",
    namespace="default",
    job_uid="0a1b2c3d-0000-4000-8000-000000000000",
    index=1,
    replacement=0,
    replicas=2,
    devices=2,
    leader_address="127.0.0.1:29400",
    api_url="http://127.0.0.1:1",
    token_file="/pod/token",
    secret_file="/pod/secret",
    pod_directory="/pod",
    checkpoint_url="file:///run/checkpoints",
)
RANK = RankEnvironment(
    rank=0,
    local_rank=0,
    world_size=4,
    attempt=3,
    master_address="127.0.0.1",
    master_port=29_500,
    master_fd=7,
    progress_fd=0,
    job_file="/pod/job.json",
    plan_file="/pod/plan.json",
    checkpoint_url="file:///run/checkpoints",
    resume_from="a000002-s00000050",
)


def test_both_contracts_go_round() -> None:
    assert PodEnvironment.parse(POD.render()) == POD
    assert RankEnvironment.parse(RANK.render()) == RANK


def test_what_a_rank_does_not_have_is_not_set() -> None:
    rank = dataclasses.replace(RANK, master_fd=None, progress_fd=None, resume_from=None)
    variables = rank.render()
    assert environment.MASTER_FD not in variables
    assert environment.PROGRESS_FD not in variables
    assert variables[environment.RESUME_FROM] == ""
    assert RankEnvironment.parse(variables) == rank


def test_torchrun_finds_the_names_that_it_knows() -> None:
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(RANK.render())


def test_other_variables_are_left_alone() -> None:
    assert PodEnvironment.parse({**POD.render(), "PATH": "/bin", "RANK": "x"}) == POD


@pytest.mark.parametrize("variable", sorted(POD.render()))
def test_a_pod_variable_that_is_missing_or_empty_is_named(variable: str) -> None:
    variables = POD.render()
    for broken in ({**variables, variable: ""}, {key: value for key, value in variables.items() if key != variable}):
        with pytest.raises(InvalidConfigError, match=rf"{variable} is not set") as refused:
            PodEnvironment.parse(broken)
        assert refused.value.field == variable


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "POLYREME_ATTEMPT"])
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1 ", "٣", "0x1"])
def test_a_number_that_is_none_is_named_with_its_value(variable: str, value: str) -> None:
    with pytest.raises(InvalidConfigError, match="no whole number"):
        RankEnvironment.parse({**RANK.render(), variable: value})


def test_no_two_fields_share_a_variable() -> None:
    assert len(POD.render()) == len(dataclasses.fields(POD))
    assert len(RANK.render()) == len(dataclasses.fields(RANK))
