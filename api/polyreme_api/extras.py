"""Libraries that only some roles need: which extra of the package brings one that is not installed."""

from __future__ import annotations

from polyreme_api.errors import EnvironmentFailedError

EXTRAS = {
    "operator": frozenset({"kopf", "kubernetes", "aiohttp", "prometheus_client", "numpy"}),
    "run": frozenset(
        {"torch", "numpy", "safetensors", "sqlalchemy", "alembic", "obstore", "PIL", "simplejpeg", "pyarrow"}
        | {"tokenizers", "sklearn", "aiohttp", "prometheus_client", "psutil", "yaml", "rich"}
    ),
    "kubectl": frozenset({"kubernetes", "numpy", "aiohttp", "obstore", "psutil", "yaml", "rich"}),
}
"""Modules by the extra that brings them (``pyproject.toml``)."""


def missing_extra(error: ModuleNotFoundError, *extras: str) -> EnvironmentFailedError | None:
    """Return what to install where one of our libraries is missing; None where it is another module.

    Args:
        error: The import that failed.
        extras: Extras to look in, the first that brings the module is named.
    """
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra in extras if module in EXTRAS[extra]), None)
    if extra is None:
        return None
    return EnvironmentFailedError(
        f"the Python module {module!r} is not installed; install it with pip install '.[{extra}]' in the checkout"
    )
