"""The command line of polyreme-datahub, and the variables that say the same."""

import pytest

from polyreme_datahub_service.options import WorkerOptions, parse


def test_without_a_deployment_this_process_does_the_work() -> None:
    options = parse([], {})
    assert options.workers is None
    assert (options.host, options.port) == ("127.0.0.1", 0)


def test_workers_are_named_by_flags_or_variables() -> None:
    variables = {
        "POLYREME_DATAHUB_WORKERS_DEPLOYMENT": "workers",
        "POLYREME_DATAHUB_WORKERS_OPERATIONS": "compose, tokenize,embed",
        "POLYREME_DATAHUB_GPU_WORKERS_MAX": "2",
        "POLYREME_DATAHUB_METRICS_ADDRESS": ":8080",
    }
    options = parse(["--workers-max", "5", "--worker-threads", "4"], variables)
    assert options.workers == WorkerOptions(
        deployment="workers", operations=("compose", "tokenize", "embed"), most=5, gpu_most=2, threads=4
    )
    assert (options.host, options.port) == ("", 8080)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers-max", "0"],
        ["--workers-max", "many"],
        ["--gpu-workers-max", "-1"],
        ["--workers-operations", " , "],
        ["--worker-threads", "1000000"],
        ["--jobs-max", "0"],
        ["--metrics-address", "8080"],
    ],
)
def test_what_cannot_be_is_refused_with_its_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments, {})
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
