"""The operator's command line, and the variables that say the same."""

import pytest

from polyreme_cluster.logging_setup import LogFormat
from polyreme_operator.options import parse


def test_default_options_are_safe() -> None:
    options = parse([], {})
    assert (options.host, options.is_local) == ("127.0.0.1", True)
    assert options.settings.defaults.binding == "NodeAffinity"
    assert options.settings.defaults.launcher_rbac
    assert options.settings.limits.grow_cooldown_s == 300
    assert options.log_format is LogFormat.JSON


def test_flags_go_before_variables() -> None:
    environment = {
        "POLYREME_OPERATOR_NAMESPACE": "there",
        "POLYREME_OPERATOR_BINDING": "GangBinder",
        "POLYREME_OPERATOR_METRICS_ADDRESS": ":8080",
        "POLYREME_OPERATOR_ENVIRONMENT": "A=1 B=x=y",
        "POLYREME_OPERATOR_LAUNCHER_RBAC": "false",
        "POLYREME_OPERATOR_GROW_COOLDOWN_SECONDS": "30",
    }
    options = parse(["--namespace", "here", "--environment", "C=3"], environment)
    assert options.settings.namespace == "here"
    assert options.settings.defaults.binding == "GangBinder"
    assert options.settings.defaults.environment == (("A", "1"), ("B", "x=y"), ("C", "3"))
    assert not options.settings.defaults.launcher_rbac
    assert options.settings.limits.grow_cooldown_s == 30
    assert (options.host, options.port, options.is_local) == ("", 8080, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--binding", "NodeName"],
        ["--metrics-address", "8080"],
        ["--metrics-address", ":99999"],
        ["--environment", "no-value"],
        ["--environment", "DATABASE=postgresql://me:hush-hush@db/registry"],
        ["--environment", "AWS_SECRET_ACCESS_KEY=hush-hush"],
        ["--worker-secret", "No Name"],
        ["--log-format", "xml"],
        ["--name", "x"],
        ["--grow-cooldown-seconds", "soon"],
        ["--grow-cooldown-seconds", "-1"],
        ["--grow-cooldown-seconds", "nan"],
    ],
)
def test_what_cannot_be_is_refused_with_its_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments, {})
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert "hush-hush" not in said


def test_a_password_in_the_environment_s_own_list_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([], {"POLYREME_OPERATOR_ENVIRONMENT": "A=1 DATABASE=postgresql://me:hush-hush@db/registry"})
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "POLYREME_OPERATOR_ENVIRONMENT: DATABASE holds a password inside a URL" in said
    assert "--worker-secret" in said
    assert "hush-hush" not in said


def test_the_workers_secret_is_named_by_a_flag_or_a_variable() -> None:
    assert parse([], {}).settings.defaults.worker_secret is None
    assert parse(["--worker-secret", "store"], {}).settings.defaults.worker_secret == "store"
    assert parse([], {"POLYREME_OPERATOR_WORKER_SECRET": "store"}).settings.defaults.worker_secret == "store"
